"""What each code of kept values promises about its error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparseloco.compress import Float32, SignOneLevel, SignTwoLevel, Statistical, Stochastic, ValueCode
from sparseloco.sections import part_bytes
from tests.contracts.cases import CODES, heavy_tailed

any_float = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def back(code: ValueCode, value_NK: Tensor, key: int = 0) -> Tensor:
    return code.decode(code.encode(value_NK, key=key))


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
@any_float
def test_codes_decode_to_float32(code: ValueCode, dtype: torch.dtype) -> None:
    decoded = back(code, heavy_tailed((3, 8), 1, dtype))
    assert (decoded.dtype, tuple(decoded.shape)) == (torch.float32, (3, 8))


def test_float32_is_exact() -> None:
    value = heavy_tailed((3, 8), 1)
    assert torch.equal(back(Float32(), value), value)


@given(seed=st.integers(0, 2**16), kept=st.integers(1, 64), code=st.sampled_from([SignOneLevel(), SignTwoLevel()]))
def test_sign_codes_err_by_less_than_their_input(seed: int, kept: int, code: ValueCode) -> None:
    """With m the mean magnitude: sum (|v| - L m)^2 <= sum v^2 - K m^2 L (2 - L), L the low level (1 for one level).

    Taking the nearer of two levels can only be better than the low one. The bf16 scale is off by 2**-9 of m at most.
    """
    value = heavy_tailed((2, kept), seed, torch.float64)
    error = (value - back(code, value)).square().sum(dim=1)
    mean = value.abs().mean(dim=1)
    level = code.low if isinstance(code, SignTwoLevel) else 1.0
    bound = value.square().sum(dim=1) - kept * mean.square() * (level * (2 - level) - 2**-7)
    assert bool((error <= bound + 1e-30).all())
    assert bool((error < value.square().sum(dim=1))[mean > 0].all())


@given(seed=st.integers(0, 2**16), low=st.integers(1, 60), gap=st.integers(1, 60))
def test_two_levels_take_the_nearer_one_with_the_sign(seed: int, low: int, gap: int) -> None:
    code = SignTwoLevel(low=low / 32, high=(low + gap) / 32)
    value = heavy_tailed((2, 40), seed)
    parts = code.encode(value, key=0)
    scale = parts["scale"].double()
    levels = torch.stack([scale * code.low, scale * code.high])
    wanted = (value.double().abs() - levels).abs().amin(dim=0)
    decoded = code.decode(parts).double()
    assert torch.equal((value.double().abs() - decoded.abs()).abs(), wanted)
    assert bool((decoded * value.double() >= 0).all())


def test_scale_is_the_mean_kept_magnitude_in_bf16() -> None:
    value = torch.tensor([[1.0, -2.0, 3.0, -6.0], [0.5, 0.5, 0.5, 0.5]])
    for code in (SignOneLevel(), SignTwoLevel()):
        parts = code.encode(value, key=0)
        assert parts["scale"].dtype == torch.bfloat16
        assert parts["scale"].tolist() == [[3.0], [0.5]]
    assert back(SignOneLevel(), value)[0].tolist() == [3.0, -3.0, 3.0, -3.0]
    assert back(SignTwoLevel(low=0.75, high=1.5), value)[0].tolist() == [2.25, -2.25, 2.25, -4.5]


@pytest.mark.parametrize("code", [SignOneLevel(), SignTwoLevel()], ids=["one-level", "two-level"])
def test_zero_counts_as_positive(code: ValueCode) -> None:
    """Both zeros: a sign code has no third state."""
    assert bool((back(code, torch.tensor([[0.0, -0.0, 8.0, 8.0]])) > 0).all())


@pytest.mark.parametrize(("bins", "bits"), [(2, 1), (4, 2), (16, 4), (256, 8)])
def test_statistical_packs_its_codes(bins: int, bits: int) -> None:
    """Really packed: the released code sends a whole byte a value."""
    code, shift, lookup = Statistical(bins).specs(10, 64)
    assert (code.bits, *map(part_bytes, (code, shift, lookup))) == (bits, 80 * bits, 4, 4 * bins)


def released(value: Tensor, bins: int) -> Tensor:
    """The released code's quantizer, as reference/paper_facts.md 1.2 has it: range 6."""
    shift = value.mean()
    centred = value - shift
    scale = 6 * centred.std(unbiased=True) / bins if value.numel() > 1 else torch.tensor(torch.nan)
    if not torch.isfinite(scale) or scale == 0:
        scale = torch.tensor(1.0)
    q = torch.clamp(torch.round(centred / scale + bins // 2), 0, bins - 1).to(torch.uint8)
    lookup = torch.zeros(bins)
    for b in range(bins):
        if bool((q == b).any()):
            lookup[b] = centred[q == b].mean()
    return lookup[q.long()] + shift


@pytest.mark.parametrize("bins", [2, 4, 16, 256])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 8), (50, 64)], ids=str)
def test_statistical_is_the_released_quantizer(bins: int, shape: tuple[int, int]) -> None:
    for value in (heavy_tailed(shape, 2), torch.zeros(shape), torch.full(shape, -0.75)):
        # Sums of at most 3200 float32 numbers in another order.
        assert torch.allclose(back(Statistical(bins), value), released(value, bins), rtol=1e-5, atol=1e-6)


