"""Replicas of one process and ranks of a gloo group do the same, bit for bit; one thread each."""

from __future__ import annotations

import pytest
import torch

from sparseloco import wire
from sparseloco.types import Coding, Envelope
from tests.driver import ROWS, train
from tests.mp import Group, RankError, run_on
from tests.one_path import worlds

pytestmark = [pytest.mark.mp, pytest.mark.xdist_group("mp")]


@pytest.mark.parametrize("model", list(worlds.MODELS))
@pytest.mark.parametrize("row", list(ROWS))
def test_same_bits(pair: Group, row: str, model: str) -> None:
    """Dropout draws from each replica's own stream; normalisation's buffers are averaged. Weights differ."""
    simulated = worlds.in_one_process(row, model, 2, 14)
    real = pair.run(worlds.on_a_rank, row, model, 14)
    assert len({outcome.digest for outcome in [*simulated, *real]}) == 1
    for mine, other in zip(simulated, real, strict=True):
        assert mine.update_norms == other.update_norms
        assert mine.private.keys() == other.private.keys()
        assert [path for path in mine.private if not torch.equal(mine.private[path], other.private[path])] == []


@pytest.mark.parametrize("row", list(ROWS))
def test_both_count_the_bytes_of_their_frames(pair: Group, row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse frames are compact in one process and of one size between processes; all else has the same bytes.

    Slices of linear payloads are padded to even size.
    """
    posted: list[tuple[int, int, int, bool]] = []
    real_encode = wire.encode

    def encode(envelope: Envelope, *, coding: Coding) -> bytes:
        frame = real_encode(envelope, coding=coding)
        payload = envelope.payload
        posted.append((envelope.peer, len(frame), wire.frame_bytes(payload.specs), payload.linear))
        return frame

    monkeypatch.setattr(wire, "encode", encode)
    simulated = train(ROWS[row](), peers=2, steps=8).transport
    real = pair.run(worlds.traffic_on_a_rank, row, 8)
    assert posted
    padding = 8 * 8 if posted[0][3] else 0
    for peer, traffic in enumerate(real):
        compact = sum(size for sender, size, _, _ in posted if sender == peer)
        fixed = sum(size for sender, _, size, _ in posted if sender == peer)
        assert simulated.traffic(peer).sent == compact
        assert simulated.traffic(1 - peer).received == compact
        assert fixed <= traffic[0] <= fixed + padding
        assert fixed <= traffic[1] <= fixed + padding


def test_start_from_other_weights_names_the_tensor_c02(pair: Group) -> None:
    """C-02: models that are not initialised alike are refused, on both ranks, before a step."""
    expected = (
        "DivergenceError: peer 1, tensor 2.bias: starts from other values than at peer 0; "
        "initialise all replicas from the same seed or the same file"
    )
    assert pair.run(worlds.refusal, "weights") == [expected, expected]


def test_start_with_another_algorithm_is_named(pair: Group) -> None:
    texts = pair.run(worlds.refusal, "algorithm")
    assert texts[0] == texts[1]
    assert texts[0] == (
        "DivergenceError: peer 1: must start like peer 0, but algorithm.outer.lr is 0.7 at peer 0 and 0.5 at peer 1; "
        "give all of them the same settings, text, model and version"
    )


def test_equal_starts_are_accepted(pair: Group) -> None:
    assert pair.run(worlds.refusal, "nothing") == ["no error", "no error"]


def test_peer_number_must_be_the_rank(pair: Group) -> None:
    texts = pair.run(worlds.wrong_peer_number)
    assert texts[0] == "ConfigError: peer=1: must be the rank 0; build Replica(..., peer=rank)"


def test_helper_shows_the_traceback_of_a_rank_that_failed() -> None:
    """The other rank waits in a barrier for ever; nobody waits for it."""
    with pytest.raises(RankError, match=r"(?s)rank 1:.*ValueError: on purpose"):
        run_on(2, worlds.fails_on_rank_1)
