"""The geometry of blocks against ``layout.split``: the same values in the same order, by another road."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparseloco.kernels.geometry import TileGeometry, block_geometry, tensor_geometry
from sparseloco.layout import Chunks, DctTiles, Flat, Layout, Matrices, Tiles

SHAPES = [
    (), (1,), (5,), (4096,), (10000,), (1, 1), (1, 7), (7, 1), (3, 5), (64, 64), (65, 64), (64, 65), (130, 70),
    (257, 3), (2, 3, 4), (8, 3, 3, 3), (70, 2, 33), (0,), (0, 4), (4, 0), (128, 192), (31, 200),
]  # fmt: skip
LAYOUTS: list[Layout] = [
    Tiles(64, 64), Tiles(64, 64, panels=3), Tiles(8, 16), Tiles(5, 3, panels=4), Tiles(64, 64, vector_chunk=100),
    Tiles(1, 4096), Tiles(4096, 1), Chunks(4096), Chunks(7), Chunks(1),
]  # fmt: skip


def values_at(memory: Tensor, g: TileGeometry) -> Tensor:
    """Chunks ``[N, C]`` that a geometry describes, read value by value."""
    chunks = []
    for n in range(g.num_chunks):
        rest, tile_col = divmod(n, g.grid_cols)
        panel, tile_row = divmod(rest, g.grid_rows)
        top = g.first_row + panel * g.panel_height + g.row_offset + tile_row * g.rows
        left = g.col_offset + tile_col * g.cols
        chunks.append([(top + r) * g.row_stride + left + c for r in range(g.rows) for c in range(g.cols)])
    return memory[torch.tensor(chunks, dtype=torch.int64).reshape(g.num_chunks, g.chunk_size)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_geometry_is_where_split_takes_its_values(layout: Layout, shape: tuple[int, ...]) -> None:
    memory = torch.arange(math.prod(shape))
    geometry = block_geometry(layout, shape)
    assert geometry is not None
    blocks = layout.split(memory.view(shape))
    assert [(g.num_chunks, g.rows, g.cols) for g in geometry] == [tuple(s) for s in layout.block_shapes(shape)]
    for g, block in zip(geometry, blocks, strict=True):
        assert torch.equal(values_at(memory, g), block)


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if isinstance(x, Tiles)], ids=str)
@pytest.mark.parametrize("shape", [(7, 5), (130, 70), (9, 2, 3), (12,)], ids=str)
def test_rows_of_a_wider_matrix(layout: Layout, shape: tuple[int, ...]) -> None:
    width = math.prod(shape[1:])
    memory = torch.arange(shape[0] * (width + 3))
    inner = torch.empty(shape, device="meta").stride()[1:]
    tensor = memory.as_strided(shape, (width + 3, *inner))
    geometry = tensor_geometry(layout, tensor)
    assert geometry is not None
    for g, block in zip(geometry, layout.split(tensor), strict=True):
        assert torch.equal(values_at(memory, g), block)


@pytest.mark.parametrize("layout", [DctTiles(8), Flat(), Matrices()], ids=str)
def test_other_layouts_have_none(layout: Layout) -> None:
    assert block_geometry(layout, (16, 16)) is None


@pytest.mark.parametrize(
    ("layout", "tensor"),
    [
        (Tiles(), torch.zeros(4, 6).T),
        (Tiles(), torch.zeros(2, 3, 4).permute(0, 2, 1)),
        (Tiles(), torch.zeros(1, 6).expand(4, 6)),
        (Tiles(), torch.zeros(4, 6)[:, ::2]),
        (Chunks(4), torch.zeros(4, 6)[:, :3]),
    ],
    ids=["transposed", "permuted", "expanded", "every second column", "chunks of a window"],
)
def test_tensors_of_another_order_have_none(layout: Layout, tensor: Tensor) -> None:
    assert tensor_geometry(layout, tensor) is None
