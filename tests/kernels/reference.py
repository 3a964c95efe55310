"""Slow and plain: gap coding bit by bit as docs/wire-format.md says it, and what tests of kernels share.

Nothing here looks at the kernels or at the coder of the package.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from sparseloco.kernels import native
from sparseloco.kernels.geometry import TileGeometry
from sparseloco.layout import BlockShape, Layout, Tiles
from sparseloco.types import Coding, Parts

FIXED, COMPACT = Coding
SETS = ("scalar", "avx2", "avx512")

needs_native = pytest.mark.skipif(not native.built(), reason="the native kernels are not built; run tools/native.sh")


def use(instruction_set: str) -> None:
    """Choose an instruction set for the rest of the test."""
    if not native.use(instruction_set):
        pytest.skip(f"this processor has no {instruction_set}")


def available_sets() -> list[str]:
    return [name for name in SETS if native.built() and native.use(name)]


# -- the format ------------------------------------------------------------------------------------------------------


def width(kept: int, chunk_size: int) -> int:
    return min(range(32), key=lambda b: (kept * b + kept + ((chunk_size - kept) >> b), b))


def group_chunks(kept: int) -> int:
    return 8 * -(-128 // kept)


def slot(chunks: int, kept: int, chunk_size: int) -> int:
    return -(-chunks * (kept + ((chunk_size - kept) >> width(kept, chunk_size))) // 8)


def _number_to_bytes(bits: Sequence[str]) -> bytes:
    """Bytes of digits, the first of them the least."""
    text = "".join(bits)
    return int("0" + text[::-1], 2).to_bytes(-(-len(text) // 8), "little")


def _groups(rows: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
    step = group_chunks(len(rows[0]))
    for first in range(0, len(rows), step):
        yield rows[first : first + step]


def encode_index(rows: Sequence[Sequence[int]], chunk_size: int, coding: int) -> bytes:
    """Index part of ascending positions, one row per chunk."""
    kept = len(rows[0])
    b = width(kept, chunk_size)
    low: list[str] = []
    unary: list[bytes] = []
    for group in _groups(rows):
        bits: list[str] = []
        for row in group:
            for before, here in zip([-1, *row[:-1]], row, strict=True):
                quotient, rest = divmod(here - before - 1, 1 << b)
                bits.append("0" * quotient + "1")
                low.append("".join(str(rest >> i & 1) for i in range(b)))
        unary.append(_number_to_bytes(bits))
    if coding == FIXED:
        sizes = [slot(len(group), kept, chunk_size) for group in _groups(rows)]
        return _number_to_bytes(low) + b"".join(u + bytes(s - len(u)) for u, s in zip(unary, sizes, strict=True))
    item = 2 if slot(group_chunks(kept), kept, chunk_size) <= 65535 else 4
    table = b"".join(len(u).to_bytes(item, "little") for u in unary)
    return table + _number_to_bytes(low) + b"".join(unary)


def encode_section(parts: Parts, chunk_size: int, coding: int) -> bytes:
    """Section of a payload of ``TopK`` with ``SignTwoLevel``."""
    codes = [f"{code:02b}"[::-1] for code in parts["code"].reshape(-1).tolist()]
    scales = parts["scale"].reshape(-1).view(torch.int16).tolist()
    return (
        encode_index(parts["index"].tolist(), chunk_size, coding)
        + _number_to_bytes(codes)
        + b"".join((s & 0xFFFF).to_bytes(2, "little") for s in scales)
    )


# -- cases -----------------------------------------------------------------------------------------------------------


def random_positions(chunks: int, kept: int, chunk_size: int, generator: torch.Generator) -> list[list[int]]:
    if chunk_size > 1 << 20:  # too many to shuffle
        drawn = torch.randint(0, chunk_size, (chunks, 2 * kept), generator=generator)
        return [sorted(sorted(set(row))[:kept]) for row in drawn.tolist()]
    shuffled = torch.rand(chunks, chunk_size, generator=generator).argsort(dim=1)[:, :kept]
    return shuffled.sort(dim=1).values.tolist()


def geometries(layout: Layout, shape: tuple[int, ...]) -> list[TileGeometry]:
    """Where each block of a tensor lies in it, from the layout alone."""
    if not isinstance(layout, Tiles):
        return [
            TileGeometry(0, 1, 1, 0, start, 1, blocks.num_chunks, 1, blocks.chunk_size, _numel(shape))
            for start, blocks in _runs(layout, shape)
        ]
    cols = _numel(shape[1:])
    return [
        TileGeometry(
            region.first_row,
            region.panels,
            region.height,
            region.row.start,
            region.col.start,
            *region.grid,
            *region.tile,
            cols,
        )
        for region in layout.regions(shape)
    ]


def _runs(layout: Layout, shape: tuple[int, ...]) -> Iterator[tuple[int, BlockShape]]:
    start = 0
    for blocks in layout.block_shapes(shape):
        yield start, blocks
        start += blocks.num_chunks * blocks.chunk_size


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def same_bits(one: Tensor, two: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return one.dtype == two.dtype and torch.equal(one.contiguous().view(integer), two.contiguous().view(integer))
