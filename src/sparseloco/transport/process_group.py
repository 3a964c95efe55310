"""Peers as ranks of a ``torch.distributed`` group of gloo; payloads travel as CPU bytes.

Sparse payloads: one uint8 buffer per fragment and round, one all-gather of frames in FIXED coding, which have one size.
Linear payloads never go through a floating-point all-reduce: slices go all-to-all, each rank adds its slice in peer
order and divides once, and the mean slices are gathered. That is the traffic of a ring and the bits of ``Loopback``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sparseloco import wire
from sparseloco.errors import ConfigError
from sparseloco.reduce import mean_of_tensors
from sparseloco.replica import Replica
from sparseloco.transport.base import Start, Traffic, compare_starts, round_traffic
from sparseloco.types import Coding, Envelope, Key, PartSpec, Payload

_PREFIX, _LOCK = "sparseloco-", "lock"


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
        group: A gloo group with at least two ranks. For sharded replicas the dim of the mesh that joins those who hold
            the same shard: ``mesh.get_group("peers")``. None means the default one, which is made here if torchrun
            started this process and nobody has made it yet.

    Raises:
        ConfigError: if ``torch.distributed`` is not initialised.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized() and "RANK" in os.environ:
            dist.init_process_group("gloo")
        if not dist.is_initialized():
            raise ConfigError(
                "group=None: must have torch.distributed initialised; call init_process_group or start with torchrun"
            )
        self.group = group
        self.num_peers = dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        if self.num_peers == 1:
            warnings.warn("group=1 rank: one replica alone synchronizes with nobody; use 2 or more", stacklevel=2)
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
        """Compare fingerprints, then a digest per tensor, on all ranks."""
        if self._connected is replica:
            return
        if replica.peer != self.rank:
            raise ConfigError(f"peer={replica.peer!r}: must be the rank {self.rank}; build Replica(..., peer=rank)")
        with replica.shards.jointly("start"):
            self._compare(replica)
        self._connected = replica

    def _compare(self, replica: Replica) -> None:
        mine = Start.of(replica)
        self._check_shards(replica)
        fingerprints = [row.tobytes().hex() for row in self._gather_bytes(bytes.fromhex(mine.fingerprint))]
        names = list(mine.digests)
        if all(fingerprint == mine.fingerprint for fingerprint in fingerprints):
            rows = self._gather_bytes(b"".join(bytes.fromhex(mine.digests[name]) for name in names))
        else:
            rows = [np.empty(0, np.uint8)] * self.num_peers
        starts = [
            Start(peer, fingerprint, dict(zip(names, _split_digests(row), strict=False)))
            for peer, (fingerprint, row) in enumerate(zip(fingerprints, rows, strict=True))
        ]
        for start in starts[1:]:
            compare_starts(starts[0], start)

    def _check_shards(self, replica: Replica) -> None:
        """Refuse a group that joins other shards than those of the same panels."""
        mine = np.array([replica.shards.rank, replica.shards.count], np.int32)
        for peer, row in enumerate(self._gather_bytes(mine.tobytes())):
            if (theirs := row.view(np.int32).tolist()) != mine.tolist():
                raise ConfigError(
                    f"group=shard {mine[0]} of {mine[1]} and, at peer {peer}, shard {theirs[0]} of {theirs[1]}: must "
                    "join the same shard of every replica; pass ProcessGroup(mesh.get_group('peers'))"
                )

    def post(self, envelope: Envelope) -> None:
        """Start the collectives of one message."""
        if envelope.payload.linear:
            # Weights and digests of all peers travel as bodiless frames.
            head = replace(envelope, payload=Payload((), {}, linear=True))
            slices, work = self._scatter_slices(envelope.payload)
            frames, gather = self._gather_frames(wire.encode(head))
            pending = _Pending(envelope, [*work, gather], frames, slices)
            cost = (wire.HEADER_BYTES, sum(s.nbytes for s in slices))
        else:
            frames, gather = self._gather_frames(wire.encode(envelope, coding=Coding.FIXED))
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
        pending = self._pending.pop(key)
        for work in pending.works:
            work.wait()
        payload = pending.envelope.payload
        table = () if payload.linear else payload.specs
        fingerprint = pending.envelope.fingerprint
        inbox = [wire.decode(frame.numpy().tobytes(), table, fingerprint) for frame in pending.frames]
        return self._gather_mean(inbox, pending) if payload.linear else inbox

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
        rows = self._gather_bytes(np.float64(value).tobytes())
        return float(sum(float(row.view(np.float64)[0]) for row in rows)) / self.num_peers

    def _gather_bytes(self, data: bytes) -> list[np.ndarray]:
        frames, work = self._gather_frames(data)
        work.wait()
        return [frame.numpy() for frame in frames]

    def _gather_frames(self, data: bytes) -> tuple[list[Tensor], dist.Work]:
        mine = torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))
        frames = [torch.empty_like(mine) for _ in range(self.num_peers)]
        work = dist.all_gather(frames, mine, group=self.group, async_op=True)
        assert work is not None
        return frames, work

    def _scatter_slices(self, payload: Payload) -> tuple[list[Tensor], list[dist.Work]]:
        """Send slice r of every float buffer to rank r; row p of a result is what rank p sent here."""
        received: list[Tensor] = []
        works: list[dist.Work] = []
        tensors = payload.tensors
        for dtype in _dtypes(payload.specs):
            specs = [s for s in payload.specs if s.dtype == dtype]
            # Who contributes nothing sends zeros, which nobody adds. MPS has no collectives.
            parts = [tensors[s.name].to("cpu") if tensors else torch.zeros(s.shape, dtype=dtype) for s in specs]
            flat = torch.cat([part.reshape(-1) for part in parts])
            padded = torch.nn.functional.pad(flat, (0, -flat.numel() % self.num_peers))
            out = torch.empty_like(padded)
            work = dist.all_to_all_single(out, padded, group=self.group, async_op=True)
            assert work is not None
            received.append(out.view(self.num_peers, -1))
            works.append(work)
        return received, works

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
            whole = [torch.empty_like(mine) for _ in inbox]
            dist.all_gather(whole, mine, group=self.group)
            rest = torch.cat(whole)
            for spec in (s for s in specs if s.dtype == dtype):
                count = int(torch.Size(spec.shape).numel())
                tensors[spec.name] = rest[:count].reshape(spec.shape)
                rest = rest[count:]
        mean = Payload.of_tensors(specs, {spec.name: tensors[spec.name] for spec in specs}, linear=True)
        odd = next((e for e in giving if e.digest != pending.envelope.digest), giving[0])
        covers = tuple(envelope.peer for envelope in giving)
        whole_mean = replace(odd, weight=sum(e.weight for e in giving), payload=mean, covers=covers)
        return [whole_mean, *(envelope for envelope in inbox if not envelope.weight)]


@contextlib.contextmanager
def joined_group(rendezvous: str, rank: int, num_ranks: int) -> Iterator[None]:
    """The default gloo group inside this block.

    Args:
        rendezvous: ``env://`` under torchrun, or ``file://`` and a path that does not exist yet.
        rank: Of this process.
        num_ranks: Processes of the group.
    """
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def meeting_folder() -> Iterator[Path]:
    """A temporary folder for the rendezvous of processes on this machine; it is gone after the block.

    A process that is killed leaves its folder behind. Its lock, however, goes with it, so the next call removes every
    folder that is not locked.
    """
    import fcntl  # not on Windows, where the rest of the package can be imported

    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open("rb") as file:  # of another user, in use, or gone by now
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with (folder / "new").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            (folder / "new").rename(folder / _LOCK)  # never there without being locked
            yield folder


def _dtypes(specs: Sequence[PartSpec]) -> list[torch.dtype]:
    return sorted({spec.dtype for spec in specs}, key=str)


def _split_digests(row: np.ndarray) -> list[str]:
    return [digest.tobytes().hex() for digest in row.reshape(-1, 16)]
