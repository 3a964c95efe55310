"""A lane: one fragment of a replica, its way out and back, and its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparseloco.algorithm import BUFFER_CHANNEL, Algorithm
from sparseloco.bits import digest_tensors, hex_digest
from sparseloco.channel import Channel, ChannelState
from sparseloco.local import InnerSteps, LocalPhase
from sparseloco.merge import Replace
from sparseloco.outer import Sgd
from sparseloco.types import Merge, OuterOptimizer, Payload, Source, TensorSpec


class InFlight(NamedTuple):
    """What a replica remembers of a message until it is settled. Private."""

    payload: Payload
    digest: str
    snapshot: list[Tensor] | None


@dataclass
class Lane:
    """One fragment.

    Attributes:
        tensors: Live parameters or buffers; their values are read and written in place.
        local: What a delta is made of.
        round: Number of the next message.
        in_flight: Messages that were posted and not settled, by round.
    """

    tensors: Sequence[Tensor]
    local: LocalPhase
    channel: Channel
    outer: OuterOptimizer
    merge: Merge
    state: ChannelState
    round: int = 0
    in_flight: dict[int, InFlight] = field(default_factory=dict)

    def live(self) -> list[Tensor]:
        """Present values of the tensors."""
        return [tensor.data for tensor in self.tensors]

    def anchors(self) -> list[Tensor]:
        """Agreed values of the tensors, in their own shapes and the type of their state."""
        return [
            self.channel.anchor_tensor(self.state, span, spec.shape)
            for spec, span in zip(self.state.specs, self.state.spans, strict=True)
        ]

    def block_paths(self) -> list[tuple[str, int]]:
        """Stable names of blocks, ``<tensor>/<number within the tensor>``, with their positions."""
        return [
            (f"{spec.name}/{j - span.start}", j)
            for spec, span in zip(self.state.specs, self.state.spans, strict=True)
            for j in span
        ]

    def digest_lanes(self) -> tuple[int, int]:
        """Digest of the shared state: anchor, outer state and compressor state."""
        shared: list[tuple[str, Tensor]] = []
        for path, j in self.block_paths():
            shared.append((path, self.state.anchor[j]))
            for name, value in sorted({**self.state.outer[j], **self.state.codec[j]}.items()):
                if isinstance(value, Tensor):
                    shared.append((f"{path}/{name}", value))
        return digest_tensors(shared)

    def post(self, step: int, key: int) -> InFlight:
        """Encode the fragment's delta after ``step``, with all randomness from ``key``."""
        digest = hex_digest(*self.digest_lanes())
        payload = self.channel.outgoing(self._sources(step), self.state, key=key)
        self.local.posted_(self.tensors)
        snapshot = [t.clone() for t in self.live()] if self.merge.needs_snapshot else None
        sent = InFlight(payload, digest, snapshot)
        self.in_flight[self.round] = sent
        self.round += 1
        return sent

    def check_finite(self, step: int) -> None:
        """Raise what :meth:`post` would raise for a delta that is not finite."""
        self.channel.check_sources(self._sources(step), self.state)

    def forget_progress(self) -> None:
        """Count the live values as those at the time of the post, for messages still in flight."""
        for round_, sent in self.in_flight.items():
            if sent.snapshot is not None:
                self.in_flight[round_] = sent._replace(snapshot=[t.clone() for t in self.live()])

    def _sources(self, step: int) -> list[Source]:
        return [
            self.local.source([self.state.anchor[j] for j in span], tensor, step)
            for tensor, span in zip(self.tensors, self.state.spans, strict=True)
        ]


def parameter_lane(algorithm: Algorithm, specs: Sequence[TensorSpec], params: Sequence[nn.Parameter]) -> Lane:
    """A fragment of trainable parameters."""
    state = algorithm.channel.init(specs, [p.data for p in params])
    return Lane(params, algorithm.local, algorithm.channel, algorithm.outer, algorithm.merge, state)


def buffer_lane(buffers: dict[str, Tensor]) -> Lane:
    """All floating-point buffers together: their plain mean, whatever the method does with parameters."""
    specs = [TensorSpec(name, tuple(b.shape), b.dtype) for name, b in buffers.items()]
    state = BUFFER_CHANNEL.init(specs, list(buffers.values()))
    return Lane(list(buffers.values()), InnerSteps(), BUFFER_CHANNEL, Sgd(), Replace(), state)


def persistent_float_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong into a state dict; derived tables such as rotary frequencies do not."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        derived: set[str] = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        for leaf, buffer in module.named_buffers(recurse=False):
            if torch.is_floating_point(buffer) and leaf not in derived:
                found[f"{path}.{leaf}" if path else leaf] = buffer
    return found
