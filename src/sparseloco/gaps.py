"""Ascending positions as bytes: Golomb-Rice gaps, low bits and unary quotients in streams of their own.

Numpy in, numpy out. ``docs/wire-format.md`` has the layout bit by bit, and the bounds. Both codings hold the same bits;
FIXED pads every group of chunks to its largest size, COMPACT says in a table how long each is. Bytes from outside are
checked here before positions are made of them. Letters: N chunks of C values, K positions in each, G groups of chunks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseloco.bits import pack_array, unpack
from sparseloco.errors import ConfigError, WireError
from sparseloco.types import Coding

Bytes = NDArray[np.uint8]

_LEAST_IN_GROUP = 128
"""A group holds at least so many positions, so that its two bytes of table cost at most 1/8 bit a position."""
_SHORT_TABLE = 2**16 - 1


@lru_cache(maxsize=1024)
def rice_width(kept: int, chunk_size: int) -> int:
    """Low bits of a gap: the width that makes the longest code of a chunk shortest; of equals the smallest.

    A chunk costs at most ``K b + K + ((C - K) >> b)`` bits.

    Raises:
        ConfigError: if ``kept`` is not from 1 to ``chunk_size``.

    Example:
        >>> [rice_width(k, 4096) for k in (16, 64, 2048, 4096)]
        [7, 5, 0, 0]
    """
    if not 1 <= kept <= chunk_size:
        raise ConfigError(f"kept={kept!r}: must be from 1 to chunk_size={chunk_size}; keep fewer positions")
    return min(range((chunk_size - kept).bit_length() + 1), key=lambda b: kept * b + ((chunk_size - kept) >> b))


def chunks_per_group(kept: int) -> int:
    """Chunks whose quotients share one entry of the table; a multiple of 8.

    Example:
        >>> chunks_per_group(64), chunks_per_group(128), chunks_per_group(1)
        (16, 8, 1024)
    """
    return 8 * -(-_LEAST_IN_GROUP // kept)


def slot_bytes(chunks: int, kept: int, chunk_size: int) -> int:
    """Largest size of the quotients of ``chunks`` chunks of one group."""
    return -(-chunks * (kept + ((chunk_size - kept) >> rice_width(kept, chunk_size))) // 8)


def table_item_bytes(kept: int, chunk_size: int) -> int:
    """Bytes of one entry of the table: 2, or 4 where a full group may be longer than 65535 bytes."""
    return 2 if slot_bytes(chunks_per_group(kept), kept, chunk_size) <= _SHORT_TABLE else 4


def fixed_bytes(chunks: int, kept: int, chunk_size: int) -> int:
    """Size in FIXED coding, which is known before any position is.

    Example:
        >>> fixed_bytes(4096, 64, 4096) * 8 / (4096 * 64)
        7.96875
    """
    shape = _shape(chunks, kept, chunk_size)
    return shape.low_bytes + int(shape.slot_G.sum())


def most_bytes(chunks: int, kept: int, chunk_size: int) -> int:
    """Largest size in COMPACT coding; what positions really take is a few percent less."""
    return _shape(chunks, kept, chunk_size).table_bytes + fixed_bytes(chunks, kept, chunk_size)


def compact_bytes(data: Bytes, chunks: int, kept: int, chunk_size: int) -> int:
    """Size of the COMPACT positions that ``data`` begins with, from their table alone.

    Raises:
        WireError: if the table is cut short or has an impossible entry.
    """
    shape = _shape(chunks, kept, chunk_size)
    return shape.table_bytes + shape.low_bytes + int(_read_table(data, shape).sum())


def encode_gaps(index_NK: NDArray[Any], chunk_size: int, coding: Coding) -> Bytes:
    """Bytes of positions.

    Args:
        index_NK: Strictly ascending in each row, from 0 to ``chunk_size - 1``; any integer type.
        chunk_size: C.
        coding: FIXED or COMPACT.

    Raises:
        ConfigError: if the positions do not ascend below ``chunk_size``.

    Example:
        >>> encode_gaps(np.array([[0, 2], [1, 3]]), 4, Coding.FIXED).tolist()
        [85]
    """
    chunks, kept = index_NK.shape
    shape = _shape(chunks, kept, chunk_size)
    if not index_NK.size:
        return np.empty(0, np.uint8)
    wide_NK = index_NK.astype(np.int64)
    gap_NK = np.diff(wide_NK, axis=1, prepend=-1) - 1
    if int(gap_NK.min()) < 0 or int(wide_NK[:, -1].max()) >= chunk_size:
        raise ConfigError(f"positions=not a set: must ascend from 0 to {chunk_size - 1} in each row; sort them")
    low = pack_array((gap_NK & ((1 << shape.width) - 1)).reshape(-1), shape.width)
    length_G, unary = _unary(gap_NK >> shape.width, shape)
    return _join(_Streams(low, length_G, unary), shape, coding)


def decode_gaps(data: Bytes, chunks: int, kept: int, chunk_size: int, coding: Coding) -> NDArray[np.int32]:
    """Positions of bytes; the exact inverse of :func:`encode_gaps`.

    Only bytes that :func:`encode_gaps` can have made are accepted.

    Returns:
        int32 ``[N, K]``, strictly ascending in each row and below ``chunk_size``.

    Raises:
        WireError: naming what is wrong.
    """
    shape = _shape(chunks, kept, chunk_size)
    streams = _split(data, shape, coding)
    if not shape.groups:
        return np.empty((chunks, kept), np.int32)
    one_NK, start_G = _ones(streams, shape)
    # Every chunk begins behind the last one bit of the chunk before it, or with its group.
    begin_N = np.empty(chunks, np.int64)
    begin_N[1:] = one_NK[:-1, -1] + 1
    begin_N[:: shape.per_group] = start_G
    order_K = np.arange(kept)
    # Zeros up to the j-th one bit are the sum of the quotients so far.
    high_NK = (one_NK - begin_N[:, None] - order_K) << shape.width
    index_NK = high_NK + order_K
    if shape.width:
        low_NK = unpack(streams.low, shape.width, chunks * kept).reshape(chunks, kept)
        index_NK += low_NK.cumsum(axis=1, dtype=np.int64)
    last = int(index_NK[:, -1].max())
    if last >= chunk_size:
        raise WireError(f"last position={last}: must be below {chunk_size}; refuse it")
    return index_NK.astype(np.int32)


def recode_gaps(data: Bytes, chunks: int, kept: int, chunk_size: int, source: Coding, target: Coding) -> Bytes:
    """The same positions in the other coding: only padding and table change, no position is made.

    Raises:
        WireError: if a length is impossible; bytes that were decoded before have none.
    """
    shape = _shape(chunks, kept, chunk_size)
    return _join(_split(data, shape, source), shape, target)


class _Shape(NamedTuple):
    """All that follows from N, K and C."""

    chunks: int
    kept: int
    width: int
    per_group: int
    slot_G: NDArray[np.int64]
    least_G: NDArray[np.int64]
    first_G: NDArray[np.int64]  # ordinal of each group's first position
    low_bytes: int
    table_type: str

    @property
    def groups(self) -> int:
        return self.slot_G.size

    @property
    def table_bytes(self) -> int:
        return self.groups * np.dtype(self.table_type).itemsize


@lru_cache(maxsize=1024)
def _shape(chunks: int, kept: int, chunk_size: int) -> _Shape:
    if not chunks * kept:
        nothing = np.empty(0, np.int64)
        return _Shape(chunks, kept, 0, 1, nothing, nothing, nothing, 0, "<u2")
    per_group = chunks_per_group(kept)
    groups = -(-chunks // per_group)
    slot_G = np.full(groups, slot_bytes(per_group, kept, chunk_size), np.int64)
    least_G = np.full(groups, -(-per_group * kept // 8), np.int64)
    rest = chunks - (groups - 1) * per_group
    slot_G[-1], least_G[-1] = slot_bytes(rest, kept, chunk_size), -(-rest * kept // 8)
    width = rice_width(kept, chunk_size)
    first_G = np.arange(groups) * (per_group * kept)
    item = table_item_bytes(kept, chunk_size)
    low_bytes = (chunks * kept * width + 7) // 8
    return _Shape(chunks, kept, width, per_group, slot_G, least_G, first_G, low_bytes, f"<u{item}")


class _Streams(NamedTuple):
    """What both codings hold: low bits, bytes of each group's quotients, and these one after another."""

    low: Bytes
    length_G: NDArray[np.int64]
    unary: Bytes


