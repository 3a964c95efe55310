"""C-29: one deadline; everything else follows from it, changes with it, and is said in one line."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from sparseloco.checkpoint import CheckpointFolder
from sparseloco.errors import ConfigError, PeerLostError
from sparseloco.settings import TransportConfig
from sparseloco.transport import collectives, meeting
from sparseloco.transport.collectives import Collectives
from sparseloco.transport.deadline import Deadline
from tests import runs

DERIVED = ("beat_s", "lost_s", "collective_s", "checkpoint_s", "stall_s", "words")


def test_every_other_limit_changes_with_the_setting_c29() -> None:
    short, long = Deadline(60), Deadline(300)
    for name in DERIVED:
        assert getattr(short, name) != getattr(long, name), name
    assert Deadline(300).words == (
        "deadline 300 s: collectives 294 s, checkpoint parts 150 s, heartbeat 2 s, lost after 6 s, stall report 300 s"
    )
    assert set(DERIVED) == {name for name in vars(Deadline) if not name.startswith("_")} - {"deadline_s"}


@pytest.mark.parametrize("seconds", [1, 7.5, 600, 86400, 604800])
def test_limits_are_in_an_order_that_names_the_cause_c29(seconds: float) -> None:
    """A checkpoint gives up before the others' collectives do, and these in time to find out who was missing.

    However long a deadline, survivors are through with that before torchrun, after 30 s, ends them.
    """
    limits = Deadline(seconds)
    assert 0 < limits.beat_s < limits.lost_s < limits.checkpoint_s < limits.collective_s < limits.stall_s
    assert limits.collective_s + limits.lost_s <= limits.deadline_s
    assert limits.lost_s <= 12


@pytest.mark.parametrize("seconds", [0, -1, 0.5, float("nan"), float("inf"), 604801])
def test_a_deadline_is_a_time_to_wait_c59(seconds: float) -> None:
    """C-59: its range is checked in one place, for settings and for libraries alike."""
    words = rf"deadline_s={seconds!r}: must be seconds from 1 to 604800, a week; use 600"
    with pytest.raises(ConfigError, match=f"^transport.{words}$"):
        TransportConfig(deadline_s=seconds)
    with pytest.raises(ConfigError, match=f"^{words}$"):
        Deadline(seconds)


@pytest.mark.parametrize("seconds", [60.0, 300.0])
def test_the_group_is_made_with_it_c31(seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C-31: gloo is given the timeout; the signs of life and the waiting are, too."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(meeting.dist, "init_process_group", lambda backend, **given: asked.update(given))
    monkeypatch.setattr(meeting, "choose_interface", lambda *_, **__: None)
    monkeypatch.setattr(meeting, "wait_for_all", lambda store, *given: asked.update(waited=given))
    meeting.join(f"file://{tmp_path}/rendezvous", 0, 2, Deadline(seconds))
    patience = timedelta(seconds=Deadline(seconds).collective_s)
    assert asked["timeout"] == asked["store"].timeout == patience
    assert asked["waited"] == (2, patience.total_seconds(), None)


def test_a_group_that_cannot_be_made_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("Gloo connectFullMesh failed\nand a trace")

    monkeypatch.setattr(meeting.dist, "init_process_group", refused)
    monkeypatch.setattr(meeting, "choose_interface", lambda *_, **__: None)
    monkeypatch.setattr(meeting, "wait_for_all", lambda *_: None)
    with pytest.raises(PeerLostError) as caught:
        meeting.join(f"file://{tmp_path}/rendezvous", 1, 3, Deadline(60))
    assert str(caught.value) == (
        "peer 1=waited for 3 ranks to meet (Gloo connectFullMesh failed): must all come within deadline_s=60; look at "
        "what the others printed, or raise transport.deadline_s"
    )


@pytest.mark.parametrize("seconds", [60.0, 300.0])
def test_every_wait_is_given_it_c31(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that was made elsewhere has a timeout of its own; what we wait for has ours."""
    monkeypatch.setattr(collectives.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(collectives.dist, "get_backend", lambda group: "gloo")
    waited: list[timedelta] = []
    work: Any = type("Work", (), {"wait": lambda self, patience: waited.append(patience)})()
    import contextlib

    Collectives(None, Deadline(seconds), contextlib.nullcontext).wait([work])
    assert waited == [timedelta(seconds=Deadline(seconds).collective_s)]


@pytest.mark.parametrize("seconds", [60.0, 300.0])
def test_a_run_gives_it_to_its_checkpoints_c31(seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import msgspec

    from sparseloco import trainer

    made: list[float] = []

    def folder(root: Path, keep: int, patience_s: float) -> CheckpointFolder:
        made.append(patience_s)
        return CheckpointFolder(root, keep, patience_s)

    monkeypatch.setattr(trainer, "CheckpointFolder", folder)
    settings = msgspec.structs.replace(runs.config(), transport=TransportConfig(deadline_s=seconds))
    with pytest.warns(UserWarning, match="buffers="):
        runs.simulated(tmp_path / "run", settings, runs.METHODS["sparseloco"]())
    assert made == [Deadline(seconds).checkpoint_s]
