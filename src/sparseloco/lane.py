"""A lane: one fragment of a replica, its way out and back, and its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from sparseloco.algorithm import BUFFER_CHANNEL, Algorithm
from sparseloco.bits import hex_digest
from sparseloco.channel import Channel, ChannelState
from sparseloco.errors import CheckpointError, DeltaError
from sparseloco.kernels.fast import digest_tensors
from sparseloco.local import InnerSteps, LocalPhase
from sparseloco.merge import Replace
from sparseloco.outer import Sgd
from sparseloco.sharding import LocalView, Shards, own_name, plain
from sparseloco.staging import Staging
from sparseloco.types import Envelope, Merge, OuterOptimizer, Payload, Source, TensorSpec

StateDict = dict[str, Any]
"""Flat dictionary of tensors and plain values, by path."""


class InFlight(NamedTuple):
    """What a replica remembers of a message until it is settled. Private; only the digest is shared.

    Attributes:
        payload: None at a replica that abstained, or that joined after the others had posted.
        digest: Of the shared state at that time.
        snapshot: Live values at that time, if the merge asks for them.
        abstained: What was not finite, if the message had no contribution; else empty.
    """

    payload: Payload | None
    digest: str
    snapshot: list[Tensor] | None
    abstained: str = ""


@dataclass
class Lane:
    """One fragment.

    Attributes:
        tensors: Live parameters or buffers; their values, or the local shards', are read and written in place.
        local: What a delta is made of.
        round: Number of the next message.
        staging: Where the state lies.
        in_flight: Messages that were posted and not settled, by round.
        abstains: What was not finite since the last message, so that the next one contributes nothing; else empty.
    """

    tensors: Sequence[Tensor]
    local: LocalPhase
    channel: Channel
    outer: OuterOptimizer
    merge: Merge
    state: ChannelState
    staging: Staging = Staging()
    round: int = 0
    in_flight: dict[int, InFlight] = field(default_factory=dict)
    abstains: str = ""

    def live(self) -> list[Tensor]:
        """Present values of the tensors, as far as they are here."""
        return [plain(tensor).data for tensor in self.tensors]

    def anchors(self) -> list[Tensor]:
        """Agreed values of the tensors as far as they are here, in the type of their state."""
        return [
            self.channel.anchor_tensor(self.state, number, tuple(live.shape)) for number, live in enumerate(self.live())
        ]

    def numel(self) -> int:
        """Numbers in the tensors, as far as they are here."""
        return sum(block.numel() for block in self.state.anchor)

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
        first_rows: list[int] = []
        for path, j in self.block_paths():
            shared.append((path, self.state.anchor[j]))
            for name, value in sorted({**self.state.outer[j], **self.state.codec[j]}.items()):
                if isinstance(value, Tensor):
                    shared.append((f"{path}/{name}", value))
            first_rows += [self.state.first_chunks[j]] * (len(shared) - len(first_rows))
        return digest_tensors(shared, first_rows)

    def tensor_digests(self) -> dict[str, str]:
        """A digest of the anchor of each tensor, as far as it is here."""
        return {
            spec.name: hex_digest(
                *digest_tensors(
                    [(f"{j - span.start}", self.state.anchor[j]) for j in span],
                    [self.state.first_chunks[j] for j in span],
                )
            )
            for spec, span in zip(self.state.specs, self.state.spans, strict=True)
        }

    def post(self, step: int, key: int) -> InFlight:
        """Encode the fragment's delta after ``step``, with all randomness from ``key``; nothing if it abstains."""
        digest = hex_digest(*self.digest_lanes())
        payload = None
        if not self.abstains:
            sources = [replace(source, end=self.staging.home(source.end)) for source in self._sources(step)]
            payload = self.channel.outgoing(sources, self.state, key=key)
        self.local.posted_(self.tensors)
        sent = InFlight(payload, digest, self._snapshot(), self.abstains)
        self.abstains = ""
        self.in_flight[self.round] = sent
        self.round += 1
        return sent

    def settle(self, inbox: Sequence[Envelope], sent: InFlight, step: int) -> float:
        """Reduce the inbox of a message, step the anchor and merge; the 2-norm of the update."""
        with self.staging.lent(self.live()) as live:
            return self.channel.settle_(
                inbox, self.state, live, outer=self.outer, merge=self.merge, snapshot=sent.snapshot, step=step
            )

    def check_finite(self, step: int) -> None:
        """Raise what :meth:`post` would raise for a delta that is not finite."""
        if not self.abstains:
            self.channel.check_sources(self._sources(step), self.state)

    def restart(self) -> None:
        """Live values become the anchor, and count as those at the time of the post for messages still in flight."""
        for tensor, anchor in zip(self.live(), self.anchors(), strict=True):
            tensor.copy_(anchor)
        for round_, sent in self.in_flight.items():
            if sent.snapshot is not None:
                self.in_flight[round_] = sent._replace(snapshot=self._snapshot())

    def payload_of(self, tensors: dict[str, Tensor]) -> Payload:
        """A payload of this fragment from its parts alone, since their table is static; of none: no contribution."""
        return Payload.of_tensors(self.channel.part_specs(self.state), tensors, self.channel.compressor.linear)

    # -- state -----------------------------------------------------------------------------------------------

    def shared_state(self, fragment: int) -> StateDict:
        """What all peers agree on, and which messages they wait for."""
        state: StateDict = {f"round/{fragment}": self.round}
        state |= {f"awaited/{fragment}/{round_}": sent.digest for round_, sent in self.in_flight.items()}
        for path, j in self.block_paths():
            state[f"anchor/{path}"] = self.state.anchor[j].clone()
            state |= {f"outer/{path}/{k}": _copied(v) for k, v in self.state.outer[j].items()}
            state |= {f"codec/{path}/{k}": v.clone() for k, v in self.state.codec[j].items()}
        return state

    def check_shared_state(self, state: StateDict) -> None:
        """Raise what :meth:`load_shared_state` would raise for a tensor that is missing or does not fit."""
        for path, j in self.block_paths():
            fitting(f"anchor/{path}", state, self.state.anchor[j])

    def load_shared_state(self, fragment: int, state: StateDict) -> None:
        """Live tensors become the anchor, the residual becomes zero, and messages of the others are awaited."""
        self.round = state[f"round/{fragment}"]
        for path, j in self.block_paths():
            anchor = self.state.anchor[j]
            anchor.copy_(fitting(f"anchor/{path}", state, anchor))
            self.state.outer[j] = _beside(anchor, _subtree(state, f"outer/{path}/"))
            self.state.codec[j] = _beside(anchor, _subtree(state, f"codec/{path}/"))
        for residual in self.state.residual:
            residual.zero_()
        self.in_flight, self.abstains = {}, ""
        self.restart()
        awaited = _subtree(state, f"awaited/{fragment}/")
        self.in_flight = {int(round_): InFlight(None, digest, self._snapshot()) for round_, digest in awaited.items()}

    def private_state(self, fragment: int) -> StateDict:
        """Live tensors, residual, and what is remembered of messages in flight."""
        state: StateDict = {f"live/{spec.name}": t.clone() for spec, t in self._named(self.live())}
        if self.abstains:
            state[f"abstains/{fragment}"] = self.abstains
        if self.state.residual:
            state |= {f"residual/{path}": self.state.residual[j].clone() for path, j in self.block_paths()}
        for round_, sent in self.in_flight.items():
            message = f"in_flight/{fragment}/{round_}"
            state[f"{message}/digest"] = sent.digest
            if sent.abstained:
                state[f"{message}/abstained"] = sent.abstained
            if sent.payload is not None:
                state |= {f"{message}/payload/{name}": part.clone() for name, part in sent.payload.tensors.items()}
            if sent.snapshot is not None:
                state |= {f"{message}/snapshot/{spec.name}": t.clone() for spec, t in self._named(sent.snapshot)}
        return state

    def load_private_state(self, fragment: int, state: StateDict) -> None:
        """Continue where :meth:`private_state` was taken."""
        for spec, live in self._named(self.live()):
            live.copy_(fitting(f"live/{spec.name}", state, live))
        # Without error feedback only an undelivered payload leaves a residual.
        if self.channel.feedback or any(f"residual/{path}" in state for path, _ in self.block_paths()):
            self.state.residual = [
                _copied(fitting(f"residual/{path}", state, self.state.anchor[j]), self.state.anchor[j])
                for path, j in self.block_paths()
            ]
        self.abstains = state.get(f"abstains/{fragment}", "")
        messages = _subtree(state, f"in_flight/{fragment}/")
        rounds = sorted({int(path.partition("/")[0]) for path in messages})
        self.in_flight = {round_: self._message(_subtree(messages, f"{round_}/")) for round_ in rounds}

    def awaited(self, payload: Payload | None) -> InFlight:
        """A message that was posted before the present state was loaded; None: only the others posted."""
        return InFlight(payload, hex_digest(*self.digest_lanes()), self._snapshot())

    def _message(self, state: StateDict) -> InFlight:
        payload = _subtree(state, "payload/")
        snapshot = None
        if self.merge.needs_snapshot:
            homes = self._named([self.staging.home(live) for live in self.live()])
            snapshot = [_copied(fitting(f"snapshot/{spec.name}", state, home), home) for spec, home in homes]
        sent = self.payload_of(payload) if payload else None
        return InFlight(sent, state["digest"], snapshot, state.get("abstained", ""))

    def _snapshot(self) -> list[Tensor] | None:
        return [self.staging.kept(t) for t in self.live()] if self.merge.needs_snapshot else None

    def _named(self, tensors: Sequence[Tensor]) -> list[tuple[TensorSpec, Tensor]]:
        return list(zip(self.state.specs, tensors, strict=True))

    def _sources(self, step: int) -> list[Source]:
        return [
            self.local.source([self.state.anchor[j] for j in span], plain(tensor), step)
            for tensor, span in zip(self.tensors, self.state.spans, strict=True)
        ]


