"""Leases and retention inside the transport, on a clock that the tests move: nothing here depends on real time."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sparseloco.peers import paths
from sparseloco.peers.store import PAGE, Page, Store, open_store
from tests import toy
from tests.driver import ROWS
from tests.peers.crowd import Clock, Peer, identities, make_run, miss, together, train_all
from tests.peers.test_hostile_peers import manifest_of

LEASE_S = 50.0
NEVER_S = 600_000.0


class Watched:
    """A store that counts how often the rounds were looked at."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.looks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def page(self, prefix: str, *, after: str = "", limit: int = PAGE) -> Page:
        found = self.store.page(prefix, after=after, limit=limit)
        self.looks += prefix.startswith("rounds/")
        return found


def crowd(tmp_path: Path, store: Store, clock: Clock, **policy: Any) -> list[Peer]:
    run = make_run(ROWS["sparseloco"](), toy.net(), lease_s=LEASE_S, deadline_s=NEVER_S, **policy)
    return [
        Peer(run, ROWS["sparseloco"](), store, me, tmp_path / f"{number}", number, clock=clock)
        for number, me in enumerate(identities(3))
    ]


def beat(peers: list[Peer]) -> None:
    """New leases of peers that are alive, and a look at those of all."""
    for peer in peers:
        peer.transport._heart.put()
    for peer in peers:
        peer.transport._heart.look()


def gather(peers: list[Peer]) -> None:
    """All join before any of them trains, and know of all, so that no round closes without one of them."""
    together(*[peer.arrive for peer in peers])
    beat(peers)


def is_open(store: Store, number: int) -> bool:
    return not any("manifest-" in entry.path for entry in store.list(f"rounds/{number:08}"))


def look_again(watched: Watched, times: int) -> None:
    seen = watched.looks
    while watched.looks < seen + times:
        time.sleep(0.005)


def test_a_silent_peer_is_waited_for_until_its_lease_runs_out_and_no_longer(tmp_path: Path) -> None:
    """Rule 6: with a deadline that never comes, the lease is all that ends the waiting, at the second."""
    watched, clock = Watched(open_store("memory://")), Clock()
    peers = crowd(tmp_path, watched, clock)
    try:
        gather(peers)
        train_all(peers, 5)
        silent = peers.pop()
        silent.transport._heart.stop()

        def move() -> None:
            while sum(entry.path.endswith(".frame") for entry in watched.list("rounds/00000001")) < 2:
                time.sleep(0.005)
            for seconds in (20.0, 20.0, LEASE_S - 40.0):
                clock.now += seconds
                beat(peers)
                look_again(watched, 8)
                assert is_open(watched, 1), f"at {clock.now} s the lease of the silent peer holds"
            clock.now += 1.0

        together(lambda: train_all(peers, 9), move)
        left = {one.peer: one.reason for one in manifest_of(watched, 1).left_out}
        assert left == {}, "whom nobody waits for is not named"
        assert len(manifest_of(watched, 1).entries) == 2
        assert clock.now == LEASE_S + 1.0
        assert not {tell.kind for peer in peers for tell in peer.said} & {"no-quorum", "waiting"}
    finally:
        for peer in (*peers, silent):
            peer.transport.leave()


def test_a_lease_that_is_put_again_is_waited_for_again(tmp_path: Path) -> None:
    """A peer that was taken for gone, and was only cut off, is in the next round."""
    watched, clock = Watched(open_store("memory://")), Clock()
    peers = crowd(tmp_path, watched, clock)
    try:
        gather(peers)
        train_all(peers, 5)
        cut_off = peers.pop()
        cut_off.transport._heart.stop()
        clock.now += LEASE_S + 1.0
        beat(peers)
        train_all(peers, 9)
        beat([*peers, cut_off])
        assert all(cut_off.me.peer_id in peer.transport._heart.live() for peer in peers)
        cut_off.transport._may_lag = True
        cut_off.arrive()
        train_all([*peers, cut_off], 13)
        assert len(manifest_of(watched, 2).entries) == 3
        assert len({peer.replica.digest() for peer in (*peers, cut_off)}) == 1
    finally:
        for peer in (*peers, cut_off):
            peer.transport.leave()


def test_what_retention_leaves_is_what_somebody_who_was_away_needs(tmp_path: Path) -> None:
    """Rule 7: each peer that stays removes its own rounds before the older of its two anchors; all else is there."""
    store, clock = open_store("memory://"), Clock()
    peers = crowd(tmp_path, store, clock, anchor_every=2)
    try:
        gather(peers)
        train_all(peers, 9)
        away = peers.pop()
        away.transport._heart.stop()
        together(lambda: train_all(peers, 53), lambda: miss(peers, 53, clock))
    finally:
        for peer in peers:
            peer.transport.leave()  # after what is written in the background
    kept = {peer.me.peer_id: peer.transport._member.retention.oldest_kept(0) for peer in peers}  # pyright: ignore
    assert sorted(kept.values()) == [6, 8], "they take turns in rounds 0, 2, 4 to 12, and each counts its own"
    frames: dict[str, list[int]] = {}
    for entry in store.list("rounds"):
        if isinstance(place := paths.parse(entry.path), paths.Frame):
            frames.setdefault(place.peer, []).append(place.round)
    assert {peer: rounds[0] for peer, rounds in frames.items() if peer in kept} == kept
    assert frames[away.me.peer_id] == [0, 1], "nobody removes what is another's"
    manifests = [entry.path for entry in store.list("rounds") if "manifest-" in entry.path]
    assert len(manifests) == 13, "these stay"
    anchors = Counter(int(entry.path.split("/")[1]) for entry in store.list("anchors"))
    assert sorted(anchors) == [6, 8, 10, 12]
    away.transport._may_lag = True
    away.arrive()
    away.transport.leave()
    assert away.replica.digest() == peers[0].replica.digest()
    assert "behind" in away.kinds(), "frames of the rounds that it missed are gone, and it went on from an anchor"


@pytest.mark.parametrize("row", ["sparseloco", "diloco", "streaming_diloco"])
def test_whoever_was_away_too_long_leaps_to_an_anchor(row: str, tmp_path: Path) -> None:
    """Frames are removed by those who own them, as their anchors allow it; the state is that of the others."""
    store, clock = open_store("memory://"), Clock()
    run = make_run(ROWS[row](), toy.net(), lease_s=LEASE_S, deadline_s=NEVER_S, anchor_every=1)
    peers = [
        Peer(run, ROWS[row](), store, me, tmp_path / f"{number}", number, clock=clock)
        for number, me in enumerate(identities(3))
    ]
    away = peers.pop()
    try:
        gather([*peers, away])
        train_all([*peers, away], 9)
        away.transport._heart.stop()
        together(lambda: train_all(peers, 45), lambda: miss(peers, 45, clock))
        fragments = range(len(away.replica.lanes))
        own = [peer.transport._member.retention for peer in peers]  # pyright: ignore[reportOptionalMemberAccess]
        while not all(one.oldest_kept(fragment) >= 6 for one in own for fragment in fragments):
            time.sleep(0.005)  # anchors are written beside the training
        away.said.clear()
        away.transport._may_lag = True
        away.arrive()
        assert "behind" in away.kinds()
        assert away.replica.step >= 44
        beat([*peers, away])
        train_all([*peers, away], 53)
        assert len({peer.replica.digest() for peer in (*peers, away)}) == 1
        newest = max(number for number in range(20) if not is_open(store, number))
        assert len(manifest_of(store, newest).entries) == 3, "it is in the next round"
    finally:
        for peer in (*peers, away):
            peer.transport.leave()
