"""One process speaks to other replicas for all that hold the same: data-parallel ranks, or the copies of HSDP.

All of them encode, so that their residuals move alike. The first one alone posts; what it collects it hands on inside
the replica, so that all apply the same messages.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from sparseloco import wire
from sparseloco.errors import ConfigError, DivergenceError
from sparseloco.reduce import MAX_WEIGHT
from sparseloco.replica import Replica
from sparseloco.sharding import Shards
from sparseloco.transport.base import Traffic, Transport
from sparseloco.transport.meeting import signs_of_life
from sparseloco.transport.torchft import ManagedGroup
from sparseloco.types import Envelope, Key, PartSpec

_COUNT = struct.Struct("<I")
_ROW = struct.Struct("<QQI?")
_FAILED = -1


class Speaker:
    """Way to the peers of a replica whose state lies in several processes, of which one speaks.

    Bytes between replicas are sent and counted once; the other copies have a traffic of 0. Before each message a hash
    of it is compared, so copies that have drifted apart are found before anything is posted.

    Args:
        transport: Between those who speak. The other copies make it in the same way and never use it.
        copies: A gloo group of the processes that hold the same parameters, or the same shards of them; its first rank
            speaks. For HSDP ``mesh.get_group("replicate")``, for DDP its process group.

    Raises:
        ConfigError: if the group has no gloo, or the transport is one of torchft.

    Example:
        ``Speaker(ProcessGroup(mesh.get_group("peers")), mesh.get_group("replicate"))``
    """

    def __init__(self, transport: Transport, copies: dist.ProcessGroup) -> None:
        if isinstance(transport, ManagedGroup):
            raise ConfigError(
                "transport='ManagedGroup': must not take over state where one process speaks for several, since the "
                "others would keep theirs; use ProcessGroup, or one process for each replica under torchft"
            )
        if "gloo" not in (backends := str(dist.get_backend_config(copies))):
            raise ConfigError(
                f"copies={backends!r}: must be a group with gloo, since messages lie in main memory; make the mesh or "
                "the group with backend 'cpu:gloo,cuda:nccl'"
            )
        self.copies = copies
        self.speaks = dist.get_rank(copies) == 0
        self._transport = transport
        self._first = dist.get_global_rank(copies, 0)
        self._guard = signs_of_life().guard
        self._shards = Shards()
        self._connected: Replica | None = None
        self._early: dict[Key, list[Envelope]] = {}

    @property
    def rank(self) -> int | None:
        """The peer number; equal at all copies."""
        return self._transport.rank

    def connect(self, replica: Replica) -> None:
        """Compare the copies, then let the one that speaks compare itself with the other replicas.

        Raises:
            ConfigError: if the algorithm averages buffers, or the group is not that of the copies.
            DivergenceError: naming the copy and the tensor that differs, or what differs between replicas.
        """
        if self._connected is replica:
            return
        if replica.algorithm.sync_buffers:
            raise ConfigError(
                "sync_buffers=True: must be False where one process speaks for several, whose buffers differ; "
                "leave buffers private"
            )
        self._shards = replica.shards.spoken_for(self.copies)
        # The transport is between those who speak, and must not wait for the other copies.
        replica.shards = self._shards.without_copies()
        try:
            with self._shards.jointly("start"):
                self._compare_start(replica)
                if self.speaks:
                    self._transport.connect(replica)
        finally:
            self._shards.guard = self._guard
            replica.shards = self._shards
        self._connected = replica

    def post(self, envelope: Envelope) -> None:
        """Compare what the copies made, and post it once.

        Raises:
            DivergenceError: at all copies, if one of them has drifted apart; nothing has been posted then.
        """
        with self._shards.jointly(f"round {envelope.key.round}"):
            odd = self._odd_copy(xxhash.xxh3_128_digest(wire.encode(envelope)))
            if odd is not None:
                raise DivergenceError(
                    f"copy {odd}, round {envelope.key.round}=another message than at copy 0: must be equal at all "
                    "copies of a replica; let DDP or FSDP2 average their gradients, and give them one learning rate "
                    "and weight"
                )
        if self.speaks:
            self._transport.post(envelope)

    def collect(self, key: Key) -> list[Envelope]:
        """What the process that speaks has collected, at all copies."""
        if key in self._early:
            return self._early.pop(key)
        with self._shards.jointly(f"round {key.round}"):
            if self.speaks:
                return self._hand_on(key)
            return self._receive(key)

    def put_back(self, key: Key, inbox: list[Envelope]) -> None:
        """Kept at every copy."""
        self._early[key] = inbox

    def traffic(self, peer: int) -> Traffic:
        """Bytes between replicas; 0 at copies that do not speak."""
        return self._transport.traffic(peer)

    def set_traffic(self, peer: int, traffic: Traffic) -> None:
        """Go on from here."""
        self._transport.set_traffic(peer, traffic)

    def _compare_start(self, replica: Replica) -> None:
        digests = replica.tensor_digests()
        table = repr((replica.peer, str(replica.shards), replica.fingerprint, list(digests)))
        odd = self._odd_copy(xxhash.xxh3_128_digest(table.encode()))
        if odd is not None:
            raise DivergenceError(
                f"copy {odd}=another peer, algorithm or model than copy 0: must be the same at all copies of a "
                "replica; give Speaker the group of those that hold the same"
            )
        for name, digest in digests.items():
            odd = self._odd_copy(bytes.fromhex(digest))
            if odd is not None:
                raise DivergenceError(
                    f"copy {odd}, tensor {name}: starts from other values than at copy 0; "
                    "initialise all copies from the same seed or the same file"
                )

    def _hand_on(self, key: Key) -> list[Envelope]:
        try:
            inbox = self._transport.collect(key)
            data = pack(inbox)
        except Exception:
            self._broadcast(torch.tensor([_FAILED]))  # else the other copies would wait
            raise
        self._broadcast(torch.tensor([len(data)]))
        self._broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return inbox

    def _receive(self, key: Key) -> list[Envelope]:
        assert self._connected is not None, "connect first"
        size = int(self._broadcast(torch.empty(1, dtype=torch.int64)))
        if size == _FAILED:
            raise DivergenceError(
                f"round {key.round}=failed at the process that speaks for this one: must succeed there; "
                "look for its message"
            )
        data = self._broadcast(torch.empty(size, dtype=torch.uint8))
        table = self._connected.part_specs(key)
        return unpack(data.numpy().tobytes(), table, self._connected.fingerprint)

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._guard():
            dist.broadcast(tensor, self._first, group=self.copies)
        return tensor

    def _odd_copy(self, data: bytes) -> int | None:
        """The first copy whose ``data`` are not those of copy 0; the same answer at all of them."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = [torch.empty_like(mine) for _ in range(self.copies.size())]
        with self._guard():
            dist.all_gather(rows, mine, group=self.copies)
        return next((copy for copy, row in enumerate(rows) if not torch.equal(row, rows[0])), None)


