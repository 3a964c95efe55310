"""The words that all layers share: blocks, payloads, envelopes and tensor tables.

Nothing here computes. Shape letters used everywhere: N chunks, C values in a chunk, K kept values, R peers.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

Blocks = tuple[Tensor, ...]
"""2-D groups ``[N, C]``, one per chunk size. One tensor gives up to eight: body and edges of its panels."""

Parts = dict[str, Tensor]
"""What a compressor makes of one block, by part name, for example ``index`` and ``code``."""

Schedule = Callable[[int], float]
"""A setting that changes with the shared step, for example a learning rate."""

LARGEST = 9.999999933815813e36
"""Magnitudes from here on count as not finite: sums and levels times a scale stay below float32's 3.4e38.

The float32 next to 1e37, for every type, so that kernels need one comparison.
"""

FOREIGN = 2**32
"""Numbers of other peers of a store start here, above all that a frame can hold; what follows is the peer's id."""


class Coding(enum.IntEnum):
    """How positions lie in a frame: padded to a size known before, or as short as they are."""

    FIXED = 0
    COMPACT = 1


class Key(NamedTuple):
    """Address of one message: the round of one fragment."""

    round: int
    fragment: int


def foreign_number(peer_id: str) -> int:
    """Number of a peer that is known by an id of hex digits; in the order of ids."""
    return FOREIGN + int(peer_id, 16)


def name_of(peer: int) -> int | str:
    """What people call a peer: its number, or the first 8 digits of its id.

    Example:
        >>> name_of(3), name_of(foreign_number("0a1b2c3d" + 24 * "0"))
        (3, '0a1b2c3d')
    """
    return peer if peer < FOREIGN else f"{peer - FOREIGN:032x}"[:8]


class TensorSpec(NamedTuple):
    """One row of the tensor table: what peers must agree on before they can add each other's payloads."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements, 1 for a scalar."""
        return int(torch.Size(self.shape).numel())


class PartSpec(NamedTuple):
    """Shape and wire width of one part of a payload; known before any value is.

    ``bits`` is what one element costs on the wire: the full item for floats, fewer for packed integers. ``chunk_size``
    is not 0 for positions: each row then holds strictly ascending numbers below it, which travel as gaps, and ``bits``
    is 0. ``signed`` is False for floats that are never negative, such as the scale of a chunk.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: int
    chunk_size: int = 0
    signed: bool = True

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Packed(Protocol):
    """The parts of one block as the bytes of a frame, checked; tensors are made of them when asked for."""

    @property
    def coding(self) -> Coding:
        """Coding of the positions in ``data``."""
        ...

    @property
    def data(self) -> bytes | memoryview:
        """One section of a frame's body."""
        ...

    def parts(self) -> Parts:
        """All parts, made anew at every call."""
        ...


Section = Parts | Packed
"""What a payload holds of one block: its parts, or the bytes of a frame that stand for them."""


