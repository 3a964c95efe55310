"""Transforms of the reduced update, between reducer and outer optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparseloco.errors import ConfigError


@dataclass(frozen=True)
class Sign:
    """Sign of every coordinate (DeMo).

    Reference: Peng et al., 2024, arXiv:2411.19870, algorithm 1.
    """

    name: ClassVar[str] = "sign"
    chunkwise: ClassVar[bool] = True
    portable: ClassVar[bool] = True

    def __call__(self, updates: Iterator[Tensor]) -> Iterator[Tensor]:
        for update in updates:
            yield update.sign()


@dataclass(frozen=True)
class ClipNorm:
    """Scale the whole fragment's update so that its 2-norm is at most ``max_norm``; needs all its blocks at once.

    Args:
        max_norm: Largest norm, positive.
    """

    max_norm: float
    name: ClassVar[str] = "clip_norm"
    chunkwise: ClassVar[bool] = False
    portable: ClassVar[bool] = False  # the norm is a floating-point sum

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            raise ConfigError(f"max_norm={self.max_norm!r}: must be positive; leave the transform out for no clipping")

    def __call__(self, updates: Iterator[Tensor]) -> Iterator[Tensor]:
        blocks = list(updates)
        if not blocks:
            return
        # The same formula as torch.nn.utils.clip_grad_norm_, so DDP with clipping matches a plain loop.
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(b) for b in blocks]))
        factor = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        for block in blocks:
            yield block * factor.to(block.dtype)
