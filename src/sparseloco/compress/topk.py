"""Exact top-k per chunk with a code for the kept values: the compressor of SparseLoCo and DeMo."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from sparseloco.compress.base import index_dtype, kept_per_chunk, position_spec, weighted
from sparseloco.compress.values import SignTwoLevel, ValueCode
from sparseloco.errors import ConfigError, check_whole
from sparseloco.types import Parts, PartSpec


@dataclass(frozen=True)
class TopK:
    """Keep the ``k`` values of largest magnitude of every chunk; of equal magnitudes the lowest index first.

    A ragged chunk of n values keeps ``max(1, round(n * k / chunk_size))``. Without a value code this is a contraction:
    ``||x - C(x)||^2 <= (1 - k / chunk_size) ||x||^2`` on whole chunks.

    Shapes: block ``[N, C]`` -> ``index [N, K]`` int16 (int32 for chunks above 32768), ascending, and the code's parts.
    Cost: about 1.02 ``log2 C(C, k) / k`` bits an index (7.5 for 64 of 4096) plus the code's bits a value; one top-k and
    one scatter per block.

    Args:
        k: Values kept per whole chunk, 1 <= k <= chunk_size.
        chunk_size: Values of a whole chunk; must be that of the layout.
        values: Code of the kept values.

    Raises:
        ConfigError: if ``k`` is outside 1..chunk_size.

    Departs from the paper: nothing in the selection; ties are fixed where the released code leaves them open.

    Reference: Sarfi et al., 2025, arXiv:2508.15706, algorithm 1.

    Example:
        >>> TopK(k=2, chunk_size=4).encode(torch.tensor([[3.0, -1.0, 0.0, 2.0]]), {}, key=0)["index"].tolist()
        [[0, 3]]
    """

    k: int = 64
    chunk_size: int = 4096
    values: ValueCode = field(default_factory=SignTwoLevel)
    name: ClassVar[str] = "top_k"
    linear: ClassVar[bool] = False
    portable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole("k", self.k)
        check_whole("chunk_size", self.chunk_size)
        if not 1 <= self.k <= self.chunk_size:
            raise ConfigError(
                f"k={self.k!r}: must be between 1 and chunk_size={self.chunk_size}; "
                "use a larger chunk_size or a smaller k"
            )

    @property
    def chunkwise(self) -> bool:
        return self.values.chunkwise

    def init(self, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Parts:
        return {}

    def specs(self, rows: int, cols: int, dtype: torch.dtype, shared: Parts) -> tuple[PartSpec, ...]:
        kept = kept_per_chunk(cols, self.k, self.chunk_size)
        return (position_spec(rows, kept, cols), *self.values.specs(rows, kept))

    def encode(self, block: Tensor, shared: Parts, *, key: int) -> Parts:
        kept = kept_per_chunk(block.shape[1], self.k, self.chunk_size)
        index_NK = top_k_indices(block.abs(), kept)
        value_NK = block.gather(1, index_NK)
        return {"index": index_NK.to(index_dtype(block.shape[1])), **self.values.encode(value_NK, key=key)}

    def accumulate_(
        self, out: Tensor, parts: Parts, weight: int, shared: Parts, *, weights: Tensor | None = None
    ) -> None:
        index_NK = parts["index"].to(torch.int64)
        # One peer's positions are distinct within a chunk, so this scatter adds in no particular order and is exact.
        out.scatter_add_(1, index_NK, weighted(self.values.decode(parts), weight, out))
        if weights is not None:
            weights.scatter_add_(1, index_NK, torch.full_like(index_NK, weight, dtype=weights.dtype))

    def advance_(self, shared: Parts, update: Tensor) -> None:
        return None


def top_k_indices(magnitude_NC: Tensor, kept: int) -> Tensor:
    """Ascending positions of the ``kept`` largest values per row; among equals the lowest positions win.

    ``torch.topk`` breaks ties as it likes. Only rows in which a tie crosses the border need the slower stable sort.

    Returns:
        int64 ``[N, kept]``.
    """
    value_NK, index_NK = magnitude_NC.topk(kept, dim=1, sorted=False)
    border_N = value_NK.amin(dim=1, keepdim=True)
    ambiguous_N = (magnitude_NC >= border_N).sum(dim=1) != kept
    if bool(ambiguous_N.any()):
        rows = magnitude_NC[ambiguous_N]
        index_NK[ambiguous_N] = rows.sort(dim=1, descending=True, stable=True).indices[:, :kept]
    return index_NK.sort(dim=1).values
