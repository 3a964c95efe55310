"""What a replica does between two rounds: inner optimizer steps, or nothing but gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from sparseloco.errors import ConfigError
from sparseloco.schedule import value_at
from sparseloco.types import Schedule, Source


@dataclass(frozen=True)
class OptimizerSpec:
    """A ``torch.optim`` class and its settings, as a value.

    Args:
        cls: Optimizer class.
        lr: Learning rate, or a function of the inner step (counted from 1).
        settings: Further keyword arguments of ``cls``, as (name, value) pairs.
    """

    cls: type[torch.optim.Optimizer]
    lr: float | Schedule
    settings: tuple[tuple[str, Any], ...] = ()

    def build(self, params: Sequence[Tensor] | Mapping[str, Tensor]) -> torch.optim.Optimizer:
        """Make the optimizer over ``params``, which must have names where ``cls`` goes by them.

        Raises:
            ConfigError: if it does and they have none.
        """
        kwargs: dict[str, Any] = dict(self.settings)
        kwargs["lr"] = value_at(self.lr, 1)
        if isinstance(params, Mapping):
            given: list[Any] = list(params.items() if self.needs_names else params.values())
            return self.cls(given, **kwargs)
        if self.needs_names:
            raise ConfigError(
                f"params=a list: must have names for {self.cls.__name__}, which goes by them; pass "
                "dict(model.named_parameters())"
            )
        return self.cls(list(params), **kwargs)

    @property
    def needs_names(self) -> bool:
        """Whether the class treats parameters by their names and shapes, as :func:`sparseloco.muon` does."""
        return getattr(self.cls, "by_name", False)


def adamw(
    lr: float | Schedule = 1e-3,
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> OptimizerSpec:
    """AdamW with the inner settings of the SparseLoCo experiments."""
    settings = (("betas", tuple(betas)), ("eps", eps), ("weight_decay", weight_decay), ("foreach", False))
    return OptimizerSpec(torch.optim.AdamW, lr, settings)


def sgd(lr: float | Schedule = 0.1, *, momentum: float = 0.0, weight_decay: float = 0.0) -> OptimizerSpec:
    """Plain or momentum SGD as an inner optimizer."""
    settings = (("momentum", momentum), ("weight_decay", weight_decay), ("foreach", False))
    return OptimizerSpec(torch.optim.SGD, lr, settings)


def forget_moments(optimizer: torch.optim.Optimizer | None) -> None:
    """Make an optimizer's state, if there is one, as it was before its first step; learning rates stay."""
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Adagrad):
        optimizer.state.clear()
        return
    for group in optimizer.param_groups:  # Adagrad makes its state when it is made itself
        for param in group["params"]:
            optimizer.state[param]["step"].zero_()
            optimizer.state[param]["sum"].fill_(group["initial_accumulator_value"])


class LocalPhase(Protocol):
    """How a replica advances by one inner step, and what its delta is made of."""

    name: ClassVar[str]

    @property
    def shared(self) -> tuple[Any, ...]:
        """What peers must have alike; part of the fingerprint."""
        ...

    def build(self, params: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
        """The inner optimizer, if this phase names one."""
        ...

    def step_(self, params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None, step: int) -> None:
        """Make inner step number ``step`` (from 1) with the gradients that lie in the parameters."""
        ...

    def source(self, anchor: Sequence[Tensor], param: Tensor, step: int) -> Source:
        """What this parameter contributes to the message posted after ``step``."""
        ...

    def posted_(self, params: Sequence[Tensor]) -> None:
        """Called once the message of these parameters is made."""
        ...


@dataclass(frozen=True)
class InnerSteps:
    """Optimizer steps on the replica's own data; the delta is ``start - local``.

    The optimizer's state is kept across rounds; only parameters are reset.

    Args:
        optimizer: Inner optimizer; None leaves it to the caller, who then calls ``Replica.stepped()``.
        clip_norm: Largest gradient norm over all parameters, applied at every inner step; None for no clipping.
    """

    optimizer: OptimizerSpec | None = None
    clip_norm: float | None = None
    name: ClassVar[str] = "inner_steps"

    @property
    def shared(self) -> tuple[Any, ...]:
        return (self.name,)

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"clip_norm={self.clip_norm!r}: must be positive; use None for no clipping")

    def build(self, params: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
        return self.optimizer.build(params) if self.optimizer else None

    def step_(self, params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None, step: int) -> None:
        if self.optimizer is None or optimizer is None:
            raise ConfigError(
                "local.optimizer=None: must name an optimizer for local_step(); "
                "call stepped() after a step of your own, or pass inner=adamw(...)"
            )
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(params.values()), self.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = value_at(self.optimizer.lr, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def source(self, anchor: Sequence[Tensor], param: Tensor, step: int) -> Source:
        return Source(anchor, param.data)

    def posted_(self, params: Sequence[Tensor]) -> None:
        return None


@dataclass(frozen=True)
class Gradients:
    """No inner step: the message is ``scale`` times the gradient of the step, never a difference of parameters.

    Args:
        scale: Factor on the gradient, or a function of the step: 1 for DDP, the learning rate where the method adds
            ``lr * gradient`` to its error feedback.
    """

    scale: float | Schedule = 1.0
    name: ClassVar[str] = "gradients"

    @property
    def shared(self) -> tuple[Any, ...]:
        return (self.name, self.scale)

    def build(self, params: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
        return None

    def step_(self, params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None, step: int) -> None:
        return None

    def source(self, anchor: Sequence[Tensor], param: Tensor, step: int) -> Source:
        grad = param.grad if param.grad is not None else torch.zeros_like(param.data)
        return Source(None, grad, value_at(self.scale, step))

    def posted_(self, params: Sequence[Tensor]) -> None:
        for param in params:
            param.grad = None
