"""What a server's access log says against what peers and `status` report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from sparseloco import adamw, advance, presets, settle
from sparseloco.peers import canonical
from sparseloco.peers.looking import Viewer
from sparseloco.peers.store import Store, open_store
from tests.peers.access_log import in_front_of
from tests.peers.crowd import Peer, identities, make_run, together

WIDTH, ROUNDS, PEERS = 128, 4, 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH, bias=False)


def train(peer: Peer) -> None:
    peer.transport.connect(peer.replica)
    while peer.replica.step < ROUNDS:
        generator = torch.Generator().manual_seed(100 * peer.replica.step + peer.number)
        x = torch.randn(4, WIDTH, generator=generator)
        (peer.model(x) - x).square().mean().backward()
        advance(peer.replica, peer.transport)
        settle(peer.replica, peer.transport)


def test_bytes_of_the_access_log_are_those_reported(
    moto_url: str, open_moto: Callable[[str], Store], tmp_path: Path
) -> None:
    """C-66: counted by a third party between peers and server. Frames and traffic to the byte; sums within 1 %, since
    leases are put again and again, and the objects of the probes are gone."""
    algorithm = presets.diloco(inner_steps=1, inner=adamw(1e-3))
    run = make_run(algorithm, model(), min_peers=PEERS, anchor_every=10**6, lease_s=120.0)
    with in_front_of(moto_url) as log:
        options = {"endpoint": log.url, "region": "us-east-1", "allow_http": "true"}
        keys = {"access_key_id": "AKIDPLANTED", "secret_access_key": "SECRETPLANTED"}
        store = open_store("s3://bucket/access-log", options={**options, **keys})
        data = canonical.encode(run)
        store.create("run.json", data)
        peers = [
            Peer(run, algorithm, store, me, tmp_path / f"{n}", n, model()) for n, me in enumerate(identities(PEERS))
        ]
        try:
            together(*[lambda peer=peer: train(peer) for peer in peers])
        finally:
            for peer in peers:
                peer.transport.leave()
        traffic = [peer.transport.traffic(peer.number) for peer in peers]
        assert log.put_bytes() == len(data) + sum(one.sent for one in traffic)
        # The probe asks for an object that is longer than its limit: the server sends 10 bytes that nobody takes.
        assert log.got_bytes() == sum(one.received for one in traffic) + 10 * PEERS
        seen = Viewer(open_moto("s3://bucket/access-log")).look()
        assert seen.closed == {0: ROUNDS}
        assert seen.bytes is not None
        dense = 4 * WIDTH * WIDTH
        assert log.put_bytes(".frame") == seen.bytes.frames == seen.bytes.listed > PEERS * ROUNDS * dense
        assert (
            sum(one.listed_bytes for one in seen.rounds) == seen.bytes.listed == sum(one.nbytes for one in seen.peers)
        )
        assert abs(log.put_bytes() - seen.bytes.total) <= 0.01 * log.put_bytes()
        assert seen.bytes.objects == len({line.path for line in log.lines if line.method == "PUT"}) - 2 * PEERS
