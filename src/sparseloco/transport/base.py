"""The two verbs of every transport, and the two calls of a training loop."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from sparseloco.replica import Replica
from sparseloco.types import Envelope, Key


class Traffic(NamedTuple):
    """Bytes of one peer since the start, all headers included.

    ``sent`` counts what the peer hands over, once, however many receive it; ``received`` what others sent to it.
    """

    sent: int
    received: int


def round_traffic(head_bytes: int, body_bytes: int, num_peers: int, *, linear: bool) -> Traffic:
    """What one message of each of ``num_peers`` equal peers costs one of them.

    A sparse frame goes to everybody. A linear body is reduced on the way: a peer sends it once (slices, then its share
    of the mean) and receives ``2 (R - 1) / R`` of it, as in a ring.
    """
    others = num_peers - 1
    received = others * head_bytes
    received += 2 * body_bytes * others // num_peers if linear else others * body_bytes
    return Traffic(head_bytes + body_bytes, received)


class Transport(Protocol):
    """Carries envelopes between peers. All waiting and all I/O live behind it."""

    @property
    def rank(self) -> int | None:
        """The peer number that this process has; None where the caller numbers its replicas."""
        ...

    def connect(self, replica: Replica) -> None:
        """Join with a replica: compare versions, algorithm, tensor table and starting values with the other peers.

        Calling it again with the same replica does nothing.

        Raises:
            DivergenceError: naming the first thing that differs.
        """
        ...

    def post(self, envelope: Envelope) -> None:
        """Hand over one message; returns before it has arrived."""
        ...

    def collect(self, key: Key) -> list[Envelope]:
        """Messages of that round and fragment, sorted by peer; waits for them.

        Raises:
            DivergenceError: if the senders' shared states differ; found by all of them alike.
            PeerLostError: if a peer has died or does not answer.
        """
        ...

    def put_back(self, key: Key, inbox: list[Envelope]) -> None:
        """Keep messages that were collected early, for one later ``collect`` of the same key."""
        ...

    def traffic(self, peer: int) -> Traffic:
        """Bytes of ``peer`` so far."""
        ...

    def set_traffic(self, peer: int, traffic: Traffic) -> None:
        """Go on counting from the bytes of a run that is resumed."""
        ...


def advance(replica: Replica, transport: Transport) -> None:
    """One inner step, then encode and post what is due."""
    transport.connect(replica)
    replica.local_step()
    post_due(replica, transport)


def settle(replica: Replica, transport: Transport) -> float:
    """Collect what is due, reduce it, step the anchor and merge.

    Returns:
        2-norm of the update over all fragments that were due, 0 if none was.
    """
    return math.hypot(*(_apply(replica, transport, key) for key in replica.due()))


def post_due(replica: Replica, transport: Transport) -> None:
    """Encode and post what is due, after an inner step that was counted already.

    A replica whose delta is not finite, at any of its shards, posts a message without a contribution and starts over
    from the anchor, unless it was made with ``nonfinite="stop"``.

    Raises:
        DeltaError: in that case; nothing has been posted or changed then at any of the shards.
    """
    if replica.shards.processes > 1:
        replica.agree_on_deltas()
    for envelope in replica.outbox():
        transport.post(envelope)


def drain(replica: Replica, transport: Transport) -> None:
    """Settle early all messages that are in flight, for the end of a run."""
    for key in replica.in_flight():
        _apply(replica, transport, key)


def _apply(replica: Replica, transport: Transport, key: Key) -> float:
    with replica.shards.jointly(f"round {key.round}"):  # one shard alone may find that peers differ
        inbox = transport.collect(key) if key in replica.in_flight() else []
        # A transport may have taken over shared state in which these rounds are applied already.
        return replica.apply(key, inbox) if key in replica.in_flight() else 0.0


def collect_early(replica: Replica, transport: Transport) -> dict[Key, list[Envelope]]:
    """Wait for all messages that are in flight and leave them where they are due later, for a checkpoint."""
    with replica.shards.jointly("messages in flight"):
        inboxes = {key: transport.collect(key) for key in replica.in_flight()}
    for key, inbox in inboxes.items():
        transport.put_back(key, inbox)
    return inboxes
