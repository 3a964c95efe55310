"""Frames: any payload comes back bit for bit, and bytes that are not a frame of this run are refused with one error."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseloco.channel import Channel
from sparseloco.compress import Compressor, Float32, TopK
from sparseloco.errors import WireError
from sparseloco.layout import Tiles
from sparseloco.reduce import MAX_WEIGHT, Mean
from sparseloco.types import Envelope, Key, PartSpec, Payload, Source, TensorSpec
from sparseloco.wire import HEADER_BYTES, decode, encode, frame_bytes
from tests.contracts.cases import COMPRESSORS, heavy_tailed

FINGERPRINT = "0123456789abcdef"
OTHER_FINGERPRINT = "fedcba9876543210"
DIGEST = "00112233445566778899aabbccddeeff"
RUN = b"run-0001"

# Where docs/wire-format.md puts the fields of a version 1 header.
MAGIC, VERSION, FLAGS, HEADER, ALGORITHM, RUN_ID, PEER, ROUND, FRAGMENT, PART, WEIGHT, SHARED, LENGTH = (
    0, 4, 5, 6, 8, 16, 24, 28, 32, 34, 36, 40, 56,
)  # fmt: skip
CHECKSUM = 64


def envelope_of(payload: Payload, weight: int = 17) -> Envelope:
    return Envelope(key=Key(41, 2), peer=5, weight=weight, fingerprint=FINGERPRINT, digest=DIGEST, payload=payload)


def payload_of(compressor: Compressor, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> Payload:
    """What a channel sends of some tensors."""
    channel = Channel(layout=Tiles(8, 8), compressor=compressor, reducer=Mean())
    specs = [TensorSpec(f"t{i}", shape, dtype) for i, shape in enumerate(shapes)]
    state = channel.init(specs, [torch.zeros(shape, dtype=dtype) for shape in shapes])
    sources = [Source(None, heavy_tailed(shape, i, dtype)) for i, shape in enumerate(shapes)]
    return channel.outgoing(sources, state, key=9)


def small() -> Envelope:
    """Two chunks of four values, two of them kept: positions in bytes 72 and 73 as 1, 3 and 0, 2."""
    block = torch.tensor([[0.0, 5.0, 1.0, -7.0], [3.0, 0.0, 2.0, 1.0]])
    compressor = TopK(k=2, chunk_size=4, values=Float32())
    specs = tuple(s._replace(name=f"0.{s.name}") for s in compressor.specs(2, 4, torch.float32, {}))
    parts = compressor.encode(block, {}, key=0)
    return envelope_of(Payload(specs, {f"0.{name}": part for name, part in parts.items()}))


def seal(frame: bytearray) -> bytes:
    """Make the checksum right again, as a hostile or broken sender would."""
    body = frame[HEADER_BYTES:]
    frame[CHECKSUM:HEADER_BYTES] = hashlib.blake2b(frame[:CHECKSUM] + body, digest_size=8).digest()
    return bytes(frame)


def changed(frame: bytes, offset: int, new: bytes) -> bytes:
    out = bytearray(frame)
    out[offset : offset + len(new)] = new
    return seal(out)


def same(one: Envelope, other: Envelope) -> None:
    fields = ("key", "peer", "weight", "fingerprint", "digest", "peers")
    assert [getattr(one, f) for f in fields] == [getattr(other, f) for f in fields]
    assert (one.payload.specs, one.payload.linear) == (other.payload.specs, other.payload.linear)
    assert list(one.payload.tensors) == list(other.payload.tensors)
    for name, tensor in one.payload.tensors.items():
        got = other.payload.tensors[name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(got, tensor)


# -- round trip ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_payload_comes_back(compressor: Compressor, dtype: torch.dtype) -> None:
    envelope = envelope_of(payload_of(compressor, [(20, 30), (), (127,), (0,), (4, 3, 3, 3)], dtype))
    frame = encode(envelope, RUN)
    assert len(frame) == frame_bytes(envelope.payload.specs) == HEADER_BYTES + envelope.payload.nbytes
    same(decode(frame, envelope.payload.specs, FINGERPRINT, RUN), envelope)
    same(decode(memoryview(frame), envelope.payload.specs, FINGERPRINT, RUN), envelope)


def test_an_empty_payload_is_a_header() -> None:
    envelope = envelope_of(Payload((), {}))
    frame = encode(envelope, RUN)
    assert len(frame) == HEADER_BYTES == 72
    same(decode(frame, (), FINGERPRINT, RUN), envelope)


@given(
    peer=st.integers(0, 2**32 - 1),
    round_=st.integers(0, 2**32 - 1),
    fragment=st.integers(0, 2**16 - 1),
    weight=st.integers(1, MAX_WEIGHT - 1),
    linear=st.booleans(),
    run=st.binary(min_size=8, max_size=8),
)
def test_every_header_comes_back(peer: int, round_: int, fragment: int, weight: int, linear: bool, run: bytes) -> None:
    payload = Payload(small().payload.specs, small().payload.tensors, linear)
    envelope = Envelope(
        key=Key(round_, fragment), peer=peer, weight=weight, fingerprint=FINGERPRINT, digest=DIGEST, payload=payload
    )
    same(decode(encode(envelope, run), payload.specs, FINGERPRINT, run), envelope)


def test_bytes_lie_where_the_document_says() -> None:
    frame = encode(small(), RUN)
    assert frame[:8] == b"SLCO\x01\x00" + (72).to_bytes(2, "little")
    assert frame[ALGORITHM:PEER] == bytes.fromhex(FINGERPRINT) + RUN
    assert struct.unpack_from("<IIHHI", frame, PEER) == (5, 41, 2, 0, 17)
    assert frame[SHARED:LENGTH] == bytes.fromhex(DIGEST)
    assert int.from_bytes(frame[LENGTH:CHECKSUM], "little") == len(frame) - HEADER_BYTES == 17
    assert frame[72] == 1 | 3 << 2 | 0 << 4 | 2 << 6, "four positions of two bits"
    assert struct.unpack_from("<4f", frame, 73) == (5.0, -7.0, 3.0, 2.0)
    assert seal(bytearray(frame)) == frame


def test_decoded_tensors_do_not_share_the_frame() -> None:
    frame = bytearray(encode(small(), RUN))
    envelope = decode(memoryview(frame), small().payload.specs, FINGERPRINT, RUN)
    frame[:] = bytes(len(frame))
    same(envelope, small())


# -- refusals --------------------------------------------------------------------------------------------------------


def refused(frame: bytes, specs: tuple[PartSpec, ...] | None = None) -> str:
    with pytest.raises(WireError) as caught:
        decode(frame, small().payload.specs if specs is None else specs, FINGERPRINT, RUN)
    return str(caught.value)


@pytest.mark.parametrize("name", ["top-k-sign-two-level", "top-k-statistical-4", "quantize-4", "dense", "low-rank-1"])
def test_every_truncation_is_refused(name: str) -> None:
    envelope = envelope_of(payload_of(COMPRESSORS[name], [(9, 10), (3,)], torch.float32))
    frame = encode(envelope, RUN)
    for length in range(len(frame)):
        refused(frame[:length], envelope.payload.specs)
    for extra in (b"\0", b"\0" * 8, frame):
        refused(frame + extra, envelope.payload.specs)


@pytest.mark.parametrize("name", ["top-k-sign-two-level", "quantize-4"])
def test_every_flipped_bit_is_refused(name: str) -> None:
    envelope = envelope_of(payload_of(COMPRESSORS[name], [(9, 10), (3,)], torch.float32))
    frame = encode(envelope, RUN)
    assert len(frame) < 250
    for bit in range(8 * len(frame)):
        bad = bytearray(frame)
        bad[bit // 8] ^= 1 << bit % 8
        refused(bytes(bad), envelope.payload.specs)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    refused(data)
    refused(b"SLCO\x01\x00" + (72).to_bytes(2, "little") + data)


@given(offset=st.integers(0, 88), new=st.binary(min_size=1, max_size=8))
def test_a_sealed_but_changed_frame_is_an_envelope_or_a_wire_error(offset: int, new: bytes) -> None:
    """Whoever can compute a checksum still meets nothing but WireError."""
    frame = bytearray(encode(small(), RUN))
    frame[offset : offset + len(new)] = new[: len(frame) - offset]
    try:
        envelope = decode(seal(frame), small().payload.specs, FINGERPRINT, RUN)
    except WireError:
        return
    index = envelope.payload.tensors["0.index"].to(torch.int64)
    assert bool(((index >= 0) & (index < 4)).all())
    assert bool((index.diff(dim=1) > 0).all())
    assert 1 <= envelope.weight < MAX_WEIGHT


def test_short_frame_text() -> None:
    assert refused(b"SLCO") == "frame=4 bytes: must be at least 72; refuse it"


FRAME = encode(small(), RUN)
BAD_FRAMES: dict[str, tuple[Callable[[], bytes], str]] = {
    "magic": (
        lambda: changed(FRAME, MAGIC, b"GIF8"),
        "frame=b'GIF8' version 1: must be b'SLCO' version 1; refuse it",
    ),
    "version": (
        lambda: changed(FRAME, VERSION, b"\x02"),
        "frame=b'SLCO' version 2: must be b'SLCO' version 1; refuse it",
    ),
    "checksum": (
        lambda: FRAME[:-1] + b"\x00",
        "peer 5, round 41: checksum does not match the bytes; fetch the frame again",
    ),
    "fingerprint": (
        lambda: changed(FRAME, ALGORITHM, bytes.fromhex(OTHER_FINGERPRINT)),
        "peer 5, round 41: frame says algorithm fedcba9876543210, this run is 0123456789abcdef; "
        "all peers need the same [algorithm] and model",
    ),
    "run": (
        lambda: changed(FRAME, RUN_ID, b"run-0002"),
        f"peer 5, round 41: frame says run {b'run-0002'.hex()}, this is {RUN.hex()}; refuse it",
    ),
    "body-too-short": (
        lambda: seal(bytearray(FRAME[:-4])),
        "peer 5, round 41: body=13 bytes: must be 17; refuse it",
    ),
    "body-too-long": (
        lambda: seal(bytearray(FRAME + bytes(3))),
        "peer 5, round 41: body=20 bytes: must be 17; refuse it",
    ),
    "length": (
        lambda: changed(FRAME, LENGTH, (18).to_bytes(8, "little")),
        "peer 5, round 41: length=18: must be 17 bytes of body; refuse it",
    ),
    "weight-0": (
        lambda: changed(FRAME, WEIGHT, bytes(4)),
        "peer 5, round 41: weight=0: must be from 1 to 536870911; refuse it",
    ),
    "weight-too-large": (
        lambda: changed(FRAME, WEIGHT, MAX_WEIGHT.to_bytes(4, "little")),
        "peer 5, round 41: weight=536870912: must be from 1 to 536870911; refuse it",
    ),
    "flags": (
        lambda: changed(FRAME, FLAGS, b"\x02"),
        "peer 5, round 41: flags=2, part=0: must be 0 or 1, and 0; refuse it",
    ),
    "part": (
        lambda: changed(FRAME, PART, b"\x07"),
        "peer 5, round 41: flags=0, part=7: must be 0 or 1, and 0; refuse it",
    ),
    "positions-descend": (
        lambda: changed(FRAME, 72, bytes([3 | 1 << 2 | 0 << 4 | 2 << 6])),
        "peer 5, part 0.index: positions must ascend below 4; refuse the frame",
    ),
    "positions-repeat": (
        lambda: changed(FRAME, 72, bytes([1 | 3 << 2 | 2 << 4 | 2 << 6])),
        "peer 5, part 0.index: positions must ascend below 4; refuse the frame",
    ),
}


@pytest.mark.parametrize(("make", "text"), BAD_FRAMES.values(), ids=BAD_FRAMES)
def test_bad_frames_are_named(make: Callable[[], bytes], text: str) -> None:
    assert refused(make()) == text


@pytest.mark.parametrize("position", [5, 6, 7])
def test_positions_beyond_a_chunk_are_refused(position: int) -> None:
    """Five values need three bits, which can name places that do not exist."""
    specs = (PartSpec("0.index", (1, 2), torch.int16, 3, chunk_size=5),)
    good = envelope_of(Payload(specs, {"0.index": torch.tensor([[1, 4]], dtype=torch.int16)}))
    same(decode(encode(good, RUN), specs, FINGERPRINT, RUN), good)
    bad = envelope_of(Payload(specs, {"0.index": torch.tensor([[1, position]], dtype=torch.int16)}))
    assert refused(encode(bad, RUN), specs) == "peer 5, part 0.index: positions must ascend below 5; refuse the frame"
