"""Where the chunks of a block lie in a live parameter: what a kernel needs instead of a copy in tiles."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from sparseloco.layout import Chunks, Layout, Tiled


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

    @property
    def num_chunks(self) -> int:
        """Tiles of all panels."""
        return self.panels * self.grid_rows * self.grid_cols

    @property
    def chunk_size(self) -> int:
        """Values of one tile."""
        return self.rows * self.cols


def block_geometry(
    layout: Layout, shape: tuple[int, ...], row_stride: int | None = None
) -> tuple[TileGeometry, ...] | None:
    """Geometry of every block that ``layout.split`` makes of a tensor of ``shape``, in its order.

    Args:
        layout: How tensors become blocks.
        shape: Shape of the live tensor; all dims but the first are contiguous.
        row_stride: Elements from one entry of dim 0 to the next; None means the tensor is contiguous.

    Returns:
        None if the layout has no such description: then the definition must do the work.

    Example:
        >>> from sparseloco.layout import Tiles
        >>> [(g.num_chunks, g.rows, g.cols) for g in block_geometry(Tiles(64, 64), (130, 70))]
        [(2, 64, 64), (2, 64, 6), (1, 2, 64), (1, 2, 6)]
    """
    width = math.prod(shape[1:])
    stride = width if row_stride is None else row_stride
    if isinstance(layout, Tiled):
        return tuple(
            TileGeometry(r.first_row, r.panels, r.height, r.row.start, r.col.start, *r.grid, *r.tile, stride)
            for r in layout.regions(shape)
        )
    if isinstance(layout, Chunks) and stride == width:
        # Memory as one column. A rest starts behind the whole chunks.
        blocks = layout.block_shapes(shape)
        starts = (0, blocks[0].num_chunks * blocks[0].chunk_size) if blocks else ()
        return tuple(
            TileGeometry(start, 1, s.num_chunks * s.chunk_size, 0, 0, s.num_chunks, 1, s.chunk_size, 1, 1)
            for start, s in zip(starts, blocks, strict=False)
        )
    return None


def tensor_geometry(layout: Layout, tensor: Tensor) -> tuple[TileGeometry, ...] | None:
    """:func:`block_geometry` of a live tensor; None also if it is no row-major matrix in memory.

    Example:
        >>> import torch
        >>> from sparseloco.layout import Tiles
        >>> tensor_geometry(Tiles(), torch.zeros(4, 6).T) is None
        True
    """
    row_stride = matrix_row_stride(tensor)
    return None if row_stride is None else block_geometry(layout, tuple(tensor.shape), row_stride)


def matrix_row_stride(tensor: Tensor) -> int | None:
    """Elements from one entry of dim 0 to the next; None if the dims behind it are not contiguous, or rows overlap."""
    width = math.prod(tensor.shape[1:])
    if tensor.is_contiguous():
        return width
    if tensor.dim() < 1 or not tensor[0].is_contiguous() or tensor.stride(0) < width:
        return None
    return tensor.stride(0)
