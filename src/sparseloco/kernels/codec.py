"""The gap coding of positions, by the native kernels where they are there, else by its definition in ``gaps``.

What is refused is refused in the words of the definition: it is asked once more for bytes that a kernel rejects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparseloco import gaps
from sparseloco.errors import WireError
from sparseloco.gaps import Bytes
from sparseloco.kernels import native, native_settle
from sparseloco.types import Coding


class Positions(NamedTuple):
    """Bytes of the positions of a block: N chunks of C values, K of them kept."""

    data: Bytes
    chunks: int
    kept: int
    chunk_size: int

    @property
    def section(self) -> native_settle.SectionBytes:
        """The same for the kernels."""
        return native_settle.SectionBytes(self.data.data, *self[1:])


def encode(index_NK: Tensor, chunk_size: int, coding: Coding) -> Bytes:
    """Bytes of positions on any device; see :func:`sparseloco.gaps.encode_gaps`."""
    index_NK = index_NK.detach().to("cpu")
    if native.available() and index_NK.numel() and index_NK.dtype in (torch.int16, torch.int32):
        with contextlib.suppress(ValueError):  # not a set: the definition says so
            packed = native_settle.pack_gaps(index_NK, chunk_size, coding, threads=native.threads_for(index_NK.numel()))
            return np.frombuffer(packed, np.uint8)
    return gaps.encode_gaps(index_NK.numpy(), chunk_size, coding)


def decode(positions: Positions, coding: Coding) -> Tensor:
    """Positions ``[N, K]``, an integer type; see :func:`sparseloco.gaps.decode_gaps`."""
    if not native.available():
        return torch.from_numpy(gaps.decode_gaps(*positions, coding))
    fault = check([positions], coding)
    if fault is not None:
        raise fault[1]
    return native_settle.unpack_gaps(
        positions.section, coding, threads=native.threads_for(positions.chunks * positions.kept)
    )


def check(blocks: Sequence[Positions], coding: Coding) -> tuple[int, WireError] | None:
    """The first block whose bytes :func:`encode` cannot have made, and why; None if all are right."""
    if native.available():
        sections = [block.section for block in blocks]
        threads = native.threads_for(sum(block.chunks * block.kept for block in blocks))
        found = native_settle.find_fault(sections, coding, values=False, threads=threads)
        if found is None:
            return None
        number, why = found
        return number, _fault(blocks[number], coding) or WireError(why)
    faults = ((number, _fault(block, coding)) for number, block in enumerate(blocks))
    return next(((number, fault) for number, fault in faults if fault is not None), None)


def recode(positions: Positions, source: Coding, target: Coding) -> Bytes:
    """Checked positions in another coding; see :func:`sparseloco.gaps.recode_gaps`."""
    if not native.available():
        return gaps.recode_gaps(*positions, source, target)
    if source == target:
        return positions.data
    return np.frombuffer(native_settle.recode_gaps(positions.section, source), np.uint8)


def _fault(positions: Positions, coding: Coding) -> WireError | None:
    try:
        gaps.decode_gaps(*positions, coding)
    except WireError as error:
        return error
    return None
