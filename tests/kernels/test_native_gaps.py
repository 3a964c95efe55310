"""Native gap coding gives the bytes of the format, and refuses all others."""

from __future__ import annotations

import pytest
import torch

from sparseloco.compress.base import index_dtype
from sparseloco.compress.topk import TopK
from sparseloco.compress.values import SignTwoLevel
from sparseloco.kernels.native_settle import (
    SectionBytes,
    find_fault,
    pack_gaps,
    recode_gaps,
    unpack_gaps,
)
from sparseloco.sections import unpack_section
from sparseloco.types import Coding, Parts, PartSpec
from tests.contracts.cases import heavy_tailed
from tests.kernels.reference import (
    COMPACT,
    FIXED,
    SETS,
    encode_index,
    encode_section,
    group_chunks,
    needs_native,
    random_positions,
    slot,
    use,
    width,
)

pytestmark = needs_native

# (N, K, C): widths from 0 to above 8, K that leaves bytes torn, several groups, short last groups, both integer types.
SHAPES = [
    (1, 1, 1), (1, 1, 2), (3, 1, 7), (2, 2, 2), (5, 3, 12), (9, 6, 384), (17, 16, 4096), (40, 64, 4096),
    (9, 100, 4096), (11, 129, 4096), (10, 256, 4096), (9, 1024, 4096), (3, 2048, 4096), (2, 4096, 4096), (33, 5, 32768),
    (3, 1, 65536), (4, 700, 100_000), (2, 50, 3_000_000), (2, 3, 2**31 - 1), (2, 2, 2**31), (1500, 1, 128),
]  # fmt: skip
any_set = pytest.mark.parametrize("instruction_set", SETS)
any_coding = pytest.mark.parametrize("coding", [FIXED, COMPACT])
any_shape = pytest.mark.parametrize(("chunks", "kept", "chunk_size"), SHAPES)


def as_tensor(rows: list[list[int]], chunk_size: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int16 if chunk_size <= 32768 else torch.int32)


