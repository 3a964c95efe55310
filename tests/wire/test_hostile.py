"""Hostile frames: every truncation and bit flip, thousands of damages behind a right checksum, and lengths that lie."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from sparseloco.compress import Dense, TopK
from sparseloco.errors import WireError
from sparseloco.layout import Chunks
from sparseloco.types import Coding
from sparseloco.wire import HEADER_BYTES, decode, encode
from tests.wire import frames
from tests.wire.mutations import Target, check, mutate, read, targets

ROOT = Path(__file__).parents[2]
TARGETS = targets()
any_target = pytest.mark.parametrize("target", TARGETS, ids=range(len(TARGETS)))
small_target = pytest.mark.parametrize("target", TARGETS[:6], ids=range(6))


@any_target
def test_good_frames_are_accepted_by_both_readers(target: Target) -> None:
    assert check(target.frame, target, second=True)


@any_target
def test_every_truncation_is_refused(target: Target) -> None:
    for length in range(len(target.frame)):
        assert read(target.frame[:length], target) is None
    for extra in (b"\0", b"\0" * 8, target.frame):
        assert read(target.frame + extra, target) is None


@any_target
def test_every_truncation_behind_a_right_checksum_is_refused(target: Target) -> None:
    """The only body that is shorter and right would be another payload; none is, since every part is needed."""
    for length in range(HEADER_BYTES, len(target.frame)):
        assert not check(frames.seal(target.frame[:length]), target, second=False)
        assert not check(frames.resized(target.frame[:length]), target, second=False)


@small_target
def test_every_flipped_bit_is_refused(target: Target) -> None:
    for bit in range(8 * len(target.frame)):
        bad = bytearray(target.frame)
        bad[bit // 8] ^= 1 << bit % 8
        assert read(bytes(bad), target) is None


@small_target
def test_every_flipped_bit_behind_a_right_checksum(target: Target) -> None:
    """Another payload in its one form, or refused: as the second reader says."""
    accepted = 0
    for bit in range(8 * len(target.frame)):
        bad = bytearray(target.frame)
        bad[bit // 8] ^= 1 << bit % 8
        accepted += check(frames.seal(bad), target, second=True)
    assert 0 < accepted < 8 * len(target.frame)


@pytest.mark.parametrize("seed", range(6))
def test_damage_behind_a_right_checksum(seed: int) -> None:
    chance = random.Random(1000 + seed)
    accepted = 0
    for _ in range(1000):
        target = chance.choice(TARGETS)
        accepted += check(mutate(target, chance), target, second=True)
    assert 100 < accepted < 900, "neither all nor none: the damages reach the checks and some make another payload"


def test_thousands_of_damages_under_a_memory_cap() -> None:
    """The short form of benchmarks/fuzz_frames.py: 48 MB of address space beyond the imports."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the size of a process is read from /proc")
    command = [sys.executable, "benchmarks/fuzz_frames.py", "--cases", "5000", "--seed", "11", "--cap", "48"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads(run.stdout)
    assert result["cases"] == result["accepted"] + result["refused"] == 5000
    assert result["compared_with_second_reader"] == 500
    assert result["accepted"] > 500


# -- lengths that lie ------------------------------------------------------------------------------------------------


def peak_of_refusing(frame: bytes, target: Target) -> int:
    """Most bytes that python and numpy took at once while a frame was refused."""
    read(target.frame, target)  # what is made once for a table is made
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(frame, target.specs, frames.FINGERPRINT, frames.RUN)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def big_table() -> Target:
    """A table of parts for 64 million values, of which the frame brings none."""
    payload = frames.payload_of(TopK(k=1, chunk_size=64), [(640,)], layout=Chunks(64))
    specs = tuple(
        spec._replace(shape=(1_000_000, spec.shape[1])) for spec in payload.specs if spec.name.startswith("0.")
    )
    return Target(encode(frames.envelope_of(payload), frames.RUN, Coding.COMPACT), specs, [])


@pytest.mark.parametrize("length", [0, 2**31, 2**62, 2**64 - 1])
@pytest.mark.parametrize("flags", [0, 2])
def test_a_length_that_lies_takes_no_memory(length: int, flags: int) -> None:
    for target in TARGETS[:6]:
        bad = bytearray(target.frame)
        bad[frames.FLAGS] = flags
        bad[frames.LENGTH : frames.CHECKSUM] = length.to_bytes(8, "little")
        assert peak_of_refusing(frames.seal(bad), target) < 100_000


def test_a_table_of_parts_that_a_frame_does_not_fill_takes_no_memory() -> None:
    """Only the numbers per group that follow from the own table; nothing per value."""
    target = big_table()
    assert peak_of_refusing(target.frame, target) < 200_000
    full = frames.resized(target.frame[:HEADER_BYTES] + b"\xff" * 1954 + bytes(1000))
    assert peak_of_refusing(full, target) < 200_000


@pytest.mark.parametrize("entry", [2**16 - 1, 2**15, 0])
def test_a_table_entry_that_lies_takes_no_memory(entry: int) -> None:
    for target in TARGETS:
        for offset, item in target.tables:
            bad = bytearray(target.frame)
            bad[offset : offset + item] = entry.to_bytes(item, "little")
            assert peak_of_refusing(frames.seal(bad), target) < 100_000


def test_a_dense_body_that_is_not_there_takes_no_memory() -> None:
    payload = frames.payload_of(Dense(), [(3,)])
    frame = encode(frames.envelope_of(payload), frames.RUN)
    (spec,) = payload.specs
    target = Target(frame, (spec._replace(shape=(1, 10**9)),), [])
    bad = bytearray(frame)
    bad[frames.LENGTH : frames.CHECKSUM] = (4 * 10**9).to_bytes(8, "little")
    assert peak_of_refusing(frames.seal(bad), target) < 100_000
