"""What all tests share: one thread, one seed, repeatable property tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from sparseloco import launch
from sparseloco.report import write
from sparseloco.report.charts import Chart
from tests.cli import Call, Ended, enter, run
from tests.forked import Workers

torch.set_num_threads(1)

# Derandomized: a red run is red again on the next machine. No deadline: shared cores are slow at times.
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")


@pytest.fixture
def seed() -> int:
    """Seed torch's global generator and say with what."""
    torch.manual_seed(0)
    return 0


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of ``--processes`` are forks instead of new interpreters, which tests/unit/test_trainer.py starts."""
    monkeypatch.setattr(launch, "multiprocessing", Workers())


@pytest.fixture
def real_charts() -> None:
    """For tests of the command line whose reports have drawn charts, which take longer than all else of a small run."""


@pytest.fixture
def cli(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> Call:
    """Run the command line in this process, in an empty folder; returns its exit code and what it printed."""
    enter(tmp_path, monkeypatch)
    if "real_charts" not in request.fixturenames:
        empty = [Chart(name, "<svg></svg>", b"") for name in ("loss_over_tokens", "loss_over_bytes")]
        monkeypatch.setattr(write, "draw", lambda runs: empty)

    def call(*arguments: str) -> Ended:
        capsys.readouterr()
        code = run(*arguments)
        return Ended(code, *capsys.readouterr())

    return call
