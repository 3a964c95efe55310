"""Positions as gaps: exact in both codings for every K and C, near the bound, and one form for each set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sparseloco.compress import TopK
from sparseloco.compress.base import log2_binomial
from sparseloco.errors import ConfigError, WireError
from sparseloco.gaps import (
    chunks_per_group,
    compact_bytes,
    decode_gaps,
    encode_gaps,
    fixed_bytes,
    most_bytes,
    recode_gaps,
    rice_width,
    slot_bytes,
    table_item_bytes,
)
from sparseloco.layout import Tiles
from sparseloco.types import Coding, Payload
from sparseloco.wire import encode
from tests.wire import frames
from tests.wire.second_reader import read_positions, slot, width

any_coding = pytest.mark.parametrize("coding", list(Coding), ids=lambda coding: coding.name)


def random_sets(chunks: int, kept: int, chunk_size: int, seed: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    rows = [np.sort(rng.choice(chunk_size, kept, replace=False)) for _ in range(chunks)]
    return np.stack(rows) if rows else np.empty((0, kept), np.int64)


@st.composite
def sets(draw: st.DrawFn) -> tuple[NDArray[np.int64], int]:
    """Sets of every kind: random, packed at either end, equally spaced, alternating between chunks."""
    chunk_size = draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 100, 4096, 32768, 32769, 65536, 70000])))
    most = min(chunk_size, 40 if chunk_size > 100 else chunk_size)
    kept = draw(st.one_of(st.integers(1, most), st.just(chunk_size if chunk_size < 5000 else most)))
    chunks = draw(st.integers(1, max(1, min(40, 20000 // kept))))
    kind = draw(st.sampled_from(["random", "first", "last", "spread", "mixed"]))
    first = np.arange(kept)
    spread = first * chunk_size // kept
    rows = {"first": [first], "last": [first + chunk_size - kept], "spread": [spread]}
    rows["mixed"] = [first, first + chunk_size - kept, spread]
    if kind == "random":
        return random_sets(chunks, kept, chunk_size, draw(st.integers(0, 2**32 - 1))), chunk_size
    return np.stack([rows[kind][i % len(rows[kind])] for i in range(chunks)]), chunk_size


def same_in_both(index_NK: NDArray[np.int64], chunk_size: int) -> None:
    chunks, kept = index_NK.shape
    for coding, other in ((Coding.FIXED, Coding.COMPACT), (Coding.COMPACT, Coding.FIXED)):
        data = encode_gaps(index_NK, chunk_size, coding)
        back = decode_gaps(data, chunks, kept, chunk_size, coding)
        assert (back.dtype, back.shape) == (np.int32, index_NK.shape)
        assert np.array_equal(back, index_NK)
        assert np.array_equal(encode_gaps(back, chunk_size, coding), data)
        recoded = recode_gaps(data, chunks, kept, chunk_size, coding, other)
        assert np.array_equal(recoded, encode_gaps(index_NK, chunk_size, other))
        if coding == Coding.FIXED:
            assert data.size == fixed_bytes(chunks, kept, chunk_size)
        else:
            assert data.size == compact_bytes(data, chunks, kept, chunk_size) <= most_bytes(chunks, kept, chunk_size)


@given(sets())
@example((np.zeros((1, 1), np.int64), 1))
@example((np.zeros((1030, 1), np.int64), 1))
@example((np.full((1030, 1), 4095), 4096))
@example((np.tile(np.arange(7), (5, 1)), 7))
def test_every_set_comes_back(case: tuple[NDArray[np.int64], int]) -> None:
    same_in_both(*case)


@pytest.mark.parametrize(
    ("chunks", "kept", "chunk_size"), [(9, 23000, 66000), (8, 35000, 70000), (1, 70000, 70000), (3, 1, 70000)]
)
def test_long_tables_and_wide_positions(chunks: int, kept: int, chunk_size: int) -> None:
    """Groups beyond 65535 bytes have entries of four bytes; positions beyond 32767 need 32 bits."""
    assert table_item_bytes(kept, chunk_size) == (4 if kept > 1 else 2)
    index_NK = random_sets(chunks, kept, chunk_size, 1)
    index_NK[0] = np.arange(chunk_size - kept, chunk_size)
    same_in_both(index_NK, chunk_size)


@pytest.mark.parametrize("coding", list(Coding))
@pytest.mark.parametrize(("chunks", "kept"), [(0, 3), (4, 0), (0, 0)])
def test_nothing_is_no_bytes(coding: Coding, chunks: int, kept: int) -> None:
    data = encode_gaps(np.empty((chunks, kept), np.int64), 9, coding)
    assert data.size == fixed_bytes(chunks, kept, 9) == most_bytes(chunks, kept, 9) == 0
    assert decode_gaps(data, chunks, kept, 9, coding).shape == (chunks, kept)
    with pytest.raises(WireError, match="length=1: must be 0 bytes; refuse it"):
        decode_gaps(np.zeros(1, np.uint8), chunks, kept, 9, coding)


@pytest.mark.parametrize(("kept", "chunk_size"), [(1, 1), (1, 4096), (64, 4096), (100, 70000), (5, 12), (6, 384)])
def test_widths_and_sizes_are_those_of_the_page(kept: int, chunk_size: int) -> None:
    assert rice_width(kept, chunk_size) == width(kept, chunk_size)
    assert slot_bytes(5, kept, chunk_size) == slot(5, kept, chunk_size)
    assert [rice_width(2**i, 4096) for i in range(4, 13)] == [7, 6, 5, 4, 3, 2, 1, 0, 0]
    assert [chunks_per_group(k) for k in (1, 2, 127, 128, 129, 4096)] == [1024, 512, 16, 8, 8, 8]


@pytest.mark.parametrize("kept", [0, 6])
def test_a_width_for_no_set_is_refused(kept: int) -> None:
    with pytest.raises(ConfigError) as caught:
        rice_width(kept, 5)
    assert str(caught.value) == f"kept={kept}: must be from 1 to chunk_size=5; keep fewer positions"


@pytest.mark.parametrize("row", [[1, 1], [2, 1], [0, 4], [-1, 2]])
@any_coding
def test_what_is_no_set_is_not_encoded(row: list[int], coding: Coding) -> None:
    with pytest.raises(ConfigError) as caught:
        encode_gaps(np.array([[0, 1], row]), 4, coding)
    assert str(caught.value) == "positions=not a set: must ascend from 0 to 3 in each row; sort them"


@given(sets())
def test_the_second_reader_reads_the_same(case: tuple[NDArray[np.int64], int]) -> None:
    index_NK, chunk_size = case
    for coding in Coding:
        data = encode_gaps(index_NK, chunk_size, coding).tobytes()
        assert read_positions(data, 0, *index_NK.shape, chunk_size, coding) == (index_NK.tolist(), len(data))


# -- near the bound --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [16, 32, 48, 64, 100, 128, 256, 512, 1024])
def test_positions_cost_at_most_1_025_of_the_bound(kept: int) -> None:
    """With their table, over the bits that no code can beat."""
    chunks = 1024
    index_NK = random_sets(chunks, kept, 4096, 7)
    bits = 8 * encode_gaps(index_NK, 4096, Coding.COMPACT).size / index_NK.size
    assert 1 <= bits / (log2_binomial(4096, kept) / kept) <= 1.025


def test_bits_per_kept_value_of_a_whole_frame() -> None:
    """A matrix of 4096 x 4096 with k = 64, all headers, codes and scales included."""
    compressor, layout = TopK(), Tiles()
    (shape,) = layout.block_shapes((4096, 4096))
    specs = tuple(
        spec._replace(name=f"0.{spec.name}")
        for spec in compressor.specs(shape.num_chunks, shape.chunk_size, torch.float32, {})
    )
    generator = torch.Generator().manual_seed(0)
    parts = {
        "index": torch.from_numpy(random_sets(shape.num_chunks, 64, 4096, 3)).to(torch.int16),
        "code": torch.randint(0, 4, (shape.num_chunks, 64), generator=generator, dtype=torch.uint8),
        "scale": torch.rand(shape.num_chunks, 1, generator=generator).to(torch.bfloat16),
    }
    envelope = frames.envelope_of(Payload(specs, {0: parts}))
    bits = {coding: 8 * len(encode(envelope, coding=coding)) / parts["index"].numel() for coding in Coding}
    assert bits[Coding.COMPACT] <= 9.85
    assert bits[Coding.FIXED] <= 10.4
    assert 32 * 64 / bits[Coding.COMPACT] >= 207, "times less than dense float32"


# -- what is wrong is named ------------------------------------------------------------------------------------------

GOOD = np.array([[1, 3], [0, 2]])  # unary 0x5a, no low bits


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([1], "table=1 bytes: must be at least 2; refuse it"),
        ([1, 0], "length=2: must be 3 bytes; refuse it"),
        ([1, 0, 0x5A, 0], "length=4: must be 3 bytes; refuse it"),
        ([0, 0, 0x5A], "group 0=0 bytes: must be from 1 to 1; refuse it"),
        ([2, 0, 0x5A, 0], "group 0=2 bytes: must be from 1 to 1; refuse it"),
        ([1, 0, 0x5B], "ones=5: must be 4, one for each position; refuse it"),
        ([1, 0, 0x1A], "ones=3: must be 4, one for each position; refuse it"),
        ([1, 0, 0xA3], "last position=5: must be below 4; refuse it"),
    ],
)
def test_compact_positions_that_are_wrong(data: list[int], text: str) -> None:
    assert encode_gaps(GOOD, 4, Coding.COMPACT).tolist() == [1, 0, 0x5A]
    with pytest.raises(WireError) as caught:
        decode_gaps(np.array(data, np.uint8), 2, 2, 4, Coding.COMPACT)
    assert str(caught.value) == text


def test_groups_that_lend_each_other_bits_are_refused() -> None:
    """Nine chunks of all 128 values: groups of eight and one, 128 and 16 bytes, every bit a one."""
    index_NK = np.tile(np.arange(128), (9, 1))
    data = encode_gaps(index_NK, 130, Coding.COMPACT)
    first, second = 130, 17
    assert data[:4].tolist() == [128, 0, 16, 0]
    assert (data.size, slot_bytes(8, 128, 130), slot_bytes(1, 128, 130)) == (4 + 128 + 16, first, second)
    lent = data.copy()
    lent[4 + 127] &= 0x7F  # one bit fewer in the first group,
    lent[2] = 17  # one more in a byte of its own in the second
    lent = np.append(lent, np.uint8(1))
    with pytest.raises(WireError, match="group 0=wrong bits: must have a one for each position, its last byte too"):
        decode_gaps(lent, 9, 128, 130, Coding.COMPACT)
    padded = np.insert(data, 4 + 128, 0)  # a last byte of zeros, counted in the table
    padded[0] = 129
    with pytest.raises(WireError, match="group 0=wrong bits"):
        decode_gaps(padded, 9, 128, 130, Coding.COMPACT)


def test_padding_of_low_bits_is_zero() -> None:
    index_NK = np.array([[0, 70]])
    for coding, at in ((Coding.FIXED, 1), (Coding.COMPACT, 3)):
        data = encode_gaps(index_NK, 100, coding)
        assert rice_width(2, 100) == 5
        data[at] |= 0x80
        with pytest.raises(WireError, match="padding=0x20: must be zero behind the last of 2 values; refuse it"):
            decode_gaps(data, 1, 2, 100, coding)


def test_bits_behind_the_last_one_of_a_fixed_slot_are_refused() -> None:
    data = encode_gaps(np.array([[0, 1]]), 100, Coding.FIXED)
    data[-1] |= 0x80
    with pytest.raises(WireError, match="ones=3: must be 2"):
        decode_gaps(data, 1, 2, 100, Coding.FIXED)
