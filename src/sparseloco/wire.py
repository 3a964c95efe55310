"""Frames: envelopes as bytes.

A frame is a fixed header and a body. The body holds one section per block (``sections.py``); the table of their parts
follows from the algorithm and is covered by its fingerprint, so it does not travel. ``docs/wire-format.md`` has the
layout. Bytes from outside are checked before a tensor is made, and stay packed until their values are asked for.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from sparseloco.errors import DivergenceError, WireError
from sparseloco.reduce import MAX_WEIGHT
from sparseloco.sections import check_floats, section_as_bytes, section_bytes, specs_by_block, split_body
from sparseloco.types import Coding, Envelope, Key, Packed, PartSpec, Payload

VERSION = 1
MAGIC = b"SLCO"
_HEADER = struct.Struct("<4sBBH8s8sIIHHI16sQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_LINEAR = 1
_COMPACT = 2


def frame_bytes(specs: Sequence[PartSpec], coding: Coding = Coding.FIXED) -> int:
    """Size of the frame of a payload with these parts: exact in FIXED coding, the largest in COMPACT coding."""
    return HEADER_BYTES + section_bytes(specs, coding)


def encode(envelope: Envelope, run_id: bytes = bytes(8), coding: Coding = Coding.FIXED) -> bytes:
    """Frame of an envelope.

    Args:
        envelope: Its payload must match its table, unless the weight is 0: then nothing of it is sent. Packed sections
            are taken as they are, or laid out anew.
        run_id: 8 bytes that tell runs apart.
        coding: FIXED for collectives, which need the size beforehand; COMPACT for all else.

    Raises:
        DivergenceError: if a float is not finite; no reader would take such a frame.
    """
    payload = envelope.payload
    sections = _sections(envelope, coding) if envelope.weight else _nothing(payload.specs, coding)
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        (_LINEAR if payload.linear else 0) | (_COMPACT if coding == Coding.COMPACT else 0),
        HEADER_BYTES,
        bytes.fromhex(envelope.fingerprint),
        run_id,
        envelope.peer,
        envelope.key.round,
        envelope.key.fragment,
        0,
        envelope.weight,
        bytes.fromhex(envelope.digest),
        sum(map(len, sections)),
    )
    return b"".join([header, _CHECKSUM.pack(_checksum(header, *sections)), *sections])


def decode(
    frame: bytes | memoryview, specs: Sequence[PartSpec], fingerprint: str, run_id: bytes = bytes(8)
) -> Envelope:
    """Envelope of a frame in either coding; its payload stays packed.

    Args:
        frame: Bytes from another peer. Immutable ones are held, others are copied once they have been checked.
        specs: Table of the parts this round's payload must have.
        fingerprint: Of the own algorithm and model.
        run_id: Of the own run.

    Raises:
        WireError: if the bytes are not a frame of this run, round table and algorithm.
    """
    view = memoryview(frame).cast("B")
    head = _read_header(view)
    peer = f"peer {head.peer}, round {head.round}"
    if head.algorithm.hex() != fingerprint:
        raise WireError(
            f"{peer}: frame says algorithm {head.algorithm.hex()}, this run is {fingerprint}; "
            "all peers need the same [algorithm] and model"
        )
    if head.run != run_id:
        raise WireError(f"{peer}: frame says run {head.run.hex()}, this is {run_id.hex()}; refuse it")
    if head.flags & ~(_LINEAR | _COMPACT) or head.part:
        raise WireError(f"{peer}: flags={head.flags}, part={head.part}: must be 0 to 3, and 0; refuse it")
    if head.weight >= MAX_WEIGHT:
        # A heavier one would make weight times value inexact in float64.
        raise WireError(f"{peer}: weight={head.weight}: must be from 0 to {MAX_WEIGHT - 1}; refuse it")
    coding = Coding.COMPACT if head.flags & _COMPACT else Coding.FIXED
    _check_length(head, view.nbytes - HEADER_BYTES, specs, coding, peer)
    body = view[HEADER_BYTES:] if isinstance(frame, bytes) else bytes(view[HEADER_BYTES:])
    try:
        sections = split_body(specs_by_block(specs), body, coding) if head.weight else _no_sections(body, coding)
    except WireError as error:
        raise WireError(f"{peer}, {error}") from None
    return Envelope(
        key=Key(head.round, head.fragment),
        peer=head.peer,
        weight=head.weight,
        fingerprint=fingerprint,
        digest=head.digest.hex(),
        payload=Payload(tuple(specs), sections, bool(head.flags & _LINEAR)),
    )


def says(head: bytes) -> tuple[str, Key, str] | None:
    """Run, place and digest that the first bytes of a frame name, unchecked: for people, never for decisions.

    Returns:
        16 hex digits, round and fragment, 32 hex digits; None if it is no header of this version.
    """
    if len(head) < _HEADER.size:
        return None
    said = _Header(*_HEADER.unpack_from(head))
    if (said.magic, said.version, said.header_bytes) != (MAGIC, VERSION, HEADER_BYTES):
        return None
    return said.run.hex(), Key(said.round, said.fragment), said.digest.hex()


def _sections(envelope: Envelope, coding: Coding) -> list[bytes | memoryview]:
    """Bytes of each block, in the order of the table."""
    sections: list[bytes | memoryview] = []
    for block, specs in specs_by_block(envelope.payload.specs).items():
        try:
            section = envelope.payload.sections[block]
            if not isinstance(section, dict):
                check_floats(specs, section)
            sections.append(section_as_bytes(specs, section, coding))
        except DivergenceError as error:
            where = f"peer {envelope.peer}, round {envelope.key.round}, block {block}"
            raise DivergenceError(f"{where}, {error}") from None
    return sections


def _nothing(specs: Sequence[PartSpec], coding: Coding) -> list[bytes | memoryview]:
    """Body of a frame that contributes nothing; in FIXED coding it is as long as any other."""
    return [bytes(section_bytes(specs))] if coding == Coding.FIXED else []


def _no_sections(body: bytes | memoryview, coding: Coding) -> dict[int, Packed]:
    """No section, once the body is what :func:`_nothing` makes."""
    if len(body) and (coding == Coding.COMPACT or np.frombuffer(body, np.uint8).any()):
        raise WireError("body=something: must hold nothing at weight 0; refuse it")
    return {}


class _Header(NamedTuple):
    """Fields of a header in their order."""

    magic: bytes
    version: int
    flags: int
    header_bytes: int
    algorithm: bytes
    run: bytes
    peer: int
    round: int
    fragment: int
    part: int
    weight: int
    digest: bytes
    body_bytes: int


def _read_header(view: memoryview) -> _Header:
    """Fields of a frame of this version whose bytes are those that were sent."""
    if view.nbytes < HEADER_BYTES:
        raise WireError(f"frame={view.nbytes} bytes: must be at least {HEADER_BYTES}; refuse it")
    head = _Header(*_HEADER.unpack_from(view))
    if (head.magic, head.version, head.header_bytes) != (MAGIC, VERSION, HEADER_BYTES):
        raise WireError(f"frame={head.magic!r} version {head.version}: must be {MAGIC!r} version {VERSION}; refuse it")
    (checksum,) = _CHECKSUM.unpack_from(view, _HEADER.size)
    if checksum != _checksum(view[: _HEADER.size], view[HEADER_BYTES:]):
        raise WireError(
            f"peer {head.peer}, round {head.round}: checksum does not match the bytes; fetch the frame again"
        )
    return head


def _check_length(head: _Header, there: int, specs: Sequence[PartSpec], coding: Coding, peer: str) -> None:
    most = section_bytes(specs, coding)
    if head.body_bytes != most if coding == Coding.FIXED else head.body_bytes > most:
        limit = f"{most}" if coding == Coding.FIXED else f"at most {most}"
        raise WireError(f"{peer}: length={head.body_bytes}: must be {limit} bytes of body; refuse it")
    if there != head.body_bytes:
        raise WireError(f"{peer}: body={there} bytes: must be {head.body_bytes}; refuse it")


def _checksum(*pieces: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()
