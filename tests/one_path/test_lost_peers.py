"""Runs of which one rank dies, hangs or differs end at all ranks, with its name; real processes of gloo."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparseloco.reduce import mean_of_tensors
from tests.mp import Group, run_on
from tests.one_path import lost

pytestmark = [pytest.mark.mp, pytest.mark.xdist_group("mp")]


@pytest.fixture(scope="module")
def three() -> Iterator[Group]:
    group = Group(3)
    yield group
    group.close()


REMEDY = "must answer within deadline_s=300; look at what it printed, then continue with --resume"
ALIKE = "give all of them the same settings, text, model and version"


def test_a_rank_that_is_killed_is_named_by_all_others_c33(tmp_path: Path) -> None:
    """C-33: who was missing, since when, and what to do."""
    told = lost.texts(3, lost.killed, tmp_path)
    assert told == dict.fromkeys(
        [0, 1], f"PeerLostError: peer 2=no sign of life for 6 s, last in phase 'step 2': {REMEDY}"
    )


def test_a_shard_that_is_killed_is_named_also_by_those_that_never_talk_to_it(tmp_path: Path) -> None:
    told = lost.texts(4, lost.killed_shard, tmp_path)
    text = f"PeerLostError: peer 1, shard 1=no sign of life for 6 s, last in phase 'step 2': {REMEDY}"
    assert told == dict.fromkeys([0, 1, 2], text)


def test_a_rank_that_fails_is_named_with_its_error(tmp_path: Path) -> None:
    told = lost.texts(3, lost.fails, tmp_path)
    text = f"PeerLostError: peer 2=ended with ValueError, last in phase 'step 2': {REMEDY}"
    assert told == {0: text, 1: text, 2: "not ours: on purpose"}


def test_a_rank_that_is_slow_is_told_from_a_dead_one_c36(tmp_path: Path) -> None:
    """C-36: the phase of the one that is waited for is named."""
    told = lost.texts(3, lost.slow, tmp_path)
    assert told.pop(2) == "not ours: done"
    assert sorted(told) == [0, 1]
    for text in told.values():
        words = (
            r"PeerLostError: peer 2=in phase 'evaluate' for \d+ s while peer \d waits in 'collect round 1': must answer"
            r" within deadline_s=300; raise transport\.deadline_s if it is slow, or look at what it printed if it is "
            "stuck"
        )
        assert re.fullmatch(words, text), text


@pytest.mark.parametrize(("row", "tensor"), [("sparse", "0.weight"), ("linear", "0.bias")])
def test_the_first_tensor_that_differs_is_named_and_the_odd_peer(three: Group, row: str, tensor: str) -> None:
    text = (
        f"DivergenceError: {tensor}=peer 2 and peers 0 and 1 differ in round 1: must be equal at all peers, and 2 of 3 "
        "agree; restart peer 2 from a checkpoint of the others"
    )
    assert three.run(lost.differs, row, 3) == [text] * 3


def test_without_a_majority_nobody_is_called_the_odd_one(pair: Group) -> None:
    text = (
        "DivergenceError: 0.weight=peers 0 and 1 differ in round 1: must be equal at all peers, and most do not agree; "
        "restart all of them from a checkpoint"
    )
    assert pair.run(lost.differs, "sparse", 2) == [text] * 2


def test_a_shard_that_differs_stops_all_shards() -> None:
    """Those who hold the other shard see no difference; they stop all the same, and none waits for another."""
    texts = run_on(4, lost.differs_on_a_shard, limit=110)
    for rank in (1, 3):
        assert texts[rank].startswith("DivergenceError: 0.weight=peers 0 and 1 differ in round 1: must be equal")
    for rank in (0, 2):
        assert texts[rank].startswith("DivergenceError: round 1=failed at another shard of this replica: must succeed")


@pytest.mark.parametrize(
    ("what", "difference"),
    [
        ("setting", "train.batch_size is 8 at peer 0 and 4 at peer 2"),
        ("algorithm", "algorithm.schedule.every is 2 at peer 0 and 3 at peer 2"),
        (
            "model",
            "tensor.weight is torch.float32 [5, 3] at peer 0 and torch.float32 [4, 3] at peer 2, "
            "tensor.bias is torch.float32 [5] at peer 0 and torch.float32 [4] at peer 2",
        ),
        ("torch", f"torch.version is {'.'.join(torch.__version__.split('.')[:2])} at peer 0 and 1.0 at peer 2"),
    ],
)
def test_what_differs_at_the_start_is_named_before_a_tensor_is_compared(
    three: Group, what: str, difference: str
) -> None:
    text = f"DivergenceError: peer 2: must start like peer 0, but {difference}; {ALIKE}"
    assert three.run(lost.starts_otherwise, what) == [text] * 3


@pytest.mark.parametrize(("what", "value"), [("version", "9.9.9"), ("source", "0123456789abcdef")])
def test_another_version_is_named_at_all_ranks(three: Group, what: str, value: str) -> None:
    texts = three.run(lost.starts_otherwise, what)
    assert len(set(texts)) == 1
    named = rf"but sparseloco\.{what} is .* at peer 0 and '?{value}'? at peer 2; give"
    assert re.search(named, texts[0]), texts[0]


def test_equal_starts_are_accepted(three: Group) -> None:
    assert three.run(lost.starts_otherwise, "nothing") == ["no error"] * 3


@pytest.mark.parametrize("lengths", [(3, 5), (0, 7), (7, 0), (0, 0), (100_000, 1)])
def test_bytes_of_any_length_are_gathered_c63(pair: Group, lengths: tuple[int, int]) -> None:
    """C-63: unequal and empty ones do not hang and arrive as they are."""
    rows = [bytes([number % 251 + rank for number in range(length)]) for rank, length in enumerate(lengths)]
    assert pair.run(lost.any_length, rows) == [rows, rows]


SHAPES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
        st.sampled_from(["float32", "float64"]),
    ),
    min_size=1,
    max_size=6,
)


@given(shapes=SHAPES)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_tensor_is_reduced_exactly_once_c03(pair: Group, shapes: list[tuple[tuple[int, ...], str]]) -> None:
    """C-03: of any shapes, in one buffer per type without buckets, borders or a cap."""
    specs, mine = lost.parts(0, shapes)
    _, theirs = lost.parts(1, shapes)
    for found in pair.run(lost.reduced, shapes):
        assert list(found) == [spec.name for spec in specs]
        for name, tensor in found.items():
            expected = mean_of_tensors([(1, mine[name].reshape(-1)), (2, theirs[name].reshape(-1))])
            assert tensor.dtype == mine[name].dtype
            assert torch.equal(tensor, expected.reshape(mine[name].shape)), name
