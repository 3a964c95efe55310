"""Runs that torchrun starts again after a rank has died, and a signal that reaches one rank alone."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests import runs
from tests.one_path import test_resume_under_torchrun as plain
from tests.one_path.test_resume_under_torchrun import STEPS, under_way
from tests.torchrun import forked, pid_of_rank, ranks_of

pytestmark = plain.pytestmark
SCRIPT = str(Path(__file__).with_name("dying_sparseloco.py"))
MISSING = str(Path(__file__).with_name("missing_rank.py"))
SHORT = ["--set", "train.steps=40", "--set", "train.evaluate_every=40", "--set", "train.log_every=4", "--no-model"]
SHORT += ["--set", "checkpoint.every=10", "--set", "transport.deadline_s=120"]
folder = plain.folder


@pytest.mark.timeout(300)
def test_a_rank_that_dies_is_started_again_and_the_run_ends_in_the_same_bits(folder: Path) -> None:
    """One of three ranks is gone after step 17; all go on from step 10 by themselves, without --resume."""
    base = ["--nproc-per-node", "3", "--max-restarts", "1", SCRIPT, "train", "run.toml", "--workers", "3", *SHORT]
    with forked(folder, *base, "--out", "straight", DYING_RANK="none", DYING_STEP="0") as launch:
        ended = launch.ended()
    assert ended.code == 0, ended.err

    with forked(folder, *base, "--out", "mine", DYING_RANK="1", DYING_STEP="17") as launch:
        ended = launch.ended()
    assert ended.code == 0, ended.err
    assert "report: mine/report.html" in ended.out
    assert "restart 1 by torchrun, with 3 ranks, continues as --resume does" in ended.err
    assert ended.err.count("resuming at step 10") == 1, ended.err
    assert runs.outcome(folder / "mine") == runs.outcome(folder / "straight")


@pytest.mark.timeout(240)
def test_a_signal_to_one_rank_saves_and_stops_all(folder: Path) -> None:
    """As a preemption of one machine does; rank 1 gets it, and rank 0 says what to do."""
    words = ["--nproc-per-node", "2", "-m", "sparseloco", "train", "run.toml", *STEPS, "--out", "mine"]
    with forked(folder, *words) as launch:
        under_way(launch, folder / "mine" / "metrics.jsonl")
        os.kill(pid_of_rank(folder, 1), signal.SIGTERM)
        ended = launch.ended()
        assert ranks_of(folder) == []
    assert ended.code != 0
    (saved,) = (folder / "mine" / "checkpoints").iterdir()
    step = int(saved.name.removeprefix("step-"))
    told = f"interrupted: sparseloco stopped at step {step} after saving; continue with: torchrun"
    assert told in ended.err, ended.err
    last = json.loads((folder / "mine" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], last["saved"]) == ("interrupted", True)


@pytest.mark.timeout(240)
def test_a_signal_while_one_is_missing_ends_the_other_in_one_line(folder: Path) -> None:
    """Rank 0 waits for one that never comes; it does not sit out an hour, nor is it killed after half a minute."""
    words = ["--out", "mine", "--set", "transport.deadline_s=3600"]
    with forked(folder, "--nproc-per-node", "2", MISSING, "train", "run.toml", *words) as launch:
        while launch.poll() is None and not (folder / "waiting").exists():
            time.sleep(0.02)
        launch.send_signal(signal.SIGTERM)
        ended = launch.ended()
        assert ranks_of(folder) == []
    assert ended.code != 0
    assert (
        "interrupted: sparseloco stopped before all 2 ranks had met, with nothing trained; continue with: torchrun "
        "--nproc-per-node 2 -m sparseloco train --resume mine\n"
    ) in ended.err, ended.err
    assert not (folder / "mine" / "checkpoints").exists()
