"""A peer whose own numbers are never finite stops, with the error of a cluster that diverged; others go on."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparseloco import inner_step
from sparseloco.absences import MOST_IN_VAIN, note_absences
from sparseloco.books import Books
from sparseloco.errors import AllAbstainedError
from sparseloco.inbox import Absence
from sparseloco.peers.looking import Viewer
from sparseloco.peers.store import open_store
from sparseloco.replica import Replica
from sparseloco.types import Key, foreign_number
from tests import toy
from tests.driver import ROWS
from tests.peers.crowd import Peer, identities, make_run, train_all
from tests.peers.runs import identity
from tests.peers.test_joined import STEPS, Scene, scene

__all__ = ["scene"]
pytestmark = pytest.mark.filterwarnings("ignore:.*contributes nothing:UserWarning")
BAD = "bad peer"


def poison(monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[int], bool]) -> None:
    """The loss of the threads named ``BAD`` is not a number in the calls for which ``is_bad`` says so."""
    right = inner_step.accumulate_gradients
    calls: list[int] = []

    def sick(*arguments: Any) -> float:
        loss = right(*arguments)
        if threading.current_thread().name != BAD:
            return loss
        calls.append(len(calls))
        return math.nan if is_bad(calls[-1]) else loss

    monkeypatch.setattr(inner_step, "accumulate_gradients", sick)


def as_bad(job: Callable[[], Any]) -> Any:
    """The result of a job in a thread that is poisoned."""
    with ThreadPoolExecutor(1, initializer=lambda: setattr(threading.current_thread(), "name", BAD)) as pool:
        return pool.submit(job).result()


def test_a_peer_that_is_never_finite_stops_and_releases_its_lease(
    scene: Callable[..., Scene], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, lambda call: True)
    made = scene("run")
    with pytest.raises(AllAbstainedError) as caught:
        as_bad(lambda: made.train(identity(1), tmp_path / "a"))
    assert str(caught.value) == (
        f"round {MOST_IN_VAIN - 1}, fragment 0=no contribution: must have one of this peer, whose numbers were not "
        "finite in 3 rounds in a row; look at this machine and its text, or, if other peers fail alike, start another "
        "run and lower optimizer.lr or algorithm.outer_lr, lengthen optimizer.warmup_steps or set optimizer.clip_norm"
    )
    seen = Viewer(open_store(made.url)).look()
    assert seen.closed == {0: MOST_IN_VAIN}
    assert [one.state for one in seen.peers] == ["left"]


def test_others_go_on(scene: Callable[..., Scene], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, lambda call: True)
    made = scene("run")
    with ThreadPoolExecutor(1) as pool:
        good = pool.submit(made.train, identity(1), tmp_path / "a")
        with pytest.raises(AllAbstainedError, match="must have one of this peer"):
            as_bad(lambda: made.train(identity(2), tmp_path / "b"))
        assert good.result()["rounds"] == STEPS // 2


def test_numbers_that_are_good_again_in_time_are_forgiven(
    scene: Callable[..., Scene], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round that is bad in its first step has one call, a good one two: two bad ones, then a good one, again."""
    poison(monkeypatch, lambda call: call % 4 in (0, 1))
    made = scene("run")
    summary = as_bad(lambda: made.train(identity(1), tmp_path / "a"))
    assert (summary["rounds"], summary["abstentions"]) == (10, 7)


def test_peers_of_a_store_are_called_by_their_id() -> None:
    """What is warned of and logged is no number above 2**32."""
    other = identities(2)[1].peer_id
    replica = Replica(toy.net(), ROWS["sparseloco"]())
    replica.absent = [Absence(foreign_number(other), Key(3, 0)), Absence(7, Key(3, 0))]
    world = SimpleNamespace(replicas=[replica], mean=lambda value: value, is_main=True, stands_alone=True)
    written: list[dict[str, Any]] = []
    log = SimpleNamespace(write=lambda kind, **fields: written.append(fields))
    config: Any = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        note_absences(world, Books([[]]), log, config)  # pyright: ignore[reportArgumentType]
    assert [str(one.message) for one in caught] == [
        f"peer {name}, round 3: contributed nothing, for a cause that no peer here knows" for name in (other[:8], 7)
    ]
    assert [one["peer"] for one in written] == [other[:8], 7]


def test_an_inbox_holds_the_ids_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[list[int]] = []
    apply = Replica.apply

    def noted(replica: Replica, key: Key, inbox: Any) -> float:
        got.append([envelope.peer for envelope in inbox])
        return apply(replica, key, inbox)

    monkeypatch.setattr(Replica, "apply", noted)
    run = make_run(ROWS["sparseloco"](), toy.net())
    store = open_store("memory://")
    peers = [Peer(run, ROWS["sparseloco"](), store, me, tmp_path / f"{n}", n) for n, me in enumerate(identities(2))]
    train_all(peers, 4)
    for peer in peers:
        peer.transport.leave()
    ids = [foreign_number(me.peer_id) for me in identities(2)]
    assert sorted(got) == sorted([[0, ids[1]], [ids[0], 1]])
