"""Merges in closed form; what a live tensor becomes once the anchor has moved."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseloco.merge import Blend, Carry, Replace
from tests.contracts.cases import heavy_tailed

ANCHOR, LIVE, SNAPSHOT = (heavy_tailed((4, 5), seed) for seed in (1, 2, 3))
any_float = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def test_replace_is_the_anchor() -> None:
    assert torch.equal(Replace()(ANCHOR, LIVE, None), ANCHOR)


@given(st.floats(0, 1))
def test_blend_is_its_formula(alpha: float) -> None:
    """Streaming DiLoCo, equation 3, rounded once to the type of the state."""
    wanted = (1 - alpha) * ANCHOR.double() + alpha * LIVE.double()
    assert torch.equal(Blend(alpha)(ANCHOR, LIVE, None), wanted.float())


def test_ends_of_blend() -> None:
    assert torch.equal(Blend(0)(ANCHOR, LIVE, None), Replace()(ANCHOR, LIVE, None))
    assert torch.equal(Blend(1)(ANCHOR, LIVE, None), LIVE)
    assert Blend(0.25)(torch.tensor([4.0]), torch.tensor([8.0]), None).item() == 5.0


def test_blend_of_bf16_parameters_is_in_the_type_of_the_state() -> None:
    mixed = Blend(0.5)(torch.tensor([1.0]), torch.tensor([1.0078125], dtype=torch.bfloat16), None)
    assert (mixed.dtype, mixed.item()) == (torch.float32, 1.00390625)


def test_carry_keeps_the_progress_made_in_flight() -> None:
    """anchor + (live - snapshot), rounded once."""
    wanted = ANCHOR.double() + (LIVE.double() - SNAPSHOT.double())
    assert torch.equal(Carry()(ANCHOR, LIVE, SNAPSHOT), wanted.float())


def test_carry_loses_nothing_and_counts_nothing_twice() -> None:
    """Two rounds with delay, dense, one peer, outer lr 1: the anchor and the way to live add up to all progress.

    All numbers are small multiples of 1/8, so every equation holds exactly.
    """
    generator = torch.Generator().manual_seed(0)

    def progress() -> torch.Tensor:
        return torch.randint(-64, 65, (10,), generator=generator) / 8

    start = progress()
    anchor, live, moved = start.clone(), start.clone(), torch.zeros(10)
    for _ in range(5):
        before_post = progress()
        live, moved = live + before_post, moved + before_post
        delta, snapshot = anchor - live, live.clone()
        in_flight = progress()
        live, moved = live + in_flight, moved + in_flight
        anchor = anchor - delta
        live = Carry()(anchor, live, snapshot)
        assert torch.equal(live, start + moved)
        assert torch.equal(live - anchor, in_flight), "exactly this is left for the next delta"


def test_carry_without_delay_is_replace() -> None:
    assert torch.equal(Carry()(ANCHOR, LIVE, LIVE.clone()), ANCHOR)


@any_float
@pytest.mark.parametrize("merge", [Replace(), Blend(0.3), Carry()], ids=["replace", "blend", "carry"])
def test_inputs_are_not_written(merge: Replace | Blend | Carry, dtype: torch.dtype) -> None:
    inputs = [tensor.to(dtype, copy=True) for tensor in (ANCHOR, LIVE, SNAPSHOT)]
    before = [tensor.clone() for tensor in inputs]
    out = merge(*inputs)
    assert out.dtype == dtype
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert merge.needs_snapshot == isinstance(merge, Carry)
