"""Frames as a hostile sender would make them: damaged where it hurts, with length and checksum made right again."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from sparseloco.compress import Dense, Float32, LowRank, Quantize, SignOneLevel, Statistical, TopK
from sparseloco.errors import WireError
from sparseloco.gaps import table_item_bytes
from sparseloco.layout import Chunks, Tiles
from sparseloco.sections import section_lengths, specs_by_block
from sparseloco.types import Coding, Envelope, PartSpec, Payload
from sparseloco.wire import HEADER_BYTES, decode, encode
from tests.wire import frames
from tests.wire.second_reader import Refused, read_frame
from tools.make_wire_samples import as_row

_CASES = [
    (TopK(k=5, chunk_size=64), Tiles(8, 8), [(9, 10), (3,)]),
    (TopK(k=5, chunk_size=64, values=SignOneLevel()), Tiles(8, 8), [(17, 8)]),
    (TopK(k=3, chunk_size=40, values=Float32()), Chunks(40), [(130,)]),
    (TopK(k=130, chunk_size=135, values=Statistical()), Chunks(135), [(1350,)]),
    (TopK(k=1, chunk_size=1000, values=SignOneLevel()), Chunks(1000), [(3000,)]),
    (TopK(k=7, chunk_size=7), Chunks(7), [(16,)]),
    (Quantize(), Tiles(8, 8), [(9, 10)]),
    (Dense(), Tiles(8, 8), [(3, 5)]),
    (LowRank(1), Tiles(99, 99), [(6, 7)]),
]
FLOATS = [struct.pack("<f", x) for x in (float("inf"), float("-inf"), float("nan"), -1.0, -0.0, 1e37, -1e37, 3.4e38)]


class Target(NamedTuple):
    """A good frame, its table, and where in it a hostile sender would cut."""

    frame: bytes
    specs: tuple[PartSpec, ...]
    tables: list[tuple[int, int]]  # offset and item size of each entry of a table of positions

    @property
    def rows(self) -> list[dict[str, object]]:
        return [as_row(spec) for spec in self.specs]


def targets() -> list[Target]:
    found: list[Target] = []
    for compressor, layout, shapes in _CASES:
        payload = frames.payload_of(compressor, shapes, torch.float32, layout)
        for coding in Coding:
            frame = encode(frames.envelope_of(payload), frames.RUN, coding)
            found.append(Target(frame, payload.specs, _tables(frame, payload.specs) if coding else []))
    table = found[0].specs
    silent = frames.envelope_of(Payload(table, {}), weight=0)
    return [*found, *(Target(encode(silent, frames.RUN, coding), table, []) for coding in Coding)]


def _tables(frame: bytes, specs: tuple[PartSpec, ...]) -> list[tuple[int, int]]:
    """Positions are the first part of their block, and their table is its beginning."""
    blocks = specs_by_block(specs)
    entries: list[tuple[int, int]] = []
    at = HEADER_BYTES
    for rows, length in zip(blocks.values(), section_lengths(blocks, frame[at:], Coding.COMPACT), strict=True):
        if rows[0].chunk_size:
            chunks, kept = rows[0].shape
            item = table_item_bytes(kept, rows[0].chunk_size)
            groups = -(-chunks // (8 * -(-128 // kept)))
            entries += [(at + item * group, item) for group in range(groups)]
        at += length
    return entries


Mutation = Callable[[bytearray, Target, random.Random], None]


def _flip(data: bytearray, target: Target, chance: random.Random) -> None:
    bit = chance.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8


def _body_byte(data: bytearray, target: Target, chance: random.Random) -> None:
    if len(data) > HEADER_BYTES:
        data[chance.randrange(HEADER_BYTES, len(data))] = chance.choice([0, 255, 128, chance.randrange(256)])


def _header_field(data: bytearray, target: Target, chance: random.Random) -> None:
    offset, size = chance.choice(
        [(frames.FLAGS, 1), (frames.HEADER, 2), (frames.PEER, 4), (frames.PART, 2), (frames.WEIGHT, 4)]
    )
    data[offset : offset + size] = chance.choice([bytes(size), b"\xff" * size, chance.randbytes(size)])


def _coding(data: bytearray, target: Target, chance: random.Random) -> None:
    data[frames.FLAGS] ^= 2


def _entry(data: bytearray, target: Target, chance: random.Random) -> None:
    """A lie in a table, or two that add up to the truth."""
    places = [place for place in target.tables if place[0] + place[1] <= len(data)]
    for offset, item in chance.sample(places, min(len(places), chance.choice([1, 2]))):
        old = int.from_bytes(data[offset : offset + item], "little")
        new = chance.choice([old + 1, old - 1, 0, 1, 2 ** (8 * item) - 1, chance.randrange(2**16)])
        data[offset : offset + item] = max(0, min(new, 2 ** (8 * item) - 1)).to_bytes(item, "little")


def _float(data: bytearray, target: Target, chance: random.Random) -> None:
    if len(data) >= HEADER_BYTES + 4:
        at = chance.choice([len(data) - 4, len(data) - 2, chance.randrange(HEADER_BYTES, len(data) - 3)])
        value = chance.choice(FLOATS)
        data[at : at + 4] = value[2:] if at == len(data) - 2 else value


def _swap(data: bytearray, target: Target, chance: random.Random) -> None:
    if len(data) > HEADER_BYTES:
        i, j = chance.choices(range(HEADER_BYTES, len(data)), k=2)
        data[i], data[j] = data[j], data[i]


def _cut(data: bytearray, target: Target, chance: random.Random) -> None:
    del data[chance.randrange(HEADER_BYTES, len(data) + 1) :]


def _drop(data: bytearray, target: Target, chance: random.Random) -> None:
    if len(data) > HEADER_BYTES:
        del data[chance.randrange(HEADER_BYTES, len(data))]


def _insert(data: bytearray, target: Target, chance: random.Random) -> None:
    at = chance.randrange(HEADER_BYTES, len(data) + 1)
    data[at:at] = chance.choice([b"\0", b"\xff", chance.randbytes(chance.randrange(1, 9))])


def _noise(data: bytearray, target: Target, chance: random.Random) -> None:
    at = chance.randrange(HEADER_BYTES, len(data) + 1)
    data[at:] = chance.randbytes(len(data) - at)


def _nothing(data: bytearray, target: Target, chance: random.Random) -> None:
    """A good frame among the bad, so that a reader that refuses all is found out."""


MUTATIONS: list[Mutation] = [
    _flip, _flip, _body_byte, _body_byte, _header_field, _coding, _entry, _entry, _float, _swap, _cut, _drop, _insert,
    _noise, _nothing,
]  # fmt: skip


def mutate(target: Target, chance: random.Random) -> bytes:
    """One to three damages; mostly with a right checksum, sometimes with a length that lies."""
    data = bytearray(target.frame)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        chance.choice(MUTATIONS)(data, target, chance)
    fate = chance.random()
    if fate < 0.05:
        return bytes(data)
    if fate < 0.1:
        data[frames.LENGTH : frames.CHECKSUM] = chance.choice([b"\xff" * 8, b"\xff" * 7 + b"\x7f", chance.randbytes(8)])
        return frames.seal(data)
    return frames.resized(data)


def read(frame: bytes, target: Target) -> Envelope | None:
    """The envelope, or None if the frame was refused; whatever else is raised is an error of the reader."""
    try:
        return decode(frame, target.specs, frames.FINGERPRINT, frames.RUN)
    except WireError:
        return None


def check(frame: bytes, target: Target, *, second: bool) -> bool:
    """Whether a frame is accepted; what is accepted must be canonical, and the second reader must agree."""
    envelope = read(frame, target)
    if envelope is not None:
        coding = Coding.COMPACT if frame[frames.FLAGS] & 2 else Coding.FIXED
        rebuilt = Payload.of_tensors(target.specs, envelope.payload.tensors, envelope.payload.linear)
        assert encode(replace(envelope, payload=rebuilt), frames.RUN, coding) == frame, "two forms of one payload"
    if second:
        try:
            other = read_frame(frame, target.rows)
            accepted = (other.header["algorithm"].hex(), other.header["run"]) == (frames.FINGERPRINT, frames.RUN)
        except Refused:
            accepted = False
        assert accepted == (envelope is not None), "the readers differ"
        assert envelope is None or other.parts == frames.plain_values(envelope.payload)
    return envelope is not None
