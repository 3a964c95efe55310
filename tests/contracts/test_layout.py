"""The contract of every layout: it inverts, is linear, keeps the 2-norm, takes any shape and pads nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparseloco.compress import Compressor, Dense, Float32, Quantize, ScaledSign, SignOneLevel, TopK
from sparseloco.layout import DctTiles, Layout, Tiles, dct_matrix
from tests.contracts.cases import LAYOUTS, PERMUTATIONS, SHAPES, heavy_tailed

SHAPE = st.lists(st.integers(0, 24), max_size=4).map(tuple)
LAYOUT = st.sampled_from(sorted(LAYOUTS)).map(LAYOUTS.__getitem__)

any_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
any_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def check_round_trip(layout: Layout, tensor: Tensor) -> None:
    back = layout.inverse(layout.forward(tensor), tuple(tensor.shape))
    assert back.shape == tensor.shape
    if layout in PERMUTATIONS.values():
        assert torch.equal(back, tensor)
    else:
        # 64-term sums of float64 numbers, twice in each direction.
        assert torch.allclose(back.double(), tensor, rtol=0, atol=1e-13 * max(1.0, _largest(tensor)))


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def check_shapes(layout: Layout, tensor: Tensor) -> None:
    blocks = layout.forward(tensor)
    shapes = layout.block_shapes(tuple(tensor.shape))
    assert [tuple(b.shape) for b in blocks] == [(s.num_chunks, s.chunk_size) for s in shapes]
    assert [tuple(b.shape) for b in layout.split(tensor)] == [(s.num_chunks, s.chunk_size) for s in shapes]
    assert all(b.dtype == tensor.dtype for b in blocks)
    assert all(min(b.shape) > 0 for b in blocks), "no empty block"
    assert sum(b.numel() for b in blocks) == tensor.numel(), "nothing is padded"


def check_laws(layout: Layout, x: Tensor, y: Tensor) -> None:
    """Linear, and the 2-norm is kept."""
    together = layout.forward(3.0 * x - 0.5 * y)
    for mixed, a, b in zip(together, layout.forward(x), layout.forward(y), strict=True):
        if layout in PERMUTATIONS.values():
            assert torch.equal(mixed, 3.0 * a - 0.5 * b)
        else:
            assert torch.allclose(mixed, 3.0 * a - 0.5 * b, rtol=0, atol=1e-12 * max(1.0, _largest(x), _largest(y)))
    square = sum(float(b.square().sum()) for b in layout.forward(x))
    assert math.isclose(square, float(x.square().sum()), rel_tol=1e-12)


@any_layout
@any_shape
def test_any_shape_keeps_every_law(layout: Layout, shape: tuple[int, ...]) -> None:
    """C-54 among others: (), (1,), (127,), (50257, 8), (4, 3, 3, 3), (0,)."""
    x, y = heavy_tailed(shape, 1, torch.float64), heavy_tailed(shape, 2, torch.float64)
    check_shapes(layout, x)
    check_laws(layout, x, y)
    if x.numel():
        check_round_trip(layout, x)
    else:  # no block is left to say the type
        assert layout.inverse(layout.forward(x), shape).shape == shape


@given(layout=LAYOUT, shape=SHAPE, seed=st.integers(0, 2**16))
def test_random_shapes_keep_every_law(layout: Layout, shape: tuple[int, ...], seed: int) -> None:
    x, y = heavy_tailed(shape, seed, torch.float64), heavy_tailed(shape, seed + 1, torch.float64)
    check_shapes(layout, x)
    check_laws(layout, x, y)
    if x.numel():
        check_round_trip(layout, x)


@given(layout=LAYOUT, rows=st.integers(1, 40), cols=st.integers(1, 40), step=st.integers(1, 3))
def test_strides_do_not_matter(layout: Layout, rows: int, cols: int, step: int) -> None:
    base = heavy_tailed((rows, cols, 3), rows * 41 + cols, torch.float64)
    for view in (base.permute(2, 1, 0), base.permute(1, 0, 2), base[::step, :, 1], base[0, :, 0], base[:, :1].mT):
        blocks, copied = layout.forward(view), layout.forward(view.contiguous())
        check_round_trip(layout, view)
        for block, other in zip(blocks, copied, strict=True):
            # A matrix product may run in another order on other strides; a permutation only moves.
            tolerance = 0.0 if layout in PERMUTATIONS.values() else 1e-12
            assert torch.allclose(block, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("layout", PERMUTATIONS.values(), ids=PERMUTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_permutations_move_bits_of_any_type(layout: Layout, dtype: torch.dtype) -> None:
    x = (heavy_tailed((65, 130), 3, torch.float64) * 16).to(dtype)
    blocks = layout.forward(x)
    assert torch.equal(layout.inverse(blocks, (65, 130)), x)
    values = torch.cat([b.reshape(-1) for b in blocks])
    assert torch.equal(values.sort().values, x.reshape(-1).sort().values)


@any_layout
def test_join_undoes_split_bit_for_bit(layout: Layout) -> None:
    """What anchors rely on: their stored form only moves values, also where coding transforms them."""
    x = heavy_tailed((65, 130), 4)
    assert torch.equal(layout.join(layout.split(x), (65, 130)), x)


def test_c15_a_tile_is_64_by_64_and_not_a_row() -> None:
    """C-15: on matrices that are not square, each chunk is a square tile."""
    for shape in ((128, 256), (256, 128)):
        x = torch.arange(128 * 256, dtype=torch.float32).reshape(shape)
        (block,) = Tiles().forward(x)
        assert tuple(block.shape) == (8, 4096)
        tiles = [x[r : r + 64, c : c + 64] for r in range(0, shape[0], 64) for c in range(0, shape[1], 64)]
        for chunk, tile in zip(block, tiles, strict=True):
            assert torch.equal(chunk, tile.reshape(-1))


def test_edges_are_blocks_of_their_own() -> None:
    x = torch.arange(65 * 130, dtype=torch.float32).reshape(65, 130)
    body, right, bottom, corner = Tiles().forward(x)
    assert torch.equal(body[1].view(64, 64), x[:64, 64:128])
    assert torch.equal(right.view(64, 2), x[:64, 128:])
    assert torch.equal(bottom[1], x[64, 64:128])
    assert torch.equal(corner.view(-1), x[64, 128:])


def test_further_dims_are_columns_and_vectors_have_chunks() -> None:
    kernel = torch.arange(4 * 27, dtype=torch.float32).reshape(4, 3, 3, 3)
    (block,) = Tiles().forward(kernel[:, :, :, :])
    assert torch.equal(block, kernel.reshape(1, 108))
    assert [tuple(b.shape) for b in Tiles().forward(torch.zeros(9000))] == [(2, 4096), (1, 808)]
    assert [tuple(b.shape) for b in DctTiles().forward(torch.zeros(130))] == [(2, 64), (1, 2)]


@pytest.mark.parametrize("n", [1, 2, 3, 17, 64])
def test_dct_matrix_is_orthonormal(n: int) -> None:
    matrix = dct_matrix(n)
    assert torch.allclose(matrix @ matrix.T, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-13)
    assert torch.allclose(matrix @ torch.ones(n, dtype=torch.float64), _first_unit(n) * math.sqrt(n), atol=1e-12)


def _first_unit(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)[0]


def test_a_constant_tile_is_one_dct_coefficient() -> None:
    (block,) = DctTiles(8).forward(torch.full((8, 8), 2.0, dtype=torch.float64))
    assert torch.allclose(block[0], 16.0 * _first_unit(64), rtol=0, atol=1e-13)


# -- panels ----------------------------------------------------------------------------------------------------------

# Every coordinate's code depends on its chunk alone, so a shard needs nothing from the others. Statistical (statistics
# of a block) and Stochastic (random numbers by place in a block) are left out: theirs depend on the whole block.
PANEL_COMPRESSORS: dict[str, Compressor] = {
    "top-k": TopK(k=64),
    "top-k-one-level": TopK(k=64, values=SignOneLevel()),
    "top-k-float32": TopK(k=64, values=Float32()),
    "dense": Dense(),
    "quantize": Quantize(),
    "scaled-sign": ScaledSign(),
}
PANEL_SHAPES = [(8, 5), (64, 64), (512, 130), (520, 64), (1032, 9), (16, 3, 3, 3), (8,), (4096,), (40000,), (33000,)]


def encode_all(layout: Layout, compressor: Compressor, tensor: Tensor) -> dict[str, Tensor]:
    parts: dict[str, Tensor] = {}
    for j, block in enumerate(layout.forward(tensor)):
        parts.update({f"{j}.{name}": part for name, part in compressor.encode(block, {}, key=0).items()})
    return parts


@pytest.mark.parametrize("compressor", PANEL_COMPRESSORS.values(), ids=PANEL_COMPRESSORS)
@pytest.mark.parametrize("shape", PANEL_SHAPES, ids=str)
def test_eight_panels_give_one_payload_on_1_2_4_8_shards(compressor: Compressor, shape: tuple[int, ...]) -> None:
    x = heavy_tailed(shape, 5)
    whole = encode_all(Tiles(panels=8), compressor, x)
    for num_shards in (1, 2, 4, 8):
        layout = Tiles(panels=8 // num_shards)
        shards = [encode_all(layout, compressor, shard) for shard in x.chunk(num_shards)]
        assert all(shard.keys() == whole.keys() for shard in shards)
        for name, part in whole.items():
            assert torch.equal(torch.cat([shard[name] for shard in shards]), part), (num_shards, name)


@given(rows=st.integers(1, 30), cols=st.integers(1, 70), num_shards=st.sampled_from([1, 2, 4, 8]))
def test_panels_of_any_height(rows: int, cols: int, num_shards: int) -> None:
    x = heavy_tailed((8 * rows, cols), rows * 71 + cols)
    whole = Tiles(16, 16, panels=8).forward(x)
    shards = [Tiles(16, 16, panels=8 // num_shards).forward(s) for s in x.chunk(num_shards)]
    for j, block in enumerate(whole):
        assert torch.equal(torch.cat([shard[j] for shard in shards]), block)


@given(rows=st.integers(1, 100), panels=st.integers(1, 12))
def test_a_panel_is_a_run_of_ceil_rows(rows: int, panels: int) -> None:
    """Also when dim 0 does not divide: no chunk reaches over a panel edge."""
    height = -(-rows // panels)
    x = torch.arange(rows * 3).reshape(rows, 3) // 3
    for block in Tiles(4, 4, panels=panels).forward(x):
        assert torch.equal(block.amin(dim=1) // height, block.amax(dim=1) // height)
