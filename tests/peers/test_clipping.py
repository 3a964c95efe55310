"""C-68: clipping norms to the median of the round, as an option of the policy."""

from __future__ import annotations

import logging
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparseloco import ConfigError
from sparseloco.peers.aloud import log_aloud
from sparseloco.peers.clipping import clip_to_median, payload_norm, scaled
from sparseloco.peers.operations import Tell
from sparseloco.peers.policy import Policy
from sparseloco.peers.store import open_store
from sparseloco.replica import Replica
from sparseloco.types import Envelope, Parts, Payload
from tests import toy
from tests.driver import ROWS
from tests.peers.crowd import Peer, identities, make_run, together

METHODS = ["sparseloco", "diloco", "streaming_diloco"]


def posted(method: str, size: float, peer: int = 0) -> tuple[Replica, Envelope]:
    """The first message of a replica whose parameters moved by ``size``."""
    replica = Replica(toy.net(), ROWS[method](), peer=peer)
    generator = torch.Generator().manual_seed(peer)
    with torch.no_grad():
        for param in replica.params.values():
            param.add_(size * torch.randn(param.shape, generator=generator))
    while not (outbox := replica.outbox()):
        replica.stepped()
    return replica, outbox[0]


def decoded(replica: Replica, envelope: Envelope, payload: Payload) -> torch.Tensor:
    lane = replica.lanes[envelope.key.fragment]
    blocks = [torch.zeros_like(anchor) for anchor in lane.state.anchor]
    for j, parts in payload.blocks.items():
        lane.channel.compressor.accumulate_(blocks[j], parts, 1, lane.state.codec[j])
    return torch.cat([block.flatten() for block in blocks])


@pytest.mark.parametrize("method", METHODS)
def test_a_norm_is_that_of_what_is_decoded_and_scaling_scales_it(method: str) -> None:
    replica, envelope = posted(method, 0.1)
    lane = replica.lanes[envelope.key.fragment]
    whole = decoded(replica, envelope, envelope.payload)
    norm = payload_norm(lane.channel, lane.state, envelope.payload)
    # Sums are exact there; torch's own sum rounds.
    assert norm == pytest.approx(float(whole.double().norm()), rel=1e-12)
    quarter = decoded(replica, envelope, scaled(envelope.payload, 0.25))
    assert torch.equal(quarter, whole * 0.25)  # a power of two, so nothing is rounded
    third = scaled(envelope.payload, 1 / 3)
    # Scales are bfloat16: 8 bits.
    assert payload_norm(lane.channel, lane.state, third) == pytest.approx(norm / 3, rel=2**-8)


@pytest.mark.parametrize("method", METHODS)
def test_long_payloads_get_the_allowed_length_and_others_stay(method: str) -> None:
    made = [posted(method, size, peer) for peer, size in enumerate((0.1, 0.11, 5.0, 0.09))]
    lane = made[0][0].lanes[made[0][1].key.fragment]

    def norm(payload: Payload) -> float:
        return payload_norm(lane.channel, lane.state, payload)

    inbox = [envelope for _, envelope in made]
    clipped, norms, most = clip_to_median(inbox, norm, 1.5)
    limit = 1.5 * statistics.median(norm(envelope.payload) for envelope in inbox)
    assert norms == {peer: norm(envelope.payload) for peer, envelope in enumerate(inbox)}
    assert (most, [peer for peer, length in norms.items() if length > most]) == (limit, [2])
    assert norm(clipped[2].payload) == pytest.approx(limit, rel=2**-8)
    assert [one is other for one, other in zip(clipped, inbox, strict=True)] == [True, True, False, True]
    assert clip_to_median(inbox, norm, 0)[:2] == (inbox, {})
    assert clip_to_median(inbox[1:3], norm, 1.5)[:2] == (inbox[1:3], {})  # of two, nobody knows which is the long one


