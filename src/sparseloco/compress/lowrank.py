"""PowerSGD's low-rank factors, one message a round, with a basis that all peers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparseloco.compress.base import float_bits, weighted
from sparseloco.errors import ConfigError, check_whole
from sparseloco.keys import derive_key, uniform
from sparseloco.types import Parts, PartSpec


@dataclass(frozen=True)
class LowRank:
    """Project a matrix onto a shared orthonormal basis and send the factor, sides alternating.

    With M the ``[N, C]`` matrix and an orthonormal Q: even rounds send ``P = M Q`` and decode ``P Q^T``; the mean of P,
    orthonormalised, is the basis of the next, odd round, which sends ``Q = M^T P``. Each pair of rounds is one step
    of a power iteration on the mean matrix. Matrices that a factor would not shrink travel whole.

    State: shared ``basis`` and ``side`` per matrix; private: none.
    Cost: ``rank * N`` or ``rank * C`` floats; two thin products and one thin QR a round.

    Args:
        rank: Columns of the factors, at least 1.

    Departs from the paper: one factor per round instead of two, as its authors' released code does.

    Reference: Vogels et al., 2019, arXiv:1905.13727, and the alternating form of the authors' released code.
    """

    rank: int = 4
    name: ClassVar[str] = "low_rank"
    linear: ClassVar[bool] = True
    portable: ClassVar[bool] = False  # matrix products and QR belong to the BLAS in use

    def __post_init__(self) -> None:
        check_whole("rank", self.rank)
        if self.rank < 1:
            raise ConfigError(f"rank={self.rank!r}: must be at least 1; use a small whole number such as 4")

    @property
    def chunkwise(self) -> bool:
        return False

    def init(self, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Parts:
        if (rows + cols) * self.rank >= rows * cols:
            return {}
        # Made on the CPU, so that peers on different devices start from the same basis.
        where = device if device.type == "meta" else torch.device("cpu")
        start = uniform(derive_key(rows, cols, self.rank), (cols, self.rank), where) - 0.5
        return {"basis": _orthonormal(start.to(dtype)).to(device), "side": torch.zeros((), dtype=torch.int64)}

    def specs(self, rows: int, cols: int, dtype: torch.dtype, shared: Parts) -> tuple[PartSpec, ...]:
        if not shared:
            return (PartSpec("value", (rows, cols), dtype, float_bits(dtype)),)
        length = cols if int(shared["side"]) else rows
        return (PartSpec("factor", (length, self.rank), dtype, float_bits(dtype)),)

    def encode(self, block: Tensor, shared: Parts, *, key: int) -> Parts:
        if not shared:
            return {"value": block.clone()}
        return {"factor": _facing(block, shared) @ shared["basis"]}

    def accumulate_(
        self, out: Tensor, parts: Parts, weight: int, shared: Parts, *, weights: Tensor | None = None
    ) -> None:
        if not shared:
            value = parts["value"]
        else:
            product = parts["factor"] @ shared["basis"].T
            value = product.T if int(shared["side"]) else product
        out.add_(weighted(value, weight, out))
        if weights is not None:
            weights.add_(weight)

    def advance_(self, shared: Parts, update: Tensor) -> None:
        if not shared:
            return
        # The basis is orthonormal, so this product gives back the mean factor that `update` was decoded from.
        shared["basis"] = _orthonormal(_facing(update, shared) @ shared["basis"])
        shared["side"] = 1 - shared["side"]


def _facing(block: Tensor, shared: Parts) -> Tensor:
    return block.T if int(shared["side"]) else block


def _orthonormal(matrix: Tensor) -> Tensor:
    """Orthonormal columns that span those of ``matrix``; a rank-deficient one is completed arbitrarily."""
    q, r = torch.linalg.qr(matrix)
    # Fix the sign of each column, which QR leaves open. QR gives columns, and products with them have other bits than
    # with rows, which is what comes back from a file.
    return (q * torch.where(r.diagonal() < 0, -1.0, 1.0).to(q.dtype)).contiguous()
