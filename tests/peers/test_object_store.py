"""Peers over a store: the same training as in one process, whoever comes, goes or is killed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from sparseloco.peers.store import Store, open_store
from tests import toy
from tests.driver import ROWS
from tests.peers.crowd import Peer, identities, loopback, make_run, train_all


def crowd(row: str, store: Store, tmp_path: Path, count: int, **policy: object) -> list[Peer]:
    run = make_run(ROWS[row](), toy.net(), **policy)
    return [
        Peer(run, ROWS[row](), store, me, tmp_path / f"folder-{number}", number)
        for number, me in enumerate(identities(count))
    ]


@pytest.mark.parametrize("row", ["sparseloco", "diloco", "streaming_diloco", "sparseloco_delayed", "powersgd"])
def test_shared_state_is_that_of_one_process(row: str, store: Store, tmp_path: Path) -> None:
    """C-12: bit for bit, in memory, over a directory and over S3."""
    steps = 13
    peers = crowd(row, store, tmp_path, 4, min_peers=4)
    try:
        train_all(peers, steps)
    finally:
        for peer in peers:
            peer.transport.leave()
    cohort = loopback(ROWS[row](), 4, steps)
    assert {peer.replica.digest() for peer in peers} == {cohort.replicas[0].digest()}
    for peer, replica in zip(peers, cohort.replicas, strict=True):
        assert peer.replica.residual_norm() == replica.residual_norm()


class Gated:
    """A store that takes no frame before a test lets it."""

    def __init__(self, store: Store, gate: threading.Event) -> None:
        self.store, self.gate = store, gate

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self.store, name)

        def call(path: str, *rest: Any, **options: Any) -> Any:
            if path.endswith(".frame"):
                self.gate.wait(60)
            return verb(path, *rest, **options)

        return call


def test_a_message_with_a_delay_is_sent_beside_the_steps_that_follow(tmp_path: Path) -> None:
    """It is posted after step 4 and collected after step 6; what lies between does not wait for the store."""
    gate, store = threading.Event(), open_store("memory://")
    (peer,) = crowd("sparseloco_delayed", Gated(store, gate), tmp_path, 1, min_peers=1)  # type: ignore[arg-type]
    try:
        peer.train(5)
        assert peer.replica.in_flight()
        assert not [entry for entry in store.list("rounds") if entry.path.endswith(".frame")]
        gate.set()
        peer.train(9)
        assert peer.replica.digest() == loopback(ROWS["sparseloco_delayed"](), 1, 9).replicas[0].digest()
    finally:
        gate.set()
        peer.transport.leave()
