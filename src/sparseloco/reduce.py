"""Reducers: the payloads of many peers become one update, the same at every peer.

Peers are added one at a time in the order of the inbox, in float64. A weight (below 2**29) times a float32 value is
exact there, so neither fused multiply-add nor thread counts can change the result; one division and one rounding
to the state's type follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from sparseloco.compress.base import Compressor
from sparseloco.errors import ConfigError
from sparseloco.types import Parts

WeightedParts = Sequence[tuple[int, Parts]]
"""One entry per peer, in peer order: integer weight and the parts of one block."""

MAX_WEIGHT = 2**29


class Reducer(Protocol):
    """Turns one block's parts from all peers into one update block."""

    name: ClassVar[str]

    def reduce(self, like: Tensor, inbox: WeightedParts, compressor: Compressor, shared: Parts) -> Tensor:
        """Update block of the shape and type of ``like``."""
        ...


@dataclass(frozen=True)
class Mean:
    """Weighted mean, over all peers or over those that sent a coordinate.

    ``over="peers"`` is the paper's equation ``(1 / R) sum_r``. ``over="contributors"`` divides each coordinate by the
    weight of the peers that sent it, as the released SparseLoCo and DeMo code does. Supports of different peers are
    almost disjoint, so the two differ by up to R times in the size of the update and a learning rate does not carry
    over. Contributors is the default because it trains better at outer learning rate 1 in our measurements.

    For payloads that hold every coordinate both are the same. Payloads of a linear compressor are averaged before they
    are decoded; a transport may do that part on the way, slice by slice, with equal bits.

    Args:
        over: ``contributors`` or ``peers``.

    Departs from the paper: its equation is ``over="peers"``; the default follows its released code.

    Reference: Sarfi et al., 2025, arXiv:2508.15706, algorithm 1, line of the average.
    """

    over: str = "contributors"
    name: ClassVar[str] = "mean"

    def __post_init__(self) -> None:
        if self.over not in ("contributors", "peers"):
            raise ConfigError(f"over={self.over!r}: must be 'contributors' or 'peers'; choose one of them")

    def reduce(self, like: Tensor, inbox: WeightedParts, compressor: Compressor, shared: Parts) -> Tensor:
        if not inbox:
            return torch.zeros_like(like)
        if compressor.linear:
            out = torch.zeros_like(like)
            compressor.accumulate_(out, mean_of_parts(inbox), 1, shared)
            return out
        total = torch.zeros_like(like, dtype=torch.float64)
        if self.over == "peers":
            for weight, parts in inbox:
                compressor.accumulate_(total, parts, weight, shared)
            return total.div_(sum(weight for weight, _ in inbox)).to(like.dtype)
        weights = torch.zeros_like(total)
        for weight, parts in inbox:
            compressor.accumulate_(total, parts, weight, shared, weights=weights)
        return total.div_(weights.clamp_(min=1)).to(like.dtype)


def mean_of_parts(inbox: WeightedParts) -> Parts:
    """Weighted mean of float parts, element by element: float64 sums in peer order, one division, one rounding."""
    first = inbox[0][1]
    return {name: mean_of_tensors([(w, parts[name]) for w, parts in inbox]) for name in first}


def mean_of_tensors(inbox: Sequence[tuple[int, Tensor]]) -> Tensor:
    """The same for one tensor; a transport calls it on slices. The mean over one peer is what that peer sent."""
    first = inbox[0][1]
    if len(inbox) == 1:
        return first
    total = torch.zeros_like(first, dtype=torch.float64)
    for weight, tensor in inbox:
        total.add_(tensor.to(torch.float64, copy=True).mul_(weight))
    return total.div_(sum(weight for weight, _ in inbox)).to(first.dtype)


def check_weight(weight: int) -> int:
    """Return ``weight`` if it may stand in an envelope.

    Raises:
        ConfigError: if it is outside 1..2**29 - 1.
    """
    if not 1 <= weight < MAX_WEIGHT:
        raise ConfigError(
            f"weight={weight!r}: must be a whole number from 1 to {MAX_WEIGHT - 1}; count tokens in larger units"
        )
    return weight
