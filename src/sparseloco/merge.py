"""Merges: what a replica's live parameters become once the anchor has moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparseloco.errors import ConfigError
from sparseloco.types import FixedMerge


@dataclass(frozen=True)
class Replace:
    """Restart from the anchor; progress made while the message was in flight is dropped."""

    name: ClassVar[str] = "replace"
    needs_snapshot: ClassVar[bool] = False

    def fixed(self) -> FixedMerge | None:
        return FixedMerge("replace")

    def __call__(self, anchor: Tensor, live: Tensor, snapshot: Tensor | None) -> Tensor:
        return anchor


@dataclass(frozen=True)
class Blend:
    """``(1 - alpha) * anchor + alpha * live``: Streaming DiLoCo's mixing.

    Args:
        alpha: Share of the live values, in [0, 1]; 0 is :class:`Replace`.

    Reference: Douillard et al., 2025, arXiv:2501.18512, equation 3.
    """

    alpha: float
    name: ClassVar[str] = "blend"
    needs_snapshot: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha={self.alpha!r}: must be between 0 and 1; use 0 to take the anchor alone")

    def fixed(self) -> FixedMerge | None:
        return FixedMerge("blend", self.alpha)

    def __call__(self, anchor: Tensor, live: Tensor, snapshot: Tensor | None) -> Tensor:
        mixed = anchor.to(torch.float64).mul(1 - self.alpha).add_(live.to(torch.float64, copy=True).mul_(self.alpha))
        return mixed.to(anchor.dtype)


@dataclass(frozen=True)
class Carry:
    """``anchor + (live - snapshot)``: keep exactly the progress made while the message was in flight.

    That progress is part of the next delta, so nothing is lost and nothing is counted twice. Without delay it is
    :class:`Replace`.
    """

    name: ClassVar[str] = "carry"
    needs_snapshot: ClassVar[bool] = True

    def fixed(self) -> FixedMerge | None:
        return FixedMerge("carry")

    def __call__(self, anchor: Tensor, live: Tensor, snapshot: Tensor | None) -> Tensor:
        assert snapshot is not None
        progress = live.to(torch.float64) - snapshot.to(torch.float64)
        return progress.add_(anchor).to(anchor.dtype)
