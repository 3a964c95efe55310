"""Peers over a store: the same training as in one process, whoever comes, goes or is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparseloco.peers.store import Store
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
