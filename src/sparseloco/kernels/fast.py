"""Which blocks a kernel takes: the one place where :class:`sparseloco.channel.Channel` asks for speed.

They do what the channel's own code does, with equal bits, for the tensors they can handle: float32 and bfloat16
parameters on the CPU, as tiles or chunks, with ``TopK`` and ``SignTwoLevel``. The channel does the rest.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sparseloco import bits
from sparseloco.compress.topk import TopK
from sparseloco.compress.values import SignTwoLevel
from sparseloco.kernels import native, native_settle
from sparseloco.reduce import Mean
from sparseloco.sections import PackedSection, section_as_bytes, specs_by_block
from sparseloco.types import Coding, Envelope, Merge, OuterOptimizer, PartSpec, Section, Source

if TYPE_CHECKING:
    from sparseloco.channel import Channel, ChannelState


class Settled(NamedTuple):
    """What a kernel made of a round.

    Attributes:
        tensors: Numbers of the tensors that are done, their live values included.
        square: Square of the update's 2-norm over these tensors.
        failed: Block whose anchor would have left the range of numbers, or None.
    """

    tensors: frozenset[int]
    square: float
    failed: int | None


def path() -> str:
    """What encodes and settles on the CPU: the name of an instruction set, or ``torch`` for the definition."""
    return native.instruction_set() if native.available() else "torch"


def digest_tensors(named: Sequence[tuple[str, Tensor]]) -> tuple[int, int]:
    """:func:`sparseloco.bits.digest_tensors`, by the native kernel for what it takes."""
    return bits.digest_tensors(named, _digest_lanes)


def _digest_lanes(block: Tensor, salt: int) -> tuple[int, int]:
    if native.available() and block.device.type == "cpu":
        return native_settle.digest_lanes(block, salt, threads=_threads())
    return bits.digest_lanes(block, salt)


def max_magnitudes(tensors: Sequence[Tensor]) -> list[float]:
    """Largest magnitude of each tensor, of any type; infinity where one is NaN, 0 for an empty one."""
    fast = [i for i, tensor in enumerate(tensors) if native.available() and native.takes_magnitude(tensor)]
    magnitudes = native.max_magnitudes([tensors[i] for i in fast], threads=_threads()) if fast else ()
    found = dict(zip(fast, magnitudes, strict=True))
    return [found[i] if i in found else _max_magnitude(tensor) for i, tensor in enumerate(tensors)]


def encode(channel: Channel, sources: Sequence[Source], state: ChannelState) -> dict[int, Section]:
    """Sections of the blocks that a kernel encoded, their residuals updated; the sources have been checked."""
    values = _two_level(channel)
    if values is None or channel.feedback is None:
        return {}
    top_k = channel.compressor
    assert isinstance(top_k, TopK)
    blocks: dict[int, native.EncoderBlock] = {}
    for source, span in zip(sources, state.spans, strict=True):
        if source.start is None:
            continue
        residual = [state.residual[j] for j in span]
        found = native.encoder_blocks(
            channel.layout, source.end, source.start, residual, k=top_k.k, chunk_size=top_k.chunk_size
        )
        blocks.update(zip(span, found or (), strict=False))
    if not blocks:
        return {}
    sections = native.encode(
        list(blocks.values()),
        decay=channel.feedback.decay,
        low=values.low,
        high=values.high,
        threads=_threads(),
    )
    specs = specs_by_block(channel.part_specs(state))
    return {
        j: PackedSection(specs[j], memoryview(section.numpy()), Coding.FIXED)
        for j, section in zip(blocks, sections, strict=True)
    }


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
    plan = _plan(channel, inbox, outer, merge, step)
    jobs: dict[int, native_settle.SettleJob] = {}
    done: set[int] = set()
    if plan is not None:
        specs = specs_by_block(channel.part_specs(state))
        for i, (tensor, span) in enumerate(zip(live, state.spans, strict=True)):
            like = snapshot[i] if snapshot is not None else None
            found = _settle_jobs(channel, inbox, state, span, tensor, like, plan, specs)
            if found is not None:
                jobs.update(zip(span, found, strict=True))
                done.add(i)
    if plan is None or not jobs:
        return Settled(frozenset(), 0.0, None)
    settled = native_settle.settle_top_k(list(jobs.values()), plan, threads=_threads())
    failed = list(jobs)[settled.failed] if settled.failed is not None else None
    return Settled(frozenset(done), sum(settled.squares), failed)


def _two_level(channel: Channel) -> SignTwoLevel | None:
    """The value code that the kernels know, if this channel uses it and they are there."""
    compressor = channel.compressor
    if not isinstance(compressor, TopK) or not isinstance(compressor.values, SignTwoLevel):
        return None
    if not native.available():
        _say_once_what_is_missing()
        return None
    return compressor.values


@cache
def _say_once_what_is_missing() -> None:
    if not native.built():
        warnings.warn(
            "native kernels=not installed: SparseLoCo must encode in plain PyTorch, some ten times slower, with the "
            "same bits; install a C++ compiler, then sparseloco again",
            stacklevel=2,
        )


def _plan(
    channel: Channel, inbox: Sequence[Envelope], outer: OuterOptimizer, merge: Merge, step: int
) -> native_settle.SettlePlan | None:
    """What all blocks share; None if a part of it is not among those that kernels know."""
    values, sgd, rule = _two_level(channel), outer.fixed_step(step), merge.fixed()
    if values is None or sgd is None or rule is None or channel.transforms or not isinstance(channel.reducer, Mean):
        return None
    return native_settle.SettlePlan(
        weights=[envelope.weight for envelope in inbox],
        codings=[_coding(envelope) for envelope in inbox],
        levels=(values.low, values.high),
        over=channel.reducer.over,
        lr=sgd.lr,
        momentum=sgd.momentum,
        nesterov=sgd.nesterov,
        weight_decay=sgd.weight_decay,
        merge=rule.kind,
        alpha=rule.alpha,
    )


def _settle_jobs(
    channel: Channel,
    inbox: Sequence[Envelope],
    state: ChannelState,
    span: range,
    live: Tensor,
    snapshot: Tensor | None,
    plan: native_settle.SettlePlan,
    specs: Mapping[int, tuple[PartSpec, ...]],
) -> list[native_settle.SettleJob] | None:
    """Jobs of one tensor; None if it must be left to the definition."""
    top_k = channel.compressor
    assert isinstance(top_k, TopK)
    anchors = [state.anchor[j] for j in span]
    blocks = native.encoder_blocks(channel.layout, live, anchors, (), k=top_k.k, chunk_size=top_k.chunk_size)
    if blocks is None or (snapshot is not None and not live.is_contiguous()):
        return None
    jobs: list[native_settle.SettleJob] = []
    for j, block in zip(span, blocks, strict=True):
        sections = [
            section_as_bytes(specs[j], envelope.payload.sections[j], coding)
            for envelope, coding in zip(inbox, map(Coding, plan.codings), strict=True)
        ]
        velocity = None
        if plan.momentum and inbox:
            velocity = state.outer[j].setdefault("velocity", torch.zeros_like(block.start))
        jobs.append(
            native_settle.SettleJob(block.start, block.live, block.geometry, block.kept, sections, velocity, snapshot)
        )
    return jobs


def _coding(envelope: Envelope) -> Coding:
    """Coding of the packed blocks of a payload; those that hold parts are packed in it."""
    packed = (section for section in envelope.payload.sections.values() if not isinstance(section, dict))
    return next((section.coding for section in packed), Coding.FIXED)


def _max_magnitude(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    largest = float(tensor.detach().abs().amax())
    return largest if largest == largest else torch.inf


def _threads() -> int:
    return torch.get_num_threads()
