"""A replica: one copy of the model that runs an algorithm, and never communicates.

It emits envelopes and is given envelopes; whoever drives it owns all waiting and all I/O. Nothing here may branch on
the method: what differs between methods lives in the parts of the algorithm.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from sparseloco import generators
from sparseloco.algorithm import Algorithm
from sparseloco.bits import hex_digest
from sparseloco.errors import ConfigError, DeltaError, check_choice
from sparseloco.inbox import POLICIES, Absence, check_same, contributions
from sparseloco.keys import derive_key
from sparseloco.lane import Lane, StateDict, agreed_fault, buffer_lane, fitting, parameter_lane, persistent_buffers
from sparseloco.local import Gradients, forget_moments
from sparseloco.optimizer_state import load_optimizer_state, optimizer_state
from sparseloco.reduce import check_weight
from sparseloco.saved import count_blocks, digest_of_any, expect, expect_all_blocks
from sparseloco.sharding import local_views, own_name, plain, reshard, shards_of, whole
from sparseloco.staging import STORAGES, Staging
from sparseloco.support import check_shards
from sparseloco.types import Envelope, Key, PartSpec, Payload, TensorSpec


class Replica:
    """One copy of ``model`` that runs ``algorithm``.

    Tied parameters count once, frozen ones never. Floating-point buffers stay private (one warning) unless
    the algorithm has ``sync_buffers``.

    State: shared are anchor, outer state and compressor state; private are residual, inner optimizer, messages in
    flight, random state and unsynced buffers. Counters are in both.

    Args:
        model: Its trainable parameters and buffers are read and written in place.
        algorithm: What to run.
        peer: This replica's number among its peers; inboxes are added in this order.
        seed: Source of all randomness together with peer, round and fragment; equal at all peers.
        nonfinite: What a delta that is not finite does: ``abstain`` posts a message without a contribution and starts
            over from the anchor, with a warning, and the round goes on among the others; ``stop`` raises. Peers may
            differ in it.
        storage: Where anchor, residual and outer state lie: ``device``, with the parameters, or ``host``, in main
            memory, where they are then encoded and settled too. The inner optimizer keeps its state where it has it.
        stepped_by: The optimizer of the caller's loop, if it makes the inner steps: its state starts anew whenever the
            parameters are reset.

    Attributes:
        shards: The processes that hold this replica together.
        step: Inner steps made so far; equal at all peers.
        weight: Integer weight of the next messages, for example tokens per round.
        optimizer: The inner optimizer, if the algorithm names one.
        absent: Peers that contributed nothing to the rounds applied since the last step, with their rounds.
        table: What peers must have in common: the trainable parameters and synced buffers, by fragment.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: Algorithm,
        *,
        peer: int = 0,
        seed: int = 0,
        nonfinite: str = "abstain",
        storage: str = "device",
        stepped_by: torch.optim.Optimizer | None = None,
    ) -> None:
        check_choice("nonfinite", nonfinite, POLICIES)
        check_choice("storage", storage, STORAGES)
        self.algorithm = algorithm
        self.peer = peer
        self.seed = seed
        self.nonfinite = nonfinite
        self.stepped_by = stepped_by
        self.step = 0
        self.weight = 1
        self.absent: list[Absence] = []
        self._staging = Staging(storage)
        views = local_views(model)
        self.shards = shards_of(views)
        self._reshard = partial(reshard, model)
        self.params = {name: view.param for name, view in views.items() if view.param.requires_grad}
        self._frozen = {name: view.param for name, view in views.items() if not view.param.requires_grad}
        if not self.params:
            raise ConfigError("model=no trainable parameters: must have at least one; set requires_grad on some")
        self.specs = tuple(TensorSpec(name, tuple(p.shape), p.dtype) for name, p in self.params.items())
        check_shards(algorithm, {name: views[name].place for name in self.params})
        self.optimizer = algorithm.local.build(self.params)
        self.lanes = [  # one per fragment, synced buffers last
            parameter_lane(algorithm, specs, [views[spec.name] for spec in specs], self._staging)
            for specs in ([self.specs[i] for i in rows] for rows in algorithm.fragments.assign(self.specs))
        ]
        self._add_buffers(model)
        self.table = tuple(spec for lane in self.lanes for spec in lane.state.specs)
        self.fingerprint = algorithm.fingerprint(self.table)

    # -- advancing -------------------------------------------------------------------------------------------

    def local_step(self) -> None:
        """One inner step with the gradients that lie in the parameters, then :meth:`stepped`."""
        self.algorithm.local.step_(self.params, self.optimizer, self.step + 1)
        self.stepped()

    def stepped(self) -> None:
        """Count one inner step that the caller made."""
        self._reshard()  # else what an evaluation gathered before the step would be used after it
        self.step += 1
        self.absent = []

    def outbox(self) -> list[Envelope]:
        """Encode the fragments that are posted after the present step; call it once per step.

        All of them abstain if the delta of one is not finite, unless ``nonfinite="stop"``.

        Raises:
            DeltaError: if a delta is not finite; nothing has been posted or changed then.
        """
        posting = self._posting()
        try:
            for _, lane in posting[1:]:  # the first is checked as it is encoded, before it changes anything
                lane.check_finite(self.step)
            return [self._post(fragment, lane) for fragment, lane in posting]
        except DeltaError as error:
            if self.nonfinite == "stop" or self.shards.processes > 1:
                raise
            cause = f"delta of {error.tensor}"
        self._abstain([lane for _, lane in posting], cause)
        return self.outbox()

    def agree_on_deltas(self) -> None:
        """On a shard, do at all shards of this replica what :meth:`outbox` would do here for a bad delta; all must ask.

        Raises:
            DeltaError: if ``nonfinite="stop"`` and a delta is not finite here or at another shard; nothing has been
                posted or changed then at any of them.
        """
        lanes = [lane for _, lane in self._posting()]
        fault = agreed_fault(lanes, self.step, self.shards)
        if fault is not None and self.nonfinite == "stop":
            raise fault
        if fault is not None:
            self._abstain(lanes, f"delta of {fault.tensor}")

    def abstain(self, cause: str) -> None:
        """Contribute nothing to the next message of any fragment, because ``cause`` was not finite.

        Live parameters return to the anchor, and the inner optimizer starts anew; the residual stays. Call it between
        steps and go on counting them with :meth:`stepped`; on a sharded replica call it at all shards.
        """
        self._abstain(self.lanes, cause)

    @property
    def is_abstaining(self) -> bool:
        """Whether a message without a contribution is still to be posted, so that steps until then are in vain."""
        return any(lane.abstains for lane in self.lanes)

    def due(self) -> list[Key]:
        """Keys whose messages must be collected and applied now, in order."""
        schedule = self.algorithm.schedule
        return [
            Key(min(lane.in_flight), fragment)
            for fragment, lane in enumerate(self.lanes)
            if lane.in_flight and schedule.collects(self.step, fragment)
        ]

    def in_flight(self) -> list[Key]:
        """Keys of all messages that were posted and not settled, oldest first; draining applies them early."""
        return sorted(Key(round_, f) for f, lane in enumerate(self.lanes) for round_ in lane.in_flight)

    def apply(self, key: Key, inbox: Sequence[Envelope]) -> float:
        """Settle one round of one fragment with the payloads that count, the same list at every peer.

        An own payload that the inbox lacks is credited to the residual. Envelopes of weight 0 are noted in ``absent``.

        Returns:
            2-norm of the update, for logs.

        Raises:
            AllAbstainedError: if nobody contributes; nothing has changed then.
            DivergenceError: if a payload is not finite, or a peer's shared state or algorithm differs; nothing has
                changed then.
        """
        lane = self.lanes[key.fragment]
        self._reshard()
        sent = lane.in_flight[key.round]
        check_same(inbox, self.fingerprint, sent.digest)
        inbox, absent = contributions(inbox, key)
        lane.channel.check_finite(inbox, lane.state)
        if sent.payload is not None and not any(self.peer in envelope.peers for envelope in inbox):
            lane.channel.credit_(sent.payload, lane.state)
        # The step of the schedule, also where a round is applied early, or late.
        norm = lane.settle(inbox, sent, self.algorithm.schedule.collect_step(*key))
        del lane.in_flight[key.round]
        if sent.abstained and all(a.peer != self.peer for a in absent):
            absent.append(Absence(self.peer, key))  # the transport had left it out already
        self.absent += [a._replace(cause=sent.abstained) if a.peer == self.peer else a for a in absent]
        return norm

    def reset(self) -> None:
        """Return to the anchor after local numbers went bad: parameters, gradients and inner optimizer state."""
        warnings.warn(f"peer {self.peer}: {self._restart()}", stacklevel=2)

    # -- looking ---------------------------------------------------------------------------------------------

    def anchor(self) -> dict[str, Tensor]:
        """The agreed parameters (and synced buffers) by name, in their own shapes."""
        return {
            spec.name: tensor
            for lane in self.lanes
            for spec, tensor in zip(lane.state.specs, lane.anchors(), strict=True)
        }

    def digest(self) -> str:
        """32 hex digits over the shared state of all fragments.

        On a shard over what it holds; :func:`sparseloco.bits.add_digests` makes the whole replica's of all of them.
        """
        return hex_digest(*map(sum, zip(*(lane.digest_lanes() for lane in self.lanes), strict=True)))

    def tensor_digests(self) -> dict[str, str]:
        """A digest per tensor that peers must start with alike, frozen ones included, to name which one differs."""
        frozen = {name: digest_of_any(plain(p)) for name, p in self._frozen.items()}
        return frozen | {name: digest for lane in self.lanes for name, digest in lane.tensor_digests().items()}

    def fixed_digests(self) -> dict[str, str]:
        """Type, shape and digest of all that training does not change and no state holds, by name.

        That is: frozen parameters, and buffers that the model derives anew each time, such as rotary frequencies. A
        sharded parameter is gathered for it, one at a time, so all shards of the replica must ask.
        """
        return {
            name: f"{tensor.dtype} {list(tensor.shape)} {digest_of_any(tensor)}"
            for name, tensor in ((name, whole(t)) for name, t in {**self._frozen, **self._derived}.items())
        }

    @property
    def rounds(self) -> int:
        """Rounds that the first fragment has posted."""
        return self.lanes[0].round

    def dense_bytes(self) -> int:
        """Float32 bytes of everything posted so far, had it been sent dense."""
        return sum(4 * lane.round * lane.numel() for lane in self.lanes)

    def residual_norm(self) -> float:
        """2-norm of everything that was not sent yet."""
        return math.sqrt(sum(float(r.double().square().sum()) for lane in self.lanes for r in lane.state.residual))

    def delta_norm(self) -> float:
        """2-norm of the way from the anchor to the live parameters."""
        pairs = (pair for lane in self.lanes for pair in zip(lane.live(), lane.anchors(), strict=True))
        deltas = (anchor.double() - live.to(anchor.device).double() for live, anchor in pairs)
        return math.sqrt(sum(float(delta.square().sum()) for delta in deltas))

    # -- state -----------------------------------------------------------------------------------------------

    def shared_state(self) -> StateDict:
        """What all peers agree on; a peer that joins needs this, the messages in flight, and nothing else.

        On a shard it is of what that shard holds.
        """
        state: StateDict = {"fingerprint": self.fingerprint, "step": self.step}
        if self.shards.count > 1:
            state["shard"] = str(self.shards)
        for fragment, lane in enumerate(self.lanes):
            state |= lane.shared_state(fragment)
        return state | {"blocks": count_blocks(state)}

    def load_shared_state(self, state: StateDict) -> None:
        """Take over shared state: live parameters become the anchor, private state starts empty.

        Messages that the peers had in flight are due here as well, so the transport must have them for this replica.

        Raises:
            CheckpointError: if it is incomplete or belongs to another algorithm or model; nothing has changed then.
        """
        remedy = "all peers need the same algorithm and model"
        expect("fingerprint", state.get("fingerprint"), self.fingerprint, remedy)
        expect("shard", state.get("shard", "shard 0 of 1"), str(self.shards), "load what the same shard saved")
        expect_all_blocks(state)
        for lane in self.lanes:
            lane.check_shared_state(state)
        self._reshard()
        self.step = state["step"]
        for fragment, lane in enumerate(self.lanes):
            lane.load_shared_state(fragment, state)
        self.optimizer = self.algorithm.local.build(self.params)

    def private_state(self) -> StateDict:
        """What only this replica has; take it while the model is this replica's.

        Live parameters, residual, inner optimizer, messages in flight, buffers that are not synced, and the random
        state of the CPU and of the devices on which the parameters are.
        """
        state: StateDict = {
            "fingerprint": self.fingerprint,
            "peer": self.peer,
            "step": self.step,
            "weight": self.weight,
            "rng": torch.get_rng_state(),
            "rng_devices": generators.states_of(generators.devices_of(self.params.values())),
            "optimizer": optimizer_state(self.optimizer) if self.optimizer else None,
        }
        state |= {f"buffer/{name}": buffer.data.clone() for name, buffer in self._private_buffers.items()}
        for fragment, lane in enumerate(self.lanes):
            state |= lane.private_state(fragment)
        return state

    def load_private_state(self, state: StateDict) -> None:
        """Continue where :meth:`private_state` was taken; load the shared state first.

        Sets torch's CPU generator and those of the devices on which the parameters are.

        Raises:
            CheckpointError: if it belongs to another algorithm, model or step, or a shape or type changed.
        """
        remedy = "resume with the algorithm and model it came from"
        expect("fingerprint", state.get("fingerprint"), self.fingerprint, remedy)
        expect("step", state.get("step"), self.step, "load private and shared state of the same moment")
        self._reshard()
        for fragment, lane in enumerate(self.lanes):
            lane.load_private_state(fragment, state)
        for name, buffer in self._private_buffers.items():
            buffer.data.copy_(fitting(f"buffer/{name}", state, buffer))
        self.weight = state["weight"]
        if self.optimizer:
            load_optimizer_state(self.optimizer, state["optimizer"])
        torch.set_rng_state(state["rng"])
        generators.set_states(generators.devices_of(self.params.values()), state.get("rng_devices", []))

    def payload_of(self, key: Key, tensors: dict[str, Tensor]) -> Payload:
        """A payload of that fragment from its parts, for messages that were kept on a disk."""
        return self.lanes[key.fragment].payload_of(tensors)

    def part_specs(self, key: Key) -> tuple[PartSpec, ...]:
        """Table of that fragment's next message, for a peer that has none of its own."""
        return self.payload_of(key, {}).specs

    # -- inside ----------------------------------------------------------------------------------------------

    def _add_buffers(self, model: nn.Module) -> None:
        """Synced buffers are one more lane; private ones are named once."""
        buffers = persistent_buffers(model)
        named = {own_name(model, name): buffer for name, buffer in model.named_buffers()}
        self._derived = {name: buffer for name, buffer in named.items() if name not in buffers}
        floats = {name: buffer for name, buffer in buffers.items() if torch.is_floating_point(buffer)}
        synced = floats if self.algorithm.sync_buffers else {}
        self._private_buffers = {name: buffer for name, buffer in buffers.items() if name not in synced}
        if synced:
            self.lanes.append(buffer_lane(synced, self._staging))
        elif floats:
            told = f"buffers={sorted(floats)}: stay private to each replica; set sync_buffers=True to average them"
            warnings.warn(told, stacklevel=3)

    def _abstain(self, lanes: Sequence[Lane], cause: str) -> None:
        for lane in lanes:
            lane.abstains = lane.abstains or cause
        where = f"peer {self.peer}, round {max(lane.round for lane in lanes)}"
        told = f"{where}: {cause} is not finite, so this peer contributes nothing; {self._restart()}"
        warnings.warn(told, stacklevel=4)

    def _restart(self) -> str:
        """Live parameters and inner optimizer as at the start of a round; what was done, in words."""
        self._reshard()
        for lane in self.lanes:
            lane.restart()
        for param in self.params.values():
            param.grad = None
        self.optimizer = self.algorithm.local.build(self.params)
        forget_moments(self.stepped_by)
        anew = self.optimizer or self.stepped_by or isinstance(self.algorithm.local, Gradients)
        fate = "inner optimizer state starts anew" if anew else "the caller's optimizer should be made anew"
        return f"parameters were reset to the anchor and {fate}"

    def _posting(self) -> list[tuple[int, Lane]]:
        count = self.algorithm.schedule.num_posted
        return [(f, lane) for f, lane in enumerate(self.lanes) if lane.round < count(self.step, f)]

    def _post(self, fragment: int, lane: Lane) -> Envelope:
        key = Key(lane.round, fragment)
        sent = lane.post(self.step, derive_key(self.seed, self.peer, key.round, key.fragment))
        return Envelope(
            key=key,
            peer=self.peer,
            weight=0 if sent.payload is None else check_weight(self.weight),
            fingerprint=self.fingerprint,
            digest=sent.digest,
            payload=lane.payload_of({}) if sent.payload is None else sent.payload,
        )