def test_statistical_edges_lie_at_minus_2_25_minus_0_75_and_0_75_deviations() -> None:
    steps = torch.tensor([-2.3, -2.2, -0.8, -0.7, 0.7, 0.8, 2.0, 3.5])
    value = torch.cat([torch.tensor([-1.0, 1.0]).repeat(20000), steps])[None]
    value = value - value.mean()
    code = Statistical().encode(value, key=0)["code"][0, -8:]
    assert code.tolist() == [0, 1, 1, 2, 2, 3, 3, 3]


def test_stochastic_is_unbiased() -> None:
    value = torch.tensor([[0.3, -0.9, 0.01, 0.0, 2.0, -1.0]])
    code = Stochastic(4)
    samples = torch.stack([back(code, value, key=key) for key in range(4000)]).double()
    # A sample lies within one step of ||v|| / 4 of the value, so its deviation is at most half a step: 5 sigma.
    bound = 5 * float(value.norm()) / 4 / 2 / 4000**0.5
    assert torch.allclose(samples.mean(dim=0), value.double(), rtol=0, atol=bound)
    assert bool((samples[:, 0, 3] == 0).all())


def test_stochastic_is_a_function_of_its_key() -> None:
    value = heavy_tailed((3, 40), 3)
    torch.manual_seed(0)
    one = Stochastic().encode(value, key=5)
    torch.manual_seed(1)
    assert torch.equal(Stochastic().encode(value, key=5)["code"], one["code"])
    assert not torch.equal(Stochastic().encode(value, key=6)["code"], one["code"])


@given(seed=st.integers(0, 2**16), levels=st.integers(1, 127), key=st.integers(-(2**63), 2**63 - 1))
def test_stochastic_is_one_step_off_at_most(seed: int, levels: int, key: int) -> None:
    value = heavy_tailed((2, 30), seed)
    norm = value.norm(dim=1, keepdim=True)
    error = (value - back(Stochastic(levels), value, key=key)).abs()
    assert bool((error <= norm / levels * (1 + 2**-20)).all())


@pytest.mark.parametrize("levels", [1, 4, 127])
def test_a_value_alone_in_its_chunk_stays_what_it_is(levels: int) -> None:
    """Its ratio is the top step; uniform numbers next to 1 must not round it to a step that has no code."""
    value = torch.full((2**20, 1), -3.0)
    decoded = back(Stochastic(levels), value)
    assert torch.allclose(decoded, value, rtol=2**-22, atol=0)
