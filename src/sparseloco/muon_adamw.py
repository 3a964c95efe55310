"""Muon for matrices and AdamW for the rest, as one inner optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparseloco.errors import ConfigError
from sparseloco.local import OptimizerSpec
from sparseloco.types import Schedule

ADAMW_FOR = ("embed", "wte", "wpe", "head")
"""Parts of a layer's name whose matrices AdamW steps: tables of tokens and positions, and the output layer."""


def muon(
    lr: float | Schedule = 1e-3,
    *,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    adamw_for: tuple[str, ...] = ADAMW_FOR,
) -> OptimizerSpec:
    """``torch.optim.Muon`` with Nesterov momentum for matrices, AdamW for all other parameters.

    Args:
        lr: Of both; Muon's steps are scaled to the root mean square of AdamW's, so AdamW's rate serves.
        momentum: Of Muon.
        betas: Of AdamW, as is ``eps``.
        eps: Added to the root of AdamW's second moment.
        weight_decay: Decoupled, of both.
        adamw_for: A matrix is AdamW's if the name of its layer has one of these in it; so is all that is no matrix.

    Departs from the paper: it scales steps by the shape and tunes a rate for Muon alone; here ``match_rms_adamw`` of
    torch (Liu et al., 2025, arXiv:2502.16982) needs none. Experts that a model keeps as one tensor of three dims are
    AdamW's, since torch's Muon takes matrices only.

    Reference: Jordan et al., 2024, kellerjordan.github.io/posts/muon; as inner optimizer, Thérien et al., 2025,
    arXiv:2505.23725.

    Raises:
        ConfigError: if torch has no Muon.
    """
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(
            f"name='muon': must have torch.optim.Muon, which torch {torch.__version__} lacks; install torch 2.9 or "
            "newer, or use adamw"
        )
    settings = (
        ("momentum", momentum),
        ("betas", tuple(betas)),
        ("eps", eps),
        ("weight_decay", weight_decay),
        ("adamw_for", tuple(adamw_for)),
    )
    return OptimizerSpec(MuonWithAdamW, lr, settings)


def is_muons(name: str, shape: tuple[int, ...], adamw_for: tuple[str, ...] = ADAMW_FOR) -> bool:
    """Whether Muon steps a parameter.

    Example:
        >>> is_muons("layers.0.mlp.up_proj.weight", (8, 4)), is_muons("lm_head.weight", (8, 4))
        (True, False)
    """
    layer = name.rpartition(".")[0].rpartition(".")[2]
    return len(shape) == 2 and not any(word in layer for word in adamw_for)


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers that are one: a group of each, one state, one ``state_dict``.

    Args:
        params: Parameters with their names.
        lr: As all others, see :func:`muon`.
    """

    by_name: ClassVar[bool] = True

    def __init__(
        self,
        params: Iterable[tuple[str, Tensor]],
        lr: float,
        *,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adamw_for: tuple[str, ...],
    ) -> None:
        named = list(params)
        matrices = [p for name, p in named if is_muons(name, tuple(p.shape), adamw_for)]
        rest = [p for name, p in named if not is_muons(name, tuple(p.shape), adamw_for)]
        if not matrices:
            raise ConfigError(
                f"name='muon': must have a matrix to step beside layers named {', '.join(adamw_for)}, and this model "
                "has none; use adamw"
            )
        both: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, momentum=momentum, adjust_lr_fn="match_rms_adamw", **both)
        ]
        if rest:
            self._parts.append(torch.optim.AdamW(rest, betas=betas, eps=eps, foreach=False, **both))
        super().__init__([part.param_groups[0] for part in self._parts], {})
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # load_state_dict replaces groups and state by this
        self._share()

    def _share(self) -> None:
        """The groups and the state of the parts are those of the whole."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state  # pyright: ignore[reportAttributeAccessIssue]
