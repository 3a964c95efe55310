"""A second reader of frames, written from docs/wire-format.md alone: one bit at a time, in plain Python.

It imports nothing of the package, so that it can only agree with the page. ``xxhash`` is the checksum's own library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import xxhash

FLOATS = {"float32": ("<f", 4), "float64": ("<d", 8), "bfloat16": ("", 2)}
COMPACT = 2
LARGEST = struct.unpack("<f", struct.pack("<I", 0x7CF0BDC2))[0]


class Refused(Exception):
    """These bytes are not a frame."""


@dataclass
class Frame:
    """Header fields by the names of the page, and values by (block, part): a flat list, or a list per chunk."""

    header: dict[str, Any]
    parts: dict[tuple[int, str], list[Any]] = field(default_factory=dict)


def read_frame(frame: bytes, table: list[dict[str, Any]]) -> Frame:
    """Read a frame. ``table`` has a row per part: block, name, shape, type; some have bits, chunk_size or signed."""
    header = read_header(frame)
    out, at = Frame(header), 72
    if header["weight"] == 0:
        need(not any(frame[72:]), "something at weight 0")
        need(len(frame) - 72 == (0 if header["flags"] & COMPACT else fixed_bytes(table)), "length at weight 0")
        return out
    for row in table:
        if row["type"] == "positions":
            values, at = read_positions(frame, at, *row["shape"], row["chunk_size"], header["flags"] & COMPACT)
        elif row["type"] == "integers":
            values, at = read_integers(frame, at, count_of(row["shape"]), row["bits"])
        else:
            values, at = read_floats(frame, at, count_of(row["shape"]), row["type"], row.get("signed", True))
        out.parts[row["block"], row["name"]] = values
    need(at == len(frame), "bytes left over")
    return out


def read_header(frame: bytes) -> dict[str, Any]:
    need(len(frame) >= 72, "short")
    names = "magic version flags header_bytes algorithm run peer round fragment part weight digest body_bytes checksum"
    header = dict(zip(names.split(), struct.unpack("<4sBBH8s8sIIHHI16sQQ", frame[:72]), strict=True))
    need(header["magic"] == b"SLCO" and header["version"] == 1 and header["header_bytes"] == 72, "not version 1")
    need(xxhash.xxh3_64_intdigest(frame[:64] + frame[72:]) == header["checksum"], "checksum")
    need(header["flags"] < 4 and header["part"] == 0, "flags")
    need(header["weight"] <= 2**29 - 1, "weight")
    need(header["body_bytes"] == len(frame) - 72, "length")
    return header


def read_positions(
    frame: bytes, at: int, chunks: int, kept: int, size: int, compact: int
) -> tuple[list[list[int]], int]:
    if chunks == 0 or kept == 0:
        return [[] for _ in range(chunks)], at
    b = width(kept, size)
    per_group = 8 * -(-128 // kept)
    groups = [min(per_group, chunks - first) for first in range(0, chunks, per_group)]
    lengths = [slot(g, kept, size) for g in groups]
    if compact:
        entry = 2 if slot(per_group, kept, size) <= 65535 else 4
        most = lengths
        need(at + entry * len(groups) <= len(frame), "table")
        lengths = [int.from_bytes(frame[at + entry * i : at + entry * (i + 1)], "little") for i in range(len(groups))]
        need(all(-(-g * kept // 8) <= n <= m for g, n, m in zip(groups, lengths, most, strict=True)), "table")
        at += entry * len(groups)
    lows, at = read_integers(frame, at, chunks * kept, b)
    out: list[list[int]] = []
    for g, length in zip(groups, lengths, strict=True):
        need(at + length <= len(frame), "unary stream")
        if compact:
            need(frame[at + length - 1] != 0, "last byte of a group")
        bits = bits_of(frame[at : at + length])
        for _ in range(g):
            low = lows[len(out) * kept : (len(out) + 1) * kept]
            out.append(read_chunk(bits, low, b))
            need(out[-1][-1] < size, "position")
        need(not any(bits), "bits behind the last one bit")
        at += length
    return out, at


def read_chunk(bits: Iterator[int], low: list[int], b: int) -> list[int]:
    """Gaps, as the encoder made them: the position before, plus one, plus the gap."""
    chunk: list[int] = []
    last = -1
    for number in low:
        quotient = 0
        while (bit := next(bits, None)) == 0:
            quotient += 1
        need(bit == 1, "too few one bits")
        last += 1 + (quotient << b) + number
        chunk.append(last)
    return chunk


def read_integers(frame: bytes, at: int, count: int, bits: int) -> tuple[list[int], int]:
    length = -(-count * bits // 8)
    need(at + length <= len(frame), "packed integers")
    stream = bits_of(frame[at : at + length])
    values = [sum(next(stream) << place for place in range(bits)) for _ in range(count)]
    need(not any(stream), "padding")
    return values, at + length


def read_floats(frame: bytes, at: int, count: int, kind: str, signed: bool) -> tuple[list[float], int]:
    code, item = FLOATS[kind]
    need(at + count * item <= len(frame), "floats")
    values: list[float] = []
    for place in range(at, at + count * item, item):
        raw = frame[place : place + item]
        # A bfloat16 is the upper half of a float32.
        (value,) = struct.unpack("<f", b"\0\0" + raw) if kind == "bfloat16" else struct.unpack(code, raw)
        need(abs(value) < LARGEST, "not finite")
        need(signed or raw[-1] < 128, "negative")
        values.append(value)
    return values, at + count * item


def width(kept: int, size: int) -> int:
    costs = [(kept * b + kept + ((size - kept) >> b), b) for b in range(40)]
    return min(costs)[1]


def slot(chunks: int, kept: int, size: int) -> int:
    return -(-chunks * (kept + ((size - kept) >> width(kept, size))) // 8)


def fixed_bytes(table: list[dict[str, Any]]) -> int:
    """Length of a body in FIXED coding."""
    total = 0
    for row in table:
        count = count_of(row["shape"])
        if row["type"] == "positions":
            (chunks, kept), size = row["shape"], row["chunk_size"]
            if count:
                per_group = 8 * -(-128 // kept)
                total += -(-count * width(kept, size) // 8)
                total += sum(slot(min(per_group, chunks - i), kept, size) for i in range(0, chunks, per_group))
        elif row["type"] == "integers":
            total += -(-count * row["bits"] // 8)
        else:
            total += count * FLOATS[row["type"]][1]
    return total


def bits_of(data: bytes) -> Iterator[int]:
    for byte in data:
        for place in range(8):
            yield byte >> place & 1


def count_of(shape: list[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def need(holds: bool, what: str) -> None:
    if not holds:
        raise Refused(what)
