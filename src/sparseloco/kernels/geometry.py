"""Where the chunks of a block lie in a live parameter: what a kernel needs instead of a copy in tiles."""

from __future__ import annotations

from typing import NamedTuple


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
