"""Where blocks lie in memory: gathering by the geometry gives what the layout's split gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparseloco.kernels.geometry import TileGeometry, geometries, matrix_row_stride
from sparseloco.layout import Chunks, DctTiles, Flat, Layout, Matrices, Tiles
from tests.contracts.cases import SHAPES

TILED = [Tiles(), Tiles(8, 16), Tiles(panels=8), Tiles(5, 3, panels=3, vector_chunk=10), Chunks(), Chunks(7)]


def gathered(tensor: Tensor, geometry: TileGeometry) -> Tensor:
    """The block by the rule in the docstring of TileGeometry, with plain loops."""
    g = geometry
    flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    rows = [
        [
            tensor.storage_offset()
            + (g.first_row + panel * g.panel_height + g.row_offset + down * g.rows + r) * g.row_stride
            + g.col_offset + across * g.cols + c
            for r in range(g.rows)
            for c in range(g.cols)
        ]
        for panel in range(g.panels)
        for down in range(g.grid_rows)
        for across in range(g.grid_cols)
    ]  # fmt: skip
    return flat[torch.tensor(rows)]


@pytest.mark.parametrize("layout", TILED, ids=str)
@pytest.mark.parametrize("shape", SHAPES[:4] + SHAPES[5:], ids=str)
def test_geometry_is_split_without_the_copy(layout: Layout, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    found = geometries(layout, tensor)
    blocks = layout.split(tensor)
    assert found is not None
    assert len(found) == len(blocks)
    for geometry, block in zip(found, blocks, strict=True):
        assert torch.equal(gathered(tensor, geometry), block)


def test_rows_may_lie_apart() -> None:
    tensor = torch.arange(200.0).reshape(10, 20)[2:9, 3:16]
    found = geometries(Tiles(4, 4), tensor)
    assert found is not None
    for geometry, block in zip(found, Tiles(4, 4).split(tensor), strict=True):
        assert geometry.row_stride == 20
        assert torch.equal(gathered(tensor, geometry), block)


def test_what_has_no_tiles_in_memory_is_left_to_torch() -> None:
    tensor = torch.zeros(6, 8)
    for layout in (Flat(), Matrices(), DctTiles(4)):
        assert geometries(layout, tensor) is None
    assert geometries(Tiles(4, 4), tensor.T) is None
    assert geometries(Chunks(4), tensor[:, :4]) is None
    assert geometries(Tiles(4, 4), torch.zeros(1, 8).expand(6, 8)) is None
    assert geometries(Tiles(4, 4), torch.zeros(4, 3, 5, 6)[:, :, :, :3]) is None


def test_row_stride() -> None:
    assert matrix_row_stride(torch.zeros(4, 3, 5)) == 15
    assert matrix_row_stride(torch.zeros(9)[::3]) == 3
    assert matrix_row_stride(torch.zeros(())) == 1
    assert matrix_row_stride(torch.zeros(0, 7)) == 7
