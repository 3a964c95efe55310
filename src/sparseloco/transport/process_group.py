"""Peers as ranks of a ``torch.distributed`` group; frames are bytes that are made on the host.

Sparse payloads: one uint8 buffer per fragment and round, one all-gather of frames in FIXED coding, which have one size.
Linear payloads never go through a floating-point all-reduce: slices go all-to-all, each rank adds its slice in peer
order and divides once, and the mean slices are gathered. That is the traffic of a ring and the bits of ``Loopback``.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sparseloco import wire
from sparseloco.errors import ConfigError, DivergenceError
from sparseloco.keys import derive_key
from sparseloco.reduce import mean_of_tensors
from sparseloco.replica import Replica
from sparseloco.transport.base import Traffic, round_traffic
from sparseloco.transport.beats import phase
from sparseloco.transport.collectives import Collectives, down
from sparseloco.transport.deadline import Deadline
from sparseloco.transport.meeting import join, signs_of_life
from sparseloco.transport.starts import Start, compare_facts, compare_starts, name_divergence
from sparseloco.types import Coding, Envelope, Key, PartSpec, Payload


@dataclass
class _Pending:
    """Collectives of one message that run while training goes on."""

    envelope: Envelope
    works: list[dist.Work]
    frames: list[Tensor]
    slices: list[Tensor]


class ProcessGroup:
    """One replica per rank of ``group``; the peer number is the rank.

    Args:
        group: A group with at least two ranks. For sharded replicas the dim of the mesh that joins those who hold
            the same shard: ``mesh.get_group("peers")``. None means the default one, which is made here, of gloo, if
            torchrun started this process and nobody has made it yet.
        deadline_s: How long a peer that does not answer is waited for; all other timeouts follow from it, but not that
            of a group which was made elsewhere. None for 600 s, or what the run says that made the group.
        facts: Further plain values by dotted name that all peers must have in common; compared by :meth:`connect`.

    Raises:
        ConfigError: if ``torch.distributed`` is not initialised, or ``deadline_s`` is no time to wait.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        deadline_s: float | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        deadline = None if deadline_s is None else Deadline(deadline_s)
        if not dist.is_initialized() and "RANK" in os.environ:
            join("env://", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), deadline or Deadline())
        self._beats = signs_of_life(deadline)
        self._collectives = Collectives(group, self._beats.deadline, self._beats.guard)
        self.group = group
        self.num_peers = self._collectives.size
        self._rank = dist.get_rank(group)
        if self.num_peers == 1:
            warnings.warn("group=1 rank: one replica alone synchronizes with nobody; use 2 or more", stacklevel=2)
        self._facts = dict(facts or {})
        self._connected: Replica | None = None
        self._pending: dict[Key, _Pending] = {}
        self._early: dict[Key, list[Envelope]] = {}
        self._sent = 0
        self._received = 0

    @property
    def rank(self) -> int:
        """Rank in the group."""
        return self._rank

    def connect(self, replica: Replica) -> None:
        """Compare versions, settings and tensor table by name, then a digest per tensor, on all ranks."""
        if self._connected is replica:
            return
        if replica.peer != self.rank:
            raise ConfigError(f"peer={replica.peer!r}: must be the rank {self.rank}; build Replica(..., peer=rank)")
        shards = replica.shards
        shards.check_spoken()
        self._beats.name = f"peer {self.rank}" + (f", shard {shards.rank}" if shards.count > 1 else "")
        shards.guard = self._beats.guard
        with phase("comparing starts"), shards.jointly("start"):
            self._check_shards(replica)
            self._compare(Start.of(replica, self._facts))
        self._connected = replica

    def _compare(self, mine: Start) -> None:
        facts = json.dumps([mine.fingerprint, mine.facts]).encode()
        if len(set(self._collectives.gather(derive_key(*facts).to_bytes(8, "little", signed=True)))) > 1:
            told = [json.loads(row) for row in self._collectives.gather_any(facts)]
            for peer, (_, theirs) in enumerate(told):
                compare_facts((0, told[0][1]), (peer, theirs))
        rows = self._collectives.gather(b"".join(map(bytes.fromhex, [mine.fingerprint, *mine.digests.values()])))
        starts = [
            Start(peer, row[:8].hex(), mine.facts, dict(zip(mine.digests, _split(row), strict=True)))
            for peer, row in enumerate(rows)
        ]
        for start in starts[1:]:
            compare_starts(starts[0], start)

    def _check_shards(self, replica: Replica) -> None:
        """Refuse a group that joins other shards than those of the same panels."""
        mine = np.array([replica.shards.rank, replica.shards.count], np.int32)
        for peer, row in enumerate(self._collectives.gather(mine.tobytes())):
            if (theirs := np.frombuffer(row, np.int32).tolist()) != mine.tolist():
                raise ConfigError(
                    f"group=shard {mine[0]} of {mine[1]} and, at peer {peer}, shard {theirs[0]} of {theirs[1]}: must "
                    "join the same shard of every replica; pass ProcessGroup(mesh.get_group('peers'))"
                )

    def post(self, envelope: Envelope) -> None:
        """Start the collectives of one message."""
        with phase(f"post round {envelope.key.round}"):
            self._post(envelope)

    def _post(self, envelope: Envelope) -> None:
        if envelope.payload.linear:
            # Weights and digests of all peers travel as bodiless frames.
            head = replace(envelope, payload=Payload((), {}, linear=True))
            slices, work = self._scatter_slices(envelope.payload)
            frames, gather = self._collectives.start_gather(wire.encode(head))
            pending = _Pending(envelope, [*work, gather], frames, slices)
            cost = (wire.HEADER_BYTES, sum(s.nbytes for s in slices))
        else:
            frames, gather = self._collectives.start_gather(wire.encode(envelope, coding=Coding.FIXED))
            pending = _Pending(envelope, [gather], frames, [])
            cost = (wire.HEADER_BYTES, frames[0].numel() - wire.HEADER_BYTES)
        sent, received = round_traffic(*cost, self.num_peers, linear=envelope.payload.linear)
        self._sent += sent
        self._received += received
        self._pending[envelope.key] = pending

    def collect(self, key: Key) -> list[Envelope]:
        """Wait for the collectives of ``key``; linear payloads come back as one envelope, already averaged."""
        if key in self._early:
            return self._early.pop(key)
        with phase(f"collect round {key.round}"):
            return self._collect(key)

    def _collect(self, key: Key) -> list[Envelope]:
        pending = self._pending.pop(key)
        self._collectives.wait(pending.works)
        payload = pending.envelope.payload
        table = () if payload.linear else payload.specs
        fingerprint = pending.envelope.fingerprint
        inbox = [wire.decode(down(frame), table, fingerprint) for frame in pending.frames]
        self._check_agreement(key, inbox)
        return self._gather_mean(inbox, pending) if payload.linear else inbox

    def _check_agreement(self, key: Key, inbox: Sequence[Envelope]) -> None:
        """All ranks see the same digests here; if these differ, all of them find out where.

        Raises:
            DivergenceError: naming the first tensor that differs, and the peers.
        """
        if self._connected is None or len({envelope.digest for envelope in inbox}) == 1:
            return
        rows = self._collectives.gather_any(json.dumps(self._connected.tensor_digests()).encode())
        raise DivergenceError(name_divergence(key.round, [json.loads(row) for row in rows]))

    def put_back(self, key: Key, inbox: list[Envelope]) -> None:
        """For the one replica of this rank."""
        self._early[key] = inbox

    def traffic(self, peer: int) -> Traffic:
        """Bytes of this rank; other ranks know theirs."""
        return Traffic(self._sent, self._received)

    def set_traffic(self, peer: int, traffic: Traffic) -> None:
        """Go on from here."""
        self._sent, self._received = traffic

    def mean(self, value: float) -> float:
        """Mean of a number over all ranks, added in rank order; for logs."""
        with phase("exchange a number"):
            rows = self._collectives.gather(np.float64(value).tobytes())
        return sum(float(np.frombuffer(row, np.float64)[0]) for row in rows) / self.num_peers

    def _scatter_slices(self, payload: Payload) -> tuple[list[Tensor], list[dist.Work]]:
        """Send slice r of every float buffer to rank r; row p of a result is what rank p sent here."""
        tensors = payload.tensors
        # Who contributes nothing sends zeros, which nobody adds.
        started = [
            self._collectives.start_slices(
                [
                    tensors[s.name] if tensors else torch.zeros(s.shape, dtype=dtype)
                    for s in payload.specs
                    if s.dtype == dtype
                ]
            )
            for dtype in _dtypes(payload.specs)
        ]
        return [slices for slices, _ in started], [work for _, work in started]

    def _gather_mean(self, inbox: Sequence[Envelope], pending: _Pending) -> list[Envelope]:
        """The mean of all contributions as one envelope, and those of the peers that contribute nothing."""
        giving = [envelope for envelope in inbox if envelope.weight]
        if not giving:
            return list(inbox)
        specs = pending.envelope.payload.specs
        tensors: dict[str, Tensor] = {}
        for dtype, slice_RS in zip(_dtypes(specs), pending.slices, strict=True):
            rows = zip(inbox, slice_RS, strict=True)
            mine = mean_of_tensors([(envelope.weight, row) for envelope, row in rows if envelope.weight])
            rest = self._collectives.gather_slices(mine)
            for spec in (s for s in specs if s.dtype == dtype):
                count = int(torch.Size(spec.shape).numel())
                tensors[spec.name] = rest[:count].reshape(spec.shape)
                rest = rest[count:]
        mean = Payload.of_tensors(specs, {spec.name: tensors[spec.name] for spec in specs}, linear=True)
        odd = next((e for e in giving if e.digest != pending.envelope.digest), giving[0])
        covers = tuple(envelope.peer for envelope in giving)
        whole_mean = replace(odd, weight=sum(e.weight for e in giving), payload=mean, covers=covers)
        return [whole_mean, *(envelope for envelope in inbox if not envelope.weight)]


def _dtypes(specs: Sequence[PartSpec]) -> list[torch.dtype]:
    return sorted({spec.dtype for spec in specs}, key=str)


def _split(row: bytes) -> list[str]:
    """Digests behind a fingerprint."""
    return [row[at : at + 16].hex() for at in range(8, len(row), 16)]
