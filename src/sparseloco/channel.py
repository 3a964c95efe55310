"""One fragment's way out and back: layout, error feedback, compressor, reducer and update transforms.

Out: delta -> stored blocks -> coded blocks (+ residual) -> parts. Back: inbox -> coded update -> stored update ->
transforms -> outer step on the anchor -> merge into the live tensors. Everything runs block by block, so nothing
dense is made beside the state. This module must not know what a replica, a schedule or a transport is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparseloco.compress.base import Compressor
from sparseloco.errors import ConfigError, DeltaError, DivergenceError
from sparseloco.kernels import fast
from sparseloco.keys import derive_key
from sparseloco.layout import BlockShape, Layout
from sparseloco.panels import piece_of
from sparseloco.reduce import Reducer
from sparseloco.sharding import Place
from sparseloco.types import (
    LARGEST,
    Envelope,
    Merge,
    OuterOptimizer,
    OuterState,
    Parts,
    PartSpec,
    Payload,
    Source,
    TensorSpec,
    UpdateTransform,
    name_of,
    state_dtype,
)


@dataclass(frozen=True)
class ErrorFeedback:
    """Keep what was not sent: ``residual <- decay * residual + delta``, then minus what the payload decodes to.

    Args:
        decay: Share of the residual carried into the next round (the paper's beta), in [0, 1].

    Departs from the paper: nothing.

    Reference: Sarfi et al., 2025, arXiv:2508.15706, algorithm 1; Karimireddy et al., 2019, arXiv:1901.09847.
    """

    decay: float = 0.95

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ConfigError(f"decay={self.decay!r}: must be between 0 and 1; the paper uses 0.95")


@dataclass
class ChannelState:
    """State of one fragment, one entry per block; on a shard, the chunks of its panels alone.

    Attributes:
        specs: Tensor table of the fragment, with the shapes of whole tensors.
        layouts: How each tensor becomes blocks here.
        shapes: Block shapes, all tensors' blocks one after another.
        spans: Range of blocks of each tensor.
        first_chunks: Number of each block's first chunk in the block of the whole tensor.
        anchor: Shared. Agreed parameters in stored form.
        outer: Shared. Outer optimizer state.
        codec: Shared. Compressor state.
        residual: Private. Coded values not sent yet; without error feedback only what was undelivered.
    """

    specs: tuple[TensorSpec, ...]
    layouts: list[Layout] = field(default_factory=list)
    shapes: list[BlockShape] = field(default_factory=list)
    spans: list[range] = field(default_factory=list)
    first_chunks: list[int] = field(default_factory=list)
    anchor: list[Tensor] = field(default_factory=list)
    outer: list[OuterState] = field(default_factory=list)
    codec: list[Parts] = field(default_factory=list)
    residual: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Channel:
    """The parts that decide what one fragment sends and what it makes of what it receives.

    Args:
        layout: How tensors become blocks.
        compressor: Blocks to payload.
        reducer: Payloads to update.
        feedback: Error feedback; None forgets what compression loses.
        transforms: Applied to the update, first to last.
    """

    layout: Layout
    compressor: Compressor
    reducer: Reducer
    feedback: ErrorFeedback | None = None
    transforms: tuple[UpdateTransform, ...] = ()

    @property
    def portable(self) -> bool:
        """Whether the update has the same bits on every IEEE machine."""
        return all(part.portable for part in (self.layout, self.compressor, *self.transforms))

    def init(
        self, specs: Sequence[TensorSpec], tensors: Iterable[Tensor], places: Sequence[Place] = ()
    ) -> ChannelState:
        """Fresh state with ``tensors`` as anchor; the residual starts at zero.

        Args:
            specs: Table of whole tensors.
            tensors: What is here of them; the state lies where they do.
            places: Where that lies in them; empty if it is all.
        """
        state = ChannelState(tuple(specs))
        for i, tensor in enumerate(tensors):
            layout = piece_of(self.layout, places[i]) if places else self.layout
            shapes = layout.block_shapes(tuple(tensor.shape))
            state.layouts.append(layout)
            state.first_chunks.extend(layout.first_chunks(tuple(tensor.shape)))
            state.spans.append(range(len(state.shapes), len(state.shapes) + len(shapes)))
            state.shapes.extend(shapes)
            wide = tensor.detach().to(state_dtype(tensor.dtype), copy=True)
            state.anchor.extend(block.contiguous() for block in layout.split(wide))
        state.outer = [{} for _ in state.shapes]
        state.codec = [
            self.compressor.init(block.shape[0], block.shape[1], block.dtype, block.device) for block in state.anchor
        ]
        if self.feedback is not None:
            state.residual = [torch.zeros_like(block) for block in state.anchor]
        return state

    def part_specs(self, state: ChannelState) -> tuple[PartSpec, ...]:
        """Table of the next payload's parts; works on meta tensors."""
        table: list[PartSpec] = []
        for j, (block, shared) in enumerate(zip(state.anchor, state.codec, strict=True)):
            specs = self.compressor.specs(block.shape[0], block.shape[1], block.dtype, shared)
            table.extend(spec._replace(name=f"{j}.{spec.name}") for spec in specs)
        return tuple(table)

    def outgoing(self, sources: Sequence[Source], state: ChannelState, *, key: int) -> Payload:
        """Encode the fragment's delta and take what is sent out of the residual.

        Args:
            sources: One per tensor, in the order of the table.
            state: Its residual is updated in place.
            key: Source of all randomness of this payload.

        Raises:
            DeltaError: if a delta is not finite; the state is then as it was.
        """
        self.check_sources(sources, state)
        sections = fast.encode(self, sources, state)
        for i, (source, span) in enumerate(zip(sources, state.spans, strict=True)):
            if span and span[0] in sections:
                continue
            for j, delta in zip(span, self._delta(source, state, i), strict=True):
                sections[j] = self._encode_block(delta, j, state, derive_key(key, j))
        if self.feedback is None:
            state.residual = []
        ordered = {j: sections[j] for j in range(len(state.shapes))}
        return Payload(self.part_specs(state), ordered, self.compressor.linear)

    def settle_(
        self,
        inbox: Sequence[Envelope],
        state: ChannelState,
        live: Sequence[Tensor],
        *,
        outer: OuterOptimizer,
        merge: Merge,
        snapshot: Sequence[Tensor] | None,
        step: int,
    ) -> float:
        """Reduce the inbox, step the anchor, and merge it into ``live``; an empty inbox leaves the anchor.

        Returns:
            2-norm of the update.

        Raises:
            DivergenceError: if an outer step would leave the range of numbers; the same at every peer. Other tensors,
                and chunks of the one it names, may have been stepped by then, so go on from a saved state.
        """
        done = fast.settle_(self, inbox, state, live, outer=outer, merge=merge, snapshot=snapshot, step=step)
        if done.failed is not None:
            raise self._overflow(done.failed, state)
        rest = [i for i in range(len(live)) if i not in done.tensors]
        blocks = [j for i in rest for j in state.spans[i]]
        square = done.square + (self._step_anchors(blocks, inbox, state, outer, step) if inbox else 0.0)
        for i in rest:
            anchor = self.anchor_tensor(state, i, tuple(live[i].shape))
            live[i].copy_(merge(anchor, live[i], snapshot[i] if snapshot is not None else None))
        return square**0.5

    def _step_anchors(
        self, blocks: Sequence[int], inbox: Sequence[Envelope], state: ChannelState, outer: OuterOptimizer, step: int
    ) -> float:
        """Reduce these blocks and step their anchors; the sum of squares of their updates."""
        square = 0.0
        updates = self._updates(blocks, inbox, state)
        for transform in self.transforms:
            updates = transform(updates)
        for j, update in zip(blocks, updates, strict=True):
            square += float(torch.linalg.vector_norm(update)) ** 2
            moved = state.anchor[j].clone()
            outer.step_(moved, update, state.outer[j], step)
            if not _is_sane(moved):
                raise self._overflow(j, state)
            state.anchor[j].copy_(moved)
        return square

    def _overflow(self, block: int, state: ChannelState) -> DivergenceError:
        return DivergenceError(
            f"anchor of {self._tensor_at(block, state)}=not finite: must stay finite (below {LARGEST:g}) in an "
            "outer step; lower the outer learning rate"
        )

    def credit_(self, payload: Payload, state: ChannelState) -> None:
        """Put an undelivered payload back into the residual; without error feedback it goes out once more."""
        if not state.residual:
            state.residual = [torch.zeros_like(block) for block in state.anchor]
        for j, residual in enumerate(state.residual):
            self.compressor.accumulate_(residual, on_device(payload.blocks[j], residual.device), 1, state.codec[j])

    def anchor_tensor(self, state: ChannelState, number: int, shape: tuple[int, ...]) -> Tensor:
        """The agreed value of one tensor, in its own shape."""
        return state.layouts[number].join(tuple(state.anchor[j] for j in state.spans[number]), shape)

    def check_sources(self, sources: Sequence[Source], state: ChannelState) -> None:
        """Refuse deltas with infinities, NaN or numbers so large that arithmetic on them overflows."""
        for spec, sane in zip(state.specs, fast.are_sane([source.end for source in sources]), strict=True):
            if not sane:
                raise DeltaError(
                    f"delta of {spec.name}=not finite: must be finite (below {LARGEST:g}) to leave its replica; "
                    "lower the learning rate or clip gradients, then reset the replica to its anchor",
                    spec.name,
                )

    def check_finite(self, inbox: Sequence[Envelope], state: ChannelState) -> None:
        """Refuse payloads with infinities, NaN or numbers so large that what they decode to overflows.

        A mean of what is left is finite; what an outer optimizer makes of it is checked again. Packed blocks are not
        looked at: a frame is checked as a whole where it is received.
        """
        for envelope in inbox:
            for block, part in envelope.payload.floats():
                if not _is_sane(part):
                    tensor = self._tensor_at(block, state)
                    raise DivergenceError(
                        f"payload of peer {name_of(envelope.peer)}, round {envelope.key.round}, "
                        f"{tensor}=not finite: must be finite (below {LARGEST:g}) to reach an anchor; "
                        "leave that peer out of the round"
                    )

    def _delta(self, source: Source, state: ChannelState, number: int) -> Iterator[Tensor]:
        """Coded delta blocks of one tensor: ``start - end``, or the scaled gradient."""
        spec, span, layout = state.specs[number], state.spans[number], state.layouts[number]
        wide = state_dtype(spec.dtype)
        for j, end in zip(span, layout.split(source.end.detach()), strict=True):
            if source.start is None:
                stored = end.to(wide) * source.scale
            else:
                # The replica was given the anchor rounded to its own type, so an idle one has a delta of exactly zero.
                stored = source.start[j - span.start].to(spec.dtype).to(wide) - end.to(wide)
            yield layout.analyze(stored, state.shapes[j])

    def _encode_block(self, delta: Tensor, j: int, state: ChannelState, key: int) -> Parts:
        if not state.residual:
            return self.compressor.encode(delta, state.codec[j], key=key)
        residual = state.residual[j]
        if self.feedback is not None and self.feedback.decay != 1:
            residual.mul_(self.feedback.decay)
        residual.add_(delta)
        parts = self.compressor.encode(residual, state.codec[j], key=key)
        self.compressor.accumulate_(residual, parts, -1, state.codec[j])
        return parts

    def _updates(self, blocks: Sequence[int], inbox: Sequence[Envelope], state: ChannelState) -> Iterator[Tensor]:
        """Stored update blocks, one at a time; shared compressor state moves on as they are made."""
        for j in blocks:
            like = state.anchor[j]
            received = [(e.weight, on_device(e.payload.blocks[j], like.device)) for e in inbox]
            update = self.reducer.reduce(like, received, self.compressor, state.codec[j])
            self.compressor.advance_(state.codec[j], update)
            yield self.layout.synthesize(update, state.shapes[j])

    @staticmethod
    def _tensor_at(block: int, state: ChannelState) -> str:
        return next(spec.name for spec, span in zip(state.specs, state.spans, strict=True) if block in span)


def on_device(parts: Parts, device: torch.device) -> Parts:
    """Parts where the state lives; frames are decoded on the CPU."""
    return {name: part.to(device) for name, part in parts.items()}


def _is_sane(tensor: Tensor) -> bool:
    """Whether all magnitudes are below ``LARGEST``; False for NaN."""
    return tensor.numel() == 0 or float(tensor.detach().abs().amax()) < LARGEST
