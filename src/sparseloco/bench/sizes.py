"""Bits: positions and whole frames against the least that can name which values were kept, and errors of codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparseloco.bench import paths, sample
from sparseloco.bench.problem import CHUNK, Case, Problem, real_sets, uniform_sets
from sparseloco.compress import SignOneLevel, SignTwoLevel, Statistical, ValueCode
from sparseloco.compress.base import log2_binomial
from sparseloco.sections import section_bytes
from sparseloco.types import Coding

_SETS_SIDE = 2048
"""1024 chunks of uniform sets for each k: tables and padding are then as small a part as in a real matrix."""


class IndexRow(NamedTuple):
    """Bits of one kept value.

    Attributes:
        sets: ``uniform``, or ``real`` for what top-k keeps of stored pseudo-gradients.
        bound: ``log2 C(4096, k) / k``.
        index: Compact index part with its tables.
        index_fixed: The same in the fixed coding.
        payload: Compact positions, codes and scales; a frame has its header besides.
    """

    sets: str
    k: int
    bound: float
    index: float
    index_fixed: float
    payload: float

    @property
    def over_bound(self) -> float:
        """Compact part over the bound, 1 at best."""
        return self.index / self.bound


def index_rows(ks: Sequence[int]) -> list[IndexRow]:
    """Uniform and real sets at each k."""
    chunks = sample.chunks()
    uniform = [_index_row("uniform", uniform_sets(_SETS_SIDE**2 // CHUNK, k)) for k in ks]
    return uniform + [_index_row("real", real_sets(chunks, k)) for k in ks]


def _index_row(sets: str, index_NK: Tensor) -> IndexRow:
    k = index_NK.shape[1]
    compact, fixed = (
        round(8 * paths.index_bytes(index_NK, coding) / index_NK.numel(), 4)
        for coding in (Coding.COMPACT, Coding.FIXED)
    )
    values = 8 * section_bytes(SignTwoLevel().specs(*index_NK.shape)) / index_NK.numel()
    return IndexRow(sets, k, round(log2_binomial(CHUNK, k) / k, 4), compact, fixed, round(compact + values, 4))


def frame_figures(side: int, k: int) -> dict[str, float]:
    """Bits per kept value of whole frames of a ``side x side`` matrix, headers and all, and their compression.

    Returns:
        ``bits_per_kept``, ``bits_per_kept_fixed``, ``bits_over_bound`` (positions alone are in the bound) and
        ``compression``: dense float32 bytes over frame bytes.
    """
    problem = Problem(Case(side, k))
    compact, fixed = (8 * len(paths.frame(problem, 0, coding)) for coding in (Coding.COMPACT, Coding.FIXED))
    kept = side**2 // CHUNK * k
    return {
        "bits_per_kept": round(compact / kept, 4),
        "bits_per_kept_fixed": round(fixed / kept, 4),
        "bits_over_bound": round(compact / kept / (log2_binomial(CHUNK, k) / k), 4),
        "compression": round(32 * side**2 / compact, 2),
    }


def value_errors() -> dict[str, float]:
    """``norm(kept - sent) / norm(kept)`` of each code for kept values, on stored pseudo-gradients.

    ``fitted_two_level`` has no code: it is what the default would gain from levels fitted to each tensor.
    """
    codes: tuple[ValueCode, ...] = (SignTwoLevel(), SignOneLevel(), Statistical())
    kept = sample.kept_values()
    errors = {code.name: value_error(code, kept) for code in codes}
    return {name: round(error, 4) for name, error in (errors | {"fitted_two_level": fitted_error(kept)}).items()}


def fitted_error(kept: Sequence[Tensor]) -> float:
    """The error of sign and two levels if both levels are the best of each block (Lloyd), scales staying exact."""
    lost = total = 0.0
    for value_NK in kept:
        magnitude_NK = value_NK.abs().double()
        scale_N1 = magnitude_NK.mean(dim=1, keepdim=True)
        ratio, energy = magnitude_NK / scale_N1.clamp(min=1e-300), scale_N1.square().expand_as(magnitude_NK)
        levels = torch.tensor([SignTwoLevel().low, SignTwoLevel().high], dtype=torch.float64)
        for _ in range(50):
            large = (ratio > levels.mean()).long()
            weight = torch.zeros(2, dtype=torch.float64).index_add_(0, large.flatten(), energy.flatten())
            moment = torch.zeros(2, dtype=torch.float64).index_add_(0, large.flatten(), (energy * ratio).flatten())
            levels = torch.where(weight > 0, moment / weight, levels)
        sent = levels[(ratio > levels.mean()).long()]
        lost += float(((ratio - sent).square() * energy).sum())
        total += float(magnitude_NK.square().sum())
    return (lost / total) ** 0.5


def value_error(code: ValueCode, kept: Sequence[Tensor]) -> float:
    """The error of one code over all blocks ``[N, K]`` together."""
    lost = total = 0.0
    for value_NK in kept:
        sent_NK = code.decode(code.encode(value_NK, key=0))
        lost += float((value_NK - sent_NK).double().square().sum())
        total += float(value_NK.double().square().sum())
    return (lost / total) ** 0.5
