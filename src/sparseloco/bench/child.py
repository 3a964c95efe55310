"""The process that measures: ``python -m sparseloco.bench.child JOB``, started by :mod:`sparseloco.bench.run`.

Allocator and thread count are fixed by the environment before a process starts, so the bench starts one for each
setting. It says what it does on stdout, one line of JSON at a time; the last one holds the result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch

from sparseloco.bench import grid, memory, sizes
from sparseloco.bench.problem import Case


def main(job: dict[str, Any]) -> None:
    """Do one job and print its progress and result."""
    torch.manual_seed(0)
    with torch.no_grad():
        for line in JOBS[job.pop("job")](**job):
            print(json.dumps(line), flush=True)  # noqa: T201


def timings(
    cases: list[dict[str, Any]], threads: int, peers: list[int], budget_s: float, variants: list[str]
) -> Iterator[dict[str, Any]]:
    """Rows of many cases."""
    torch.set_num_threads(threads)
    rows: list[dict[str, Any]] = []
    for case in cases:
        measured = grid.measure(Case(**case), threads=threads, peers=peers, budget_s=budget_s, variants=variants)
        for found in measured:
            rows.extend(row._asdict() for row in found)
            yield {"step": f"k = {case['k']}, {case['dtype']}, {threads} thread{'s' * (threads > 1)}"}
    yield {"result": rows}


def temporaries(side: int, k: int, peers: int, variants: list[str]) -> Iterator[dict[str, Any]]:
    """Bytes per parameter above the inputs, by variant."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for variant in variants:
        found[variant] = memory.temp_bytes(side, k, variant, peers)
        yield {"step": f"memory of {variant}"}
    yield {"result": found}


def bits(side: int, k: int, ks: list[int]) -> Iterator[dict[str, Any]]:
    """Sizes and errors: no clock."""
    frames = sizes.frame_figures(side, k)
    yield {"step": "bits of frames"}
    rows = sizes.index_rows(ks)
    yield {"step": "bits of positions"}
    index = [{**row._asdict(), "over_bound": round(row.over_bound, 4)} for row in rows]
    yield {"result": {**frames, "index": index, "value_error": sizes.value_errors()}}


JOBS = {"timings": timings, "temporaries": temporaries, "bits": bits}

if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)
