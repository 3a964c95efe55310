"""Outer optimizers: torch's SGD in fixed arithmetic, and torch's own classes unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparseloco.local import OptimizerSpec, adamw, sgd
from sparseloco.outer import OuterState, Sgd, TorchOptimizer
from tests.contracts.cases import heavy_tailed

STEPS = 8


def updates(dtype: torch.dtype) -> list[Tensor]:
    return [heavy_tailed((5, 7), step, dtype) for step in range(STEPS)]


def run_torch(cls: type[torch.optim.Optimizer], dtype: torch.dtype, **settings: Any) -> tuple[Tensor, dict[str, Any]]:
    param = torch.nn.Parameter(heavy_tailed((5, 7), 99, dtype))
    optimizer = cls([param], **settings)
    for update in updates(dtype):
        param.grad = update.clone()
        optimizer.step()
    return param.detach(), dict(optimizer.state[param])


def run_ours(outer: Sgd | TorchOptimizer, dtype: torch.dtype) -> tuple[Tensor, OuterState]:
    anchor, state = heavy_tailed((5, 7), 99, dtype), {}
    for step, update in enumerate(updates(dtype)):
        before = update.clone()
        outer.step_(anchor, update, state, step)
        assert torch.equal(update, before), "the update is not written"
    return anchor, state


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True), (0.5, True)])
@pytest.mark.parametrize("lr", [1.0, 0.7, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_sgd_is_torchs_sgd_to_rounding(momentum: float, nesterov: bool, lr: float, dtype: torch.dtype) -> None:
    wanted, _ = run_torch(torch.optim.SGD, dtype, lr=lr, momentum=momentum, nesterov=nesterov)
    got, state = run_ours(Sgd(lr, momentum, nesterov), dtype)
    # Ours rounds once a step where torch rounds after each operation; in float64, factors such as 0.7 are the float32
    # numbers nearest to them, 2**-25 away. Eight steps of numbers up to 100.
    assert torch.allclose(got, wanted, rtol=0, atol=8 * 100 * 2**-23)
    assert set(state) == ({"velocity"} if momentum else set())


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.5, False), (0.5, True)])
def test_sgd_with_factors_that_float32_holds_is_torchs_in_float64(momentum: float, nesterov: bool) -> None:
    wanted, _ = run_torch(torch.optim.SGD, torch.float64, lr=0.5, momentum=momentum, nesterov=nesterov)
    got, _ = run_ours(Sgd(0.5, momentum, nesterov), torch.float64)
    assert torch.allclose(got, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.875, False), (0.875, True)])
def test_sgd_rounds_each_stored_number_once(momentum: float, nesterov: bool) -> None:
    """Products are exact in float64; one rounding each of velocity, direction and anchor to float32."""
    anchor, velocity = heavy_tailed((5, 7), 99).double(), torch.zeros(5, 7, dtype=torch.float64)
    for update in updates(torch.float32):
        u = update.double()
        velocity = (momentum * velocity + u).float().double()
        ahead = (momentum * velocity + u).float().double()
        anchor = (anchor - 0.75 * (ahead if nesterov else velocity)).float().double()
    got, _ = run_ours(Sgd(0.75, momentum, nesterov), torch.float32)
    assert torch.equal(got.double(), anchor)


def test_c15_the_learning_rate_enters_once() -> None:
    """C-15: the released code scales the error feedback by it as well, so 0.5 acts as 0.25."""
    for outer in (Sgd(0.5), TorchOptimizer(sgd(0.5))):
        anchor = torch.zeros(1, 3)
        outer.step_(anchor, torch.ones(1, 3), {}, 1)
        assert anchor.tolist() == [[-0.5, -0.5, -0.5]]


def test_nesterov_by_hand() -> None:
    """DiLoCo's outer step on a constant update of 1: m = 1, 1.5; moved by 0.5 * (1 + 0.5 m) each time."""
    anchor, state, outer = torch.zeros(1, 1), {}, Sgd(0.5, 0.5, nesterov=True)
    outer.step_(anchor, torch.ones(1, 1), state, 1)
    assert anchor.item() == -0.75
    outer.step_(anchor, torch.ones(1, 1), state, 2)
    assert (state["velocity"].item(), anchor.item()) == (1.5, -1.625)


def test_weight_decay_is_decoupled() -> None:
    anchor = torch.full((1, 1), 8.0)
    Sgd(0.5, weight_decay=0.25).step_(anchor, torch.ones(1, 1), {}, 1)
    assert anchor.item() == 8.0 * (1 - 0.125) - 0.5


def test_the_decayed_anchor_is_rounded_before_the_step() -> None:
    """Each stored number is a product or a sum of two, so fused multiply-add cannot change it."""
    anchor, update = heavy_tailed((50, 70), 1), heavy_tailed((50, 70), 2)
    decayed = (anchor.double() * 0.9375).float().double()
    wanted = (decayed - 0.25 * update.double()).float()
    Sgd(0.25, weight_decay=0.25).step_(anchor, update, {}, 1)
    assert torch.equal(anchor, wanted)


@pytest.mark.parametrize("outer", [Sgd(lambda step: step / 4), TorchOptimizer(sgd(lambda step: step / 4))])
def test_a_schedule_sees_the_shared_step(outer: Sgd | TorchOptimizer) -> None:
    anchor = torch.zeros(1, 1)
    for step in (2, 4):
        outer.step_(anchor, torch.ones(1, 1), {}, step)
    assert anchor.item() == -1.5


TORCH_SPECS: dict[str, OptimizerSpec] = {
    "adamw": adamw(0.01),
    "adamw-torchs-defaults": OptimizerSpec(torch.optim.AdamW, 0.01),
    "sgd": sgd(0.1),
    "sgd-momentum": sgd(0.1, momentum=0.9, weight_decay=0.1),
    "sgd-nesterov": OptimizerSpec(torch.optim.SGD, 0.7, (("momentum", 0.9), ("nesterov", True))),
    "adagrad": OptimizerSpec(torch.optim.Adagrad, 0.1),
    "rmsprop": OptimizerSpec(torch.optim.RMSprop, 0.01, (("momentum", 0.5), ("centered", True))),
    "amsgrad": OptimizerSpec(torch.optim.Adam, 0.01, (("amsgrad", True),)),
}


@pytest.mark.parametrize("spec", TORCH_SPECS.values(), ids=TORCH_SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_torch_optimizers_run_as_torch_runs_them(spec: OptimizerSpec, dtype: torch.dtype) -> None:
    wanted, wanted_state = run_torch(spec.cls, dtype, lr=spec.lr, **dict(spec.settings))
    got, state = run_ours(TorchOptimizer(spec), dtype)
    assert torch.equal(got, wanted)
    assert state.keys() == wanted_state.keys()
    for name, value in wanted_state.items():
        assert torch.equal(state[name], value) if isinstance(value, Tensor) else state[name] == value
