"""The contract of reducers: one peer is the identity, order changes nothing where sums are exact, weights count."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparseloco.compress import Compressor, Dense, Float32, LowRank, ScaledSign, TopK
from sparseloco.reduce import MAX_WEIGHT, Mean, Reducer, check_weight, mean_of_parts, mean_of_tensors
from sparseloco.types import Parts
from tests.contracts.cases import COMPRESSORS, decode, heavy_tailed, init

REDUCERS: dict[str, Reducer] = {
    "contributors": Mean(),
    "peers": Mean(over="peers"),
}

any_reducer = pytest.mark.parametrize("reducer", REDUCERS.values(), ids=REDUCERS)
any_compressor = pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)
any_float = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def inbox_of(compressor: Compressor, blocks: list[Tensor], shared: Parts) -> list[Parts]:
    return [compressor.encode(block, shared, key=i) for i, block in enumerate(blocks)]


def on_grid(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Multiples of 1/8 below 64: sums of some of them times small integers are exact in float64, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-511, 512, shape, generator=generator).to(dtype) / 8


@any_reducer
@any_compressor
@any_float
@pytest.mark.parametrize("weight", [1, 3, 2**29 - 1])
def test_one_peer_is_the_identity(reducer: Reducer, compressor: Compressor, dtype: torch.dtype, weight: int) -> None:
    """weight * value is exact in float64, and divided by the weight it is the value again."""
    x = heavy_tailed((20, 30), 1, dtype)
    shared = init(compressor, x)
    parts = compressor.encode(x, shared, key=0)
    update = reducer.reduce(torch.zeros_like(x), [(weight, parts)], compressor, shared)
    assert update.dtype == dtype
    assert torch.equal(update, decode(compressor, parts, x, shared))


@any_reducer
@any_compressor
def test_nobody_is_no_update(reducer: Reducer, compressor: Compressor) -> None:
    like = torch.ones(20, 30)
    assert torch.equal(reducer.reduce(like, [], compressor, init(compressor, like)), torch.zeros(20, 30))


@any_reducer
@any_compressor
@any_float
def test_inputs_are_not_written(reducer: Reducer, compressor: Compressor, dtype: torch.dtype) -> None:
    blocks = [heavy_tailed((20, 30), i, dtype) for i in range(3)]
    shared = init(compressor, blocks[0])
    received = inbox_of(compressor, blocks, shared)
    before = [{name: part.clone() for name, part in parts.items()} for parts in received]
    like = torch.ones(20, 30, dtype=dtype)
    update = reducer.reduce(like, [(5, parts) for parts in received], compressor, shared)
    update.add_(1.0)
    assert torch.equal(like, torch.ones(20, 30, dtype=dtype))
    for parts, copy in zip(received, before, strict=True):
        assert all(torch.equal(part, copy[name]) for name, part in parts.items())


GRID_COMPRESSORS: dict[str, Compressor] = {
    "top-k": TopK(k=9, chunk_size=64),
    "top-k-float32": TopK(k=9, chunk_size=64, values=Float32()),
    "scaled-sign": ScaledSign(),
    "dense": Dense(),
}


@any_reducer
@pytest.mark.parametrize("compressor", GRID_COMPRESSORS.values(), ids=GRID_COMPRESSORS)
@any_float
@given(order=st.permutations(range(6)), weights=st.lists(st.integers(1, 1000), min_size=6, max_size=6))
def test_order_of_peers_changes_no_bit(
    reducer: Reducer, compressor: Compressor, dtype: torch.dtype, order: list[int], weights: list[int]
) -> None:
    """Bitwise, since decoded values are multiples of 2**-20 below 2**9 here: every partial sum is exact in float64.

    For any float32 values the sums may differ by a rounding of float64, which is why inboxes are sorted by peer.
    """
    blocks = [on_grid((3, 64), i, dtype) for i in range(6)]
    received = inbox_of(compressor, blocks, {})
    inbox = list(zip(weights, received, strict=True))
    like = torch.zeros(3, 64, dtype=dtype)
    one = reducer.reduce(like, inbox, compressor, {})
    other = reducer.reduce(like, [inbox[i] for i in order], compressor, {})
    assert torch.equal(one, other)


@any_reducer
@any_compressor
def test_order_of_peers_changes_rounding_at_most(reducer: Reducer, compressor: Compressor) -> None:
    blocks = [heavy_tailed((20, 30), i) for i in range(5)]
    shared = init(compressor, blocks[0])
    inbox = [(i + 1, parts) for i, parts in enumerate(inbox_of(compressor, blocks, shared))]
    like = torch.zeros(20, 30)
    one = reducer.reduce(like, inbox, compressor, shared)
    other = reducer.reduce(like, inbox[::-1], compressor, shared)
    # float64 sums, so one rounding to float32 may fall to the other side; then a factor's product adds its own.
    assert torch.allclose(one, other, rtol=2**-22, atol=2**-22 * float(one.abs().max()))


@any_reducer
@any_compressor
def test_weight_two_is_the_same_peer_twice(reducer: Reducer, compressor: Compressor) -> None:
    """Bitwise for any values: v + v and 2 * v are the same float64 number when they come first."""
    blocks = [heavy_tailed((20, 30), i) for i in range(3)]
    shared = init(compressor, blocks[0])
    a, b, c = inbox_of(compressor, blocks, shared)
    like = torch.zeros(20, 30)
    twice = reducer.reduce(like, [(1, a), (1, a), (1, b), (3, c)], compressor, shared)
    assert torch.equal(reducer.reduce(like, [(2, a), (1, b), (3, c)], compressor, shared), twice)


@any_reducer
@any_compressor
def test_only_ratios_of_weights_count(reducer: Reducer, compressor: Compressor) -> None:
    blocks = [heavy_tailed((20, 30), i) for i in range(3)]
    shared = init(compressor, blocks[0])
    inbox = list(zip((1, 2, 5), inbox_of(compressor, blocks, shared), strict=True))
    like = torch.zeros(20, 30)
    scaled = [(weight * 2**20, parts) for weight, parts in inbox]
    one = reducer.reduce(like, inbox, compressor, shared)
    assert torch.equal(one, reducer.reduce(like, scaled, compressor, shared))


def sparse(values: dict[int, float]) -> Parts:
    """Payload with two of four coordinates."""
    index = torch.tensor([sorted(values)], dtype=torch.int16)
    return {"index": index, "value": torch.tensor([[values[i] for i in sorted(values)]])}


def test_r8_mean_over_senders_and_mean_over_all() -> None:
    """R8 of the survey: workers send {0: 4, 1: 3} and {0: 2, 2: 3}."""
    compressor = TopK(k=2, chunk_size=4, values=Float32())
    inbox = [(1, sparse({0: 4.0, 1: 3.0})), (1, sparse({0: 2.0, 2: 3.0}))]
    like = torch.zeros(1, 4)
    assert Mean(over="contributors").reduce(like, inbox, compressor, {}).tolist() == [[3.0, 3.0, 3.0, 0.0]]
    assert Mean(over="peers").reduce(like, inbox, compressor, {}).tolist() == [[3.0, 1.5, 1.5, 0.0]]
    assert Mean() == Mean(over="contributors"), "the default is what the released code does"


def test_weights_of_the_contributors_not_their_number() -> None:
    compressor = TopK(k=2, chunk_size=4, values=Float32())
    inbox = [(3, sparse({0: 4.0, 1: 3.0})), (1, sparse({0: 2.0, 2: 3.0}))]
    like = torch.zeros(1, 4)
    assert Mean().reduce(like, inbox, compressor, {}).tolist() == [[3.5, 3.0, 3.0, 0.0]]
    assert Mean(over="peers").reduce(like, inbox, compressor, {}).tolist() == [[3.5, 2.25, 0.75, 0.0]]


def test_a_sent_zero_counts() -> None:
    """A contributor is who sent the coordinate, whatever its value."""
    compressor = TopK(k=2, chunk_size=4, values=Float32())
    inbox = [(1, sparse({0: 4.0, 1: 3.0})), (1, sparse({0: 0.0, 2: 3.0}))]
    assert Mean().reduce(torch.zeros(1, 4), inbox, compressor, {}).tolist() == [[2.0, 3.0, 3.0, 0.0]]


@pytest.mark.parametrize("name", [n for n, c in COMPRESSORS.items() if not n.startswith("top-k") and not c.linear])
def test_both_means_are_one_for_whole_payloads(name: str) -> None:
    compressor = COMPRESSORS[name]
    received = inbox_of(compressor, [heavy_tailed((3, 64), i) for i in range(4)], {})
    inbox = [(i + 1, parts) for i, parts in enumerate(received)]
    like = torch.zeros(3, 64)
    contributors = Mean().reduce(like, inbox, compressor, {})
    assert torch.equal(contributors, Mean(over="peers").reduce(like, inbox, compressor, {}))


@any_reducer
@pytest.mark.parametrize("compressor", [Dense(), LowRank(2)], ids=["dense", "low-rank"])
@pytest.mark.parametrize("side", [0, 1])
def test_mean_of_linear_payloads_decodes_to_the_mean(reducer: Reducer, compressor: Compressor, side: int) -> None:
    assert compressor.linear
    blocks = [heavy_tailed((20, 30), i, torch.float64) for i in range(4)]
    shared = init(compressor, blocks[0])
    for _ in range(side):
        compressor.advance_(shared, blocks[0])
    weights = [1, 2, 3, 10]
    received = inbox_of(compressor, blocks, shared)
    inbox = list(zip(weights, received, strict=True))
    decoded = [w * decode(compressor, parts, blocks[0], shared) for w, parts in inbox]
    wanted = torch.stack(decoded).sum(dim=0) / sum(weights)
    update = reducer.reduce(torch.zeros_like(blocks[0]), inbox, compressor, shared)
    assert torch.allclose(update, wanted, rtol=0, atol=1e-13)  # float64 sums of 30 products, in another order
    again = decode(compressor, mean_of_parts(inbox), blocks[0], shared)
    assert torch.equal(update, again)


@given(cut=st.integers(0, 40))
def test_a_mean_by_slices_has_the_same_bits(cut: int) -> None:
    """What a transport does on the way: each slice at another peer."""
    inbox = [(i + 1, heavy_tailed((40,), i)) for i in range(5)]
    whole = mean_of_tensors(inbox)
    slices = [mean_of_tensors([(w, x[part]) for w, x in inbox]) for part in (slice(0, cut), slice(cut, 40))]
    assert torch.equal(torch.cat(slices), whole)


@pytest.mark.parametrize("weight", [1, 4096, MAX_WEIGHT - 1])
def test_weights_in_range(weight: int) -> None:
    assert check_weight(weight) == weight
