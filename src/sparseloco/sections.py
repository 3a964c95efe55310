"""Sections: what one block sends, as bytes.

A section is the block's parts in the order of their table, each beginning on a byte: positions as gaps (``gaps.py``),
other small integers packed, floats as they are. A frame's body is its sections one after another; each decodes alone.
``docs/wire-format.md`` has the layout. Bytes from outside are checked here, all of them, before they count as packed.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from sparseloco.bits import check_packed, pack, unpack
from sparseloco.compress.values import SignTwoLevel
from sparseloco.errors import DivergenceError, WireError
from sparseloco.gaps import Bytes, compact_bytes, fixed_bytes, most_bytes
from sparseloco.kernels import codec, native
from sparseloco.types import LARGEST, Coding, Packed, Parts, PartSpec, Section

_BITS_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class PackedSection:
    """A section that has been checked, or that an encoder of ours made.

    Args:
        specs: Parts of the block, without its number in their names.
        data: Their bytes; not copied.
        coding: Coding of the positions.
    """

    specs: tuple[PartSpec, ...]
    data: bytes | memoryview
    coding: Coding

    def parts(self) -> Parts:
        """All parts, made anew at every call."""
        return unpack_section(self.specs, self.data, self.coding)


def part_bytes(spec: PartSpec, coding: Coding = Coding.FIXED) -> int:
    """Size of one part; of positions in COMPACT coding the largest.

    Example:
        >>> part_bytes(PartSpec("code", (3, 3), torch.uint8, 2))
        3
    """
    if spec.chunk_size:
        chunks, kept = spec.shape
        count = fixed_bytes if coding == Coding.FIXED else most_bytes
        return count(chunks, kept, spec.chunk_size)
    return (spec.numel * spec.bits + 7) // 8


def section_bytes(specs: Sequence[PartSpec], coding: Coding = Coding.FIXED) -> int:
    """Size of these parts: exact in FIXED coding, the largest in COMPACT coding. Works for many blocks, too."""
    return sum(part_bytes(spec, coding) for spec in specs)


def specs_by_block(specs: Sequence[PartSpec]) -> Mapping[int, tuple[PartSpec, ...]]:
    """Rows of a payload's table by block number, with that prefix taken off their names."""
    return _by_block(tuple(specs))


@lru_cache(maxsize=64)
def _by_block(specs: tuple[PartSpec, ...]) -> Mapping[int, tuple[PartSpec, ...]]:
    blocks: dict[int, list[PartSpec]] = {}
    for spec in specs:
        block, _, name = spec.name.partition(".")
        blocks.setdefault(int(block), []).append(spec._replace(name=name))
    return {block: tuple(rows) for block, rows in blocks.items()}


def pack_section(specs: Sequence[PartSpec], parts: Mapping[str, Tensor], coding: Coding) -> bytes:
    """Bytes of the parts of one block.

    Args:
        specs: Table of the block, without its number in the names.
        parts: Tensors on any device, of the shapes and types of the table.
        coding: How positions are laid out.

    Raises:
        DivergenceError: if a float is not finite, since no reader would take it.
        ConfigError: if positions do not ascend.
    """
    return b"".join(_pack_part(parts[spec.name], spec, coding) for spec in specs)


def unpack_section(specs: Sequence[PartSpec], data: bytes | memoryview, coding: Coding) -> Parts:
    """Parts of the bytes of one block, on the CPU, in memory of their own.

    Raises:
        WireError: if :func:`pack_section` cannot have made these bytes.
    """
    return {spec.name: _unpack_part(piece, spec, coding) for spec, piece in _cut(specs, _array(data), coding)}


def check_section(specs: Sequence[PartSpec], data: bytes | memoryview, coding: Coding) -> None:
    """Raise what :func:`unpack_section` would raise."""
    for spec, piece in _cut(specs, _array(data), coding):
        if spec.dtype.is_floating_point:
            _as_floats(piece, spec)
            continue
        with _named(f"part {spec.name}"):
            if spec.chunk_size:
                codec.check(_positions(piece, spec), coding)
            else:
                check_packed(piece, spec.bits, spec.numel)


def recode_section(specs: Sequence[PartSpec], data: bytes | memoryview, source: Coding, target: Coding) -> bytes:
    """A section that has been checked, in another coding."""
    if source == target:
        return bytes(data)
    pieces: list[Bytes] = []
    for spec, piece in _cut(specs, _array(data), source):
        if spec.chunk_size:
            piece = codec.recode(_positions(piece, spec), source, target)
        pieces.append(piece)
    return b"".join(piece.tobytes() for piece in pieces)


def section_as_bytes(specs: Sequence[PartSpec], section: Section, coding: Coding) -> bytes | memoryview:
    """What a payload holds of one block, in the coding of a frame."""
    if isinstance(section, dict):
        return pack_section(specs, section, coding)
    return section.data if section.coding == coding else recode_section(specs, section.data, section.coding, coding)


def check_floats(specs: Sequence[PartSpec], section: Packed) -> None:
    """Refuse what no reader would take: floats of a section that an encoder of ours packed.

    Raises:
        DivergenceError: as :func:`pack_section` does.
    """
    for spec, piece in _cut(specs, _array(section.data), section.coding):
        if spec.dtype.is_floating_point and piece.size:  # a shard may hold nothing, which has no view in another type
            _check_finite(torch.from_numpy(piece.copy()).view(spec.dtype), spec)


