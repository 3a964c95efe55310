"""The fixed coding of a section, bit by bit as docs/wire-format.md describes it: slow, and without product code."""

from __future__ import annotations

import torch
from torch import Tensor


def fixed_section(index: Tensor, code: Tensor, scale: Tensor, chunk_size: int) -> bytes:
    """Bytes of one block's section.

    Args:
        index: Ascending positions ``[N, K]``.
        code: Two-bit codes ``[N, K]``.
        scale: bfloat16 ``[N, 1]``.
        chunk_size: C.
    """
    rows = index.tolist()
    kept = index.shape[1]
    width = low_bits(kept, chunk_size)
    low: list[int] = []
    unary: list[list[int]] = []
    for row in rows:
        bits: list[int] = []
        before = -1
        for position in row:
            gap, before = position - before - 1, position
            low += [gap >> i & 1 for i in range(width)]
            bits += [0] * (gap >> width) + [1]
        unary.append(bits)
    group = 8 * -(-128 // kept)
    slots = b"".join(_slot(unary[n : n + group], kept, chunk_size, width) for n in range(0, len(rows), group))
    codes = [bit for row in code.tolist() for value in row for bit in (value & 1, value >> 1)]
    halves = scale.reshape(-1).view(torch.int16).tolist()
    scales = b"".join((half & 0xFFFF).to_bytes(2, "little") for half in halves)
    return _bytes(low) + slots + _bytes(codes) + scales


def low_bits(kept: int, chunk_size: int) -> int:
    """Width of the low parts: of equal sizes the smallest."""
    return min(range(17), key=lambda b: (kept * b + kept + ((chunk_size - kept) >> b), b))


def _slot(chunks: list[list[int]], kept: int, chunk_size: int, width: int) -> bytes:
    size = -(-len(chunks) * (kept + ((chunk_size - kept) >> width)) // 8)
    return _bytes([bit for bits in chunks for bit in bits]).ljust(size, b"\0")


def _bytes(bits: list[int]) -> bytes:
    size = -(-len(bits) // 8)
    return int("".join(map(str, reversed(bits))) or "0", 2).to_bytes(size, "little")
