"""Resume where each replica is a process: the same bits as never stopped, and as in the simulation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import runs
from tests.mp import Group
from tests.runs import METHODS, STEPS

pytestmark = [pytest.mark.mp, pytest.mark.xdist_group("mp"), pytest.mark.filterwarnings("ignore:buffers=")]


@pytest.mark.parametrize("method", list(METHODS))
def test_resume_is_as_if_never_stopped_c16(method: str, pair: Group, tmp_path: Path) -> None:
    straight = tmp_path / "straight"
    pair.run(runs.on_a_rank, str(straight), runs.config(every=1, keep=STEPS), method, None)
    expected = runs.outcome(straight)
    # Inside a round, before and at its border, with messages in flight, and at the end.
    for step in (2, 4, 5, 7, 8, 11):
        out = tmp_path / str(step)
        pair.run(runs.on_a_rank, str(out), runs.config(), method, step, str(straight))
        assert runs.outcome(out) == expected, f"resumed at step {step}"


@pytest.mark.parametrize("method", ["sparseloco_delayed", "diloco", "powersgd"])
def test_a_run_may_change_worlds(method: str, pair: Group, tmp_path: Path) -> None:
    algorithm = METHODS[method]()
    runs.simulated(tmp_path / "one", runs.config(every=1, keep=STEPS), algorithm)
    pair.run(runs.on_a_rank, str(tmp_path / "two"), runs.config(every=1, keep=STEPS), method, 5, str(tmp_path / "one"))
    again = runs.checkpoint_at(tmp_path / "two", 9)
    runs.simulated(tmp_path / "three", runs.config(), algorithm, resume=again)
    digests = {name: runs.outcome(tmp_path / name)["digest"] for name in ("one", "two", "three")}
    assert len(set(digests.values())) == 1
    losses = [[line.get("train_loss") for line in runs.metrics(tmp_path / name)] for name in ("one", "two", "three")]
    assert losses[0] == losses[1] == losses[2]
