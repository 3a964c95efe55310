"""The seam between the bench and what it measures: one function per operation and path.

``DEFINITION`` is plain torch, the arithmetic that every other path must reproduce bit for bit. ``FAST`` is what a run
uses on this machine. ``NATIVE_LIMITS`` are the memory passes in native code, if there are any. Nothing else in this
package knows how frames or kernels are called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseloco import wire
from sparseloco.bench.problem import CHUNK, Problem
from sparseloco.compress.topk import TopK
from sparseloco.types import Envelope, Key, Payload

CODINGS = ("compact", "fixed")
_FINGERPRINT, _DIGEST = "0" * 16, "0" * 32

Pass = Callable[..., None]
NATIVE_LIMITS: tuple[Pass, Pass] | None = None
"""``ef_pass(residual, start, live, decay)`` and ``apply_pass(anchor, live, step)`` in native code, or None."""


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
    return _envelope(problem, {f"0.{name}": part for name, part in parts.items()}, peer)


def frame(problem: Problem, peer: int, coding: str = "compact") -> bytes:
    """Frame of one peer in one of the two codings."""
    assert coding in CODINGS
    return wire.encode(payload(problem, peer))


def index_bytes(index_NK: Tensor, coding: str) -> int:
    """Bytes of the index part of one block, with its tables."""
    assert coding in CODINGS
    return wire.pack(index_NK, (CHUNK - 1).bit_length()).size


def _encode(problem: Problem) -> bytes:
    sent = problem.algorithm.channel.outgoing([problem.source], problem.state, key=0)
    return wire.encode(_envelope(problem, dict(sent.tensors), 0))


def _decode_apply(problem: Problem, frames: Sequence[bytes]) -> None:
    channel = problem.algorithm.channel
    inbox = [_unpack(problem, one) for one in frames]
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
    return wire.encode(envelope)


def _unpack(problem: Problem, one: bytes) -> Envelope:
    return wire.decode(one, problem.algorithm.channel.part_specs(problem.state), _FINGERPRINT)


def _envelope(problem: Problem, tensors: dict[str, Tensor], peer: int) -> Envelope:
    specs = problem.algorithm.channel.part_specs(problem.state)
    return Envelope(
        key=Key(0, 0),
        peer=peer,
        weight=1,
        fingerprint=_FINGERPRINT,
        digest=_DIGEST,
        payload=Payload(specs, tensors),
    )


DEFINITION = Path("torch definition", _encode, _decode_apply, _pack, _unpack)
FAST = DEFINITION
