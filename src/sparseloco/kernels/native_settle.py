"""Native settling, gap coding and digest: thin faces that take tensors and bytes.

Every function has a definition in torch or numpy with equal bits, for any instruction set and number of threads:
``Channel.settle_`` with ``TopK`` and ``SignTwoLevel``, ``gaps``, and ``bits.digest_lanes``. Letters: N chunks of C
values, K positions in each, R peers. Tensors are on the CPU and contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparseloco.kernels.geometry import TileGeometry
from sparseloco.kernels.native import module
from sparseloco.types import Coding

_FAULTS = {
    1: "table={at} bytes: must hold all groups",
    2: "table, group {at}: size must be possible for its positions",
    3: "length={at} bytes: must be that of the parts",
    4: "low values: bits behind the last must be zero",
    5: "group {at}=wrong bits: must have a one for each position and none behind",
    6: "chunk {at}: last position must be below the chunk size",
    7: "codes: bits behind the last must be zero",
    8: "scale of chunk {at}=not finite: must be finite (below 1e+37)",
    9: "scale of chunk {at}=negative: must have no minus sign",
}


# -- positions and sections ------------------------------------------------------------------------------------------


class SectionBytes(NamedTuple):
    """Bytes of one block from one peer: N chunks of C values, K of them sent."""

    data: bytes | memoryview
    chunks: int
    kept: int
    chunk_size: int


def find_fault(
    sections: Sequence[SectionBytes], coding: Coding, *, values: bool = True, threads: int = 1
) -> tuple[int, str] | None:
    """What is wrong with sections from outside: number of the first bad one, and why; None if all are canonical.

    Args:
        sections: Index parts, each followed by codes and scales of ``SignTwoLevel`` if ``values``.
        coding: ``FIXED`` or ``COMPACT``.
        values: False for index parts alone.
        threads: At most so many.
    """
    fault = module().check_sections([tuple(s) for s in sections], int(coding), values, threads)
    return None if fault is None else (fault[0], _FAULTS[fault[1]].format(at=fault[2]) + "; refuse it")


def pack_gaps(index_NK: Tensor, chunk_size: int, coding: Coding, *, threads: int = 1) -> bytes:
    """Index part of positions, int16 or int32, strictly ascending below ``chunk_size`` in each row.

    Raises:
        ValueError: if a row does not ascend.
    """
    chunks, kept = index_NK.shape
    packed = module().pack_index(index_NK.contiguous(), chunks, kept, chunk_size, int(coding), threads)
    if isinstance(packed, int):
        raise ValueError(f"positions of chunk {packed}=not a set: must ascend below {chunk_size}; sort them")
    return packed


def unpack_gaps(part: SectionBytes, coding: Coding, *, threads: int = 1) -> Tensor:
    """Positions ``[N, K]`` of a checked index part: int16, or int32 for chunks above 32768."""
    dtype = torch.int16 if part.chunk_size <= 1 << 15 else torch.int32
    index_NK = torch.empty(part.chunks, part.kept, dtype=dtype)
    module().unpack_index(*part, int(coding), index_NK, threads)
    return index_NK


def recode_gaps(part: SectionBytes, coding: Coding) -> bytes:
    """A checked index part of ``coding`` in the other coding."""
    return module().recode_index(*part, int(coding))


# -- settling --------------------------------------------------------------------------------------------------------


class SettleJob(NamedTuple):
    """One block.

    Attributes:
        anchor: Float32 ``[N, C]``, moved in place.
        live: The whole live tensor, float32 or bfloat16; what ``geometry`` covers is written.
        geometry: Where the block's chunks lie in it.
        kept: K.
        sections: Checked bytes of each peer, in peer order.
        velocity: Float32 ``[N, C]``, in place; with momentum only.
        snapshot: Like ``live``; for the merge ``carry``.
    """

    anchor: Tensor
    live: Tensor
    geometry: TileGeometry
    kept: int
    sections: Sequence[bytes | memoryview]
    velocity: Tensor | None = None
    snapshot: Tensor | None = None


class SettlePlan(NamedTuple):
    """What all jobs of a round share; the settings are those of ``SignTwoLevel``, ``Mean``, ``Sgd`` and the merges.

    Attributes:
        weights: Of the peers, in peer order; empty: the anchors stay and are merged.
        codings: Of the peers' sections.
        levels: Low and high.
        over: ``contributors`` or ``peers``.
        lr: Outer learning rate of this step.
        momentum: Factor on the velocity.
        nesterov: Look ahead along the velocity.
        weight_decay: Decoupled decay.
        merge: ``replace``, ``blend`` or ``carry``.
        alpha: Share of the live values in ``blend``.
    """

    weights: Sequence[int]
    codings: Sequence[int]
    levels: tuple[float, float]
    over: str = "contributors"
    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    merge: str = "replace"
    alpha: float = 0.0


class Settled(NamedTuple):
    """Outcome of a round.

    Attributes:
        squares: Sum of squares of each job's update, in float64. The same for every instruction set and number of
            threads; the definition adds in another order, and in float32, so its last bits may differ.
        failed: First job whose anchor would have left the range of numbers (1e37), or None. No such value is written,
            but other chunks and other jobs may have been stepped, so go on from a saved state.
    """

    squares: list[float]
    failed: int | None


def settle_top_k(jobs: Sequence[SettleJob], plan: SettlePlan, *, threads: int = 1) -> Settled:
    """Decode, average, step the anchors and write the live tensors, in one pass over memory."""
    squares, failed = module().settle(
        _items(jobs),
        list(plan.weights),
        [int(coding) for coding in plan.codings],
        plan.levels,
        ("peers", "contributors").index(plan.over),
        [plan.lr, plan.momentum, plan.weight_decay],
        plan.nesterov,
        ("replace", "blend", "carry").index(plan.merge),
        plan.alpha,
        threads,
    )
    return Settled(squares, failed if failed >= 0 else None)


def apply_pass(jobs: Sequence[SettleJob], *, threads: int = 1) -> None:
    """Read and write the anchors and write the live tensors, and nothing else: what a settle costs at least."""
    module().apply_pass(_items([job._replace(sections=()) for job in jobs]), threads)


def _items(jobs: Sequence[SettleJob]) -> list[tuple[object, ...]]:
    return [
        (
            job.anchor.detach(),
            job.live.detach(),
            list(job.geometry),
            job.kept,
            None if job.velocity is None else job.velocity.detach(),
            None if job.snapshot is None else job.snapshot.detach(),
            list(job.sections),
        )
        for job in jobs
    ]


# -- digest ----------------------------------------------------------------------------------------------------------


def digest_lanes(block: Tensor, salt: int, *, threads: int = 1) -> tuple[int, int]:
    """``bits.digest_lanes`` of a matrix of 4-byte or 8-byte items, without temporaries."""
    if block.numel() == 0:
        return (0, 0)
    return module().digest(block.detach().contiguous().view(torch.int32), salt, threads)
