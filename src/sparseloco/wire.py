"""Frames: envelopes as bytes.

A frame is a fixed header and a body. The body holds the payload's parts in the order of their table, each packed to
its wire width and padded to whole bytes; the table follows from the algorithm and is covered by its fingerprint, so
it does not travel. ``docs/wire-format.md`` has the layout. Bytes from outside are checked before a tensor is made.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparseloco.bits import pack, unpack
from sparseloco.errors import WireError
from sparseloco.reduce import MAX_WEIGHT
from sparseloco.types import Envelope, Key, PartSpec, Payload

VERSION = 1
MAGIC = b"SLCO"
_HEADER = struct.Struct("<4sBBH8s8sIIHHI16sQ")
_CHECKSUM_BYTES = 8
HEADER_BYTES = _HEADER.size + _CHECKSUM_BYTES
_BITS_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def frame_bytes(specs: Sequence[PartSpec]) -> int:
    """Size of the frame of a payload with these parts."""
    return HEADER_BYTES + sum(spec.nbytes for spec in specs)


def encode(envelope: Envelope, run_id: bytes = bytes(8)) -> bytes:
    """Frame of an envelope.

    Args:
        envelope: Its payload's tensors must match its table.
        run_id: 8 bytes that tell runs apart.
    """
    payload = envelope.payload
    body = b"".join(_encode_part(payload.tensors[spec.name], spec) for spec in payload.specs)
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        int(payload.linear),
        HEADER_BYTES,
        bytes.fromhex(envelope.fingerprint),
        run_id,
        envelope.peer,
        envelope.key.round,
        envelope.key.fragment,
        0,
        envelope.weight,
        bytes.fromhex(envelope.digest),
        len(body),
    )
    return header + _checksum(header, body) + body


def decode(
    frame: bytes | memoryview, specs: Sequence[PartSpec], fingerprint: str, run_id: bytes = bytes(8)
) -> Envelope:
    """Envelope of a frame.

    Args:
        frame: Bytes from another peer.
        specs: Table of the parts this round's payload must have.
        fingerprint: Of the own algorithm and model.
        run_id: Of the own run.

    Raises:
        WireError: if the bytes are not a frame of this run, round table and algorithm.
    """
    data = bytes(frame)
    if len(data) < HEADER_BYTES:
        raise WireError(f"frame={len(data)} bytes: must be at least {HEADER_BYTES}; refuse it")
    fields = _HEADER.unpack_from(data)
    (
        magic,
        version,
        linear,
        header_bytes,
        algorithm,
        run,
        peer,
        round_,
        fragment,
        part,
        weight,
        digest,
        length,
    ) = fields
    if (magic, version, header_bytes) != (MAGIC, VERSION, HEADER_BYTES):
        raise WireError(f"frame={magic!r} version {version}: must be {MAGIC!r} version {VERSION}; refuse it")
    body = data[HEADER_BYTES:]
    if data[_HEADER.size : HEADER_BYTES] != _checksum(data[: _HEADER.size], body):
        raise WireError(f"peer {peer}, round {round_}: checksum does not match the bytes; fetch the frame again")
    if algorithm.hex() != fingerprint:
        raise WireError(
            f"peer {peer}, round {round_}: frame says algorithm {algorithm.hex()}, this run is {fingerprint}; "
            "all peers need the same [algorithm] and model"
        )
    if run != run_id:
        raise WireError(f"peer {peer}, round {round_}: frame says run {run.hex()}, this is {run_id.hex()}; refuse it")
    expected = sum(spec.nbytes for spec in specs)
    if length != expected:
        raise WireError(f"peer {peer}, round {round_}: length={length}: must be {expected} bytes of body; refuse it")
    if len(body) != expected:
        raise WireError(f"peer {peer}, round {round_}: body={len(body)} bytes: must be {expected}; refuse it")
    if linear > 1 or part:
        raise WireError(f"peer {peer}, round {round_}: flags={linear}, part={part}: must be 0 or 1, and 0; refuse it")
    if not 1 <= weight < MAX_WEIGHT:
        # A heavier one would make weight times value inexact in float64.
        raise WireError(f"peer {peer}, round {round_}: weight={weight}: must be from 1 to {MAX_WEIGHT - 1}; refuse it")
    return Envelope(
        key=Key(round_, fragment),
        peer=peer,
        weight=weight,
        fingerprint=fingerprint,
        digest=digest.hex(),
        payload=Payload(tuple(specs), _decode_body(body, specs, peer), bool(linear)),
    )


def _decode_body(body: bytes, specs: Sequence[PartSpec], peer: int) -> dict[str, Tensor]:
    # A copy, since torch wants writable memory.
    data = np.frombuffer(bytearray(body), dtype=np.uint8)
    tensors: dict[str, Tensor] = {}
    start = 0
    for spec in specs:
        tensors[spec.name] = _decode_part(data[start : start + spec.nbytes], spec)
        start += spec.nbytes
        if spec.chunk_size:
            _check_positions(tensors[spec.name], spec, peer)
    return tensors


def _encode_part(tensor: Tensor, spec: PartSpec) -> bytes:
    if spec.dtype.is_floating_point:
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        return flat.view(_BITS_VIEW[flat.element_size()]).numpy().tobytes()
    return pack(tensor, spec.bits).tobytes() if spec.bits else b""


def _decode_part(data: NDArray[np.uint8], spec: PartSpec) -> Tensor:
    count = int(torch.Size(spec.shape).numel())
    if spec.dtype.is_floating_point:
        # Slices of the body need not be aligned to their item size, so each part gets its own memory.
        return torch.from_numpy(data.copy()).view(spec.dtype).reshape(spec.shape)
    if not spec.bits:
        return torch.zeros(spec.shape, dtype=spec.dtype)
    values = unpack(data, spec.bits, count)
    return torch.from_numpy(values.astype(np.int32)).to(spec.dtype).reshape(spec.shape)


def _check_positions(index_NK: Tensor, spec: PartSpec, peer: int) -> None:
    wide = index_NK.to(torch.int32)
    if wide.numel() and (int(wide.max()) >= spec.chunk_size or bool((wide.diff(dim=1) <= 0).any())):
        raise WireError(
            f"peer {peer}, part {spec.name}: positions must ascend below {spec.chunk_size}; refuse the frame"
        )


def _checksum(header: bytes, body: bytes) -> bytes:
    digest = hashlib.blake2b(header, digest_size=_CHECKSUM_BYTES)
    digest.update(body)
    return digest.digest()