def _unary(quotient_NK: NDArray[np.int64], shape: _Shape) -> tuple[NDArray[np.int64], Bytes]:
    """Length of each group, and ``q`` zeros and a one for each quotient; every group begins on a byte."""
    one = np.cumsum(quotient_NK.reshape(-1) + 1) - 1  # as if groups were not padded
    last_G = np.append(shape.first_G[1:], one.size) - 1
    bits_G = np.diff(one[last_G], prepend=-1)
    length_G = (bits_G + 7) // 8
    shift_G = 8 * _starts(length_G) - _starts(bits_G)
    one += np.repeat(shift_G, np.diff(shape.first_G, append=one.size))
    digits = np.zeros(8 * int(length_G.sum()), np.uint8)
    digits[one] = 1
    return length_G, np.packbits(digits, bitorder="little")


def _ones(streams: _Streams, shape: _Shape) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Place of every one bit ``[N, K]``, and of the first bit of each group; checks that each group has its number."""
    one = np.flatnonzero(np.unpackbits(streams.unary, bitorder="little"))
    if one.size != shape.chunks * shape.kept:
        raise WireError(f"ones={one.size}: must be {shape.chunks * shape.kept}, one for each position; refuse it")
    start_G = 8 * _starts(streams.length_G)
    end_G = start_G + 8 * streams.length_G
    last_one_G = one[np.append(shape.first_G[1:], one.size) - 1]
    # One bits ascend and their total is right, so these bounds leave each group exactly its own.
    odd = (one[shape.first_G] < start_G) | (last_one_G >= end_G) | (last_one_G < end_G - 8)
    if odd.any():
        group = int(np.argmax(odd))
        raise WireError(f"group {group}=wrong bits: must have a one for each position, its last byte too; refuse it")
    return one.reshape(shape.chunks, shape.kept), start_G


def _join(streams: _Streams, shape: _Shape, coding: Coding) -> Bytes:
    if coding == Coding.COMPACT:
        table = streams.length_G.astype(shape.table_type).view(np.uint8)
        return np.concatenate([table, streams.low, streams.unary])
    out = np.zeros(shape.low_bytes + int(shape.slot_G.sum()), np.uint8)
    out[: shape.low_bytes] = streams.low
    out[shape.low_bytes :][_places(streams.length_G, shape)] = streams.unary
    return out


def _split(data: Bytes, shape: _Shape, coding: Coding) -> _Streams:
    """Streams of the bytes of one part, lengths checked."""
    if coding == Coding.COMPACT:
        length_G = _read_table(data, shape)
        start, expected = shape.table_bytes, shape.table_bytes + shape.low_bytes + int(length_G.sum())
    else:
        length_G = shape.slot_G
        start, expected = 0, shape.low_bytes + int(shape.slot_G.sum())
    if data.size != expected:
        raise WireError(f"length={data.size}: must be {expected} bytes; refuse it")
    low, unary = data[start : start + shape.low_bytes], data[start + shape.low_bytes :]
    if coding == Coding.COMPACT:
        return _Streams(low, length_G, unary)
    length_G = _without_padding(unary, shape)
    return _Streams(low, length_G, unary[_places(length_G, shape)])


def _read_table(data: Bytes, shape: _Shape) -> NDArray[np.int64]:
    if data.size < shape.table_bytes:
        raise WireError(f"table={data.size} bytes: must be at least {shape.table_bytes}; refuse it")
    length_G = np.frombuffer(data[: shape.table_bytes].tobytes(), shape.table_type).astype(np.int64)
    odd = (length_G < shape.least_G) | (length_G > shape.slot_G)
    if odd.any():
        group = int(np.argmax(odd))
        raise WireError(
            f"group {group}={length_G[group]} bytes: must be from {shape.least_G[group]} to {shape.slot_G[group]}; "
            "refuse it"
        )
    return length_G


def _without_padding(unary: Bytes, shape: _Shape) -> NDArray[np.int64]:
    """Bytes of each slot up to its last one that is not zero."""
    used = np.flatnonzero(unary)
    start_G = _starts(shape.slot_G)
    behind_G = np.searchsorted(used, start_G + shape.slot_G)
    last_G = np.append(-1, used)[behind_G]
    return np.maximum(last_G + 1 - start_G, 0)


def _places(length_G: NDArray[np.int64], shape: _Shape) -> NDArray[np.int64]:
    """Where the bytes of joined groups lie in their slots."""
    gap_G = _starts(shape.slot_G) - _starts(length_G)
    return np.arange(int(length_G.sum())) + np.repeat(gap_G, length_G)


def _starts(length_G: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.cumsum(length_G) - length_G
