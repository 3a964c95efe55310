"""Replicas of one process and ranks of a gloo group do the same, bit for bit; one thread each."""

from __future__ import annotations

import pytest
import torch

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
def test_same_count_of_bytes_sent(pair: Group, row: str) -> None:
    """Both count what a peer hands over with its headers; slices of linear payloads are padded to even size."""
    sent = [traffic[0] for traffic in pair.run(worlds.traffic_on_a_rank, row, 8)]
    cohort = train(ROWS[row](), peers=2, steps=8)
    simulated = cohort.transport.traffic(0).sent
    assert sent[0] == sent[1]
    assert simulated <= sent[0] <= simulated + 8 * 8


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
    assert texts[0].startswith("DivergenceError: peer 1: says algorithm ")
    assert texts[0].endswith("all peers need the same [algorithm] and model")


def test_equal_starts_are_accepted(pair: Group) -> None:
    assert pair.run(worlds.refusal, "nothing") == ["no error", "no error"]


def test_peer_number_must_be_the_rank(pair: Group) -> None:
    texts = pair.run(worlds.wrong_peer_number)
    assert texts[0] == "ConfigError: peer=1: must be the rank 0; build Replica(..., peer=rank)"


def test_helper_shows_the_traceback_of_a_rank_that_failed() -> None:
    """The other rank waits in a barrier for ever; nobody waits for it."""
    with pytest.raises(RankError, match=r"(?s)rank 1:.*ValueError: on purpose"):
        run_on(2, worlds.fails_on_rank_1)