def position_sets(chunks: int, kept: int, chunk_size: int) -> list[list[list[int]]]:
    """Random, packed at the start, packed at the end, and half and half: the longest and shortest codes."""
    first = list(range(kept))
    last = list(range(chunk_size - kept, chunk_size))
    mixed = first[: kept // 2] + last[kept // 2 :]
    generator = torch.Generator().manual_seed(chunks * kept)
    random = random_positions(chunks, kept, chunk_size, generator)
    return [
        random,
        [first] * chunks,
        [last] * chunks,
        [mixed] * chunks,
        [[first, last, mixed][n % 3] for n in range(chunks)],
    ]


def parts_of(section: SectionBytes, coding: Coding) -> Parts:
    """What the definition makes of a section."""
    shape = (section.chunks, section.kept)
    index = PartSpec("index", shape, index_dtype(section.chunk_size), 0, chunk_size=section.chunk_size)
    return unpack_section((index, *SignTwoLevel().specs(*shape)), section.data, coding)


@any_set
@any_coding
@any_shape
def test_bytes_are_those_of_the_format_and_come_back(
    instruction_set: str, coding: Coding, chunks: int, kept: int, chunk_size: int
) -> None:
    use(instruction_set)
    for rows in position_sets(chunks, kept, chunk_size):
        index = as_tensor(rows, chunk_size)
        data = encode_index(rows, chunk_size, coding)
        part = SectionBytes(data, chunks, kept, chunk_size)
        for threads in (1, 2, 3):
            assert pack_gaps(index, chunk_size, coding, threads=threads) == data
            assert torch.equal(unpack_gaps(part, coding, threads=threads), index)
            assert find_fault([part], coding, values=False, threads=threads) is None
        assert recode_gaps(part, coding) == encode_index(rows, chunk_size, Coding(1 - coding))


def test_the_widths_of_the_format() -> None:
    assert [width(k, 4096) for k in (16, 32, 64, 128, 256, 512, 1024, 2048)] == [7, 6, 5, 4, 3, 2, 1, 0]


@any_set
@any_coding
@pytest.mark.parametrize(
    ("rows", "cols", "k"), [(1, 64, 1), (5, 384, 6), (40, 4096, 64), (3, 40_000, 77), (9, 512, 512)]
)
def test_whole_sections_are_accepted(instruction_set: str, coding: Coding, rows: int, cols: int, k: int) -> None:
    use(instruction_set)
    parts = TopK(k=k, chunk_size=cols).encode(heavy_tailed((rows, cols), 3), {}, key=0)
    section = SectionBytes(encode_section(parts, cols, coding), rows, k, cols)
    assert find_fault([section], coding) is None
    got = parts_of(section, coding)
    assert got.keys() == parts.keys()
    for name, part in parts.items():
        assert torch.equal(got[name], part), name


@any_coding
@pytest.mark.parametrize("rows", [[[1, 1]], [[2, 1]], [[-1, 0]], [[0, 8]], [[0, 1], [3, 3]]])
def test_positions_that_do_not_ascend_are_refused(coding: Coding, rows: list[list[int]]) -> None:
    chunk = len(rows) - 1
    text = f"^positions of chunk {chunk}=not a set: must ascend below 8; sort them$"
    with pytest.raises(ValueError, match=text):
        pack_gaps(torch.tensor(rows, dtype=torch.int16), 8, coding)


# -- bytes from outside ----------------------------------------------------------------------------------------------


def sample(coding: Coding, rows: int = 21, k: int = 9, cols: int = 100) -> SectionBytes:
    parts = TopK(k=k, chunk_size=cols).encode(heavy_tailed((rows, cols), 5), {}, key=0)
    return SectionBytes(encode_section(parts, cols, coding), rows, k, cols)


@any_set
@any_coding
def test_a_flipped_bit_is_refused_or_another_section(instruction_set: str, coding: Coding) -> None:
    """What passes must be canonical: its parts encode to the very bytes, and its values are sane."""
    use(instruction_set)
    section = sample(coding)
    passed = 0
    for bit in range(8 * len(section.data)):
        data = bytearray(section.data)
        data[bit // 8] ^= 1 << bit % 8
        changed = section._replace(data=bytes(data))
        if find_fault([changed], coding) is not None:
            continue
        passed += 1
        parts = parts_of(changed, coding)
        index, scale = parts["index"].int(), parts["scale"].float()
        assert bool((index.diff(dim=1) > 0).all())
        assert bool(((index >= 0) & (index < 100)).all())
        assert bool((scale.abs() < 1e37).all())
        assert not bool(scale.signbit().any())
        assert encode_section(parts, 100, coding) == changed.data
    codes_and_scales = 2 * 21 * 9 + 21 * 15
    assert passed > codes_and_scales // 2  # any code is a code; most bits of a scale give another scale


@any_set
@any_coding
def test_every_truncation_is_refused(instruction_set: str, coding: Coding) -> None:
    use(instruction_set)
    section = sample(coding)
    for length in range(len(section.data)):
        assert find_fault([section._replace(data=section.data[:length])], coding) is not None
    assert find_fault([section._replace(data=bytes(section.data) + b"\0")], coding) is not None


@any_set
@any_coding
def test_random_bytes_are_refused_or_canonical(instruction_set: str, coding: Coding) -> None:
    use(instruction_set)
    generator = torch.Generator().manual_seed(coding)
    for case in range(300):
        chunks, kept = 1 + case % 9, 1 + case % 5
        chunk_size = kept + case % 40
        size = int(torch.randint(0, 60, (1,), generator=generator))
        data = bytes(torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).tolist())
        section = SectionBytes(data, chunks, kept, chunk_size)
        if find_fault([section], coding) is None:
            assert encode_section(parts_of(section, coding), chunk_size, coding) == data


def broken(section: SectionBytes, at: int, byte: int) -> SectionBytes:
    data = bytearray(section.data)
    data[at] = byte
    return section._replace(data=bytes(data))


@any_set
def test_each_fault_says_what_it_is(instruction_set: str) -> None:
    use(instruction_set)
    rows, k, cols = 21, 9, 100
    assert group_chunks(k) == 120  # so these are one group
    fixed, compact = sample(FIXED), sample(COMPACT)
    scale = len(fixed.data) - 2 * rows
    low = (rows * k * width(k, cols) + 7) // 8
    texts = {
        "table=1 bytes: must hold all groups": (compact._replace(data=compact.data[:1]), COMPACT),
        "table, group 0: size must be possible for its positions": (broken(compact, 1, 255), COMPACT),
        f"length={len(fixed.data) - 1} bytes: must be that of the parts": (fixed._replace(data=fixed.data[1:]), FIXED),
        "low values: bits behind the last must be zero": (broken(fixed, low - 1, 128 | fixed.data[low - 1]), FIXED),
        "group 0=wrong bits: must have a one for each position and none behind": (
            broken(fixed, low + slot(rows, k, cols) - 1, 128),
            FIXED,
        ),
        "chunk 0: last position must be below the chunk size": (broken(fixed, low, 0), FIXED),
        "codes: bits behind the last must be zero": (
            broken(fixed, scale - 1, 128 | fixed.data[scale - 1]),
            FIXED,
        ),
        "scale of chunk 20=not finite: must be finite (below 1e+37)": (broken(fixed, scale + 41, 0x7F), FIXED),
        "scale of chunk 20=negative: must have no minus sign": (
            broken(fixed, scale + 41, 0x80 | fixed.data[scale + 41]),
            FIXED,
        ),
    }
    for text, (section, coding) in texts.items():
        good = sample(coding)
        assert find_fault([good, section, good], coding) == (1, text + "; refuse it")


@any_set
@pytest.mark.parametrize(
    ("bits", "good"), [(0, True), (0x7CF0, True), (0x7CF1, False), (0x7F80, False), (0x8000, False)]
)
def test_scales_up_to_the_largest(instruction_set: str, bits: int, good: bool) -> None:
    use(instruction_set)
    section = sample(FIXED)
    at = len(section.data) - 2
    changed = broken(broken(section, at, bits & 255), at + 1, bits >> 8)
    assert (find_fault([changed], FIXED) is None) == good


def test_impossible_shapes_are_refused() -> None:
    for shape in [(1, 0, 4), (1, 5, 4), (-1, 1, 4), (2**40, 1, 2**20), (1, 1, 2**31 + 1)]:
        with pytest.raises(ValueError, match=r"shape: must have 1 <= K <= C <= 2\^31, and N \* C at most 2\^48"):
            find_fault([SectionBytes(b"", *shape)], FIXED)
