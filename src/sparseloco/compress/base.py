"""The compressor protocol, and the arithmetic that all compressors share."""

from __future__ import annotations

import math
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from sparseloco.types import Parts, PartSpec


class Compressor(Protocol):
    """One block in, its parts out; a frozen value without tensors in it.

    ``shared`` is the part of its state that all peers agree on, one dictionary per block; most have none.
    ``chunkwise``: each chunk is coded alone and without randomness, so that shards can share out the chunks.
    ``accumulate_`` is the only decoder. It has four uses: error feedback subtracts, the reducer adds, an
    undelivered payload is credited, and decoding is accumulating into zeros.
    """

    name: ClassVar[str]
    linear: ClassVar[bool]
    portable: ClassVar[bool]

    @property
    def chunkwise(self) -> bool:
        """Whether the parts of a block are those of its chunks, one under another."""
        ...

    def init(self, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Parts:
        """Shared state for a block ``[rows, cols]`` on ``device``, which may be meta."""
        ...

    def specs(self, rows: int, cols: int, dtype: torch.dtype, shared: Parts) -> tuple[PartSpec, ...]:
        """Shape, type and wire width of every part of such a block, without any value."""
        ...

    def encode(self, block: Tensor, shared: Parts, *, key: int) -> Parts:
        """Compress ``block [N, C]``; all randomness comes from ``key``."""
        ...

    def accumulate_(
        self, out: Tensor, parts: Parts, weight: int, shared: Parts, *, weights: Tensor | None = None
    ) -> None:
        """Add ``weight`` times the decoded block to ``out [N, C]``.

        ``weights``, when given, receives ``weight`` at every coordinate that the parts hold.
        """
        ...

    def advance_(self, shared: Parts, update: Tensor) -> None:
        """Move shared state on after a round whose reduced block was ``update``."""
        ...


def exact_mean(magnitude_NK: Tensor) -> Tensor:
    """Mean over the last dim of non-negative numbers, the same whatever the order of summation.

    Magnitudes are cut to whole multiples of a power of two so small that their sum fits the 53 bits of float64;
    then every partial sum is exact. The cut is below 2**-52 * K relative to the largest.

    Returns:
        Float64, last dim reduced.
    """
    count = magnitude_NK.shape[-1]
    if count == 0:
        return magnitude_NK.sum(dim=-1, dtype=torch.float64)
    wide = magnitude_NK.to(torch.float64)
    _, exponent = torch.frexp(wide.amax(dim=-1, keepdim=True))
    shift = 52 - (count - 1).bit_length() - exponent.to(torch.float64)
    # A subnormal maximum would need a factor beyond the range of float64; float32 inputs never get there.
    scale = torch.exp2(shift.clamp(max=1000.0))
    total = torch.floor(wide * scale).sum(dim=-1)
    return total / (scale.squeeze(-1) * count)


def position_spec(rows: int, kept: int, cols: int) -> PartSpec:
    """Row of the table for ``kept`` ascending positions in each of ``rows`` chunks of ``cols`` values."""
    return PartSpec("index", (rows, kept), index_dtype(cols), 0, chunk_size=cols)


def index_dtype(chunk_size: int) -> torch.dtype:
    """Smallest signed type that holds every position of a chunk."""
    return torch.int16 if chunk_size <= 1 << 15 else torch.int32


def kept_per_chunk(chunk_values: int, k: int, chunk_size: int) -> int:
    """Values kept of a chunk that may be ragged: ``max(1, round(n * k / C))``, none if it is empty.

    Example:
        >>> kept_per_chunk(4096, 64, 4096), kept_per_chunk(384, 64, 4096), kept_per_chunk(3, 64, 4096)
        (64, 6, 1)
    """
    if chunk_values == 0:
        return 0
    return min(chunk_values, max(1, (chunk_values * k + chunk_size // 2) // chunk_size))


def float_bits(dtype: torch.dtype) -> int:
    """Wire width of a float part."""
    return torch.finfo(dtype).bits


def weighted(values: Tensor, weight: int, out: Tensor) -> Tensor:
    """``weight * values`` in the type of ``out``; exact for float32 values and integer weights below 2**29."""
    return values.to(out.dtype).mul_(weight) if values.dtype != out.dtype else values * weight


def power_of_two_levels(num_levels: int) -> Tensor:
    """Magnitudes 0, 2**-(n-2), ..., 1/2, 1 of an exponent-only float format with ``num_levels`` codes."""
    exponents = torch.arange(num_levels - 1, dtype=torch.float32) - (num_levels - 2)
    return torch.cat([torch.zeros(1), torch.exp2(exponents)])


def log2_binomial(n: int, k: int) -> float:
    """``log2 C(n, k)``: the least bits that can name which k of n values were kept."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
