"""Runs killed with -9 between two operations on the disk, at seeded moments: what goes on ends in the same bits.

Each run is a process that forks off a server which has torch loaded already, so a start takes no time. It kills itself
when the interpreter reports the n-th operation on files. ``benchmarks/kill_resume.py`` kills real commands by the
clock.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
from pathlib import Path

import pytest
import torch

from sparseloco.checkpoint import CheckpointFolder
from sparseloco.trainer import CHECKPOINTS
from tests import runs
from tests.forked import forks
from tests.runs import METHODS

pytestmark = [pytest.mark.mp, pytest.mark.filterwarnings("ignore:buffers=:UserWarning")]
ON_DISK = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree")
KEEP, KILLS = 2, 8


def run(out: str, kill_at: int | None) -> None:
    """Start or continue a run that saves after every step; dies at one of its operations on the disk."""
    counted = itertools.count(1)

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event in ON_DISK and str(arguments[0]).startswith(out) and next(counted) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    if kill_at is not None:
        sys.addaudithook(watch)
    torch.set_num_threads(1)
    found, _ = CheckpointFolder(Path(out, CHECKPOINTS)).newest()
    runs.simulated(Path(out), runs.config(every=1, keep=KEEP), METHODS["sparseloco_delayed"](), resume=found)


def test_runs_killed_between_operations_on_the_disk_end_in_the_same_bits_c18(tmp_path: Path) -> None:
    context, chance, out = forks(), random.Random(0), tmp_path / "killed"

    def start(folder: Path, kill_at: int | None) -> int | None:
        process = context.Process(target=run, args=(str(folder), kill_at))
        process.start()
        process.join()
        return process.exitcode

    assert start(tmp_path / "straight", None) == 0
    kills = 0
    while kills < KILLS:
        if start(out, chance.randint(1, 80)) == 0:
            continue  # it got to its end; from there each start goes on from the last checkpoint
        kills += 1
        assert len(list((out / CHECKPOINTS).glob("step-*"))) <= KEEP + 1
    assert start(out, None) == 0
    assert runs.outcome(out) == runs.outcome(tmp_path / "straight")
    assert sorted(path.name for path in (out / CHECKPOINTS).iterdir()) == ["step-00000010", "step-00000011"]
