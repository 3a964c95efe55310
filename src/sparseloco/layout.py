"""Layouts: linear, invertible, norm-keeping views of a tensor as 2-D blocks ``[N, C]``.

A layout has two halves. ``split`` and ``join`` only move values; anchors and residuals are stored in that form.
``analyze`` and ``synthesize`` are an orthonormal map inside each chunk: the identity everywhere except in
:class:`DctTiles`. ``forward`` and ``inverse`` are both halves together. Every shape is taken as it is: nothing is
padded; the rest of a tensor that fills no whole chunk becomes a ragged block of its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from sparseloco.errors import ConfigError, check_whole
from sparseloco.types import Blocks


class BlockShape(NamedTuple):
    """``num_chunks`` chunks, each a tile of ``rows`` x ``cols`` values."""

    num_chunks: int
    rows: int
    cols: int

    @property
    def chunk_size(self) -> int:
        """Values in one chunk."""
        return self.rows * self.cols


class Layout(ABC):
    """How tensors become blocks. Final classes below; all are frozen values without state."""

    name: ClassVar[str]
    portable: ClassVar[bool]

    @abstractmethod
    def block_shapes(self, shape: tuple[int, ...]) -> tuple[BlockShape, ...]:
        """Shapes of the blocks of a tensor of ``shape``; empty for an empty tensor."""

    @abstractmethod
    def split(self, tensor: Tensor) -> Blocks:
        """Move the values of ``tensor`` into blocks; always a copy or a view, never arithmetic."""

    @abstractmethod
    def join(self, blocks: Blocks, shape: tuple[int, ...]) -> Tensor:
        """Undo :meth:`split`: a tensor of ``shape``."""

    @abstractmethod
    def analyze(self, block: Tensor, block_shape: BlockShape) -> Tensor:
        """Stored values of one block to coded values."""

    @abstractmethod
    def synthesize(self, block: Tensor, block_shape: BlockShape) -> Tensor:
        """Coded values of one block to stored values."""

    def first_chunks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Number that the first chunk of each block has in the block of the whole tensor; 0 but for a shard."""
        return (0,) * len(self.block_shapes(shape))

    def forward(self, tensor: Tensor) -> Blocks:
        """``split``, then ``analyze``: what compressors see."""
        shapes = self.block_shapes(tuple(tensor.shape))
        return tuple(self.analyze(b, s) for b, s in zip(self.split(tensor), shapes, strict=True))

    def inverse(self, blocks: Blocks, shape: tuple[int, ...]) -> Tensor:
        """``synthesize``, then ``join``: undo :meth:`forward`, exactly for permutations, else to rounding."""
        shapes = self.block_shapes(shape)
        return self.join(tuple(self.synthesize(b, s) for b, s in zip(blocks, shapes, strict=True)), shape)


class _Permutation(Layout):
    """A layout that only moves values."""

    portable: ClassVar[bool] = True

    def analyze(self, block: Tensor, block_shape: BlockShape) -> Tensor:
        return block

    def synthesize(self, block: Tensor, block_shape: BlockShape) -> Tensor:
        return block


@dataclass(frozen=True)
class Flat(_Permutation):
    """The whole tensor as one chunk: ``[1, n]``.

    Example:
        >>> [tuple(b.shape) for b in Flat().forward(torch.zeros(3, 5))]
        [(1, 15)]
    """

    name: ClassVar[str] = "flat"

    def block_shapes(self, shape: tuple[int, ...]) -> tuple[BlockShape, ...]:
        n = math.prod(shape)
        return (BlockShape(1, n, 1),) if n else ()

    def split(self, tensor: Tensor) -> Blocks:
        return (tensor.reshape(1, -1),) if tensor.numel() else ()

    def join(self, blocks: Blocks, shape: tuple[int, ...]) -> Tensor:
        return _concatenate(blocks, shape)


@dataclass(frozen=True)
class Chunks(_Permutation):
    """Consecutive runs of ``chunk_size`` values in memory order, and one shorter run at the end.

    Example:
        >>> [tuple(b.shape) for b in Chunks(4).forward(torch.zeros(3, 3))]
        [(2, 4), (1, 1)]
    """

    chunk_size: int = 4096
    name: ClassVar[str] = "chunks"

    def __post_init__(self) -> None:
        check_positive("chunk_size", self.chunk_size)

    def block_shapes(self, shape: tuple[int, ...]) -> tuple[BlockShape, ...]:
        whole, rest = divmod(math.prod(shape), self.chunk_size)
        body = (BlockShape(whole, self.chunk_size, 1),) if whole else ()
        return body + ((BlockShape(1, rest, 1),) if rest else ())

    def split(self, tensor: Tensor) -> Blocks:
        flat = tensor.reshape(-1)
        shapes = self.block_shapes(tuple(tensor.shape))
        pieces = flat.split([s.num_chunks * s.chunk_size for s in shapes]) if shapes else ()
        return tuple(p.view(s.num_chunks, s.chunk_size) for p, s in zip(pieces, shapes, strict=True))

    def join(self, blocks: Blocks, shape: tuple[int, ...]) -> Tensor:
        return _concatenate(blocks, shape)


