"""The baseline: SparseLoCo as a pipeline of plain PyTorch calls, the way published code works.

Our own code. Per 64 x 64 tile: ``torch.topk`` of magnitudes, gather, one 4-bin quantizer per tensor over 6 standard
deviations, positions in 12 bits and one byte per code; back by ``scatter_reduce`` with the mean over contributors.
Every call makes one pass over memory; nothing is fused.

Like published code, the sender makes the difference first, and decodes its own message as a receiver does, from its
bytes and by ``scatter_reduce``, to take it out of the residual. ``lean`` is the same pipeline with what one would first
improve by hand: operations in place, no unpacking of what is at hand, plain scatters, two of them for the mean.
Both write into memory that is there already, and the finite check is one sum. The bench fails if the first takes
more than 30 times the limit.

Shapes: N chunks, C = 4096 values in a chunk, K kept values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 64
_BINS = 4
_RANGE = 6.0


class Message(NamedTuple):
    """What one peer sends for one tensor.

    Attributes:
        positions: uint8 ``[N, K * 3 / 2]``, two positions in three bytes.
        codes: uint8 ``[N, K]``.
        lookup: float32 ``[4]``, the value of each code.
    """

    positions: Tensor
    codes: Tensor
    lookup: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that travel, without any header."""
        return self.positions.numel() + self.codes.numel() + 4 * self.lookup.numel()


@dataclass(frozen=True)
class PlainPipeline:
    """One matrix whose sides are multiples of 64.

    Args:
        k: Values kept per tile; even, since two positions share three bytes.
        decay: Share of the residual carried into the next round.
        lr: Outer learning rate.
        lean: Fewer and cheaper calls with the same result.
    """

    k: int = 64
    decay: float = 0.95
    lr: float = 1.0
    lean: bool = False

    def encode(self, start: Tensor, live: Tensor, residual: Tensor) -> Message:
        """Message of ``start - live`` with error feedback; ``residual`` is updated in place."""
        residual.mul_(self.decay)
        if self.lean:
            residual.add_(start).sub_(live)
        else:
            residual.add_(start - live)
        e_NC = tiles(residual)
        index_NK = e_NC.abs().topk(self.k, dim=1, sorted=False).indices
        codes, lookup = quantize(e_NC.gather(1, index_NK))
        message = Message(pack_12_bits(index_NK), codes, lookup)
        sent_NC = torch.zeros_like(e_NC)
        if self.lean:
            sent_NC.scatter_(1, index_NK, dequantize(codes, lookup))
        else:
            sent_NC.scatter_reduce_(1, *gathered([message]), reduce="mean", include_self=False)
        tiled_view(residual).sub_(tile_grid(sent_NC, residual.shape))
        return message

    def decode_apply(self, messages: Sequence[Message], anchor: Tensor, live: Tensor) -> None:
        """Mean over contributors of all messages, one SGD step on ``anchor``, and ``live`` set to it.

        Raises:
            FloatingPointError: if the mean is not finite.
        """
        index, value = gathered(messages)
        mean_NC = torch.zeros(index.shape[0], TILE * TILE)
        if self.lean:
            count_NC = torch.zeros_like(mean_NC).scatter_add_(1, index, torch.ones_like(value))
            mean_NC.scatter_add_(1, index, value).div_(count_NC.clamp_(min=1))
        else:
            mean_NC.scatter_reduce_(1, index, value, reduce="mean", include_self=False)
        if not bool(mean_NC.sum().isfinite()):
            raise FloatingPointError("mean of the messages is not finite")
        tiled_view(anchor).sub_(tile_grid(mean_NC, anchor.shape), alpha=self.lr)
        live.copy_(anchor)


def gathered(messages: Sequence[Message]) -> tuple[Tensor, Tensor]:
    """Positions (int64) and values (float32) of all messages side by side: ``[N, R * K]`` each."""
    index = torch.cat([unpack_12_bits(message.positions) for message in messages], dim=1)
    value = torch.cat([dequantize(message.codes, message.lookup) for message in messages], dim=1)
    return index, value


def quantize(value_NK: Tensor) -> tuple[Tensor, Tensor]:
    """4 bins of equal width over 6 standard deviations around the mean of all values.

    Returns:
        uint8 codes ``[N, K]`` and the mean of the values of each bin, float32 ``[4]``.
    """
    flat = value_NK.flatten()
    centre = flat.mean()
    width = flat.std() * (_RANGE / _BINS)
    codes = ((flat - centre) / width).round_().add_(_BINS // 2).clamp_(0, _BINS - 1).to(torch.int64)
    total = torch.zeros(_BINS).scatter_add_(0, codes, flat)
    count = torch.zeros(_BINS).scatter_add_(0, codes, torch.ones_like(flat))
    return codes.to(torch.uint8).view(value_NK.shape), total / count.clamp_(min=1)


def dequantize(codes_NK: Tensor, lookup: Tensor) -> Tensor:
    """Value of each code: float32 ``[N, K]``."""
    return lookup.index_select(0, codes_NK.flatten().to(torch.int32)).view(codes_NK.shape)


def pack_12_bits(index_NK: Tensor) -> Tensor:
    """Positions below 4096, two in three bytes: uint8 ``[N, K * 3 / 2]``."""
    pair = index_NK.to(torch.int16).view(index_NK.shape[0], -1, 2)
    first, second = pair[..., 0], pair[..., 1]
    out = torch.empty(*first.shape, 3, dtype=torch.uint8)
    out[..., 0] = first & 0xFF
    out[..., 1] = (first >> 8) | ((second & 0xF) << 4)
    out[..., 2] = second >> 4
    return out.view(index_NK.shape[0], -1)


def unpack_12_bits(packed: Tensor) -> Tensor:
    """Undo :func:`pack_12_bits`: int64 ``[N, K]``, the type that scatter wants."""
    low, middle, high = packed.view(packed.shape[0], -1, 3).to(torch.int16).unbind(-1)
    out = torch.empty(*low.shape, 2, dtype=torch.int64)
    out[..., 0] = low | ((middle & 0xF) << 8)
    out[..., 1] = (middle >> 4) | (high << 4)
    return out.view(packed.shape[0], -1)


def tiled_view(matrix: Tensor) -> Tensor:
    """View of a matrix as ``[tile row, row, tile column, column]``."""
    rows, cols = matrix.shape
    return matrix.view(rows // TILE, TILE, cols // TILE, TILE)


def tiles(matrix: Tensor) -> Tensor:
    """Copy of a matrix, tile after tile: ``[N, 4096]``."""
    return tiled_view(matrix).permute(0, 2, 1, 3).reshape(-1, TILE * TILE)


def tile_grid(block_NC: Tensor, shape: Sequence[int]) -> Tensor:
    """View of tiles in the order of :func:`tiled_view`."""
    return block_NC.view(shape[0] // TILE, shape[1] // TILE, TILE, TILE).permute(0, 2, 1, 3)