def split_body(
    specs: Mapping[int, tuple[PartSpec, ...]], body: bytes | memoryview, coding: Coding
) -> dict[int, Packed]:
    """Sections of a frame's body by block number, all checked; they share its memory.

    Raises:
        WireError: naming block and part.
    """
    view = memoryview(body)
    sections: dict[int, Packed] = {}
    start = 0
    for (block, rows), length in zip(specs.items(), section_lengths(specs, view, coding), strict=True):
        sections[block] = PackedSection(rows, view[start : start + length], coding)
        start += length
    _check_all(specs, sections, coding)
    return sections


def _check_all(specs: Mapping[int, tuple[PartSpec, ...]], sections: Mapping[int, Packed], coding: Coding) -> None:
    """Check sections, those of the default code by one call of a kernel; what it refuses is refused in our words."""
    whole = [block for block, rows in specs.items() if native.available() and _is_two_level(rows)]
    found = [_positions(_array(sections[block].data), specs[block][0]) for block in whole]
    fault = codec.first_fault(found, coding) if whole else None
    suspects = set(specs).difference(whole) | ({whole[fault[0]]} if fault else set())
    for block in sorted(suspects):
        with _named(f"block {block}"):
            check_section(specs[block], sections[block].data, coding)
    if fault:
        raise WireError(f"block {whole[fault[0]]}, {fault[1]}")


def _is_two_level(rows: tuple[PartSpec, ...]) -> bool:
    """Whether a block is positions with the values of ``SignTwoLevel``, which kernels check as a whole."""
    return bool(rows) and bool(rows[0].chunk_size) and rows[1:] == SignTwoLevel().specs(*rows[0].shape)


def section_lengths(specs: Mapping[int, tuple[PartSpec, ...]], body: bytes | memoryview, coding: Coding) -> list[int]:
    """Bytes of each block in a body, read off the tables of its positions alone.

    Raises:
        WireError: if a table cannot be right, or if the lengths do not add up to the body's.
    """
    data = _array(body)
    ends = [0]
    for block, rows in specs.items():
        end = ends[-1]
        with _named(f"block {block}"):
            for spec in rows:
                end += _length(spec, data[end:], coding)
        ends.append(end)
    if ends[-1] != data.size:
        raise WireError(f"body={data.size} bytes: must be {ends[-1]} as its tables say; refuse it")
    return [end - start for start, end in itertools.pairwise(ends)]


def _cut(specs: Sequence[PartSpec], data: Bytes, coding: Coding) -> Iterator[tuple[PartSpec, Bytes]]:
    """Parts with their bytes; what is left over is refused."""
    start = 0
    for spec in specs:
        length = _length(spec, data[start:], coding)
        if start + length > data.size:
            break
        yield spec, data[start : start + length]
        start += length
    else:
        if start == data.size:
            return
    raise WireError(f"section={data.size} bytes: must be as long as its parts; refuse it")


def _length(spec: PartSpec, data: Bytes, coding: Coding) -> int:
    if spec.chunk_size and coding == Coding.COMPACT:
        chunks, kept = spec.shape
        with _named(f"part {spec.name}"):
            return compact_bytes(data, chunks, kept, spec.chunk_size)
    return part_bytes(spec)


def _pack_part(tensor: Tensor, spec: PartSpec, coding: Coding) -> bytes:
    if spec.chunk_size:
        return codec.encode(tensor, spec.chunk_size, coding).tobytes()
    if not spec.dtype.is_floating_point:
        return pack(tensor, spec.bits).tobytes()
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    _check_finite(flat, spec)
    return flat.view(_BITS_VIEW[flat.element_size()]).numpy().tobytes()


def _unpack_part(data: Bytes, spec: PartSpec, coding: Coding) -> Tensor:
    if spec.chunk_size:
        with _named(f"part {spec.name}"):
            return codec.decode(_positions(data, spec), coding).to(spec.dtype)
    if spec.dtype.is_floating_point:
        return _as_floats(data, spec)
    with _named(f"part {spec.name}"):
        values = unpack(data, spec.bits, spec.numel)
    return torch.from_numpy(values.astype(np.int32)).to(spec.dtype).reshape(spec.shape)


def _positions(data: Bytes, spec: PartSpec) -> codec.Positions:
    chunks, kept = spec.shape
    return codec.Positions(data, chunks, kept, spec.chunk_size)


def _as_floats(data: Bytes, spec: PartSpec) -> Tensor:
    if not data.size:  # a shard may hold no chunk of a block
        return torch.empty(spec.shape, dtype=spec.dtype)
    # Slices of a body need not be aligned to their item size, so each part gets its own memory.
    tensor = torch.from_numpy(data.copy()).view(spec.dtype).reshape(spec.shape)
    wrong = _wrong_floats(tensor, spec)
    if wrong:
        raise WireError(f"part {spec.name}={wrong}; refuse it")
    return tensor


def _check_finite(tensor: Tensor, spec: PartSpec) -> None:
    wrong = _wrong_floats(tensor, spec)
    if wrong:
        raise DivergenceError(f"part {spec.name}={wrong} to leave its replica; lower the learning rate")


def _wrong_floats(tensor: Tensor, spec: PartSpec) -> str | None:
    if tensor.numel() and not float(tensor.abs().amax()) < LARGEST:  # NaN is below nothing
        return f"not finite: must be finite (below {LARGEST:g})"
    if not spec.signed and bool(tensor.signbit().any()):
        return "negative: must have no minus sign"
    return None


@contextmanager
def _named(what: str) -> Generator[None]:
    """Put a name before what a check says."""
    try:
        yield
    except WireError as error:
        raise WireError(f"{what}, {error}") from None


def _array(data: bytes | memoryview) -> Bytes:
    return np.frombuffer(data, dtype=np.uint8)
