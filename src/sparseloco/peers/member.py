"""A replica as a member of a run: where it stands in the chain of every fragment, and what it owes."""

from __future__ import annotations

import contextlib
import hashlib
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from functools import partial

from sparseloco import rejoin, wire
from sparseloco.errors import CheckpointError, ConfigError, StoreError, WireError
from sparseloco.peers import anchors, canonical
from sparseloco.peers.clipping import payload_norm
from sparseloco.peers.closing import Closed, Desk, Order
from sparseloco.peers.fates import Fate
from sparseloco.peers.frames import Expected, check_weight_within, seal_envelope
from sparseloco.peers.journal import Journal, Posted
from sparseloco.peers.manifest import History, Manifest
from sparseloco.peers.operations import Tell
from sparseloco.peers.policy import Policy
from sparseloco.peers.run_file import RunFile, Void, voids_of
from sparseloco.peers.sealed import TRAILER_BYTES
from sparseloco.replica import Replica
from sparseloco.types import Envelope, Key, Payload, TensorSpec


def tensor_table(specs: tuple[TensorSpec, ...]) -> str:
    """Hash of names, shapes and types of a model's trainable tensors, as ``run.json`` has it."""
    return canonical.sha256(canonical.encode([[spec.name, list(spec.shape), str(spec.dtype)] for spec in specs]))


def check_run(run: RunFile, replica: Replica) -> None:
    """Refuse a replica that is not of this run.

    Raises:
        ConfigError: naming what differs.
    """
    found = tensor_table(replica.specs)
    if found != run.tensors:
        raise ConfigError(
            f"tensors={found[:16]}: must be {run.tensors[:16]}, the tensor table of run {run.run}; build the model "
            "that run.json describes"
        )
    if replica.fingerprint != run.fingerprint:
        raise ConfigError(
            f"fingerprint={replica.fingerprint}: must be {run.fingerprint}, as in run {run.run}; use the [algorithm] "
            "of run.json"
        )
    if replica.shards.count > 1:
        raise ConfigError(
            f"shards={replica.shards.count}: must be 1 over a store, where a peer is one process; use whole models"
        )