def pack(inbox: Sequence[Envelope]) -> bytes:
    """An inbox as bytes: frames, and beside each what a frame does not say of a mean of several peers."""
    pieces = [_COUNT.pack(len(inbox))]
    for envelope in inbox:
        light = replace(envelope, weight=min(envelope.weight, MAX_WEIGHT - 1))
        frame = wire.encode(light)
        row = _ROW.pack(envelope.weight, len(frame), len(envelope.covers), bool(envelope.payload.specs))
        pieces += [row, np.array(envelope.covers, "<u4").tobytes(), frame]
    return b"".join(pieces)


def unpack(data: bytes, specs: Sequence[PartSpec], fingerprint: str) -> list[Envelope]:
    """Undo :func:`pack`; payloads stay packed."""
    (count,) = _COUNT.unpack_from(data)
    at = _COUNT.size
    inbox: list[Envelope] = []
    for _ in range(count):
        weight, length, num_covers, has_body = _ROW.unpack_from(data, at)
        at += _ROW.size
        covers = np.frombuffer(data, "<u4", num_covers, at).tolist()
        at += 4 * num_covers
        found = wire.decode(data[at : at + length], specs if has_body else (), fingerprint)
        inbox.append(replace(found, weight=weight, covers=tuple(covers)))
        at += length
    return inbox
