"""All peers in one process: post for all, then collect for all, without threads."""

from __future__ import annotations

import warnings

from sparseloco import wire
from sparseloco.errors import ConfigError, QuorumError
from sparseloco.replica import Replica
from sparseloco.transport.base import Start, Traffic, compare_starts, round_traffic
from sparseloco.types import Coding, Envelope, Key, PartSpec


class Loopback:
    """Carries real frames between ``num_peers`` replicas of this process.

    Each message is encoded to bytes and checked as such, once for all receivers, so bytes are those of a real run over
    a store: compact frames. A :class:`ProcessGroup` sends frames of one size, which are some percent longer.

    Args:
        num_peers: Replicas that take part.
    """

    def __init__(self, num_peers: int) -> None:
        if num_peers < 1:
            raise ConfigError(f"num_peers={num_peers!r}: must be at least 1; use 2 or more to synchronize")
        if num_peers == 1:
            warnings.warn("num_peers=1: one replica alone synchronizes with nobody; use 2 or more", stacklevel=2)
        self.num_peers = num_peers
        self._replicas: dict[int, Replica] = {}
        self._frames: dict[Key, dict[int, bytes]] = {}
        self._tables: dict[Key, tuple[PartSpec, ...]] = {}
        self._inboxes: dict[Key, list[Envelope]] = {}
        self._readers: dict[Key, int] = {}
        self._traffic: dict[int, Traffic] = {}

    @property
    def rank(self) -> int | None:
        """None: many peers live here."""
        return None

    def connect(self, replica: Replica) -> None:
        """Register a replica and compare its start with that of the first."""
        if self._replicas.get(replica.peer) is replica:
            return
        if not 0 <= replica.peer < self.num_peers or replica.peer in self._replicas:
            raise ConfigError(
                f"peer={replica.peer!r}: must be a free number from 0 to {self.num_peers - 1}; number replicas from 0"
            )
        if self._replicas:
            compare_starts(Start.of(next(iter(self._replicas.values()))), Start.of(replica))
        self._replicas[replica.peer] = replica

    def post(self, envelope: Envelope) -> None:
        """Encode and keep the frame."""
        frame = wire.encode(envelope, coding=Coding.COMPACT)
        self._frames.setdefault(envelope.key, {})[envelope.peer] = frame
        self._tables[envelope.key] = envelope.payload.specs
        head = wire.HEADER_BYTES
        if envelope.payload.linear:
            # A ring carries as much for a peer that contributes nothing.
            body = wire.frame_bytes(envelope.payload.specs) - head
            self._count(envelope.peer, round_traffic(head, body, self.num_peers, linear=True))
            return
        # Compact frames differ in size, so each peer is charged for what the others really send.
        for peer in range(self.num_peers):
            mine = peer == envelope.peer
            self._count(peer, Traffic(len(frame) * mine, len(frame) * (not mine)))

    def collect(self, key: Key) -> list[Envelope]:
        """Decode all frames of ``key`` at the first call; forget them after the last peer has collected."""
        if key not in self._inboxes:
            frames = self._frames.get(key, {})
            if len(frames) < self.num_peers:
                raise QuorumError(
                    f"round {key.round}, fragment {key.fragment}: only {len(frames)} of {self.num_peers} peers have "
                    "posted; advance every replica before the first one settles"
                )
            fingerprint = next(iter(self._replicas.values())).fingerprint
            self._inboxes[key] = [wire.decode(frames[p], self._tables[key], fingerprint) for p in sorted(frames)]
            self._readers[key] = self.num_peers
        inbox = self._inboxes[key]
        self._readers[key] -= 1
        if not self._readers[key]:
            for table in (self._frames, self._tables, self._inboxes, self._readers):
                table.pop(key, None)
        return inbox

    def put_back(self, key: Key, inbox: list[Envelope]) -> None:
        """One more reader for that inbox."""
        self._inboxes[key] = inbox
        self._readers[key] = self._readers.get(key, 0) + 1

    def traffic(self, peer: int) -> Traffic:
        """Bytes of ``peer`` as they would be between processes."""
        return self._traffic.get(peer, Traffic(0, 0))

    def _count(self, peer: int, more: Traffic) -> None:
        before = self.traffic(peer)
        self._traffic[peer] = Traffic(before.sent + more.sent, before.received + more.received)

    def set_traffic(self, peer: int, traffic: Traffic) -> None:
        """Go on from here."""
        self._traffic[peer] = traffic
