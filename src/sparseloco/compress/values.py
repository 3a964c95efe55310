"""Codes for the values that top-k keeps: full floats, signs with one or two levels, and the released quantizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from sparseloco.compress.base import exact_mean
from sparseloco.errors import ConfigError
from sparseloco.keys import uniform
from sparseloco.types import Parts, PartSpec


class ValueCode(Protocol):
    """How ``value_NK`` travels; ``decode(encode(v))`` is what error feedback subtracts.

    ``chunkwise``: each chunk is coded alone and without randomness.
    """

    name: ClassVar[str]
    chunkwise: ClassVar[bool]

    def specs(self, rows: int, kept: int) -> tuple[PartSpec, ...]:
        """Parts for ``rows`` chunks of ``kept`` values."""
        ...

    def encode(self, value_NK: Tensor, *, key: int) -> Parts:
        """Parts of the kept values."""
        ...

    def decode(self, parts: Parts) -> Tensor:
        """Float32 values ``[N, K]``."""
        ...


@dataclass(frozen=True)
class Float32:
    """Kept values as they are: ``[N, K]`` float32, 32 bits each."""

    name: ClassVar[str] = "float32"
    chunkwise: ClassVar[bool] = True

    def specs(self, rows: int, kept: int) -> tuple[PartSpec, ...]:
        return (PartSpec("value", (rows, kept), torch.float32, 32),)

    def encode(self, value_NK: Tensor, *, key: int) -> Parts:
        return {"value": value_NK.to(torch.float32)}

    def decode(self, parts: Parts) -> Tensor:
        return parts["value"]


@dataclass(frozen=True)
class SignTwoLevel:
    """Two bits a value: its sign, and whether it is small or large; one bf16 scale per chunk.

    The scale is the mean kept magnitude; a value becomes ``sign * scale * (high if large else low)``, large being
    above the middle of both levels. The levels are numbers of the format, so encoding needs one pass.

    Args:
        low: Level of small values, a multiple of 1/32 so that level times scale is exact in float32.
        high: Level of large values, likewise.

    Cost: 2 bits a value and 16 bits a chunk.

    Departs from the paper: it uses a per-tensor 4-bin quantizer (:class:`Statistical`), which carries about one bit.

    Reference: none; the levels come from ``benchmarks/bench_values.py`` on real pseudo-gradients.
    """

    low: float = 0.96875
    high: float = 1.09375
    name: ClassVar[str] = "sign_two_level"
    chunkwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < 8 or (self.low * 32) % 1 or (self.high * 32) % 1:
            raise ConfigError(
                f"low={self.low!r}, high={self.high!r}: must be multiples of 1/32 with 0 < low < high < 8; "
                "round them to 1/32"
            )

    def specs(self, rows: int, kept: int) -> tuple[PartSpec, ...]:
        return (
            PartSpec("code", (rows, kept), torch.uint8, 2),
            PartSpec("scale", (rows, 1), torch.bfloat16, 16, signed=False),
        )

    def encode(self, value_NK: Tensor, *, key: int) -> Parts:
        magnitude_NK = value_NK.abs()
        scale = _chunk_scale(magnitude_NK)
        border = scale.to(value_NK.dtype) * ((self.low + self.high) / 2)
        code = (value_NK < 0).to(torch.uint8) + 2 * (magnitude_NK > border).to(torch.uint8)
        return {"code": code, "scale": scale}

    def decode(self, parts: Parts) -> Tensor:
        levels = torch.tensor([self.low, -self.low, self.high, -self.high], device=parts["code"].device)
        return levels[parts["code"].to(torch.int64)] * parts["scale"].to(torch.float32)


@dataclass(frozen=True)
class SignOneLevel:
    """One bit a value: its sign; the magnitude is the chunk's mean kept magnitude.

    Cost: 1 bit a value and 16 bits a chunk; its error on real pseudo-gradients is printed by
    ``benchmarks/bench_values.py``.

    Departs from the paper: it uses :class:`Statistical`.
    """

    name: ClassVar[str] = "sign_one_level"
    chunkwise: ClassVar[bool] = True

    def specs(self, rows: int, kept: int) -> tuple[PartSpec, ...]:
        return (
            PartSpec("negative", (rows, kept), torch.uint8, 1),
            PartSpec("scale", (rows, 1), torch.bfloat16, 16, signed=False),
        )

    def encode(self, value_NK: Tensor, *, key: int) -> Parts:
        return {"negative": (value_NK < 0).to(torch.uint8), "scale": _chunk_scale(value_NK.abs())}

    def decode(self, parts: Parts) -> Tensor:
        scale = parts["scale"].to(torch.float32)
        return torch.where(parts["negative"].to(torch.bool), -scale, scale)


@dataclass(frozen=True)
class Statistical:
    """The quantizer of the released SparseLoCo code, for fidelity.

    With mean m and unbiased standard deviation s of all kept values of a block: bin
    ``q = clamp(round((v - m) / (span * s / bins)) + bins // 2, 0, bins - 1)``; the value back is the mean of the
    bin. At 4 bins it carries about one bit a value, since no kept value lies near zero.

    Departs from the paper: statistics are per block, so a ragged edge has its own; for dims that are multiples of
    the tile side that is per tensor, as released.

    Reference: Sarfi et al., 2025, arXiv:2508.15706, released code (function of the same purpose, bins 4, range 6).
    """

    bins: int = 4
    span: float = 6.0
    name: ClassVar[str] = "statistical"
    chunkwise: ClassVar[bool] = False  # one mean and deviation for the block

    def __post_init__(self) -> None:
        if self.bins not in (2, 4, 16, 256):
            raise ConfigError(f"bins={self.bins!r}: must be 2, 4, 16 or 256; use 4 for the released setting")

    def specs(self, rows: int, kept: int) -> tuple[PartSpec, ...]:
        return (
            PartSpec("code", (rows, kept), torch.uint8, (self.bins - 1).bit_length()),
            PartSpec("shift", (1,), torch.float32, 32),
            PartSpec("lookup", (self.bins,), torch.float32, 32),
        )

    def encode(self, value_NK: Tensor, *, key: int) -> Parts:
        value = value_NK.to(torch.float32)
        shift = value.mean()
        centred = value - shift
        deviation = centred.norm() / max(1, centred.numel() - 1) ** 0.5
        step = self.span * deviation / self.bins
        step = torch.where(torch.isfinite(step) & (step > 0), step, 1.0)
        code = torch.round(centred / step + self.bins // 2).clamp_(0, self.bins - 1).to(torch.int64)
        count = torch.bincount(code.reshape(-1), minlength=self.bins)
        total = torch.bincount(code.reshape(-1), weights=centred.reshape(-1), minlength=self.bins)
        lookup = (total / count.clamp(min=1)).to(torch.float32)
        return {"code": code.to(torch.uint8), "shift": shift.reshape(1), "lookup": lookup}

    def decode(self, parts: Parts) -> Tensor:
        return (parts["lookup"] + parts["shift"])[parts["code"].to(torch.int64)]


@dataclass(frozen=True)
class Stochastic:
    """Unbiased rounding to ``levels`` steps of the chunk's norm (QSGD).

    ``v -> ||v|| * sign(v) * floor(levels * |v| / ||v|| + u) / levels`` with uniform u, from the message's key.

    Args:
        levels: Steps between zero and the norm, 1 to 127.

    Reference: Alistarh et al., 2017, arXiv:1610.02132, as used in Basu et al., 2019, arXiv:1906.02367.
    """

    levels: int = 4
    name: ClassVar[str] = "stochastic"
    chunkwise: ClassVar[bool] = False  # random numbers by place in the block

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= 127:
            raise ConfigError(f"levels={self.levels!r}: must be between 1 and 127; use Float32 values for more")

    def specs(self, rows: int, kept: int) -> tuple[PartSpec, ...]:
        return (
            PartSpec("code", (rows, kept), torch.uint8, self.levels.bit_length() + 1),
            PartSpec("norm", (rows, 1), torch.float32, 32, signed=False),
        )

    def encode(self, value_NK: Tensor, *, key: int) -> Parts:
        value = value_NK.to(torch.float32)
        norm = value.norm(dim=1, keepdim=True)
        ratio = value.abs() / torch.where(norm > 0, norm, 1.0) * self.levels
        step = torch.floor(ratio + uniform(key, value.shape, value.device)).clamp_(max=self.levels)
        return {"code": (step * 2 + (value < 0)).to(torch.uint8), "norm": norm}

    def decode(self, parts: Parts) -> Tensor:
        step = (parts["code"] >> 1).to(torch.float32) * (parts["norm"] / self.levels)
        return torch.where((parts["code"] & 1).to(torch.bool), -step, step)


def _chunk_scale(magnitude_NK: Tensor) -> Tensor:
    """Mean kept magnitude per chunk, float64 to float32 to bf16, each rounded to nearest even."""
    return exact_mean(magnitude_NK).to(torch.float32).to(torch.bfloat16).unsqueeze(1)
