"""Ranks that wait for each other before there is a group: all go on, or all learn that they shall not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from sparseloco.errors import Interrupted, PeerLostError
from sparseloco.transport import meeting
from sparseloco.transport.deadline import Deadline
from sparseloco.transport.meeting import wait_for_all

NEVER: Callable[[], bool] = lambda: False  # noqa: E731
STOPPED = "stopped before all 3 ranks had met, with nothing trained"


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    found = dist.FileStore(str(tmp_path / "store"), 3) if request.param == "file" else dist.HashStore()
    return dist.PrefixStore("attempt-0", found)


def outcomes(store: dist.Store, *stops: Callable[[], bool]) -> list[str]:
    """What ranks of three end with, each with a question of its own."""

    def rank(stop: Callable[[], bool]) -> str:
        try:
            wait_for_all(store, 3, 60.0, stop)
        except Interrupted as error:
            return str(error)
        return "all are here"

    with ThreadPoolExecutor(len(stops)) as pool:
        return list(pool.map(rank, stops))


def test_all_go_on_once_all_have_come(store: dist.Store) -> None:
    assert outcomes(store, NEVER, NEVER, NEVER) == ["all are here"] * 3


def test_one_that_is_asked_to_stop_takes_with_it_all_that_wait_and_all_that_come_later(store: dist.Store) -> None:
    """As SIGTERM to one rank of three of which the third died in its imports."""
    assert outcomes(store, NEVER, lambda: True) == [STOPPED] * 2
    assert outcomes(store, NEVER, NEVER) == [STOPPED] * 2


def test_a_stop_that_comes_after_the_last_one_is_left_to_the_run(store: dist.Store) -> None:
    """None of them may leave then, since the others go on."""
    store.add("arrived", 2)
    assert outcomes(store, lambda: True) == ["all are here"]
    assert outcomes(store, lambda: True) == ["all are here"]


def test_how_many_came_is_said_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "choose_interface", lambda *_, **__: None)
    with pytest.raises(PeerLostError) as caught:
        meeting.join(f"file://{tmp_path}/rendezvous", 0, 3, Deadline(1))
    assert str(caught.value) == (
        "peer 0=waited for 3 ranks to meet (1 came): must all come within deadline_s=1; look at what the others "
        "printed, or raise transport.deadline_s"
    )
