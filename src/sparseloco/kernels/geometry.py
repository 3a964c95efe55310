"""Where the chunks of a block lie in a live parameter: what a kernel needs instead of a copy in tiles."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from sparseloco.layout import Chunks, Layout, Tiles


class TileGeometry(NamedTuple):
    """Equal tiles of a row-major matrix, in elements; chunk n is tile n, row by row of tiles, panel by panel.

    Attributes:
        first_row: Row at which the first panel starts.
        panels: Number of equal panels.
        panel_height: Rows from one panel to the next.
        row_offset: First row of the tiled rectangle inside its panel.
        col_offset: First column of the rectangle.
        grid_rows: Tiles of the rectangle, downwards.
        grid_cols: Tiles of the rectangle, across.
        rows: Height of one tile.
        cols: Width of one tile; a chunk has ``rows * cols`` values.
        row_stride: Elements from one row of the matrix to the next.
    """

    first_row: int
    panels: int
    panel_height: int
    row_offset: int
    col_offset: int
    grid_rows: int
    grid_cols: int
    rows: int
    cols: int
    row_stride: int


def geometries(layout: Layout, tensor: Tensor) -> tuple[TileGeometry, ...] | None:
    """Where the blocks of ``layout`` lie in ``tensor``, one entry per block, without a copy.

    Returns:
        None if the layout transforms values, if it is none of ``Tiles`` and ``Chunks``, or if the tensor is no
        row-major matrix ``[dim 0, other dims]`` in memory; split it in torch then.
    """
    if isinstance(layout, Chunks):
        return _run_geometries(layout, tensor) if tensor.is_contiguous() else None
    if not isinstance(layout, Tiles):
        return None
    row_stride = matrix_row_stride(tensor)
    if row_stride is None:
        return None
    regions = layout._regions(tuple(tensor.shape))  # pyright: ignore[reportPrivateUsage]
    return tuple(
        TileGeometry(r.first_row, r.panels, r.height, r.row.start, r.col.start, *r.grid, *r.tile, row_stride)
        for r in regions
    )


def matrix_row_stride(tensor: Tensor) -> int | None:
    """Elements from one row to the next of ``tensor`` seen as ``[dim 0, other dims]``; None if it is no such matrix."""
    rows = tensor.shape[0] if tensor.dim() else 1
    cols = math.prod(tensor.shape[1:])
    if not tensor.numel():
        return max(1, cols)
    try:
        matrix = tensor.detach().view(rows, cols)
    except RuntimeError:  # torch's way to say that these strides need a copy
        return None
    if cols > 1 and matrix.stride(1) != 1:
        return None
    if rows == 1:
        return cols
    return matrix.stride(0) if matrix.stride(0) >= cols else None


def _run_geometries(layout: Chunks, tensor: Tensor) -> tuple[TileGeometry, ...]:
    """Runs of a contiguous tensor: tiles of one column."""
    found: list[TileGeometry] = []
    first = 0
    for count, height, _ in layout.block_shapes(tuple(tensor.shape)):
        found.append(TileGeometry(first, 1, count * height, 0, 0, count, 1, height, 1, 1))
        first += count * height
    return tuple(found)