def agreed_fault(lanes: Sequence[Lane], step: int, shards: Shards) -> DeltaError | None:
    """The first delta that is not finite at any shard of a replica, the same at all of them; all must ask."""
    names = [spec.name for lane in lanes for spec in lane.state.specs]
    if not names:
        return None
    fault: DeltaError | None = None
    try:
        for lane in lanes:
            lane.check_finite(step)
    except DeltaError as error:
        fault = error
    first = shards.least(names.index(fault.tensor) if fault else len(names))
    if first == len(names) or (fault is not None and names[first] == fault.tensor):
        return fault
    return DeltaError(
        f"delta of {names[first]}=not finite at another shard of this replica: must be finite at all "
        f"{shards.processes}; look for the message of that shard",
        names[first],
    )


def parameter_lane(
    algorithm: Algorithm, specs: Sequence[TensorSpec], views: Sequence[LocalView], staging: Staging
) -> Lane:
    """A fragment of trainable parameters."""
    homes = (staging.home(view.tensor) for view in views)
    state = algorithm.channel.init(specs, homes, [view.place for view in views])
    params = [view.param for view in views]
    return Lane(params, algorithm.local, algorithm.channel, algorithm.outer, algorithm.merge, state, staging)


def buffer_lane(buffers: dict[str, Tensor], staging: Staging) -> Lane:
    """All floating-point buffers together: their plain mean, whatever the method does with parameters."""
    specs = [TensorSpec(name, tuple(b.shape), b.dtype) for name, b in buffers.items()]
    state = BUFFER_CHANNEL.init(specs, map(staging.home, buffers.values()))
    return Lane(list(buffers.values()), InnerSteps(), BUFFER_CHANNEL, Sgd(), Replace(), state, staging)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong into a state dict; derived tables such as rotary frequencies do not."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        derived: set[str] = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf not in derived:
                found[own_name(model, f"{path}.{leaf}" if path else leaf)] = buffer
    return found


def fitting(path: str, state: StateDict, like: Tensor) -> Tensor:
    """Tensor at ``path`` of a state.

    Raises:
        CheckpointError: if it is missing, or if its shape or type would be changed silently.
    """
    tensor = state.get(path)
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{path}=missing: must be in the state; load a complete one")
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise CheckpointError(
            f"{path}={tensor.dtype} {tuple(tensor.shape)}: must be {like.dtype} {tuple(like.shape)}; "
            "load it into the model it came from"
        )
    return tensor


def _subtree(state: StateDict, prefix: str) -> StateDict:
    return {path[len(prefix) :]: _copied(v) for path, v in state.items() if path.startswith(prefix)}


def _beside(like: Tensor, state: StateDict) -> StateDict:
    """State of a block where the block lies; counters stay, since torch's optimizers keep them in main memory."""
    return {name: value.to(like.device) if getattr(value, "ndim", 0) else value for name, value in state.items()}


def _copied(value: Any, like: Tensor | None = None) -> Any:
    """A copy, in the memory of ``like`` if given."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if like is None else value.to(like.device, copy=True)
