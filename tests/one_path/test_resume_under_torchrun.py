"""Runs that torchrun starts: a signal stops them after saving, all processes end, and they resume to the same bits."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import runs
from tests.unit.test_cli import CONFIG

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LAUNCH = ["--nproc-per-node", "2", "-m", "sparseloco", "train"]
STEPS = ["--set", "train.steps=200", "--set", "train.evaluate_every=200", "--set", "train.log_every=4", "--no-model"]

pytestmark = [
    pytest.mark.mp,
    pytest.mark.xdist_group("mp"),
    pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs the kernel's list of processes"),
]


@contextmanager
def torchrun(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process of torchrun and its two ranks; what is left of them at the end is killed."""
    process = subprocess.Popen(
        [*TORCHRUN, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "SPARSELOCO_CACHE": "cache"},
    )
    try:
        yield process
    finally:
        for pid in [*ranks_of(folder), *([process.pid] if process.poll() is None else [])]:
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def ranks_of(folder: Path) -> list[int]:
    """Processes that work in the folder, from the kernel's list."""
    found: list[int] = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            here, words = (place / "cwd").readlink() == folder, (place / "cmdline").read_bytes()
        except OSError:  # it has ended, or is another user's
            continue
        if here and b"sparseloco" in words and b"torch.distributed.run" not in words:
            found.append(int(place.name))
    return found


def under_way(process: subprocess.Popen[str], metrics: Path) -> None:
    """Wait for the third line of the log, which is that of a step."""
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 2):
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(CONFIG)
    lines = (f"Line {number} says that {number * 7919 % 1000} is not {number % 13}.\n" for number in range(2000))
    (tmp_path / "text.txt").write_text("".join(lines))
    return tmp_path


@pytest.mark.timeout(240)
def test_a_signal_to_torchrun_saves_and_the_run_goes_on_to_the_same_bits(folder: Path) -> None:
    with torchrun(folder, *LAUNCH, "run.toml", *STEPS, "--out", "straight") as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert "report: straight/report.html" in out

    with torchrun(folder, *LAUNCH, "run.toml", *STEPS, "--out", "mine") as process:
        under_way(process, folder / "mine" / "metrics.jsonl")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
        assert ranks_of(folder) == []
    assert process.returncode != 0
    (saved,) = (folder / "mine" / "checkpoints").iterdir()
    step = int(saved.name.removeprefix("step-"))
    assert step % 10 == 0
    told = [line for line in err.splitlines() if line.startswith(("stopping", "interrupted"))]
    again = "torchrun --nproc-per-node 2 -m sparseloco train --resume mine --no-model"
    assert told == [
        "stopping at the next round border, after saving; once more to stop at once (torchrun kills what has not ended "
        "in 30 s; TORCH_ELASTIC_SHUTDOWN_TIMEOUT changes that)",
        f"interrupted: sparseloco stopped at step {step} after saving; continue with: {again}",
    ]

    with torchrun(folder, *shlex.split(again)[1:]) as process:
        _, err = process.communicate()
    assert process.returncode == 0, err
    assert err.count("resuming at step") == 1, "rank 0 alone says it"
    assert runs.outcome(folder / "mine") == runs.outcome(folder / "straight")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ranks_end_when_torchrun_is_killed(folder: Path) -> None:
    long = ["--set", "train.steps=100000", "--set", "train.evaluate_every=100000", "--set", "train.log_every=1"]
    with torchrun(folder, *LAUNCH, "run.toml", *long, "--out", "mine") as process:
        under_way(process, folder / "mine" / "metrics.jsonl")
        assert len(ranks_of(folder)) == 2
        process.kill()
        deadline = time.monotonic() + 30
        while ranks_of(folder) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert ranks_of(folder) == []
