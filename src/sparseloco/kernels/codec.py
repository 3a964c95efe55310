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
    """Bytes that begin with the positions of a block: N chunks of C values, K of them kept."""

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
    check(positions, coding)
    return native_settle.unpack_gaps(
        positions.section, coding, threads=native.threads_for(positions.chunks * positions.kept)
    )


def check(positions: Positions, coding: Coding) -> None:
    """Refuse bytes that :func:`encode` cannot have made.

    Raises:
        WireError: naming what is wrong.
    """
    if not native.available():
        gaps.decode_gaps(*positions, coding)
    elif (fault := _first_fault([positions], coding, values=False)) is not None:
        gaps.decode_gaps(*positions, coding)
        raise WireError(fault[1])


def first_fault(sections: Sequence[Positions], coding: Coding) -> tuple[int, str] | None:
    """Number of the first whole section that is wrong, and why; for sections with the values of ``SignTwoLevel``.

    All in one call, so that threads start once. Ask :func:`sparseloco.kernels.native.available` first.
    """
    return _first_fault(sections, coding, values=True)


def recode(positions: Positions, source: Coding, target: Coding) -> Bytes:
    """Checked positions in another coding; see :func:`sparseloco.gaps.recode_gaps`."""
    if not native.available():
        return gaps.recode_gaps(*positions, source, target)
    if source == target:
        return positions.data
    return np.frombuffer(native_settle.recode_gaps(positions.section, source), np.uint8)


def _first_fault(sections: Sequence[Positions], coding: Coding, *, values: bool) -> tuple[int, str] | None:
    threads = native.threads_for(sum(section.chunks * section.kept for section in sections))
    return native_settle.find_fault([s.section for s in sections], coding, values=values, threads=threads)
