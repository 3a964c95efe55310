"""Frames: any payload comes back bit for bit in both codings, and what is not a frame of this run is named."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from sparseloco.compress import Compressor, Quantize, SignOneLevel, SignTwoLevel, TopK
from sparseloco.errors import DivergenceError, WireError
from sparseloco.layout import Chunks
from sparseloco.reduce import MAX_WEIGHT
from sparseloco.types import LARGEST, Coding, Envelope, Key, PartSpec, Payload
from sparseloco.wire import HEADER_BYTES, decode, encode, frame_bytes
from tests.contracts.cases import COMPRESSORS
from tests.wire import frames
from tests.wire.frames import DIGEST, FINGERPRINT, RUN, changed, envelope_of, payload_of, resized, same, seal, small

any_coding = pytest.mark.parametrize("coding", list(Coding), ids=lambda coding: coding.name)


# -- round trip ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@any_coding
def test_every_payload_comes_back(compressor: Compressor, dtype: torch.dtype, coding: Coding) -> None:
    envelope = envelope_of(payload_of(compressor, [(20, 30), (), (127,), (0,), (4, 3, 3, 3)], dtype))
    specs = envelope.payload.specs
    frame = encode(envelope, RUN, coding)
    assert len(frame) <= frame_bytes(specs, coding)
    assert coding == Coding.COMPACT or len(frame) == frame_bytes(specs)
    for given_as in (frame, bytearray(frame), memoryview(frame)):
        same(decode(given_as, specs, FINGERPRINT, RUN), envelope)
    received = decode(frame, specs, FINGERPRINT, RUN)
    other = Coding(1 - coding)
    assert encode(received, RUN, coding) == frame
    assert encode(received, RUN, other) == encode(envelope, RUN, other), "laid out anew, not made anew"
    unpacked = replace(received, payload=Payload.of_tensors(specs, received.payload.tensors, received.payload.linear))
    assert encode(unpacked, RUN, coding) == frame


@given(
    chunk_size=st.one_of(st.integers(1, 70), st.sampled_from([100, 4095, 4096, 32769, 70000])),
    kept=st.floats(0, 1),
    count=st.integers(1, 300),
    one_level=st.booleans(),
)
def test_any_k_and_any_chunk_size(chunk_size: int, kept: float, count: int, one_level: bool) -> None:
    k = max(1, min(round(kept * chunk_size), 200))
    compressor = TopK(k=k, chunk_size=chunk_size, values=SignOneLevel() if one_level else SignTwoLevel())
    length = count * min(chunk_size, 100) + min(chunk_size, 70000) // 2
    envelope = envelope_of(payload_of(compressor, [(length,)], torch.float32, Chunks(chunk_size)))
    for coding in Coding:
        frame = encode(envelope, RUN, coding)
        received = decode(frame, envelope.payload.specs, FINGERPRINT, RUN)
        same(received, envelope)
        assert encode(received, RUN, coding) == frame


@any_coding
def test_an_empty_payload_is_a_header(coding: Coding) -> None:
    envelope = envelope_of(Payload((), {}))
    frame = encode(envelope, RUN, coding)
    assert len(frame) == HEADER_BYTES == 72
    same(decode(frame, (), FINGERPRINT, RUN), envelope)


@any_coding
@pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)
def test_a_peer_that_abstains_sends_nothing(compressor: Compressor, coding: Coding) -> None:
    """In FIXED coding as many zero bytes as any other body has; in COMPACT coding none."""
    full = payload_of(compressor, [(20, 30), (7,)])
    silent = envelope_of(Payload(full.specs, {}, full.linear), weight=0)
    frame = encode(silent, RUN, coding)
    assert not any(frame[HEADER_BYTES:])
    assert len(frame) == (frame_bytes(full.specs) if coding == Coding.FIXED else HEADER_BYTES)
    assert encode(envelope_of(full, weight=0), RUN, coding) == frame
    received = decode(frame, full.specs, FINGERPRINT, RUN)
    same(received, silent)
    assert [encode(received, RUN, other) for other in Coding] == [encode(silent, RUN, other) for other in Coding]


@given(
    peer=st.integers(0, 2**32 - 1),
    round_=st.integers(0, 2**32 - 1),
    fragment=st.integers(0, 2**16 - 1),
    weight=st.integers(1, MAX_WEIGHT - 1),
    linear=st.booleans(),
    coding=st.sampled_from(Coding),
    run=st.binary(min_size=8, max_size=8),
)
def test_every_header_comes_back(
    peer: int, round_: int, fragment: int, weight: int, linear: bool, coding: Coding, run: bytes
) -> None:
    payload = replace(small().payload, linear=linear)
    envelope = Envelope(
        key=Key(round_, fragment), peer=peer, weight=weight, fingerprint=FINGERPRINT, digest=DIGEST, payload=payload
    )
    frame = encode(envelope, run, coding)
    assert frame[frames.FLAGS] == linear + 2 * coding
    same(decode(frame, payload.specs, FINGERPRINT, run), envelope)


def test_bytes_lie_where_the_document_says() -> None:
    frame = encode(small(), RUN)
    assert frame[:8] == b"SLCO\x01\x00" + (72).to_bytes(2, "little")
    assert frame[frames.ALGORITHM : frames.PEER] == bytes.fromhex(FINGERPRINT) + RUN
    assert struct.unpack_from("<IIHHI", frame, frames.PEER) == (5, 41, 2, 0, 17)
    assert frame[frames.SHARED : frames.LENGTH] == bytes.fromhex(DIGEST)
    assert int.from_bytes(frame[frames.LENGTH : frames.CHECKSUM], "little") == len(frame) - HEADER_BYTES == 17
    assert int.from_bytes(frame[64:72], "little") == xxhash.xxh3_64(frame[:64] + frame[72:]).intdigest()
    assert frame[72] == 0x5A, "the example of the document"
    assert struct.unpack_from("<4f", frame, 73) == (5.0, -7.0, 3.0, 2.0)
    compact = encode(small(), RUN, Coding.COMPACT)
    assert compact[72:] == b"\x01\x00" + frame[72:]
    assert compact[frames.FLAGS] == 2


@any_coding
def test_decoded_tensors_do_not_share_the_frame(coding: Coding) -> None:
    frame = bytearray(encode(small(), RUN, coding))
    envelope = decode(memoryview(frame), small().payload.specs, FINGERPRINT, RUN)
    frame[:] = bytes(len(frame))
    same(envelope, small())


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1e37])
def test_a_payload_that_is_not_finite_is_not_sent(number: float) -> None:
    """No reader would take such a frame, so the sender is told."""
    good = small()
    parts = {**good.payload.blocks[0], "value": torch.full((2, 2), number)}
    with pytest.raises(DivergenceError) as caught:
        encode(replace(good, payload=replace(good.payload, sections={0: parts})))
    assert str(caught.value) == (
        "peer 5, round 41, block 0, part value=not finite: must be finite (below 1e+37) to leave its replica; "
        "lower the learning rate"
    )


# -- refusals --------------------------------------------------------------------------------------------------------


def refused(frame: bytes, specs: tuple[PartSpec, ...] | None = None) -> str:
    with pytest.raises(WireError) as caught:
        decode(frame, small().payload.specs if specs is None else specs, FINGERPRINT, RUN)
    return str(caught.value)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    refused(data)
    refused(b"SLCO\x01\x00" + (72).to_bytes(2, "little") + data)


def test_short_frame_text() -> None:
    assert refused(b"SLCO") == "frame=4 bytes: must be at least 72; refuse it"


FRAME = encode(small(), RUN)
COMPACT = encode(small(), RUN, Coding.COMPACT)
BAD_FRAMES: dict[str, tuple[Callable[[], bytes], str]] = {
    "magic": (
        lambda: changed(FRAME, frames.MAGIC, b"GIF8"),
        "frame=b'GIF8' version 1: must be b'SLCO' version 1; refuse it",
    ),
    "version": (
        lambda: changed(FRAME, frames.VERSION, b"\x02"),
        "frame=b'SLCO' version 2: must be b'SLCO' version 1; refuse it",
    ),
    "checksum": (
        lambda: FRAME[:-1] + b"\x00",
        "peer 5, round 41: checksum does not match the bytes; fetch the frame again",
    ),
    "fingerprint": (
        lambda: changed(FRAME, frames.ALGORITHM, bytes.fromhex(frames.OTHER_FINGERPRINT)),
        "peer 5, round 41: frame says algorithm fedcba9876543210, this run is 0123456789abcdef; "
        "all peers need the same [algorithm] and model",
    ),
    "run": (
        lambda: changed(FRAME, frames.RUN_ID, b"run-0002"),
        f"peer 5, round 41: frame says run {b'run-0002'.hex()}, this is {RUN.hex()}; refuse it",
    ),
    "body-too-short": (lambda: seal(FRAME[:-4]), "peer 5, round 41: body=13 bytes: must be 17; refuse it"),
    "body-too-long": (lambda: seal(FRAME + bytes(3)), "peer 5, round 41: body=20 bytes: must be 17; refuse it"),
    "length": (
        lambda: changed(FRAME, frames.LENGTH, (18).to_bytes(8, "little")),
        "peer 5, round 41: length=18: must be 17 bytes of body; refuse it",
    ),
    "compact-length": (
        lambda: resized(COMPACT + b"\0"),
        "peer 5, round 41: length=20: must be at most 19 bytes of body; refuse it",
    ),
    "compact-body": (
        lambda: resized(COMPACT[:-1]),
        "peer 5, round 41, body=18 bytes: must be 19 as its tables say; refuse it",
    ),
    "compact-table": (
        lambda: changed(COMPACT, 72, b"\x02"),
        "peer 5, round 41, block 0, part index, group 0=2 bytes: must be from 1 to 1; refuse it",
    ),
    "weight-0": (
        lambda: changed(FRAME, frames.WEIGHT, bytes(4)),
        "peer 5, round 41, body=something: must hold nothing at weight 0; refuse it",
    ),
    "weight-0-compact": (
        lambda: resized(changed(COMPACT, frames.WEIGHT, bytes(4))[:HEADER_BYTES] + b"\0"),
        "peer 5, round 41, body=something: must hold nothing at weight 0; refuse it",
    ),
    "weight-0-length": (
        lambda: resized(changed(FRAME, frames.WEIGHT, bytes(4))[:HEADER_BYTES]),
        "peer 5, round 41: length=0: must be 17 bytes of body; refuse it",
    ),
    "weight-too-large": (
        lambda: changed(FRAME, frames.WEIGHT, MAX_WEIGHT.to_bytes(4, "little")),
        "peer 5, round 41: weight=536870912: must be from 0 to 536870911; refuse it",
    ),
    "flags": (
        lambda: changed(FRAME, frames.FLAGS, b"\x04"),
        "peer 5, round 41: flags=4, part=0: must be 0 to 3, and 0; refuse it",
    ),
    "part": (
        lambda: changed(FRAME, frames.PART, b"\x07"),
        "peer 5, round 41: flags=0, part=7: must be 0 to 3, and 0; refuse it",
    ),
    "positions": (
        lambda: changed(FRAME, 72, b"\xa3"),
        "peer 5, round 41, block 0, part index, last position=5: must be below 4; refuse it",
    ),
    "ones": (
        lambda: changed(COMPACT, 74, b"\xda"),
        "peer 5, round 41, block 0, part index, ones=5: must be 4, one for each position; refuse it",
    ),
    "value": (
        lambda: changed(FRAME, 73, struct.pack("<f", float("nan"))),
        "peer 5, round 41, block 0, part value=not finite: must be finite (below 1e+37); refuse it",
    ),
}


@pytest.mark.parametrize(("make", "text"), BAD_FRAMES.values(), ids=BAD_FRAMES)
def test_bad_frames_are_named(make: Callable[[], bytes], text: str) -> None:
    assert refused(make()) == text


def scaled() -> Envelope:
    """Three codes of four bits and one scale: bytes 72 to 73 and 74 to 77."""
    specs = tuple(s._replace(name=f"0.{s.name}") for s in Quantize().specs(1, 3, torch.float32, {}))
    return envelope_of(Payload(specs, {0: Quantize().encode(torch.tensor([[1.0, -2.0, 0.5]]), {}, key=0)}))


@pytest.mark.parametrize("scale", [-1.0, -0.0])
def test_a_scale_with_a_sign_is_refused(scale: float) -> None:
    frame = changed(encode(scaled(), RUN), 74, struct.pack("<f", scale))
    text = "peer 5, round 41, block 0, part scale=negative: must have no minus sign; refuse it"
    assert refused(frame, scaled().payload.specs) == text


def test_padding_of_codes_is_refused() -> None:
    frame = encode(scaled(), RUN)
    assert (len(frame), frame[73] >> 4) == (78, 0)
    text = "peer 5, round 41, block 0, part code, padding=0x1: must be zero behind the last of 3 values; refuse it"
    assert refused(changed(frame, 73, bytes([frame[73] | 0x10])), scaled().payload.specs) == text


def test_the_largest_number_that_counts_as_finite() -> None:
    """The float32 next to 1e37 is the first that does not, of either sign."""
    (limit,) = struct.unpack("<I", struct.pack("<f", 1e37))
    assert struct.unpack("<f", struct.pack("<I", limit)) == (LARGEST,)
    for sign in (0, 1 << 31):
        decode(changed(FRAME, 73, struct.pack("<I", limit - 1 | sign)), small().payload.specs, FINGERPRINT, RUN)
        assert "not finite" in refused(changed(FRAME, 73, struct.pack("<I", limit | sign)))
