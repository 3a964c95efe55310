"""Peers as processes of their own that have nothing in common but a store."""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from tests import toy
from tests.driver import ROWS
from tests.forked import forks
from tests.peers.crowd import Peer, identities, loopback, make_run

ROUNDS = 20
STEPS = 4 * ROUNDS + 2
PEERS = 4


def one_peer(url: str, folder: str, row: str, number: int, environment: dict[str, str]) -> tuple[str, float, int]:
    """What a peer is in the end: digest of its shared state, norm of its residual, bytes sent."""
    from sparseloco.peers.store import open_store

    os.environ.update(environment)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    run = make_run(ROWS[row](), toy.net(), min_peers=PEERS, lease_s=30.0, anchor_every=5)
    peer = Peer(run, ROWS[row](), open_store(url), identities(PEERS)[number], Path(folder), number)
    try:
        peer.train(STEPS)
        return peer.replica.digest(), peer.replica.residual_norm(), peer.transport.traffic(number).sent
    finally:
        peer.transport.leave()


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(PEERS, mp_context=forks()) as pool:
        yield pool


@pytest.fixture(params=["directory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, str]]:
    if request.param == "directory":
        return str(tmp_path / "run"), {}
    environment = {
        "AWS_ENDPOINT_URL": request.getfixturevalue("moto_url"),
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "AKIDPLANTED",
        "AWS_SECRET_ACCESS_KEY": "SECRETPLANTED",
    }
    return f"s3://bucket/processes-{uuid.uuid4().hex}", environment


@pytest.mark.mp
@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", ["sparseloco", "diloco", "streaming_diloco"])
def test_four_processes_and_twenty_rounds_equal_one_process(
    row: str, place: tuple[str, dict[str, str]], processes: ProcessPoolExecutor, tmp_path: Path
) -> None:
    """C-12, C-40: one store is the single truth, and every peer has every bit of it."""
    url, environment = place
    jobs = [
        processes.submit(one_peer, url, str(tmp_path / f"{number}"), row, number, environment)
        for number in range(PEERS)
    ]
    outcomes = [job.result(timeout=280) for job in jobs]
    expected = loopback(ROWS[row](), PEERS, STEPS)
    assert {digest for digest, _, _ in outcomes} == {expected.replicas[0].digest()}
    assert [norm for _, norm, _ in outcomes] == [replica.residual_norm() for replica in expected.replicas]
    assert all(sent > 0 for _, _, sent in outcomes)
