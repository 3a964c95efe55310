"""The contract of every compressor: zero stays zero, nothing is lost, sizes are known, strides do not matter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparseloco.compress import Compressor, Dense, Float32, LowRank, Quantize, ScaledSign, TopK
from sparseloco.compress.base import exact_mean, log2_binomial, power_of_two_levels
from sparseloco.layout import Tiles
from sparseloco.sections import pack_section, part_bytes, section_bytes
from sparseloco.types import Coding
from tests.contracts.cases import BLOCK_SHAPES, COMPRESSORS, SHAPES, decode, heavy_tailed, init, send

any_compressor = pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)
any_block = pytest.mark.parametrize("shape", BLOCK_SHAPES, ids=str)
any_float = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def square(x: Tensor) -> float:
    return float(x.double().square().sum())


# -- laws of all of them ---------------------------------------------------------------------------------------------


@any_compressor
@any_block
@any_float
def test_zero_in_zero_out(compressor: Compressor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    for zero in (torch.zeros(shape, dtype=dtype), -torch.zeros(shape, dtype=dtype)):
        assert torch.equal(send(compressor, zero), zero)


@any_compressor
@any_block
@any_float
def test_sent_and_kept_are_the_input(compressor: Compressor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Error feedback subtracts what a receiver adds: residual == fl(x - decoded), one rounding and not one bit more."""
    x = heavy_tailed(shape, 11, dtype)
    shared = init(compressor, x)
    parts = compressor.encode(x, shared, key=3)
    residual = x.clone()
    compressor.accumulate_(residual, parts, -1, shared)
    assert torch.equal(residual, x - decode(compressor, parts, x, shared))


