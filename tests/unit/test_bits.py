"""Packing is exact for every width; a digest adds over rows and notices every change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseloco.bits import digest_lanes, pack, unpack
from sparseloco.errors import WireError
from tests.contracts.cases import heavy_tailed


@st.composite
def packed_values(draw: st.DrawFn) -> tuple[int, list[int]]:
    bits = draw(st.integers(0, 32))
    return bits, draw(st.lists(st.integers(0, 2**bits - 1), max_size=40))


@given(packed_values())
def test_unpack_undoes_pack(case: tuple[int, list[int]]) -> None:
    bits, values = case
    data = pack(torch.tensor(values, dtype=torch.int64), bits)
    assert data.dtype == np.uint8
    assert data.size == -(-len(values) * bits // 8)
    assert unpack(data, bits, len(values)).tolist() == values


@pytest.mark.parametrize("bits", range(33))
def test_every_width_and_length(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    for count in range(41):
        values = torch.randint(0, 2**bits, (count,), generator=generator)
        if count:
            values[0] = 2**bits - 1
        assert unpack(pack(values, bits), bits, count).tolist() == values.tolist()


@given(packed_values())
def test_bits_lie_least_significant_first_without_gaps(case: tuple[int, list[int]]) -> None:
    """The format in one line of Python: a little-endian number whose digits are the values."""
    bits, values = case
    number = sum(value << (i * bits) for i, value in enumerate(values))
    assert pack(torch.tensor(values, dtype=torch.int64), bits).tobytes() == number.to_bytes(
        -(-len(values) * bits // 8), "little"
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_any_integer_type_shape_and_stride(dtype: torch.dtype) -> None:
    values = torch.arange(24).reshape(4, 6).to(dtype).T
    assert unpack(pack(values, 5), 5, 24).tolist() == values.reshape(-1).tolist()


@pytest.mark.parametrize(("size", "bits", "count"), [(2, 2, 4), (0, 2, 4), (3, 16, 1), (1, 8, 0), (4, 12, 3)])
def test_a_wrong_size_is_refused(size: int, bits: int, count: int) -> None:
    expected = (count * bits + 7) // 8
    text = f"packed part={size} bytes: must be {expected} for {count} values of {bits} bits; refuse it"
    with pytest.raises(WireError) as caught:
        unpack(np.zeros(size, dtype=np.uint8), bits, count)
    assert str(caught.value) == text


@pytest.mark.parametrize(("data", "bits", "count", "padding"), [([0x80], 1, 7, "0x1"), ([1, 0x30], 5, 2, "0xc")])
def test_bits_behind_the_last_value_are_refused(data: list[int], bits: int, count: int, padding: str) -> None:
    with pytest.raises(WireError) as caught:
        unpack(np.array(data, dtype=np.uint8), bits, count)
    assert str(caught.value) == f"padding={padding}: must be zero behind the last of {count} values; refuse it"


# -- digests ---------------------------------------------------------------------------------------------------------

any_type = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32])


def add(*digests: tuple[int, int]) -> tuple[int, int]:
    return tuple(sum(lane) % 2**64 for lane in zip(*digests, strict=True))


def block(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (heavy_tailed((rows, cols), rows * 100 + cols, torch.float64) * 64).to(dtype)


@any_type
@given(rows=st.integers(1, 12), cols=st.integers(1, 12), cut=st.integers(0, 12), salt=st.integers(0, 2**60))
def test_digest_adds_over_rows(dtype: torch.dtype, rows: int, cols: int, cut: int, salt: int) -> None:
    """Each shard is salted with the number of its first row, so no shard needs the whole."""
    x, cut = block(rows, cols, dtype), min(cut, rows)
    shards = add(digest_lanes(x[:cut], salt), digest_lanes(x[cut:], salt + cut))
    assert shards == digest_lanes(x, salt)


@given(rows=st.integers(1, 8), cols=st.integers(1, 8), place=st.integers(0, 63), bit=st.integers(0, 31))
def test_one_flipped_bit_changes_both_lanes(rows: int, cols: int, place: int, bit: int) -> None:
    """Certain, not likely: all factors are odd."""
    x = block(rows, cols)
    other = x.clone()
    other.view(torch.int32).view(-1)[place % x.numel()] ^= -(2**31) if bit == 31 else 2**bit
    for one, two in zip(digest_lanes(x, 5), digest_lanes(other, 5), strict=True):
        assert one != two


@given(rows=st.integers(1, 8), cols=st.integers(2, 8), seed=st.integers(0, 1000))
def test_two_swapped_elements_change_it(rows: int, cols: int, seed: int) -> None:
    x = torch.arange(rows * cols, dtype=torch.float32).reshape(rows, cols)
    i, j = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(seed))[:2].tolist()
    other = x.clone()
    other.view(-1)[i], other.view(-1)[j] = float(x.view(-1)[j]), float(x.view(-1)[i])
    assert digest_lanes(x, 5) != digest_lanes(other, 5)


def test_place_shape_salt_and_sign_of_zero_count() -> None:
    zero, one = torch.zeros(2, 3), torch.zeros(2, 3)
    one[0, 0] = 1.0
    moved = torch.zeros(2, 3)
    moved[0, 1] = 1.0
    below = torch.zeros(2, 3)
    below[1, 0] = 1.0
    everything = [
        digest_lanes(zero, 0),
        digest_lanes(one, 0),
        digest_lanes(moved, 0),
        digest_lanes(below, 0),
        digest_lanes(-zero, 0),
        digest_lanes(zero, 1),
        digest_lanes(torch.zeros(3, 2), 0),
        digest_lanes(torch.full((2, 3), torch.nan), 0),
    ]
    assert len(set(everything)) == len(everything)


@given(side=st.integers(2, 8), salt=st.integers(0, 100))
def test_a_transpose_is_another_matrix(side: int, salt: int) -> None:
    x = torch.arange(side * side, dtype=torch.float32).reshape(side, side)
    assert digest_lanes(x, salt) != digest_lanes(x.T, salt)


def test_every_place_of_a_run_and_every_run_counts() -> None:
    """Words share a factor by their place in 64, and runs of 64 have one each."""
    words = torch.zeros(2, 400, dtype=torch.int32)
    seen = {digest_lanes(words, 1)}
    for place in range(words.numel()):
        words.view(-1)[place] = 1
        seen.add(digest_lanes(words, 1))
        words.view(-1)[place] = 0
    assert len(seen) == words.numel() + 1


def test_long_rows_and_many_rows_are_taken_in_pieces() -> None:
    """What the definition says, word by word in Python."""
    shape = (3, 2**20 + 70)
    words = torch.zeros(shape, dtype=torch.int32)
    words[2, 5], words[0, 2**20 + 65], words[1, 64] = 7, -1, 123_456_789
    salt, mask = 11, 2**64 - 1

    def mix(x: int) -> int:
        x &= mask
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    lanes = [0, 0]
    for lane in (0, 1):
        for n, c in [(2, 5), (0, 2**20 + 65), (1, 64)]:
            run, place = divmod(c, 64)
            factor = (mix(2**63 + 2 * place + lane) >> 32 | 1) * (mix(~(2 * run + lane)) | 1)
            lanes[lane] += (int(words[n, c]) & (2**32 - 1)) * factor * (mix(2 * (salt + n) + lane) | 1)
        lanes[lane] += lane * sum(mix(2 * (salt + n) + lane) | 1 for n in range(3))
    assert digest_lanes(words, salt) == (lanes[0] & mask, lanes[1] & mask)


def test_strides_do_not_matter() -> None:
    x = block(5, 7)
    assert digest_lanes(x.T.contiguous().T, 3) == digest_lanes(x, 3)


def test_an_empty_block_adds_nothing() -> None:
    assert digest_lanes(torch.zeros(0, 4), 9) == digest_lanes(torch.zeros(4, 0), 9) == (0, 0)
