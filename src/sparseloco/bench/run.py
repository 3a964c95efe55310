"""The whole bench: jobs for child processes, and one object of figures from their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparseloco.bench import figures, grid, memory
from sparseloco.bench.problem import Case, cases
from sparseloco.errors import SparseLocoError

K_GRID = (16, 32, 64, 128, 256, 512, 1024)
HEADLINE_K = 64
_KEEP = str(1 << 40)
TUNED = {"MALLOC_MMAP_THRESHOLD_": _KEEP, "MALLOC_TRIM_THRESHOLD_": _KEEP}
"""glibc keeps all memory it was ever given, so no variant pays for page faults. Read before a process starts."""

Progress = Callable[[str, int, int], None]
Job = tuple[dict[str, Any], dict[str, str], int]
"""Arguments of a child, its environment, and how many steps it reports."""


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Args:
        side: Rows and columns of the matrix that headline figures are for; a multiple of 64.
        grid_side: The same for all other cases.
        ks: Values kept per chunk in the grid; bits are always counted for all of ``K_GRID``.
        dtypes: Types of the parameters.
        threads: Thread counts.
        peers: Payloads that are decoded at once.
        variants: What is measured in the grid; the headline has all.
        budget_s: Seconds for each variant of each operation in the grid, after at least three calls.
        headline_budget_s: The same for the headline.
    """

    side: int = 4096
    grid_side: int = 2048
    ks: tuple[int, ...] = K_GRID
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    threads: tuple[int, ...] = (1, 2)
    peers: tuple[int, ...] = (1, 8, 16)
    variants: tuple[str, ...] = grid.VARIANTS
    budget_s: float = 0.25
    headline_budget_s: float = 0.5

    def __post_init__(self) -> None:
        cases(self.side, self.ks, self.dtypes)
        cases(self.grid_side, self.ks, self.dtypes)

    def grid_cases(self) -> list[Case]:
        """All cases but the headline's."""
        return cases(self.grid_side, self.ks, self.dtypes)


QUICK = Settings(grid_side=1024, ks=(HEADLINE_K,), variants=(grid.FAST, grid.PLAIN, grid.LIMIT), budget_s=0.1)
"""Under a minute on two cores: the headline, and k = 64 with each type and thread count on a small matrix."""


def measure(settings: Settings, progress: Progress = lambda what, done, total: None) -> dict[str, Any]:
    """Run all jobs, one after another, and return the figures of ``sparseloco bench --json``.

    Raises:
        SparseLocoError: if a process that measures fails.
    """
    began = time.monotonic()
    jobs = _jobs(settings)
    total, done = sum(steps for _, _, steps in jobs), 0
    results: list[Any] = []
    for arguments, environment, steps in jobs:
        first = done

        def step(what: str, count: int, first: int = first) -> None:
            progress(what, first + count, total)

        results.append(run_child(arguments, environment, step))
        done += steps
    bits, temporaries, *rows = results
    found = figures.assemble([row for some in rows for row in some], bits, temporaries, HEADLINE_K, settings.side)
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def run_child(arguments: Mapping[str, Any], environment: Mapping[str, str], step: Callable[[str, int], None]) -> Any:
    """Result of one job, made in a process of its own with the given additions to the environment."""
    command = [sys.executable, "-m", "sparseloco.bench.child", json.dumps(arguments)]
    with subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        count, result = 0, None
        try:
            for line in process.stdout:
                said = json.loads(line)
                if "result" in said:
                    result = said["result"]
                else:
                    count += 1
                    step(said["step"], count)
        except BaseException:
            process.terminate()  # an interruption may have reached this process alone
            raise
    if process.returncode != 0 or result is None:
        raise SparseLocoError(
            f"bench process={process.returncode}: must end with 0, and did {arguments['job']}; "
            "see its own words above, and take a smaller --side if memory ran out"
        )
    return result


def _jobs(settings: Settings) -> list[Job]:
    """Bits first, since they need no quiet machine; then memory, the headline, and the grid by thread count."""
    headline = [Case(settings.side, HEADLINE_K)]
    return [
        ({"job": "bits", "side": settings.side, "k": HEADLINE_K, "ks": list(K_GRID)}, _threads(1), 2),
        _memory_job(settings),
        _timing_job(headline, replace(settings, budget_s=settings.headline_budget_s, variants=grid.VARIANTS), 1),
        *(_timing_job(settings.grid_cases(), settings, count) for count in settings.threads),
    ]


def _memory_job(settings: Settings) -> Job:
    variants = [grid.FAST, grid.PLAIN]
    arguments = {"job": "temporaries", "side": settings.side, "k": HEADLINE_K, "peers": 8, "variants": variants}
    return arguments, _threads(1) | memory.ENVIRONMENT, len(variants)


def _timing_job(some: Sequence[Case], settings: Settings, threads: int) -> Job:
    described = [{"side": case.side, "k": case.k, "dtype": case.dtype} for case in some]
    arguments = {"job": "timings", "cases": described, "threads": threads, "variants": list(settings.variants)}
    arguments |= {"peers": list(settings.peers), "budget_s": settings.budget_s}
    return arguments, _threads(threads) | TUNED, len(some) * len(grid.operation_names(settings.peers))


def _threads(count: int) -> dict[str, str]:
    # Threads that wait sleep: spinning ones take the core of those they wait for where other programs run too.
    return {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count), "OMP_WAIT_POLICY": "PASSIVE"}