@any_compressor
@any_block
@any_float
def test_a_credited_payload_comes_back(compressor: Compressor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = heavy_tailed(shape, 12, dtype)
    shared = init(compressor, x)
    parts = compressor.encode(x, shared, key=3)
    back = x.clone()
    compressor.accumulate_(back, parts, -1, shared)
    compressor.accumulate_(back, parts, 1, shared)
    largest = max(float(x.abs().max()), float(decode(compressor, parts, x, shared).abs().max()))
    assert torch.allclose(back, x, rtol=0, atol=2 * torch.finfo(dtype).eps * largest)  # two roundings


@any_compressor
@any_block
@any_float
def test_table_says_the_real_size(compressor: Compressor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = heavy_tailed(shape, 13, dtype)
    shared = init(compressor, x)
    parts = compressor.encode(x, shared, key=3)
    specs = compressor.specs(*shape, dtype, shared)
    on_meta = compressor.specs(*shape, dtype, compressor.init(*shape, dtype, torch.device("meta")))
    assert specs == on_meta, "the table needs no values"
    assert [spec.name for spec in specs] == list(parts)
    for spec in specs:
        part = parts[spec.name]
        assert (tuple(part.shape), part.dtype) == (spec.shape, spec.dtype)
        if part.is_floating_point():
            assert part.numel() * part.element_size() == part_bytes(spec)
            assert spec.signed or not part.signbit().any()
        elif spec.chunk_size:
            assert 0 <= int(part.min()) <= int(part.max()) < spec.chunk_size
            assert bool((part.to(torch.int64).diff(dim=1) > 0).all()), "positions ascend"
        else:
            assert 0 <= int(part.min()) <= int(part.max()) < 2**spec.bits
    section = pack_section(specs, parts, Coding.FIXED)
    assert len(section) == section_bytes(specs) == sum(part_bytes(spec) for spec in specs)
    assert len(pack_section(specs, parts, Coding.COMPACT)) <= section_bytes(specs, Coding.COMPACT)


@any_compressor
def test_size_does_not_depend_on_values(compressor: Compressor) -> None:
    shapes = [
        {name: (part.shape, part.dtype) for name, part in compressor.encode(x, init(compressor, x), key=0).items()}
        for x in (torch.zeros(20, 30), torch.ones(20, 30), heavy_tailed((20, 30), 1))
    ]
    assert shapes[0] == shapes[1] == shapes[2]


@any_compressor
@any_float
def test_strides_do_not_matter(compressor: Compressor, dtype: torch.dtype) -> None:
    base = heavy_tailed((40, 90), 14, dtype)
    for view in (base.T[:20, :30], base[::2, ::3], base[:20, 5:35]):
        assert not view.is_contiguous()
        shared = init(compressor, view)
        parts = compressor.encode(view, shared, key=3)
        exact = not isinstance(compressor, LowRank)  # a matrix product may run in another order on other strides
        for name, part in compressor.encode(view.contiguous(), shared, key=3).items():
            assert torch.equal(parts[name], part) if exact else torch.allclose(parts[name], part, rtol=1e-5)
        out = torch.zeros(view.T.shape, dtype=dtype).T
        compressor.accumulate_(out, parts, 1, shared)
        assert torch.equal(out, decode(compressor, parts, view, shared))


@any_compressor
def test_input_is_not_written_and_parts_are_copies(compressor: Compressor) -> None:
    x = heavy_tailed((20, 30), 15)
    before = x.clone()
    shared = init(compressor, x)
    parts = compressor.encode(x, shared, key=3)
    assert torch.equal(x, before)
    frozen = {name: part.clone() for name, part in parts.items()}
    x.zero_()
    assert all(torch.equal(part, frozen[name]) for name, part in parts.items())


@any_compressor
def test_a_function_of_key_and_block_only(compressor: Compressor) -> None:
    x = heavy_tailed((20, 30), 16)
    shared = init(compressor, x)
    torch.manual_seed(1)
    first = compressor.encode(x, shared, key=3)
    torch.manual_seed(2)
    second = compressor.encode(x, init(compressor, x), key=3)
    assert all(torch.equal(part, second[name]) for name, part in first.items())


@any_compressor
def test_weights_fall_on_what_was_sent(compressor: Compressor) -> None:
    x = heavy_tailed((3, 64), 17) + 20.0  # no zeros
    shared = init(compressor, x)
    parts = compressor.encode(x, shared, key=3)
    out, weights = torch.zeros(3, 64, dtype=torch.float64), torch.zeros(3, 64, dtype=torch.float64)
    compressor.accumulate_(out, parts, 6, shared, weights=weights)
    sent = torch.ones_like(weights)
    if "index" in parts:
        sent = torch.zeros_like(weights).scatter_(1, parts["index"].to(torch.int64), 1.0)
    assert torch.equal(weights, 6 * sent)
    assert bool((out[sent == 0] == 0).all())


@any_compressor
def test_an_integer_weight_is_exact_in_float64(compressor: Compressor) -> None:
    """A weight below 2**29 times a float32 value fits the 53 bits of float64."""
    x = heavy_tailed((20, 30), 18)
    shared = init(compressor, x)
    parts = compressor.encode(x, shared, key=3)
    out = torch.zeros(20, 30, dtype=torch.float64)
    weight = 2**29 - 1
    compressor.accumulate_(out, parts, weight, shared)
    assert torch.equal(out / weight, decode(compressor, parts, x, shared).double())


@any_compressor
@pytest.mark.parametrize("shape", [(), (1,), (127,), (50257, 8), (4, 3, 3, 3), (0,)], ids=str)
def test_c54_any_tensor_shape(compressor: Compressor, shape: tuple[int, ...]) -> None:
    """C-54: quantizers that take matrices only, chunking that fails on odd sizes."""
    x = heavy_tailed(shape, 19)
    for block in Tiles().forward(x):
        assert send(compressor, block).shape == block.shape
    assert shape in SHAPES


# -- top-k -----------------------------------------------------------------------------------------------------------


def lowest_index_first(row: list[float], k: int) -> list[int]:
    return sorted(sorted(range(len(row)), key=lambda i: (-abs(row[i]), i))[:k])


TIED = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1e-45, 3e38])


@given(rows=st.lists(st.lists(TIED, min_size=16, max_size=16), min_size=1, max_size=5), k=st.integers(1, 16))
def test_ties_go_to_the_lowest_index(rows: list[list[float]], k: int) -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor(rows, dtype=dtype)
        index = TopK(k=k, chunk_size=16, values=Float32()).encode(x, {}, key=0)["index"]
        assert index.tolist() == [lowest_index_first(row, k) for row in x.tolist()]


