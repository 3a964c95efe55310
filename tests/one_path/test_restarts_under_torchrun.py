"""Runs that torchrun starts again after a rank has died, and a signal that reaches one rank alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import runs
from tests.one_path import test_resume_under_torchrun as plain
from tests.one_path.test_resume_under_torchrun import ROOT, STEPS, TORCHRUN, ranks_of, under_way

pytestmark = plain.pytestmark
SCRIPT = str(Path(__file__).with_name("dying_sparseloco.py"))
SHORT = ["--set", "train.steps=40", "--set", "train.evaluate_every=40", "--set", "train.log_every=4", "--no-model"]
SHORT += ["--set", "checkpoint.every=10", "--set", "transport.deadline_s=120"]
folder = plain.folder


@contextmanager
def torchrun(place: Path, *arguments: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    """As in the other file, with more variables."""
    process = subprocess.Popen(
        [*TORCHRUN, *arguments],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "OMP_NUM_THREADS": "1",
            "SPARSELOCO_CACHE": "cache",
            **more,
        },
    )
    try:
        yield process
    finally:
        for pid in [*ranks_of(place), *([process.pid] if process.poll() is None else [])]:
            os.kill(pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.timeout(300)
def test_a_rank_that_dies_is_started_again_and_the_run_ends_in_the_same_bits(folder: Path) -> None:
    """One of three ranks is gone after step 17; all go on from step 10 by themselves, without --resume."""
    base = ["--nproc-per-node", "3", "--max-restarts", "1", SCRIPT, "train", "run.toml", "--workers", "3", *SHORT]
    with torchrun(folder, *base, "--out", "straight", DYING_RANK="none", DYING_STEP="0") as process:
        _, err = process.communicate()
    assert process.returncode == 0, err

    with torchrun(folder, *base, "--out", "mine", DYING_RANK="1", DYING_STEP="17") as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert "report: mine/report.html" in out
    assert "restart 1 by torchrun, with 3 ranks, continues as --resume does" in err
    assert err.count("resuming at step 10") == 1, err
    assert runs.outcome(folder / "mine") == runs.outcome(folder / "straight")


@pytest.mark.timeout(240)
def test_a_signal_to_one_rank_saves_and_stops_all(folder: Path) -> None:
    """As a preemption of one machine does; rank 1 gets it, and rank 0 says what to do."""
    launch = ["--nproc-per-node", "2", "-m", "sparseloco", "train", "run.toml", *STEPS, "--out", "mine"]
    with torchrun(folder, *launch) as process:
        under_way(process, folder / "mine" / "metrics.jsonl")
        os.kill(rank_one(folder), signal.SIGTERM)
        _, err = process.communicate()
        assert ranks_of(folder) == []
    assert process.returncode != 0
    (saved,) = (folder / "mine" / "checkpoints").iterdir()
    step = int(saved.name.removeprefix("step-"))
    assert f"interrupted: sparseloco stopped at step {step} after saving; continue with: torchrun" in err, err
    last = json.loads((folder / "mine" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], last["saved"]) == ("interrupted", True)


def rank_one(place: Path) -> int:
    """Process of rank 1, by its environment."""
    found = [pid for pid in ranks_of(place) if b"\0RANK=1\0" in (Path("/proc") / str(pid) / "environ").read_bytes()]
    return found[0]
