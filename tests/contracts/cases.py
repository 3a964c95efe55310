"""The lists that the contract tests run over: a new layout or compressor is one more line here."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseloco.compress import (
    Compressor,
    Dense,
    Float32,
    LowRank,
    Quantize,
    ScaledSign,
    SignOneLevel,
    SignTwoLevel,
    Statistical,
    Stochastic,
    TopK,
    ValueCode,
)
from sparseloco.layout import Chunks, DctTiles, Flat, Layout, Matrices, Tiles
from sparseloco.types import Parts

PERMUTATIONS: dict[str, Layout] = {
    "flat": Flat(),
    "chunks-4096": Chunks(),
    "chunks-7": Chunks(7),
    "matrices": Matrices(),
    "tiles-64x64": Tiles(),
    "tiles-64x64-8-panels": Tiles(panels=8),
    "tiles-8x16": Tiles(8, 16),
    "tiles-5x3-3-panels": Tiles(5, 3, panels=3, vector_chunk=10),
}
TRANSFORMS: dict[str, Layout] = {
    "dct-64": DctTiles(),
    "dct-8-4-panels": DctTiles(8, panels=4),
}
LAYOUTS = PERMUTATIONS | TRANSFORMS

# The shapes of user case C-54 and the ones that lie around the edges of tiles and chunks.
SHAPES: list[tuple[int, ...]] = [
    (), (0,), (1,), (127,), (50257, 8), (4, 3, 3, 3), (65, 130), (3, 0, 5), (64, 64), (4096,), (4097,),
    (1, 1), (7, 200),
]  # fmt: skip

CODES: dict[str, ValueCode] = {
    "float32": Float32(),
    "sign-two-level": SignTwoLevel(),
    "sign-two-level-1-2": SignTwoLevel(low=1.0, high=2.0),
    "sign-one-level": SignOneLevel(),
    "statistical-2": Statistical(2),
    "statistical-4": Statistical(),
    "statistical-256": Statistical(256),
    "stochastic-1": Stochastic(1),
    "stochastic-4": Stochastic(),
    "stochastic-127": Stochastic(127),
}
COMPRESSORS: dict[str, Compressor] = {
    "dense": Dense(),
    "quantize-2": Quantize(2),
    "quantize-4": Quantize(),
    "quantize-8": Quantize(8),
    "quantize-linear-2": Quantize(2, "linear"),
    "quantize-linear-8": Quantize(8, "linear"),
    "quantize-linear-12": Quantize(12, "linear"),
    "scaled-sign": ScaledSign(),
    "low-rank-1": LowRank(1),
    "low-rank-3": LowRank(3),
    **{f"top-k-{name}": TopK(k=5, chunk_size=64, values=code) for name, code in CODES.items()},
    "top-k-all": TopK(k=64, chunk_size=64, values=Float32()),
}

# Blocks [N, C]: whole chunks, ragged edges, a single value, a matrix that LowRank shrinks on both sides.
BLOCK_SHAPES: list[tuple[int, int]] = [(1, 1), (1, 3), (3, 64), (5, 17), (1, 63), (20, 30)]


def init(compressor: Compressor, block: Tensor) -> Parts:
    """Shared state for a block."""
    return compressor.init(block.shape[0], block.shape[1], block.dtype, block.device)


def decode(compressor: Compressor, parts: Parts, like: Tensor, shared: Parts | None = None) -> Tensor:
    """Accumulate into zeros: the one decoder."""
    out = torch.zeros_like(like, memory_format=torch.contiguous_format)
    compressor.accumulate_(out, parts, 1, init(compressor, like) if shared is None else shared)
    return out


def send(compressor: Compressor, block: Tensor, key: int = 7) -> Tensor:
    """What a peer makes of another's block."""
    shared = init(compressor, block)
    return decode(compressor, compressor.encode(block, shared, key=key), block, shared)


def heavy_tailed(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of very different sizes, some exact ties and some zeros."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    size = torch.exp2(torch.randint(-12, 5, shape, generator=generator).to(torch.float64))
    kept = torch.rand(shape, generator=generator) > 0.1
    coarse = torch.round(normal * 8) / 8
    use_coarse = torch.rand(shape, generator=generator) > 0.7
    return (torch.where(use_coarse, coarse, normal * size) * kept).to(dtype)