@given(seed=st.integers(0, 2**16), k=st.integers(1, 64))
def test_selection_is_exact(seed: int, k: int) -> None:
    x = heavy_tailed((4, 64), seed)
    index = TopK(k=k, chunk_size=64).encode(x, {}, key=0)["index"]
    assert index.tolist() == [lowest_index_first(row, k) for row in x.tolist()]


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -2.5])
def test_a_constant_chunk_keeps_its_first_values(value: float) -> None:
    index = TopK().encode(torch.full((3, 4096), value), {}, key=0)["index"]
    assert torch.equal(index, torch.arange(64, dtype=torch.int16).expand(3, 64))


@pytest.mark.parametrize("cols", [1, 2, 63, 64, 127, 384, 4095, 4096])
@pytest.mark.parametrize("k", [1, 32, 64, 100, 2048, 4096])
def test_k_n_rule(cols: int, k: int) -> None:
    """A chunk of n values keeps max(1, (n * k + C // 2) // C)."""
    x = heavy_tailed((2, cols), cols)
    compressor = TopK(k=k, chunk_size=4096)
    wanted = max(1, (cols * k + 2048) // 4096)
    assert compressor.encode(x, {}, key=0)["index"].shape == (2, wanted)
    assert compressor.specs(2, cols, torch.float32, {})[0].shape == (2, wanted)


def test_positions_cost_eight_bits_in_4096_at_most() -> None:
    index, code, scale = TopK().specs(16, 4096, torch.float32, {})
    assert (index.bits, index.dtype, code.bits, scale.bits) == (0, torch.int16, 2, 16)
    # 16 chunks: 64 positions of 5 low bits and at most (64 + 4032 / 32) / 64 = 2.97 unary ones; 64 codes of 2 bits; one
    # scale of 16 bits
    assert section_bytes((index, code, scale)) == 16 * (40 + 190 / 8 + 16 + 2) == 16 * 81.75
    wide = TopK(k=3, chunk_size=40000).encode(torch.ones(1, 40000).cumsum(1), {}, key=0)["index"]
    assert (wide.dtype, wide.tolist()) == (torch.int32, [[39997, 39998, 39999]])


def test_the_least_bits_of_a_position() -> None:
    assert log2_binomial(4096, 64) / 64 == pytest.approx(7.36, abs=0.005)  # Covenant-72B, section 2.1


@given(seed=st.integers(0, 2**16), k=st.integers(1, 64))
def test_top_k_contracts_with_the_papers_constant(seed: int, k: int) -> None:
    """||x - C(x)||^2 <= (1 - k / C) ||x||^2 on whole chunks; float32 values in float64, so nothing rounds."""
    x = heavy_tailed((4, 64), seed).double()
    left = x - send(TopK(k=k, chunk_size=64, values=Float32()), x)
    assert square(left) <= (1 - k / 64) * square(x)


def test_top_k_meets_its_constant_on_a_constant_chunk() -> None:
    x = torch.full((1, 64), 3.0, dtype=torch.float64)
    assert square(x - send(TopK(k=16, chunk_size=64, values=Float32()), x)) == 0.75 * square(x)


def test_top_k_of_everything_is_dense() -> None:
    x = heavy_tailed((3, 64), 20)
    assert torch.equal(send(TopK(k=64, chunk_size=64, values=Float32()), x), send(Dense(), x))


def test_c64_one_batched_top_k_for_all_chunks() -> None:
    """C-64: the number of torch calls does not grow with that of chunks; the payload is that of each chunk alone."""

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    x = heavy_tailed((1000, 4096), 21)
    x[0] = 1.0  # a chunk full of ties
    calls = []
    for rows in (10, 1000):
        with Count() as count:
            parts = TopK().encode(x[:rows], {}, key=0)
        calls.append(count.calls)
    assert calls[0] == calls[1] < 60
    alone = [TopK().encode(chunk[None], {}, key=0) for chunk in x[::50]]
    for name, part in parts.items():
        assert torch.equal(part[::50], torch.cat([p[name] for p in alone]))


# -- the others ------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**16), cols=st.integers(1, 80))
def test_scaled_sign_meets_lemma_8(seed: int, cols: int) -> None:
    """||x - C(x)||^2 = (1 - ||x||_1^2 / (C ||x||_2^2)) ||x||^2, per chunk."""
    x = heavy_tailed((3, cols), seed, torch.float64)
    left = (x - send(ScaledSign(), x)).square().sum(dim=1)
    wanted = x.square().sum(dim=1) - x.abs().sum(dim=1).square() / cols
    # The scale is rounded to float32 once, which costs C e^2 <= 2**-48 of ||x||^2.
    assert torch.allclose(left, wanted, rtol=0, atol=1e-13 * max(1e-30, float(x.square().sum())))


@given(seed=st.integers(0, 2**16), rank=st.integers(1, 5), rounds=st.integers(0, 3))
def test_low_rank_is_a_projection(seed: int, rank: int, rounds: int) -> None:
    """Non-expansive, on both sides; what it sends is orthogonal to what it keeps."""
    x = heavy_tailed((20, 30), seed, torch.float64)
    compressor = LowRank(rank)
    shared = init(compressor, x)
    for _ in range(rounds):
        compressor.advance_(shared, decode(compressor, compressor.encode(x, shared, key=0), x, shared))
    sent = decode(compressor, compressor.encode(x, shared, key=0), x, shared)
    assert square(sent) <= square(x) * (1 + 1e-12)
    assert square(sent) + square(x - sent) == pytest.approx(square(x), rel=1e-10, abs=1e-300)
    assert torch.linalg.matrix_rank(sent) <= rank


def test_low_rank_finds_a_low_rank_matrix() -> None:
    """Power iteration: on a matrix of rank r, two rounds are enough to send all of it."""
    left, right = heavy_tailed((20, 2), 1, torch.float64), heavy_tailed((2, 30), 2, torch.float64)
    x, compressor = left @ right, LowRank(2)
    shared = init(compressor, x)
    for _ in range(2):
        sent = decode(compressor, compressor.encode(x, shared, key=0), x, shared)
        compressor.advance_(shared, sent)
    sent = decode(compressor, compressor.encode(x, shared, key=0), x, shared)
    assert square(x - sent) < 1e-20 * square(x)


def test_low_rank_sends_small_matrices_whole() -> None:
    x = heavy_tailed((4, 5), 3)
    compressor = LowRank(3)  # factors would need 27 numbers, the matrix has 20
    assert init(compressor, x) == {}
    assert torch.equal(send(compressor, x), x)


def test_quantize_takes_the_nearest_e3m0_number() -> None:
    x = torch.linspace(-1, 1, 4001)[None] * 4.0
    magnitudes = [0.0, *(2.0**-e for e in range(6, -1, -1))]
    grid = torch.tensor([4.0 * s * m for s in (-1, 1) for m in magnitudes])
    got = send(Quantize(4), x)
    assert set(got[0].tolist()) == set(grid.tolist())
    assert torch.equal((x - got).abs()[0], (x[0][:, None] - grid).abs().amin(dim=1))
    assert torch.equal(power_of_two_levels(8), torch.tensor(magnitudes))


@given(seed=st.integers(0, 2**16), bits=st.integers(2, 12))
def test_quantize_linear_is_half_a_step_off_at_most(seed: int, bits: int) -> None:
    x = heavy_tailed((3, 40), seed, torch.float64)
    step = x.abs().amax(dim=1, keepdim=True) / ((1 << (bits - 1)) - 1)
    error = (x - send(Quantize(bits, "linear"), x)).abs()
    # Ratio, scale and product are rounded to float32, each by 2**-24 of the largest value at most.
    assert bool((error <= step / 2 + 2**-22 * x.abs().amax(dim=1, keepdim=True)).all())


@given(st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_exact_mean_does_not_depend_on_order(values: list[float], random) -> None:
    shuffled = values[:]
    random.shuffle(shuffled)
    one, other = exact_mean(torch.tensor([values])), exact_mean(torch.tensor([shuffled]))
    assert torch.equal(one, other)
    cut = len(values) * 2.0**-50 * max(values)
    assert float(one) == pytest.approx(sum(map(float, values)) / len(values), rel=1e-14, abs=cut)
