"""Transforms of the update: the sign of each coordinate, and one norm over the whole fragment."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseloco.update import ClipNorm, Sign
from tests.contracts.cases import heavy_tailed


def blocks() -> list[torch.Tensor]:
    return [heavy_tailed(shape, i) for i, shape in enumerate([(3, 64), (1, 7), (1, 1)])]


def test_sign_of_every_coordinate() -> None:
    (got,) = Sign()(iter([torch.tensor([[2.0, -0.5, 0.0, -0.0, 1e-45]])]))
    assert got.tolist() == [[1.0, -1.0, 0.0, 0.0, 1.0]]


def test_sign_takes_blocks_one_at_a_time() -> None:
    taken: list[int] = []

    def source():
        for i, block in enumerate(blocks()):
            taken.append(i)
            yield block

    stream = Sign()(source())
    next(stream)
    assert taken == [0], "nothing dense is made beside the state"
    assert len(list(stream)) == 2


@pytest.mark.parametrize("max_norm", [1e-5, 0.01, 1.0, 10.0, 1e6])
@pytest.mark.parametrize("size", [1e-6, 1.0])
def test_clip_is_torchs_clip_grad_norm(max_norm: float, size: float) -> None:
    scaled = [block * size for block in blocks()]
    params = [torch.nn.Parameter(torch.zeros_like(block)) for block in scaled]
    for param, block in zip(params, scaled, strict=True):
        param.grad = block.clone()
    torch.nn.utils.clip_grad_norm_(params, max_norm, foreach=False)
    for got, param in zip(ClipNorm(max_norm)(iter(scaled)), params, strict=True):
        assert torch.equal(got, param.grad)


@given(max_norm=st.floats(1e-3, 1e3), seed=st.integers(0, 1000))
def test_clipped_norm_is_the_smaller_one_and_the_direction_stays(max_norm: float, seed: int) -> None:
    x = heavy_tailed((3, 64), seed, torch.float64)
    (got,) = ClipNorm(max_norm)(iter([x]))
    norm = float(x.norm())
    # The 1e-6 in the denominator is torch's.
    assert float(got.norm()) == pytest.approx(min(norm, max_norm), rel=2e-6 / norm + 1e-12)
    assert torch.allclose(got * norm, x * float(got.norm()), rtol=1e-12, atol=0)


def test_small_updates_pass_unchanged_and_nothing_gives_nothing() -> None:
    x = heavy_tailed((3, 64), 1)
    (got,) = ClipNorm(1e9)(iter([x]))
    assert torch.equal(got, x)
    assert list(ClipNorm(1.0)(iter([]))) == []


def test_zero_is_not_divided_by_its_norm() -> None:
    (got,) = ClipNorm(1.0)(iter([torch.zeros(2, 3)]))
    assert torch.equal(got, torch.zeros(2, 3))