@dataclass
class Member:
    """One replica in one run.

    Attributes:
        run: ``run.json``.
        replica: The replica.
        journal: What it must not forget.
        desk: How it closes rounds.
        errands: For anchors, beside everything else.
        retention: What it removes.
        chains: History of each fragment up to its next round to apply; the digest is filled in by :meth:`order`.
        posted: Own frames by key: hash and size.
    """

    run: RunFile
    replica: Replica
    journal: Journal
    desk: Desk
    errands: Executor
    retention: anchors.Retention
    chains: dict[int, History] = field(default_factory=dict)
    posted: dict[Key, tuple[str, int]] = field(default_factory=dict)
    _spare: Future[None] | None = None

    def start_of(self, fragment: int) -> History:
        """Where the chain of a fragment begins."""
        return History(run=self.run, round=0, fragment=fragment, digest="", voids=voids_of(self.desk.amendments))

    def voided(self) -> Void | None:
        """What the owner, as is known now, has voided of the rounds that this replica has applied."""
        voids = voids_of(self.desk.amendments)
        self.chains = {fragment: replace(chain, voids=voids) for fragment, chain in self.chains.items()}
        return next(filter(None, (chain.voided for chain in self.chains.values())), None)

    def forget(self) -> None:
        """Give up what is this replica's alone and has not been settled, and count steps anew; shared state stays."""
        self.posted.clear()
        self.retention = anchors.Retention(self.desk.store, self.desk.me.peer_id)  # it may have counted on what is void
        for fragment, lane in enumerate(self.replica.lanes):
            rejoin.set_residual(self.replica, fragment, [])
            lane.in_flight = {}
        self.replica.step = 0

    def payload_of(self, posted: Posted) -> Payload | None:
        """Content of a message that was written down; its digest may be that of a state that was wrong.

        Raises:
            CheckpointError: if it cannot be read.
        """
        lane = self.replica.lanes[posted.key.fragment]
        if not posted.weight:
            return None
        specs = lane.channel.part_specs(lane.state)
        run = bytes.fromhex(self.run.run)
        try:
            return wire.decode(posted.frame[:-TRAILER_BYTES], specs, self.replica.fingerprint, run).payload
        except WireError as error:
            raise CheckpointError(f"journal: {error}; remove the journal, which costs its residual only") from error

    def order(self, key: Key, *, replayed: bool = False) -> Order:
        """What is to be closed next for a fragment, with its present shared state."""
        chain = self.chains[key.fragment]
        assert chain.round == key.round, f"{key} is not the next round"
        lane = self.replica.lanes[key.fragment]
        digest = rejoin.fragment_digest(self.replica, key.fragment)
        state = anchors.state_hash(self.replica, self.run.run, key) if chain.wants_state_hash else ""
        specs = lane.channel.part_specs(lane.state)
        return Order(
            history=replace(chain, digest=digest, state_sha256=state, replayed=replayed),
            expected=Expected(self.run.run, key, self.replica.fingerprint, digest, specs),
            own=self.posted.get(key),
            number=self.replica.peer,
            norm=partial(payload_norm, lane.channel, lane.state),
        )

    def policy(self, fragment: int) -> Policy:
        """The policy that a manifest of this peer would bring about in the open round of a fragment."""
        chain = self.chains[fragment]
        return chain.run_under(chain.unacknowledged(self.desk.amendments)).policy

    def take_down(self, envelope: Envelope) -> None:
        """Seal an own message and write it down with what it leaves behind, before it goes anywhere.

        Raises:
            ConfigError: if the policy does not allow its weight.
            CheckpointError: if it cannot be written down.
        """
        fragment = envelope.key.fragment
        check_weight_within(envelope.weight, self.policy(fragment).max_tokens_per_round)
        frame = seal_envelope(envelope, self.run.run, self.desk.me)
        residual = self.replica.lanes[fragment].state.residual
        self.journal.write(Posted(envelope.key, frame, envelope.weight, residual))
        self.hold(envelope.key, frame)

    def hold(self, key: Key, frame: bytes) -> None:
        """Keep the bytes of an own message."""
        self.posted[key] = (self.desk.frames.put(key, frame), len(frame))

    def accept(self, order: Order, closed: Closed) -> None:
        """Go on to the next round of a fragment; its shared state is still that before this round.

        The outer step that follows has the rate that the manifest brings about.
        """
        key, manifest = order.key, closed.manifest
        run = order.history.run_under(manifest.amended)
        changed = run.algorithm != self.run.algorithm
        rejoin.set_outer_lr(self.replica, key.fragment, float(run.algorithm["outer_lr"]) if changed else None)
        self.chains[key.fragment] = order.history.after(manifest, "")
        self.posted.pop(key, None)
        if closed.fate == Fate.STALE:
            self._drop_residual(key)
        elif closed.fate == Fate.CREDITED and self._sent_something(key):
            text = (
                f"round {key.round}, fragment {key.fragment}: closed without this peer's frame; it owes it from now on"
            )
            self.desk.tell(Tell("credited", key.round, key.fragment, text))
        if manifest.state_sha256:
            self._write_anchor(manifest, run.policy.anchor_every, run.policy.lease_s)

    def _sent_something(self, key: Key) -> bool:
        """Whether the own message of a round was not an abstention, which nobody is owed."""
        sent = self.replica.lanes[key.fragment].in_flight.get(key.round)
        return sent is None or sent.payload is not None

    def _drop_residual(self, key: Key) -> None:
        """The private state is older than what this peer is known to have sent (rule 5)."""
        lane = self.replica.lanes[key.fragment]
        had = any(bool(block.any()) for block in lane.state.residual) or key.round in lane.in_flight
        rejoin.set_residual(self.replica, key.fragment, [])
        if key.round in lane.in_flight:
            lane.in_flight[key.round] = lane.in_flight[key.round]._replace(payload=None)
        if had:
            text = (
                f"round {key.round}, fragment {key.fragment}: lists a frame of this peer that it does not remember; "
                "what it had not sent yet is dropped"
            )
            self.desk.tell(Tell("residual-dropped", key.round, key.fragment, text))

    def _write_anchor(self, manifest: Manifest, every: int, patience_s: float) -> None:
        """If it is this peer's turn, or the next one's after some waiting, put the anchor in the background."""
        turn = anchors.turn_of(manifest, self.desk.me.peer_id, every)
        if turn not in (0, 1) or (turn and self._spare is not None and not self._spare.done()):
            return  # one thread at most waits for others, so that there is always one that writes
        key = Key(manifest.round, manifest.fragment)
        data = anchors.serialize(self.replica, self.run.run, key)
        assert hashlib.sha256(data).hexdigest() == manifest.state_sha256

        def errand() -> None:
            if turn and (self.desk.stop.wait(patience_s) or self._is_there(manifest, len(data))):
                return
            with contextlib.suppress(StoreError):  # an anchor is missed, and the next peer or round has another
                if anchors.write(self.desk.store, manifest, data):
                    self.retention.found_whole(key, anchors.path_of(manifest), written=True)
                    self.retention.clean(key.fragment)

        running = self.errands.submit(errand)
        self._spare = running if turn else self._spare

    def _is_there(self, manifest: Manifest, size: int) -> bool:
        with contextlib.suppress(StoreError):
            return self.desk.store.size(anchors.path_of(manifest)) == size
        return False
