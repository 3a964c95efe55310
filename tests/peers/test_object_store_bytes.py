"""What a store costs: bytes that are reported are bytes of objects, and catching up is cheap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparseloco import adamw, presets
from sparseloco.peers.replay import Progress
from sparseloco.peers.store import Store, open_store
from sparseloco.transport.base import Traffic
from tests import toy
from tests.driver import ROWS
from tests.peers.crowd import Peer, identities, make_run, train_all


class Counting:
    """Counts what really goes through a store, apart from the transport's own meter."""

    def __init__(self, store: Store) -> None:
        self.store, self.sent, self.received = store, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def put(self, path: str, data: bytes) -> None:
        self.store.put(path, data)
        self.sent += len(data)

    def create(self, path: str, data: bytes) -> None:
        self.store.create(path, data)
        self.sent += len(data)

    def get(self, path: str, *, limit: int) -> bytes:
        data = self.store.get(path, limit=limit)
        self.received += len(data)
        return data

    def get_range(self, path: str, start: int, length: int) -> bytes:
        data = self.store.get_range(path, start, length)
        self.received += len(data)
        return data


def test_reported_bytes_are_those_of_the_objects(tmp_path: Path) -> None:
    """C-66: counted where they go in and out, not by a formula."""
    store = open_store("memory://")
    counting = [Counting(store) for _ in range(2)]
    run = make_run(ROWS["sparseloco"](), toy.net())
    peers = [
        Peer(run, ROWS["sparseloco"](), counted, me, tmp_path / f"{n}", n)
        for n, (counted, me) in enumerate(zip(counting, identities(2), strict=True))
    ]
    train_all(peers, 13)
    for peer, counted in zip(peers, counting, strict=True):
        peer.transport.leave()
        assert peer.transport.traffic(peer.number) == Traffic(counted.sent, counted.received)
    frames = sum(entry.size for entry in store.list("rounds") if peers[0].me.peer_id in entry.path)
    assert counting[0].sent > frames > 0


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    run = make_run(ROWS["sparseloco"](), toy.net())
    peer = Peer(run, ROWS["sparseloco"](), open_store("memory://"), identities(1)[0], tmp_path, 0)
    peer.transport.connect(peer.replica)
    peer.transport.set_traffic(0, Traffic(10**9, 10**8))
    peer.transport._heart.stop()
    more = peer.transport.traffic(0)
    assert 10**9 <= more.sent < 10**9 + 10**4
    peer.transport.leave()


def test_replay_costs_less_than_six_thousandths_of_dense_per_peer_and_round(tmp_path: Path) -> None:
    """C-30: real frames at default settings, everything that is downloaded counted; and how far it is, is told."""
    algorithm = presets.sparseloco(inner_steps=1, inner=adamw(1e-3))

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(1024, 1024, bias=False)

    rounds, count = 6, 2
    run = make_run(algorithm, model(), anchor_every=10**6)
    store = open_store("memory://")
    peers = [Peer(run, algorithm, store, me, tmp_path / f"{n}", n, model()) for n, me in enumerate(identities(count))]
    told: list[Progress] = []
    joiner = Peer(run, algorithm, store, identities(3)[2], tmp_path / "joiner", 7, model())
    joiner.transport._progress = told.append
    try:
        train_wide(peers, rounds)
        for entry in store.list("anchors"):
            store.delete(entry.path)
        joiner.transport.connect(joiner.replica)
        assert joiner.replica.digest() == peers[0].replica.digest()
    finally:
        for peer in [*peers, joiner]:
            peer.transport.leave()
    dense = 4 * 1024 * 1024
    assert [progress.rounds for progress in told] == list(range(1, rounds + 1))
    assert told[-1].received_bytes / (rounds * count * dense) < 0.006
    assert told[-1].left_s == 0.0
    assert told[0].left_s is not None
    assert told[0].left_s > 0
    assert told[-1].bytes_per_s > 0


def train_wide(peers: list[Peer], until: int) -> None:
    from sparseloco import advance, settle
    from tests.peers.crowd import together

    def one(peer: Peer) -> None:
        peer.transport.connect(peer.replica)
        while peer.replica.step < until:
            generator = torch.Generator().manual_seed(100 * peer.replica.step + peer.number)
            x = torch.randn(4, 1024, generator=generator)
            (peer.model(x) - x).square().mean().backward()
            advance(peer.replica, peer.transport)
            settle(peer.replica, peer.transport)

    together(*[lambda peer=peer: one(peer) for peer in peers])