@dataclass(frozen=True)
class Matrices(_Permutation):
    """One block per tensor, ``[dim 0, product of the other dims]``: what low-rank methods factor.

    Scalars and vectors become a single row.
    """

    name: ClassVar[str] = "matrices"

    def block_shapes(self, shape: tuple[int, ...]) -> tuple[BlockShape, ...]:
        n = math.prod(shape)
        if not n:
            return ()
        rows = shape[0] if len(shape) > 1 else 1
        return (BlockShape(rows, n // rows, 1),)

    def split(self, tensor: Tensor) -> Blocks:
        shapes = self.block_shapes(tuple(tensor.shape))
        return tuple(tensor.reshape(s.num_chunks, s.chunk_size) for s in shapes)

    def join(self, blocks: Blocks, shape: tuple[int, ...]) -> Tensor:
        return _concatenate(blocks, shape)


class Region(NamedTuple):
    """A rectangle of equal tiles in each of ``panels`` equal panels of a matrix."""

    first_row: int
    panels: int
    height: int
    row: slice
    col: slice
    tile: tuple[int, int]

    @property
    def grid(self) -> tuple[int, int]:
        rows, cols = self.row.stop - self.row.start, self.col.stop - self.col.start
        return rows // self.tile[0], cols // self.tile[1]


class Tiled(_Permutation):
    """A layout that cuts dim 0 into panels of ``ceil(n / panels)`` entries and each panel into equal tiles."""

    panels: int

    @abstractmethod
    def tile_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Height and width of a tile of a tensor of ``shape``, seen as the matrix ``[dim 0, rest]``."""

    def block_shapes(self, shape: tuple[int, ...]) -> tuple[BlockShape, ...]:
        regions = self.regions(shape)
        return tuple(BlockShape(r.panels * r.grid[0] * r.grid[1], *r.tile) for r in regions)

    def split(self, tensor: Tensor) -> Blocks:
        shape = tuple(tensor.shape)
        regions = self.regions(shape)
        if not regions:
            return ()
        matrix = tensor.reshape(*matrix_shape(shape))
        return tuple(_cut(matrix, region) for region in regions)

    def join(self, blocks: Blocks, shape: tuple[int, ...]) -> Tensor:
        if not blocks:
            return torch.empty(shape)
        out = blocks[0].new_empty(matrix_shape(shape))
        for block, region in zip(blocks, self.regions(shape), strict=True):
            _paste(out, block, region)
        return out.reshape(shape)

    def regions(self, shape: tuple[int, ...]) -> tuple[Region, ...]:
        """Where the blocks lie in a tensor, seen as the matrix ``[dim 0, rest]``; a vector is one column."""
        if not math.prod(shape):
            return ()
        return _tile_regions(matrix_shape(shape), self.tile_of(shape), self.panels)


@dataclass(frozen=True)
class Tiles(Tiled):
    """Two-dimensional tiles of ``rows`` x ``cols``, stored tile after tile.

    Dim 0 is first cut into ``panels`` panels of ``ceil(n / panels)`` rows, then each panel is tiled by itself, so a
    sharding of dim 0 whose edges are panel edges compresses to the same payload. Further dims are flattened into
    columns. A vector is cut into runs of ``vector_chunk`` (default ``rows * cols``) values.

    Args:
        rows: Tile height.
        cols: Tile width.
        panels: Panels along dim 0; part of the algorithm's fingerprint.
        vector_chunk: Chunk size for tensors with fewer than two dims; None means ``rows * cols``.

    Departs from the paper: edges keep their own smaller tiles. The released code takes the largest divisor up
    to 64 as tile side instead, which is 1 for a prime length.

    Reference: Lidin et al., 2026, arXiv:2603.08163, section 2.1 (64 x 64 blocks, 1-D chunks of 4096).

    Example:
        >>> [tuple(b.shape) for b in Tiles(64, 64).forward(torch.zeros(130, 70))]
        [(2, 4096), (2, 384), (1, 128), (1, 12)]
    """

    rows: int = 64
    cols: int = 64
    panels: int = 1
    vector_chunk: int | None = None
    name: ClassVar[str] = "tiles"

    def __post_init__(self) -> None:
        for field in ("rows", "cols", "panels"):
            check_positive(field, getattr(self, field))
        if self.vector_chunk is not None:
            check_positive("vector_chunk", self.vector_chunk)

    def tile_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return (self.vector_chunk or self.rows * self.cols, 1) if len(shape) < 2 else (self.rows, self.cols)


@dataclass(frozen=True)
class DctTiles(Layout):
    """Tiles seen through an orthonormal two-dimensional cosine transform (DCT-II).

    Vectors are cut into runs of ``side`` values with a one-dimensional transform. Residuals live in the transformed
    domain, which changes nothing but rounding since the transform is linear.

    Departs from the paper: edge tiles have a transform of their own size instead of the largest divisor up to 64.

    Reference: Peng et al., 2024, arXiv:2411.19870 (DeMo).
    """

    side: int = 64
    panels: int = 1
    name: ClassVar[str] = "dct_tiles"
    portable: ClassVar[bool] = False  # a matrix product; its summation order belongs to the BLAS in use

    def __post_init__(self) -> None:
        check_positive("side", self.side)
        check_positive("panels", self.panels)

    @property
    def _tiles(self) -> Tiles:
        return Tiles(self.side, self.side, self.panels, vector_chunk=self.side)

    def block_shapes(self, shape: tuple[int, ...]) -> tuple[BlockShape, ...]:
        return self._tiles.block_shapes(shape)

    def split(self, tensor: Tensor) -> Blocks:
        return self._tiles.split(tensor)

    def join(self, blocks: Blocks, shape: tuple[int, ...]) -> Tensor:
        return self._tiles.join(blocks, shape)

    def analyze(self, block: Tensor, block_shape: BlockShape) -> Tensor:
        left, right = _dct_pair(block, block_shape)
        tiles = block.view(-1, block_shape.rows, block_shape.cols)
        return (left @ tiles @ right.T).reshape(block.shape)

    def synthesize(self, block: Tensor, block_shape: BlockShape) -> Tensor:
        left, right = _dct_pair(block, block_shape)
        tiles = block.view(-1, block_shape.rows, block_shape.cols)
        return (left.T @ tiles @ right).reshape(block.shape)


def dct_matrix(n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Orthonormal DCT-II matrix ``[n, n]``: row u, column x is ``c_u cos(pi (2x + 1) u / 2n)``."""
    x = torch.arange(n, dtype=torch.float64)
    matrix = torch.cos(math.pi * (2 * x[None, :] + 1) * x[:, None] / (2 * n)) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix.to(dtype)


@lru_cache(maxsize=64)
def _cached_dct(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return dct_matrix(n, dtype).to(device)


def _dct_pair(block: Tensor, shape: BlockShape) -> tuple[Tensor, Tensor]:
    return (
        _cached_dct(shape.rows, block.dtype, block.device),
        _cached_dct(shape.cols, block.dtype, block.device),
    )


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """``[dim 0, rest]``; a vector is one column, so that its panels are cut along dim 0 too."""
    rows = shape[0] if shape else 1
    return rows, math.prod(shape[1:])


def _tile_regions(matrix: tuple[int, int], tile: tuple[int, int], panels: int) -> tuple[Region, ...]:
    """Cut ``matrix`` into panels and each panel into a body and up to three edges of equal tiles."""
    rows, cols = matrix
    height = -(-rows // panels)
    whole = rows // height
    bands = [(0, whole, height)]
    if rows - whole * height:
        bands.append((whole * height, 1, rows - whole * height))
    return tuple(
        Region(
            first,
            count,
            band_height,
            row,
            col,
            (min(tile[0], row.stop - row.start), min(tile[1], col.stop - col.start)),
        )
        for first, count, band_height in bands
        for row in _body_and_edge(band_height, tile[0])
        for col in _body_and_edge(cols, tile[1])
    )


def _body_and_edge(length: int, side: int) -> Iterator[slice]:
    body = length - length % side
    if body:
        yield slice(0, body)
    if length - body:
        yield slice(body, length)


def _window(matrix: Tensor, region: Region) -> Tensor:
    """View of a region as ``[panel, tile row, row in tile, tile column, column in tile]``."""
    last_row = region.first_row + region.panels * region.height
    panels = matrix[region.first_row : last_row].view(region.panels, region.height, matrix.shape[1])
    rectangle = panels[:, region.row, region.col]
    (grid_rows, grid_cols), (rows, cols) = region.grid, region.tile
    return rectangle.unflatten(2, (grid_cols, cols)).unflatten(1, (grid_rows, rows))


def _cut(matrix: Tensor, region: Region) -> Tensor:
    return _window(matrix, region).permute(0, 1, 3, 2, 4).reshape(-1, region.tile[0] * region.tile[1])


def _paste(matrix: Tensor, block: Tensor, region: Region) -> None:
    window = _window(matrix, region)
    panels, grid_rows, rows, grid_cols, cols = window.shape
    window.copy_(block.view(panels, grid_rows, grid_cols, rows, cols).permute(0, 1, 3, 2, 4))


def _concatenate(blocks: Blocks, shape: tuple[int, ...]) -> Tensor:
    if not blocks:
        return torch.empty(shape)
    return torch.cat([block.reshape(-1) for block in blocks]).reshape(shape)


def check_positive(field: str, value: int) -> None:
    """Refuse a setting that is no whole number of at least 1."""
    check_whole(field, value)
    if value < 1:
        raise ConfigError(f"{field}={value!r}: must be at least 1; use a positive whole number")
