"""A peer that is killed: what it had posted is posted again, byte for byte, and counts exactly once."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from sparseloco.peers import paths
from sparseloco.peers.journal import Journal
from sparseloco.peers.manifest import Manifest
from sparseloco.peers.store import PAGE, Listed, Page, Store, open_store
from sparseloco.transport.faults import Crash
from tests import toy
from tests.driver import ROWS
from tests.peers.crowd import Clock, Peer, identities, loopback, make_run, miss, together, train_all


class Deadly:
    """A store at which the process dies with the first put of a frame of a certain round, before or after it."""

    def __init__(self, store: Store, number: int, *, after: bool) -> None:
        self.store, self.after = store, after
        self.folder = f"rounds/{number:08}/"
        self.dead = threading.Event()

    def put(self, path: str, data: bytes) -> None:
        self._check()
        if path.startswith(self.folder) and path.endswith(".frame"):
            if self.after:
                self.store.put(path, data)
            self.dead.set()
        self._check()
        self.store.put(path, data)

    def create(self, path: str, data: bytes) -> None:
        self._check()
        self.store.create(path, data)

    def get(self, path: str, *, limit: int) -> bytes:
        self._check()
        return self.store.get(path, limit=limit)

    def get_range(self, path: str, start: int, length: int) -> bytes:
        self._check()
        return self.store.get_range(path, start, length)

    def size(self, path: str) -> int:
        self._check()
        return self.store.size(path)

    def list(self, prefix: str, *, after: str = "") -> list[Listed]:
        self._check()
        return self.store.list(prefix, after=after)

    def page(self, prefix: str, *, after: str = "", limit: int = PAGE) -> Page:
        self._check()
        return self.store.page(prefix, after=after, limit=limit)

    def delete(self, path: str) -> None:
        self._check()
        self.store.delete(path)

    def _check(self) -> None:
        if self.dead.is_set():
            raise Crash("killed")


def make(row: str, tmp_path: Path, store: Store, number: int, *, clock: Clock | None = None, **policy: Any) -> Peer:
    run = make_run(ROWS[row](), toy.net(), **policy)
    folder = tmp_path / str(number)
    return Peer(run, ROWS[row](), store, identities(3)[number], folder, number, clock=clock or time.monotonic)


def dies(peer: Peer, until: int) -> None:
    """Train until the store kills it; its threads end without a word to the others, as with the process."""
    with pytest.raises(Crash):
        peer.train(until)
    peer.transport._desk.stop.set()
    peer.transport._heart.stop()


def objects_of(store: Store, number: int, peer: Peer) -> list[str]:
    return [entry.path for entry in store.list(f"rounds/{number:08}") if f"/{peer.me.peer_id}/" in entry.path]


@pytest.mark.parametrize("after", [False, True], ids=["before put", "after put"])
@pytest.mark.parametrize("row", ["sparseloco", "diloco", "sparseloco_delayed"])
def test_restart_posts_the_same_bytes_and_the_round_is_what_it_would_have_been(
    row: str, after: bool, tmp_path: Path
) -> None:
    """C-49: killed between write-ahead and put, or after it, the round has the payload once, as if nothing had been."""
    store = open_store("memory://")
    peers = [make(row, tmp_path, store, number, min_peers=3) for number in range(2)]
    deadly = Deadly(store, 1, after=after)
    victim = make(row, tmp_path, deadly, 2, min_peers=3)
    again: list[Peer] = []

    def killed_and_started_again() -> None:
        dies(victim, 11)
        again.append(make(row, tmp_path, store, 2, min_peers=3))
        again[0].train(11)

    try:
        together(*[lambda peer=peer: peer.train(11) for peer in peers], killed_and_started_again)
    finally:
        for peer in [*peers, *again]:
            peer.transport.leave()
    expected = loopback(ROWS[row](), 3, 11)
    assert {peer.replica.digest() for peer in [*peers, *again]} == {expected.replicas[0].digest()}
    residual = again[0].replica.lanes[0].state.residual
    assert all(torch.equal(a, b) for a, b in zip(residual, expected.replicas[2].lanes[0].state.residual, strict=True))
    assert len(objects_of(store, 1, victim)) == 1


@pytest.mark.parametrize("after", [False, True], ids=["before put", "after put"])
def test_who_comes_back_after_the_round_is_credited_or_counted_but_never_both(after: bool, tmp_path: Path) -> None:
    """C-35, C-49: the manifest decides; losing a peer for good costs its residual only."""
    store = open_store("memory://")
    clock = Clock()
    peers = [make("sparseloco", tmp_path, store, number, clock=clock) for number in range(2)]
    victim = make("sparseloco", tmp_path, Deadly(store, 1, after=after), 2, clock=clock)
    everybody = [*peers, victim]
    for peer in everybody:
        peer.arrive()
    for peer in everybody:
        peer.transport._heart.look()

    def dies_and_is_missed() -> None:
        dies(victim, 17)
        miss(peers, 17, clock)

    together(*[lambda peer=peer: peer.train(17) for peer in peers], dies_and_is_missed)
    posted = Journal(tmp_path / "2" / victim.run.run / victim.me.peer_id, victim.run.run).read(0)
    assert posted is not None
    assert posted.key.round == 1
    back = make("sparseloco", tmp_path, store, 2)
    try:
        back.transport.connect(back.replica)
        assert back.replica.digest() == peers[0].replica.digest()
        manifest = msgspec.json.decode(store.get(str(paths.Manifest(1, 0, 0)), limit=2**20), type=Manifest)
        listed = manifest.entry_of(back.me.peer_id) is not None
        lane = back.replica.lanes[0]
        owed = [block.clone() for block in posted.residual]
        if not listed:
            victim_lane = victim.replica.lanes[0]
            sent = victim_lane.in_flight[1].payload
            assert sent is not None
            for j, block in enumerate(owed):
                lane.channel.compressor.accumulate_(block, sent.blocks[j], 1, {})
        assert all(torch.equal(a, b) for a, b in zip(lane.state.residual, owed, strict=True))
        train_all([*peers, back], 25)
        assert len({peer.replica.digest() for peer in [*peers, back]}) == 1
    finally:
        for peer in [*peers, back]:
            peer.transport.leave()


def test_all_killed_at_once_go_on(tmp_path: Path) -> None:
    """The run has no other place than the store and the folders of its peers."""
    store = open_store("memory://")
    victims = [make("streaming_diloco", tmp_path, Deadly(store, 1, after=bool(n)), n) for n in range(2)]
    together(*[lambda peer=peer: dies(peer, 30) for peer in victims])
    peers = [make("streaming_diloco", tmp_path, store, number) for number in range(2)]
    try:
        train_all(peers, 30)
        assert len({peer.replica.digest() for peer in peers}) == 1
    finally:
        for peer in peers:
            peer.transport.leave()


def test_a_frame_that_cannot_be_written_down_is_not_sent(tmp_path: Path) -> None:
    """Write-ahead comes first, also where the disk is full."""
    from sparseloco.errors import CheckpointError

    store = open_store("memory://")
    peer = make("sparseloco", tmp_path, store, 0)
    peer.transport.connect(peer.replica)
    folder = tmp_path / "0"
    folder.write_text("no directory")
    with pytest.raises(CheckpointError, match="what this peer sends cannot be saved first"):
        peer.train(8)
    assert objects_of(store, 0, peer) == []
    peer.transport.leave()
