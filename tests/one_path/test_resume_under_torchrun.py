"""Runs that torchrun starts: a signal stops them after saving, all processes end, and they resume to the same bits."""

from __future__ import annotations

import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import runs
from tests.cli import text
from tests.forked import Fork
from tests.torchrun import forked, ranks_of, torchrun
from tests.unit.test_cli import CONFIG

LAUNCH = ["--nproc-per-node", "2", "-m", "sparseloco", "train"]
STEPS = ["--set", "train.steps=200", "--set", "train.evaluate_every=200", "--set", "train.log_every=4", "--no-model"]

pytestmark = [
    pytest.mark.mp,
    pytest.mark.xdist_group("mp"),
    pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs the kernel's list of processes"),
]


def under_way(process: subprocess.Popen[str] | Fork, metrics: Path) -> None:
    """Wait for the third line of the log, which is that of a step."""
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 2):
        time.sleep(0.02)
    assert process.poll() is None, "it has ended"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text(text())
    return tmp_path


@pytest.mark.timeout(240)
def test_a_signal_to_torchrun_saves_and_the_run_goes_on_to_the_same_bits(folder: Path) -> None:
    """The run that is stopped is one of the real command; the two others need no new interpreters."""
    with forked(folder, *LAUNCH, "run.toml", *STEPS, "--out", "straight") as launch:
        ended = launch.ended()
    assert ended.code == 0, ended.err
    assert "report: straight/report.html" in ended.out

    with torchrun(folder, *LAUNCH, "run.toml", *STEPS, "--out", "mine") as process:
        under_way(process, folder / "mine" / "metrics.jsonl")
        assert len(ranks_of(folder)) == 2
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

    with forked(folder, *shlex.split(again)[1:]) as launch:
        ended = launch.ended()
    assert ended.code == 0, ended.err
    assert ended.err.count("resuming at step") == 1, "rank 0 alone says it"
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
