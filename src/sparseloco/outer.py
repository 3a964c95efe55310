"""Outer optimizers: one step on the anchor with the reduced update, the same at every peer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparseloco.errors import ConfigError
from sparseloco.local import OptimizerSpec
from sparseloco.schedule import value_at
from sparseloco.types import FixedStep, OuterState, Schedule


@dataclass(frozen=True)
class Sgd:
    """SGD in fixed arithmetic: the same bits on every IEEE machine.

    ``m <- momentum * m + u``; ``d = u + momentum * m`` with Nesterov, else ``m``; ``anchor <- anchor - lr * d``.
    Factors are rounded to float32, so each product is exact in float64 and fused multiply-add changes nothing; each
    stored result is rounded once. Plain SGD (momentum 0) keeps no state.

    Args:
        lr: Outer learning rate, or a function of the shared step. It enters nowhere else.
        momentum: Factor on the velocity, in [0, 1).
        nesterov: Look ahead along the velocity.
        weight_decay: Decoupled decay, at least 0: the anchor is first multiplied by ``1 - lr * weight_decay``.

    Departs from the paper: nothing; the released SparseLoCo code also scales error feedback by lr, which squares it.

    Reference: Sarfi et al., 2025, arXiv:2508.15706, algorithm 1; Douillard et al., 2023, arXiv:2311.08105.
    """

    lr: float | Schedule = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    name: ClassVar[str] = "sgd"
    portable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not callable(self.lr) and not 0 < self.lr < math.inf:
            raise ConfigError(f"lr={self.lr!r}: must be positive; the outer step moves along minus the update")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum={self.momentum!r}: must be in [0, 1); use 0 for plain SGD")
        if self.nesterov and self.momentum == 0:
            raise ConfigError("nesterov=True: must have momentum above 0; set momentum, or nesterov=False")
        if not self.weight_decay >= 0:
            raise ConfigError(f"weight_decay={self.weight_decay!r}: must be at least 0; use 0 for none")

    def fixed_step(self, step: int) -> FixedStep:
        return FixedStep(_float32(value_at(self.lr, step)), _float32(self.momentum), self.nesterov, self.weight_decay)

    def step_(self, anchor: Tensor, update: Tensor, state: OuterState, step: int) -> None:
        lr, mu, _, weight_decay = self.fixed_step(step)
        direction = update
        if self.momentum:
            direction = self._velocity(update, state, mu)
        moved = anchor.to(torch.float64)
        if weight_decay:
            moved = (moved * _float32(1.0 - lr * weight_decay)).to(anchor.dtype).to(torch.float64)
        anchor.copy_(moved.sub_(direction.to(torch.float64, copy=True).mul_(lr)))

    def _velocity(self, update: Tensor, state: OuterState, mu: float) -> Tensor:
        velocity = state.setdefault("velocity", torch.zeros_like(update))
        velocity.copy_(velocity.to(torch.float64, copy=True).mul_(mu).add_(update))
        if not self.nesterov:
            return velocity
        return velocity.to(torch.float64, copy=True).mul_(mu).add_(update).to(update.dtype)


@dataclass(frozen=True)
class TorchOptimizer:
    """Any ``torch.optim`` class as outer optimizer; runs as torch runs it, so bits depend on the machine.

    Args:
        spec: Class and settings.
    """

    spec: OptimizerSpec
    name: ClassVar[str] = "torch_optimizer"
    portable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.spec.needs_names:
            raise ConfigError(
                "name='muon': must be adamw or sgd where the optimizer steps on the anchor, which is kept in blocks "
                "and not in matrices; use adamw"
            )

    def fixed_step(self, step: int) -> None:
        return None

    def step_(self, anchor: Tensor, update: Tensor, state: OuterState, step: int) -> None:
        param = torch.nn.Parameter(anchor, requires_grad=False)
        optimizer = self.spec.build([param])
        for group in optimizer.param_groups:
            group["lr"] = value_at(self.spec.lr, step)
        optimizer.state[param] = state  # the optimizer fills and updates our dictionary in place
        param.grad = update
        optimizer.step()


def _float32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32))
