"""Channel work by the native kernels: all blocks of a fragment in one call, so that threads start once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparseloco.kernels import native, native_settle
from sparseloco.kernels.plan import Codec, Round, Settled
from sparseloco.sections import PackedSection, section_as_bytes
from sparseloco.types import Coding, Envelope, Section, Source


def encode(codec: Codec, sources: Sequence[Source], *, decay: float) -> dict[int, Section]:
    """Sections of the blocks that the kernels take, by number; their residuals are updated."""
    blocks: dict[int, native.EncoderBlock] = {}
    for i, (source, span) in enumerate(zip(sources, codec.state.spans, strict=True)):
        if source.start is not None and native.available():
            residual = [codec.state.residual[j] for j in span]
            blocks.update(zip(span, _blocks(codec, i, source.end, source.start, residual) or (), strict=False))
    if not blocks:
        return {}
    values, threads = codec.values, native.threads_for(sum(block.start.numel() for block in blocks.values()))
    sections = native.encode(list(blocks.values()), decay=decay, low=values.low, high=values.high, threads=threads)
    return {
        j: PackedSection(codec.specs[j], section.numpy().data, Coding.FIXED)
        for j, section in zip(blocks, sections, strict=True)
    }


def settle_(codec: Codec, round_: Round) -> Settled:
    """Reduce, step and merge the tensors that the kernels take."""
    jobs: dict[int, native_settle.SettleJob] = {}
    done: set[int] = set()
    codings = [_coding(envelope) for envelope in round_.inbox]
    for i in range(len(round_.live) if native.available() else 0):
        found = _jobs(codec, round_, codings, i)
        if found is not None:
            jobs.update(found)
            done.add(i)
    if not jobs:
        return Settled(frozenset(done))
    threads = native.threads_for(sum(job.anchor.numel() for job in jobs.values()))
    settled = native_settle.settle_top_k(list(jobs.values()), _plan(codec, round_, codings), threads=threads)
    failed = list(jobs)[settled.failed] if settled.failed is not None else None
    return Settled(frozenset(done), sum(settled.squares), failed)


def _blocks(
    codec: Codec, number: int, live: Tensor, start: Sequence[Tensor], residual: Sequence[Tensor]
) -> list[native.EncoderBlock] | None:
    top_k = codec.top_k
    layout = codec.state.layouts[number]
    return native.encoder_blocks(layout, live, start, residual, k=top_k.k, chunk_size=top_k.chunk_size)


def _jobs(
    codec: Codec, round_: Round, codings: Sequence[Coding], number: int
) -> dict[int, native_settle.SettleJob] | None:
    """Jobs of one tensor by block; None if it must be left to the definition."""
    live, snapshot, span = round_.live[number], round_.snapshot_of(number), codec.state.spans[number]
    blocks = _blocks(codec, number, live, [codec.state.anchor[j] for j in span], ())
    if blocks is None or (snapshot is not None and snapshot.stride() != live.stride()):
        return None
    jobs: dict[int, native_settle.SettleJob] = {}
    for j, block in zip(span, blocks, strict=True):
        velocity = codec.velocity(j, block.start) if round_.outer.momentum and round_.inbox else None
        if not block.geometry.num_chunks:  # of a shard that holds none of them
            continue
        sections = [
            section_as_bytes(codec.specs[j], envelope.payload.sections[j], coding)
            for envelope, coding in zip(round_.inbox, codings, strict=True)
        ]
        jobs[j] = native_settle.SettleJob(
            block.start, block.live, block.geometry, block.kept, sections, velocity, snapshot
        )
    return jobs


def _plan(codec: Codec, round_: Round, codings: Sequence[Coding]) -> native_settle.SettlePlan:
    return native_settle.SettlePlan(
        weights=[envelope.weight for envelope in round_.inbox],
        codings=codings,
        levels=(codec.values.low, codec.values.high),
        over=round_.over,
        lr=round_.outer.lr,
        momentum=round_.outer.momentum,
        nesterov=round_.outer.nesterov,
        weight_decay=round_.outer.weight_decay,
        merge=round_.merge.kind,
        alpha=round_.merge.alpha,
    )


def _coding(envelope: Envelope) -> Coding:
    """Coding of the packed blocks of a payload; those that hold parts are packed in it."""
    packed = (section for section in envelope.payload.sections.values() if not isinstance(section, dict))
    return next((section.coding for section in packed), Coding.FIXED)
