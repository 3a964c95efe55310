"""Supports that hardly meet are settled without sums, up to one value sent per two of a chunk; bits stay the same."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from sparseloco.merge import Blend, Carry, Replace
from sparseloco.outer import Sgd
from sparseloco.types import Merge
from tests.kernels.reference import COMPACT, FIXED, needs_native
from tests.kernels.test_native_settle import WEIGHTS, Case, Round, check, check_round

pytestmark = [needs_native, pytest.mark.usefixtures("definition")]

RATES = [Sgd(lr=1.0), Sgd(lr=0.7)]


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same_support(case: Case, peers: int) -> Round:
    """The last ``peers`` of the inbox send the places of the first of them, with values of their own."""
    round_ = Round(case)
    for j in range(len(round_.state.anchor)):
        index = round_.inbox[-peers].payload.blocks[j]["index"]
        for envelope in round_.inbox[-peers:]:
            parts = envelope.payload.blocks[j]
            parts["index"] = index.clone()
            parts["code"].random_(0, 4, generator=generator_of(envelope.peer))
            parts["scale"] *= 1 + envelope.peer / 8
    return round_


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("outer", RATES, ids=str)
@pytest.mark.parametrize("meeting", [1, 2, 3, 7, 16])
def test_values_that_meet_are_averaged(meeting: int, outer: Sgd, weights: str) -> None:
    check_round(same_support(Case(peers=16, weights=weights, outer=outer, seed=meeting), meeting))


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_values_that_meet_are_added_in_peer_order(order: tuple[int, ...]) -> None:
    """Of 1, 2^80, -2^80 and 3, what is added before the large ones have cancelled is lost."""
    round_ = same_support(Case(peers=4), 4)
    for peer, number in enumerate(order):
        for parts in round_.inbox[peer].payload.blocks.values():
            parts["scale"].fill_([1.0, 2.0**80, 2.0**80, 3.0][number])
            parts["code"].fill_([0, 0, 1, 0][number])
    check_round(round_)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("k", "peers"), [(128, 16), (1000, 2), (1024, 2), (2048, 1)])
def test_more_values_meet_than_are_put_aside_at_a_time(k: int, peers: int, dtype: torch.dtype) -> None:
    check_round(same_support(Case(place="groups", k=k, peers=peers, dtype=dtype, weights="uneven"), peers))


@pytest.mark.parametrize("place", ["tiles", "small tiles", "odd tiles", "wide tiles", "long runs", "vector", "narrow"])
@pytest.mark.parametrize("merge", [Replace(), Blend(0.3), Carry()], ids=lambda m: m.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_place_and_merge(place: str, merge: Merge, dtype: torch.dtype) -> None:
    k = {"odd tiles": 2, "small tiles": 20}.get(place, 300)
    check_round(same_support(Case(place=place, k=k, peers=3, merge=merge, dtype=dtype, weights="odd"), 2))


@pytest.mark.parametrize(("k", "peers"), [(8, 8), (8, 9), (64, 1), (65, 1), (4, 16), (5, 13)])
@pytest.mark.parametrize("outer", RATES, ids=str)
def test_both_sides_of_the_border(k: int, peers: int, outer: Sgd) -> None:
    """Chunks of 128 values: 64 values sent are few, 65 are many."""
    check(Case(place="small tiles", k=k, peers=peers, outer=outer, weights="uneven"))


@pytest.mark.parametrize("outer", RATES, ids=str)
@pytest.mark.parametrize("meeting", [1, 2, 5])
@pytest.mark.parametrize("zeros", ["all", "first", "last", "some"])
def test_zeros_count_as_sent(zeros: str, meeting: int, outer: Sgd) -> None:
    """Alone, a zero leaves an anchor of minus zero alone; among others, it makes the mean smaller."""
    round_ = same_support(Case(peers=5, weights="uneven", outer=outer), meeting)
    none = {"all": range(5), "first": [0, 5 - meeting], "last": [4], "some": [1, 3]}[zeros]
    for peer in none:
        for parts in round_.inbox[peer].payload.blocks.values():
            parts["scale"].zero_()
    check_round(round_)


def random_floats(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bits of either sign below 1e36: subnormals, powers of two and their neighbours, zeros."""
    generator = generator_of(seed)
    exponent = torch.randint(0, 246, shape, generator=generator)  # 2^-126 and less to 2^118
    fraction = torch.randint(0, 1 << 23, shape, generator=generator)
    near = torch.tensor([0, 0, 1, 2, (1 << 23) - 1, (1 << 23) - 2])
    kind = torch.randint(0, 12, shape, generator=generator)
    fraction = torch.where(kind < 6, near[kind % 6], fraction)
    sign = torch.randint(0, 2, shape, generator=generator)
    return ((sign << 31 | exponent << 23 | fraction) & 0xFFFFFFFF).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("outer", RATES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_exponents(seed: int, outer: Sgd, dtype: torch.dtype) -> None:
    """A difference of float32 values is the same whether it is rounded by way of float64 or not."""
    round_ = same_support(Case(place="groups", k=128, peers=10, outer=outer, dtype=dtype, weights="uneven"), 3)
    for j, block in enumerate(round_.state.anchor):
        block.copy_(random_floats(tuple(block.shape), seed))
        for envelope in round_.inbox:
            parts = envelope.payload.blocks[j]
            scale = random_floats(tuple(parts["scale"].shape), 100 * seed + envelope.peer).abs().bfloat16()
            # Half of the values are near the anchor's, so that bits cancel.
            near = torch.arange(len(scale)).reshape(-1, 1) % 2 == 1
            at = block.gather(1, parts["index"][:, :1].long()).abs().bfloat16()
            parts["scale"] = torch.where(near, at, scale)
    check_round(round_)


@pytest.mark.parametrize("coding", ["fixed", "compact"])
def test_positions_twice_stay_inside_memory(coding: str) -> None:
    """Nobody checked these sections: a peer's positions all come out as the last of the chunk, again and again."""
    round_ = Round(Case(place="tiles", k=1024, peers=2, coding=coding))
    before = [block.clone() for block in round_.state.anchor]
    sections = [[bytearray(section) for section in block] for block in round_.sections()]
    start = {FIXED: 0, COMPACT: 64}[round_.coding_of(0)]
    for section in sections[0]:
        section[start : len(section) // 2] = b"\xff" * (len(section) // 2 - start)
    state, _, _ = round_.settle([[bytes(s) for s in block] for block in sections], 1)
    assert not torch.equal(state.anchor[0], before[0])
    assert all(bool((t.abs() < 1e37).all()) for t in state.anchor)