@dataclass(frozen=True)
class Payload:
    """What one fragment of one replica sends in one round.

    Received payloads stay packed, since the parts of many peers would take tens of times the memory of their frames.

    Attributes:
        specs: Static table of the parts (``"<block>.<part>"``); it follows from algorithm and tensor shapes alone.
        sections: What each block sends, by block number, in the order of ``specs``.
        linear: The mean of payloads decodes to the mean of what they decode to.
    """

    specs: tuple[PartSpec, ...]
    sections: Mapping[int, Section]
    linear: bool = False

    @classmethod
    def of_tensors(cls, specs: Sequence[PartSpec], tensors: Mapping[str, Tensor], linear: bool = False) -> Payload:
        """A payload of parts that are named as in ``specs``."""
        sections: dict[int, Section] = {}
        for name, part in tensors.items():
            block, _, rest = name.partition(".")
            parts = sections.setdefault(int(block), {})
            assert isinstance(parts, dict)
            parts[rest] = part
        return cls(tuple(specs), sections, linear)

    @property
    def blocks(self) -> Mapping[int, Parts]:
        """Parts by block number. Those of a packed block are made at each access and not kept."""
        return _Unpacked(self.sections)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All parts by the names of ``specs``; those of packed blocks are made anew at every call."""
        return {f"{j}.{name}": part for j, parts in self.blocks.items() for name, part in parts.items()}

    def floats(self) -> Iterator[tuple[int, Tensor]]:
        """Every part of a float type that is not packed, with the number of its block."""
        for j, section in self.sections.items():
            if isinstance(section, dict):
                yield from ((j, part) for part in section.values() if part.is_floating_point())


class _Unpacked(Mapping[int, Parts]):
    """Parts of sections, made when asked for."""

    def __init__(self, sections: Mapping[int, Section]) -> None:
        self._sections = sections

    def __getitem__(self, block: int) -> Parts:
        section = self._sections[block]
        return section if isinstance(section, dict) else section.parts()

    def __iter__(self) -> Iterator[int]:
        return iter(self._sections)

    def __len__(self) -> int:
        return len(self._sections)


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """A payload with its address, its sender and what the sender believes.

    Attributes:
        key: Round and fragment.
        peer: Sender; in a payload that was reduced on the way, the lowest of ``covers``.
        weight: Integer weight of the sender in the mean, below 2**29; 0: it contributes nothing to this round, and its
            payload has no sections.
        fingerprint: Algorithm and tensor table of the sender, 16 hex digits.
        digest: Shared state of this fragment at the sender when it posted, 32 hex digits.
        payload: What to add.
        covers: Peers whose contributions this payload holds; empty means ``(peer,)``.
    """

    key: Key
    peer: int
    weight: int
    fingerprint: str
    digest: str
    payload: Payload
    covers: tuple[int, ...] = ()

    @property
    def peers(self) -> tuple[int, ...]:
        """Every peer whose contribution is inside."""
        return self.covers or (self.peer,)


@dataclass(frozen=True)
class Source:
    """What a delta is made of, without making it.

    Attributes:
        start: Anchor blocks of one tensor in their stored form; None if ``end`` holds a gradient.
        end: The live parameter, or its gradient.
        scale: Factor on a gradient; 1 for differences of parameters.
    """

    start: Sequence[Tensor] | None
    end: Tensor
    scale: float = 1.0


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Data type of anchor, residual and update for a parameter of ``dtype``: at least float32."""
    return torch.promote_types(dtype, torch.float32)


OuterState = dict[str, Any]
"""Shared state of one block, by name; tensors, and plain numbers where ``torch.optim`` keeps them."""


class FixedStep(NamedTuple):
    """One outer step of SGD in fixed arithmetic (:class:`sparseloco.outer.Sgd`); factors are rounded to float32."""

    lr: float
    momentum: float
    nesterov: bool
    weight_decay: float


class OuterOptimizer(Protocol):
    """Steps one anchor block at a time; ``state`` starts empty and is filled by the first step."""

    name: ClassVar[str]
    portable: ClassVar[bool]

    def fixed_step(self, step: int) -> FixedStep | None:
        """The step in fixed arithmetic, so that a kernel may take it; None if this optimizer has none."""
        ...

    def step_(self, anchor: Tensor, update: Tensor, state: OuterState, step: int) -> None:
        """Move ``anchor`` by ``update`` in place; ``step`` is the shared inner step, for schedules."""
        ...


class FixedMerge(NamedTuple):
    """A merge that kernels know.

    Attributes:
        kind: ``replace``: the anchor; ``blend``: ``(1 - alpha) * anchor + alpha * live``; ``carry``:
            ``anchor + (live - snapshot)``.
        alpha: For ``blend``.
    """

    kind: Literal["replace", "blend", "carry"]
    alpha: float = 0.0


class Merge(Protocol):
    """New live values of one tensor, in the type of its state; the caller rounds them to the parameter's type."""

    name: ClassVar[str]
    needs_snapshot: ClassVar[bool]

    def fixed(self) -> FixedMerge | None:
        """The same as numbers, so that a kernel may merge; None if this merge is of another kind."""
        ...

    def __call__(self, anchor: Tensor, live: Tensor, snapshot: Tensor | None) -> Tensor:
        """``snapshot`` holds the live values at the time of the post, if asked for."""
        ...


class UpdateTransform(Protocol):
    """Maps the update blocks of one fragment, given one after another in stored form.

    ``chunkwise``: each chunk is mapped alone, so that shards can share out the chunks.
    """

    name: ClassVar[str]
    chunkwise: ClassVar[bool]
    portable: ClassVar[bool]

    def __call__(self, updates: Iterator[Tensor]) -> Iterator[Tensor]:
        """Transformed blocks, in the same order."""
        ...
