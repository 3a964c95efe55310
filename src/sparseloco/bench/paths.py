"""The seam between the bench and what it measures: one function per operation and path.

``DEFINITION`` is plain torch, the arithmetic that every other path must reproduce bit for bit. ``fast()`` is what a run
uses on this machine. Nothing else in this package knows how frames or kernels are called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from sparseloco import wire
from sparseloco.bench.problem import CHUNK, Problem
from sparseloco.compress.topk import TopK
from sparseloco.kernels import codec, native
from sparseloco.kernels import fast as choice
from sparseloco.types import Coding, Envelope, Key, Payload

P = ParamSpec("P")
T = TypeVar("T")

_FINGERPRINT, _DIGEST = "0" * 16, "0" * 32


@dataclass(frozen=True)
class Path:
    """One implementation.

    Attributes:
        name: As the output names it.
        encode: Delta, error feedback, top-k, codes, residual and the whole frame with its checksum.
        decode_apply: Frames of all peers, checked, reduced, stepped on the anchor and written to the live matrix.
        pack: The parts of a payload to a frame.
        unpack: A frame to the parts of its payload, checked.
    """

    name: str
    encode: Callable[[Problem], bytes]
    decode_apply: Callable[[Problem, Sequence[bytes]], None]
    pack: Callable[[Problem, Envelope], bytes]
    unpack: Callable[[Problem, bytes], Envelope]


def payload(problem: Problem, peer: int) -> Envelope:
    """What one peer sends, as parts."""
    compressor = problem.algorithm.channel.compressor
    assert isinstance(compressor, TopK)
    index_NK, value_NK = problem.kept_by(peer)
    parts = {"index": index_NK.to(torch.int16), **compressor.values.encode(value_NK, key=0)}
    return _envelope(Payload(problem.algorithm.channel.part_specs(problem.state), {0: parts}), peer)


def frame(problem: Problem, peer: int, coding: Coding = Coding.COMPACT) -> bytes:
    """Frame of one peer in one of the two codings."""
    return wire.encode(payload(problem, peer), coding=coding)


def index_bytes(index_NK: Tensor, coding: Coding) -> int:
    """Bytes of the index part of one block, with its tables."""
    return codec.encode(index_NK, CHUNK, coding).size


def _encode(problem: Problem) -> bytes:
    sent = problem.algorithm.channel.outgoing([problem.source], problem.state, key=0)
    return wire.encode(_envelope(sent, 0), coding=Coding.COMPACT)


def _decode_apply(problem: Problem, frames: Sequence[bytes]) -> None:
    channel = problem.algorithm.channel
    inbox = [_received(problem, one) for one in frames]
    channel.check_finite(inbox, problem.state)
    channel.settle_(
        inbox,
        problem.state,
        [problem.live],
        outer=problem.algorithm.outer,
        merge=problem.algorithm.merge,
        snapshot=None,
        step=0,
    )


def _pack(problem: Problem, envelope: Envelope) -> bytes:
    return wire.encode(envelope, coding=Coding.COMPACT)


def _unpack(problem: Problem, one: bytes) -> Envelope:
    envelope = _received(problem, one)
    for parts in envelope.payload.blocks.values():
        assert parts
    return envelope


def _received(problem: Problem, one: bytes) -> Envelope:
    return wire.decode(one, problem.algorithm.channel.part_specs(problem.state), _FINGERPRINT)


def _envelope(payload: Payload, peer: int) -> Envelope:
    return Envelope(key=Key(0, 0), peer=peer, weight=1, fingerprint=_FINGERPRINT, digest=_DIGEST, payload=payload)


def _by_definition(call: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(call)
    def without_kernels(*args: P.args, **kwargs: P.kwargs) -> T:
        with native.definition_only():
            return call(*args, **kwargs)

    return without_kernels


_CALLS = (_encode, _decode_apply, _pack, _unpack)
DEFINITION = Path("torch definition", *map(_by_definition, _CALLS))  # pyright: ignore[reportArgumentType]


def fast() -> Path:
    """What encodes and settles on this machine; the definition if there are no kernels."""
    return Path(f"native, {choice.path()}", *_CALLS) if native.available() else DEFINITION
