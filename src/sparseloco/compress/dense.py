"""Compressors that send every coordinate: in full, rounded to a few bits, or as a sign."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparseloco.compress.base import exact_mean, float_bits, power_of_two_levels, weighted
from sparseloco.errors import ConfigError
from sparseloco.types import Parts, PartSpec


class _Everywhere:
    """What compressors without shared state, that send every coordinate, have in common."""

    portable: ClassVar[bool] = True

    @property
    def chunkwise(self) -> bool:
        return True

    def init(self, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Parts:
        return {}

    def advance_(self, shared: Parts, update: Tensor) -> None:
        return None


@dataclass(frozen=True)
class Dense(_Everywhere):
    """The block itself, in the type of its state (float32, or float64 for float64 parameters)."""

    name: ClassVar[str] = "dense"
    linear: ClassVar[bool] = True

    def specs(self, rows: int, cols: int, dtype: torch.dtype, shared: Parts) -> tuple[PartSpec, ...]:
        return (PartSpec("value", (rows, cols), dtype, float_bits(dtype)),)

    def encode(self, block: Tensor, shared: Parts, *, key: int) -> Parts:
        return {"value": block.clone()}

    def accumulate_(
        self, out: Tensor, parts: Parts, weight: int, shared: Parts, *, weights: Tensor | None = None
    ) -> None:
        _add_everywhere(out, parts["value"], weight, weights)


@dataclass(frozen=True)
class Quantize(_Everywhere):
    """Every coordinate in ``bits`` bits, with one float32 scale (the largest magnitude) per chunk.

    ``grid="exponent"`` is a float without mantissa: at 4 bits a sign and the magnitudes 0, 1/64, ..., 1/2, 1 times the
    scale (E3M0). ``grid="linear"`` is a uniform grid from -scale to scale.

    Args:
        bits: Width of one code, 2 to 16, sign included.
        grid: ``exponent`` or ``linear``.

    Departs from the paper: which of the eight E3M0 codes is zero, and the scale, are not given there.

    Reference: Douillard et al., 2025, arXiv:2501.18512, section 3.3 (FP4 E3M0 outer gradients).
    """

    bits: int = 4
    grid: str = "exponent"
    name: ClassVar[str] = "quantize"
    linear: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 16:
            raise ConfigError(f"bits={self.bits!r}: must be between 2 and 16; use Dense() to send full precision")
        if self.grid not in ("exponent", "linear"):
            raise ConfigError(f"grid={self.grid!r}: must be 'exponent' or 'linear'; choose one of them")
        if self.grid == "exponent" and self.bits > 8:
            raise ConfigError(f"bits={self.bits!r}: must be at most 8 with grid='exponent'; use grid='linear'")

    def specs(self, rows: int, cols: int, dtype: torch.dtype, shared: Parts) -> tuple[PartSpec, ...]:
        code_type = torch.uint8 if self.bits <= 8 else torch.int32
        return (
            PartSpec("code", (rows, cols), code_type, self.bits),
            PartSpec("scale", (rows, 1), torch.float32, 32, signed=False),
        )

    def encode(self, block: Tensor, shared: Parts, *, key: int) -> Parts:
        scale = block.abs().amax(dim=1, keepdim=True).to(torch.float32)
        ratio = (block / torch.where(scale > 0, scale, 1.0)).to(torch.float32).clamp_(-1.0, 1.0)
        half = 1 << (self.bits - 1)
        if self.grid == "linear":
            code = torch.round(ratio * (half - 1)).to(torch.int32) + (half - 1)
        else:
            levels = power_of_two_levels(half).to(block.device)
            borders = (levels[1:] + levels[:-1]) / 2
            code = torch.bucketize(ratio.abs().contiguous(), borders).to(torch.int32) + half * (ratio < 0)
        return {"code": code.to(self.specs(0, 0, block.dtype, shared)[0].dtype), "scale": scale}

    def accumulate_(
        self, out: Tensor, parts: Parts, weight: int, shared: Parts, *, weights: Tensor | None = None
    ) -> None:
        half = 1 << (self.bits - 1)
        code = parts["code"].to(torch.int32)
        if self.grid == "linear":
            value = (code - (half - 1)).to(torch.float32) * (parts["scale"] / (half - 1))
        else:
            level = power_of_two_levels(half).to(out.device)[code % half]
            value = torch.where(code >= half, -level, level) * parts["scale"]
        _add_everywhere(out, value, weight, weights)


@dataclass(frozen=True)
class ScaledSign(_Everywhere):
    """Sign of every coordinate times the mean magnitude of its chunk: ``||x||_1 / C * sign(x)``.

    A contraction: ``||x - C(x)||^2 = (1 - ||x||_1^2 / (C ||x||_2^2)) ||x||^2``. Zero counts as positive.

    Departs from the paper: nothing.

    Reference: Karimireddy et al., 2019, arXiv:1901.09847, algorithm 2 and lemma 8.

    Example:
        >>> ScaledSign().encode(torch.tensor([[1.0, -3.0]]), {}, key=0)["scale"].item()
        2.0
    """

    name: ClassVar[str] = "scaled_sign"
    linear: ClassVar[bool] = False

    def specs(self, rows: int, cols: int, dtype: torch.dtype, shared: Parts) -> tuple[PartSpec, ...]:
        return (
            PartSpec("negative", (rows, cols), torch.uint8, 1),
            PartSpec("scale", (rows, 1), torch.float32, 32, signed=False),
        )

    def encode(self, block: Tensor, shared: Parts, *, key: int) -> Parts:
        scale = exact_mean(block.abs()).to(torch.float32).unsqueeze(1)
        return {"negative": (block < 0).to(torch.uint8), "scale": scale}

    def accumulate_(
        self, out: Tensor, parts: Parts, weight: int, shared: Parts, *, weights: Tensor | None = None
    ) -> None:
        value = torch.where(parts["negative"].to(torch.bool), -parts["scale"], parts["scale"])
        _add_everywhere(out, value, weight, weights)


def _add_everywhere(out: Tensor, value: Tensor, weight: int, weights: Tensor | None) -> None:
    out.add_(weighted(value, weight, out))
    if weights is not None:
        weights.add_(weight)
