"""Frames for tests: small payloads, headers, and making the checksum right again."""

from __future__ import annotations

from typing import Any

import torch
import xxhash

from sparseloco.channel import Channel
from sparseloco.compress import Compressor, Float32, TopK
from sparseloco.layout import Layout, Tiles
from sparseloco.reduce import Mean
from sparseloco.sections import specs_by_block
from sparseloco.types import Envelope, Key, Payload, Source, TensorSpec
from sparseloco.wire import HEADER_BYTES
from tests.contracts.cases import heavy_tailed

FINGERPRINT = "0123456789abcdef"
OTHER_FINGERPRINT = "fedcba9876543210"
DIGEST = "00112233445566778899aabbccddeeff"
RUN = b"run-0001"

# Where docs/wire-format.md puts the fields of a version 1 header.
MAGIC, VERSION, FLAGS, HEADER, ALGORITHM, RUN_ID, PEER, ROUND, FRAGMENT, PART, WEIGHT, SHARED, LENGTH, CHECKSUM = (
    0, 4, 5, 6, 8, 16, 24, 28, 32, 34, 36, 40, 56, 64,
)  # fmt: skip


def envelope_of(payload: Payload, weight: int = 17) -> Envelope:
    return Envelope(key=Key(41, 2), peer=5, weight=weight, fingerprint=FINGERPRINT, digest=DIGEST, payload=payload)


def payload_of(
    compressor: Compressor,
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype = torch.float32,
    layout: Layout | None = None,
) -> Payload:
    """What a channel sends of some tensors."""
    channel = Channel(layout=layout or Tiles(8, 8), compressor=compressor, reducer=Mean())
    specs = [TensorSpec(f"t{i}", shape, dtype) for i, shape in enumerate(shapes)]
    state = channel.init(specs, [torch.zeros(shape, dtype=dtype) for shape in shapes])
    sources = [Source(None, heavy_tailed(shape, i, dtype)) for i, shape in enumerate(shapes)]
    return channel.outgoing(sources, state, key=9)


def small() -> Envelope:
    """Two chunks of four values, two of them kept: the example of docs/wire-format.md, with float32 values."""
    block = torch.tensor([[0.0, 5.0, 1.0, -7.0], [3.0, 0.0, 2.0, 1.0]])
    compressor = TopK(k=2, chunk_size=4, values=Float32())
    specs = tuple(s._replace(name=f"0.{s.name}") for s in compressor.specs(2, 4, torch.float32, {}))
    return envelope_of(Payload(specs, {0: compressor.encode(block, {}, key=0)}))


def seal(frame: bytes | bytearray) -> bytes:
    """Make the checksum right again, as a hostile or broken sender would."""
    out = bytearray(frame)
    out[CHECKSUM:HEADER_BYTES] = xxhash.xxh3_64_intdigest(out[:CHECKSUM] + out[HEADER_BYTES:]).to_bytes(8, "little")
    return bytes(out)


def resized(frame: bytes | bytearray) -> bytes:
    """Make the length and then the checksum right."""
    out = bytearray(frame)
    out[LENGTH:CHECKSUM] = (len(out) - HEADER_BYTES).to_bytes(8, "little")
    return seal(out)


def changed(frame: bytes, offset: int, new: bytes) -> bytes:
    out = bytearray(frame)
    out[offset : offset + len(new)] = new
    return seal(out)


def same(one: Envelope, other: Envelope) -> None:
    fields = ("key", "peer", "weight", "fingerprint", "digest", "peers")
    assert [getattr(one, f) for f in fields] == [getattr(other, f) for f in fields]
    same_payload(one.payload, other.payload)


def same_payload(one: Payload, other: Payload) -> None:
    assert (one.specs, one.linear) == (other.specs, other.linear)
    tensors, others = one.tensors, other.tensors
    assert list(tensors) == list(others)
    for name, tensor in tensors.items():
        assert (others[name].dtype, others[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(others[name], tensor)


def plain_values(payload: Payload) -> dict[tuple[int, str], list[Any]]:
    """Values as the second reader gives them: positions by chunk, all else flat; none of a peer that abstains."""
    values: dict[tuple[int, str], list[Any]] = {}
    if not payload.sections:
        return values
    for block, rows in specs_by_block(payload.specs).items():
        parts = payload.blocks[block]
        for spec in rows:
            part = parts[spec.name] if spec.chunk_size else parts[spec.name].reshape(-1)
            values[block, spec.name] = part.tolist()
    return values
