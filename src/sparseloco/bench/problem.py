"""What is measured: one square matrix, its state, and the payloads of many peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sparseloco import presets
from sparseloco.algorithm import Algorithm
from sparseloco.bench.plain import TILE
from sparseloco.channel import ChannelState
from sparseloco.compress.topk import top_k_indices
from sparseloco.errors import ConfigError
from sparseloco.types import Source, TensorSpec

CHUNK = TILE * TILE
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One point of the grid.

    Args:
        side: Rows and columns of the matrix, a multiple of 64.
        k: Values kept per chunk of 4096, even.
        dtype: Type of the parameters, float32 or bfloat16; anchor and residual are float32.
    """

    side: int
    k: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.side < TILE or self.side % TILE:
            raise ConfigError(f"side={self.side!r}: must be a positive multiple of {TILE}; the baseline pads nothing")
        if not 2 <= self.k <= CHUNK or self.k % 2:
            raise ConfigError(
                f"k={self.k!r}: must be even and between 2 and {CHUNK}; the baseline packs two positions in three bytes"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r}: must be one of {', '.join(DTYPES)}; choose one of them")

    @property
    def millions(self) -> float:
        """Parameters in millions."""
        return self.side**2 / 1e6


class Problem:
    """State of one replica after inner steps, and what its peers sent.

    Every variant that is measured gets a problem of its own, made from the same seed, so none finds a cache that
    another has filled.

    Attributes:
        case: What it was made for.
        algorithm: The preset ``sparseloco`` with the case's k.
        state: Channel state; its anchor is the start, its residual is what ``encode`` updates.
        live: Parameters ``[side, side]`` after inner steps; ``decode_apply`` writes them.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.algorithm: Algorithm = presets.sparseloco(k=case.k)
        generator = torch.Generator().manual_seed(case.k)
        shape, dtype = (case.side, case.side), DTYPES[case.dtype]
        start = torch.empty(shape).normal_(generator=generator).to(dtype)
        self.live = torch.empty(shape).normal_(0, 0.02, generator=generator).add_(start).to(dtype)
        spec = TensorSpec("matrix", shape, dtype)
        self.state: ChannelState = self.algorithm.channel.init([spec], [start])
        for residual in self.state.residual:
            residual.normal_(0, 0.05, generator=generator)

    @property
    def source(self) -> Source:
        """What the delta is made of."""
        return Source(self.state.anchor, self.live)

    @property
    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        """Anchor, live parameters and residual as matrices ``[side, side]`` in plain row order.

        Tiles are only another order of the same random numbers, so the blocks' memory is taken as it is.
        """
        (anchor,), (residual,) = self.state.anchor, self.state.residual
        return anchor.view(self.live.shape), self.live, residual.view(self.live.shape)

    @cached_property
    def kept(self) -> tuple[Tensor, Tensor]:
        """Positions and values ``[N, K]`` that top-k keeps of random numbers: a payload before its codes."""
        generator = torch.Generator().manual_seed(self.case.k + 1)
        value_NC = torch.empty(self.case.side**2 // CHUNK, CHUNK).normal_(generator=generator)
        index_NK = top_k_indices(value_NC.abs(), self.case.k)
        return index_NK, value_NC.gather(1, index_NK)

    def kept_by(self, peer: int) -> tuple[Tensor, Tensor]:
        """The same for one of many peers: chunks in another order, so that supports of peers are independent."""
        index_NK, value_NK = self.kept
        return rolled(index_NK, peer), rolled(value_NK, peer)


def rolled(rows: Tensor, peer: int) -> Tensor:
    """Rows moved on by an amount of the peer's own."""
    return rows.roll(peer * 97, 0).contiguous()


def uniform_sets(num_chunks: int, k: int) -> Tensor:
    """Positions of ``k`` values in each of ``num_chunks`` chunks, all sets alike likely: int64 ``[N, K]``."""
    noise = torch.empty(num_chunks, CHUNK).uniform_(generator=torch.Generator().manual_seed(k))
    return top_k_indices(noise, k)


def real_sets(chunks: Tensor, k: int) -> Tensor:
    """Positions that top-k keeps in stored chunks ``[N, 4096]``: int64 ``[N, K]``, ascending."""
    return top_k_indices(chunks.abs(), k)


def cases(side: int, ks: Sequence[int], dtypes: Sequence[str]) -> list[Case]:
    """The grid of one matrix size."""
    return [Case(side, k, dtype) for dtype in dtypes for k in ks]
