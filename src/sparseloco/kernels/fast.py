"""Which blocks a kernel takes: the one place where :class:`sparseloco.channel.Channel` asks for speed.

What is done here is what the channel's own code does, with equal bits, for float32 and bfloat16 parameters as tiles or
chunks, with ``TopK`` and ``SignTwoLevel``: on the CPU by the native kernels, on a card by Triton's. The channel does
the rest. ``SPARSELOCO_KERNELS=torch`` switches all kernels off, and ``triton`` takes Triton's on the CPU too, where its
interpreter runs them: both are for tests.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from torch import Tensor

from sparseloco import bits
from sparseloco.compress.topk import TopK
from sparseloco.compress.values import SignTwoLevel
from sparseloco.kernels import card, cpu, native, native_settle
from sparseloco.kernels.plan import Codec, Round, Settled
from sparseloco.reduce import Mean
from sparseloco.types import LARGEST, Envelope, Merge, OuterOptimizer, Section, Source

if TYPE_CHECKING:
    from sparseloco.channel import Channel, ChannelState


def path() -> str:
    """What encodes and settles on the CPU: the name of an instruction set, or ``torch`` for the definition."""
    return native.instruction_set() if native.available() else "torch"


def digest_tensors(named: Sequence[tuple[str, Tensor]], first_rows: Sequence[int] | None = None) -> tuple[int, int]:
    """:func:`sparseloco.bits.digest_tensors`, by the native kernel for what it takes."""
    return bits.digest_tensors(named, _digest_lanes, first_rows)


def are_sane(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether all magnitudes of each tensor are below ``LARGEST``; not so for NaN."""
    fast = [i for i, tensor in enumerate(tensors) if native.available() and native.takes_magnitude(tensor)]
    threads = native.threads_for(sum(tensors[i].numel() for i in fast))
    sane = native.are_below([tensors[i] for i in fast], LARGEST, threads=threads) if fast else ()
    found = dict(zip(fast, sane, strict=True))
    return [found[i] if i in found else card.is_sane(tensor) for i, tensor in enumerate(tensors)]


def encode(channel: Channel, sources: Sequence[Source], state: ChannelState) -> dict[int, Section]:
    """Sections of the blocks that a kernel encoded, their residuals updated; the sources have been checked."""
    codec = _codec(channel, state)
    if codec is None or channel.feedback is None:
        return {}
    decay = channel.feedback.decay
    return cpu.encode(codec, sources, decay=decay) | card.encode(codec, sources, decay=decay)


def settle_(
    channel: Channel,
    inbox: Sequence[Envelope],
    state: ChannelState,
    live: Sequence[Tensor],
    *,
    outer: OuterOptimizer,
    merge: Merge,
    snapshot: Sequence[Tensor] | None,
    step: int,
) -> Settled:
    """Reduce, step and merge the tensors that a kernel takes."""
    codec, sgd, rule = _codec(channel, state), outer.fixed_step(step), merge.fixed()
    if codec is None or sgd is None or rule is None or channel.transforms or not isinstance(channel.reducer, Mean):
        return Settled()
    round_ = Round(inbox, live, snapshot, channel.reducer.over, sgd, rule)
    here, there = cpu.settle_(codec, round_), card.settle_(codec, round_)
    failed = here.failed if here.failed is not None else there.failed
    return Settled(here.tensors | there.tensors, here.square + there.square, failed)


def _codec(channel: Channel, state: ChannelState) -> Codec | None:
    """The channel in the kernels' words, if they know all of its parts."""
    top_k = channel.compressor
    if not isinstance(top_k, TopK) or not isinstance(top_k.values, SignTwoLevel):
        return None
    if not native.built() and not native.is_off() and any(block.device.type == "cpu" for block in state.anchor):
        _say_once_what_is_missing()
    return Codec(channel, state, top_k, top_k.values)


@cache
def _say_once_what_is_missing() -> None:
    warnings.warn(
        "native kernels=not installed: SparseLoCo must encode in plain PyTorch, some ten times slower, with the "
        "same bits; install a C++ compiler, then sparseloco again",
        stacklevel=2,
    )


def _digest_lanes(block: Tensor, salt: int) -> tuple[int, int]:
    if native.available() and block.device.type == "cpu":
        return native_settle.digest_lanes(block, salt, threads=native.threads_for(block.numel()))
    return bits.digest_lanes(block, salt)