def run_three(folder: Path, **policy: float) -> list[Peer]:
    """Three peers, of which the last one moves a hundred times as far as the others, then a fourth that joins."""
    run = make_run(ROWS["sparseloco"](), toy.net(), min_peers=3, **policy)
    store = open_store("memory://")
    peers = [
        Peer(run, ROWS["sparseloco"](), store, me, folder / str(number), number)
        for number, me in enumerate(identities(4))
    ]

    def one(peer: Peer) -> None:
        peer.arrive()
        while peer.replica.step < 8:
            if peer.number == 2:
                with torch.no_grad():
                    for param in peer.model.parameters():
                        param.add_(3.0)
            peer.step()

    together(*(lambda peer=peer: one(peer) for peer in peers[:3]))
    peers[3].arrive()
    for peer in peers:
        peer.transport.leave()
    return peers


def test_a_peer_that_jumps_bends_nobody_beyond_the_median(tmp_path: Path) -> None:
    """All apply the same scaled payloads, and so does one that joins and replays them."""
    start = Replica(toy.net(), ROWS["sparseloco"]()).anchor()

    def moved(peer: Peer) -> float:
        return sum(float((value - start[name]).norm()) for name, value in peer.replica.anchor().items())

    free = run_three(tmp_path / "free")
    clipped = run_three(tmp_path / "clipped", clip_norm_ratio=1.0)
    for peers in (free, clipped):
        assert len({peer.replica.digest() for peer in peers}) == 1
    assert moved(clipped[0]) < moved(free[0]) / 10
    said = [tell.text for tell in clipped[0].said if tell.kind == "clipped-other"]
    assert f"what {identities(4)[2].peer_id[:8]} sent is scaled by 0.0" in said[0]
    assert "what this peer sent is scaled by 0.0" in next(t.text for t in clipped[2].said if t.kind == "clipped")
    assert "clipped" not in clipped[0].kinds()
    for peer in clipped:  # C-68: whoever looks for a peer that bends the run finds every length in the log
        norms = next(tell.text for tell in peer.said if tell.kind == "norms")
        assert re.fullmatch(r"round 0, fragment 0: norms, of which \S+ may be: (\S+( peer)? \S+(, |$)){3}", norms)
    assert not any(tell.kind == "norms" for peer in free for tell in peer.said)
    assert not any(tell.kind.startswith("clipped") for peer in free for tell in peer.said)


def test_only_what_was_cut_off_from_this_peer_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="sparseloco.peers"):
        for kind in ("clipped", "clipped-other"):
            log_aloud(Tell(kind, 1, 0, kind))
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "clipped"), ("INFO", "clipped-other"),
    ]  # fmt: skip


def test_a_norm_is_worked_out_where_the_state_is() -> None:
    """No card is needed to see where a block would be made: on the device of the anchor, its parts with it."""
    replica, envelope = posted("sparseloco", 0.1)
    lane = replica.lanes[envelope.key.fragment]
    seen: list[tuple[str, set[str]]] = []

    class Looking:
        def accumulate_(self, out: torch.Tensor, parts: Parts, weight: int, shared: Parts) -> None:
            seen.append((out.device.type, {part.device.type for part in parts.values()}))
            raise LookupError

    anchor = [block.to("meta") for block in lane.state.anchor]
    with pytest.raises(LookupError):
        payload_norm(
            replace(lane.channel, compressor=Looking()),  # pyright: ignore[reportArgumentType]
            replace(lane.state, anchor=anchor),
            envelope.payload,
        )
    assert seen == [("meta", {"meta"})]


@pytest.mark.parametrize("ratio", [0.5, -1.0, float("nan")])
def test_a_ratio_below_the_median_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError) as caught:
        Policy(clip_norm_ratio=ratio)
    assert str(caught.value) == (
        f"policy.clip_norm_ratio={ratio!r}: must be 0 for no clipping or at least 1, the median itself; use 3"
    )
