"""Replicas that come and go inside a cluster: torchft says who takes part in a round, and gloo carries the frames.

Every round is one quorum of torchft's lighthouse. Who is behind in it, since it is new, was stopped for a while or
missed a round, first takes over the shared state of one who is not, and sends nothing in that round. Then all gather
the frames, of fixed size. A peer applies all of them or, if anything failed, none. torchft is imported when a group is
made.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import struct
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import AllgatherOptions  # pyright: ignore[reportPrivateImportUsage]

from sparseloco import wire
from sparseloco.errors import CheckpointError, ConfigError, DivergenceError, QuorumError, SparseLocoError
from sparseloco.lane import StateDict
from sparseloco.local import forget_moments
from sparseloco.replica import Replica
from sparseloco.transport.base import Traffic
from sparseloco.types import Coding, Envelope, Key

_STATE = "sparseloco"
_HELLO = struct.Struct("<IQ8s16s")
"""Peer, step, fingerprint of the algorithm and digest of the shared state."""
_SIZE_TAG, _STATE_TAG = 1, 2
_JOIN_ATTEMPTS = 10


class Group(Protocol):
    """What is used of torchft's process groups."""

    def size(self) -> int: ...

    def allgather(self, output: list[list[Tensor]], mine: list[Tensor], options: Any) -> Any: ...

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Any: ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Any: ...


class Manager(Protocol):
    """What is used of ``torchft.Manager``."""

    def register_state_dict_fn(self, key: str, load_state_dict: Any, state_dict: Any) -> None: ...

    def start_quorum(self) -> None: ...

    def errored(self) -> object | None: ...

    def report_error(self, e: Exception) -> None: ...

    def should_commit(self) -> bool: ...


class StateOverGroup:
    """A ``CheckpointTransport`` of torchft: shared state goes to a replica that is behind through the group itself.

    It travels as safetensors, while torchft's own transports unpickle what another machine sends.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def metadata(self) -> str:
        """Nothing to be told before."""
        return ""

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Send the state to each of those ranks."""
        data = pack(state_dict)
        for rank in dst_ranks:
            self._group.send([torch.tensor([len(data)])], rank, _SIZE_TAG).wait()
            self._group.send([_bytes(data)], rank, _STATE_TAG).wait()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Take it from the rank that has it."""
        size = torch.zeros(1, dtype=torch.int64)
        self._group.recv([size], src_rank, _SIZE_TAG).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        self._group.recv([data], src_rank, _STATE_TAG).wait()
        return unpack(data.numpy().tobytes())

    def disallow_checkpoint(self) -> None:
        """Sending has ended when :meth:`send_checkpoint` returns."""

    def shutdown(self, wait: bool = True) -> None:
        """Nothing runs."""


class ManagedGroup:
    """Peers of a ``torchft.Manager`` with a synchronous quorum; see :func:`managed_group`, which makes one.

    Args:
        manager: Asked for a quorum and a verdict in every round.
        group: The process group that the manager configures.
        peer: Number of this replica, another one at each; a replica that comes back may have its old one.
    """

    def __init__(self, manager: Manager, group: Group, *, peer: int) -> None:
        self.manager = manager
        self.group = group
        self._peer = peer
        self._replica: Replica | None = None
        self._posted: dict[Key, Envelope] = {}
        self._inboxes: dict[Key, list[Envelope]] = {}
        self._healed = False
        self._sent = 0
        self._received = 0

    @property
    def rank(self) -> int:
        """Number of this replica."""
        return self._peer

    def connect(self, replica: Replica) -> None:
        """Join: take over the state of those who train already, and settle the round in which this happens."""
        if self._replica is replica:
            return
        if replica.peer != self._peer:
            raise ConfigError(f"peer={replica.peer!r}: must be {self._peer}; build Replica(..., peer={self._peer})")
        if replica.shards.count > 1:
            raise ConfigError(f"shards={replica.shards.count}: must be 1 under torchft; use ProcessGroup")
        if replica.algorithm.schedule.delay:
            raise ConfigError(
                f"delay={replica.algorithm.schedule.delay}: must be 0 under torchft, where a round is settled in the "
                "step that posts it; use ProcessGroup"
            )
        self._replica = replica
        self.manager.register_state_dict_fn(_STATE, self._take_over, replica.shared_state)
        if not any(self._meet(replica) for _ in range(_JOIN_ATTEMPTS)):
            raise QuorumError(
                f"peer={self._peer}: must be in a round that counts, and was in none of {_JOIN_ATTEMPTS}; give the "
                "lighthouse the same min_replicas, and look at torchft's own words"
            )
        for key in replica.in_flight():
            replica.apply(key, self.collect(key))

    def post(self, envelope: Envelope) -> None:
        """Keep the message; with the last one of this step, hold the round."""
        replica = self._replica
        assert replica is not None
        self._posted[envelope.key] = envelope
        if len(self._posted) == len(replica.in_flight()):
            self._meet(replica)

    def collect(self, key: Key) -> list[Envelope]:
        """Messages of the round that :meth:`post` held; none if it was given up, at whoever gave it up."""
        return self._inboxes.pop(key)

    def put_back(self, key: Key, inbox: list[Envelope]) -> None:
        """For the one replica of this process."""
        self._inboxes[key] = inbox

    def traffic(self, peer: int) -> Traffic:
        """Bytes of this replica, without state that was handed over; others know theirs."""
        return Traffic(self._sent, self._received)

    def set_traffic(self, peer: int, traffic: Traffic) -> None:
        """Go on from here."""
        self._sent, self._received = traffic

    def _take_over(self, state: StateDict) -> None:
        assert self._replica is not None
        self._replica.load_shared_state(state)
        forget_moments(self._replica.stepped_by)
        self._healed = True

    def _meet(self, replica: Replica) -> bool:
        """One quorum and all messages of one step; whether the round counts here."""
        self._begin()
        inboxes: dict[Key, list[Envelope]] = {}
        if not self.manager.errored():
            try:
                self._check(replica)
                inboxes = {key: self._gather(replica, key) for key in replica.in_flight()}
            except SparseLocoError:
                raise
            except RuntimeError as error:  # a peer is gone or late
                self.manager.report_error(error)
        counts = self.manager.should_commit()
        self._inboxes = {key: inboxes[key] if counts else [] for key in replica.in_flight()}
        self._posted.clear()
        return counts

    def _begin(self) -> None:
        """Wait for a quorum, and take over its state if this replica is behind."""
        self._healed = False
        try:
            self.manager.start_quorum()
        except SparseLocoError:
            raise
        except (RuntimeError, TimeoutError) as error:
            raise QuorumError(
                f"lighthouse=no quorum ({error}): must answer within quorum_timeout_s; see whether it runs and enough "
                "replicas do"
            ) from error
        if self._healed:
            self._posted.clear()  # they were made from a state that nobody else has

    def _check(self, replica: Replica) -> None:
        """Compare step, algorithm and shared state of all who take part."""
        mine = (bytes.fromhex(replica.fingerprint), bytes.fromhex(replica.digest()))
        rows = [_HELLO.unpack(row) for row in self._gather_bytes(_HELLO.pack(self._peer, replica.step, *mine))]
        self._sent += _HELLO.size
        self._received += _HELLO.size * (len(rows) - 1)
        peers = [row[0] for row in rows]
        if len(set(peers)) < len(peers):
            raise ConfigError(f"peer={self._peer}: must be another number at each replica; the group has {peers}")
        for peer, step, *theirs in rows:
            if (step, *theirs) != (replica.step, *mine):
                raise DivergenceError(
                    f"peer {peer}: says step {step}, algorithm {theirs[0].hex()} and shared state {theirs[1].hex()}, "
                    f"here they are {replica.step}, {replica.fingerprint} and {replica.digest()}; start one of them "
                    "anew"
                )

    def _gather(self, replica: Replica, key: Key) -> list[Envelope]:
        table = replica.part_specs(key)
        size = wire.frame_bytes(table)
        envelope = self._posted.get(key)
        mine = wire.encode(envelope, coding=Coding.FIXED) if envelope else bytes(size)
        rows = self._gather_bytes(mine)
        frames = [row for row in rows if any(row[: wire.HEADER_BYTES])]
        self._sent += size * (envelope is not None)
        self._received += size * (len(frames) - (envelope is not None))
        inbox = [wire.decode(frame, table, replica.fingerprint) for frame in frames]
        return sorted(inbox, key=lambda each: each.peer)

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        mine = _bytes(data)
        rows = [torch.empty_like(mine) for _ in range(self.group.size())]
        self.group.allgather([rows], [mine], AllgatherOptions()).wait()
        return [row.numpy().tobytes() for row in rows]


@contextlib.contextmanager
def managed_group(
    peer: int,
    lighthouse: str,
    *,
    min_replicas: int = 1,
    host: str = "localhost",
    timeout_s: float = 60.0,
    quorum_timeout_s: float = 3600.0,
) -> Iterator[ManagedGroup]:
    """A transport for the replica of this process, whose quorum comes from a lighthouse of torchft.

    Args:
        peer: Number of this replica, another one at each.
        lighthouse: Address of ``torchft_lighthouse``, such as ``http://10.0.0.1:29510``.
        min_replicas: A round of fewer counts for nobody.
        host: Name by which the other replicas reach this machine.
        timeout_s: Longest wait for another replica within a round.
        quorum_timeout_s: Longest wait for a round to begin; all wait for the slowest, so inner steps must fit in.

    Raises:
        ConfigError: if torchft is not installed.
        QuorumError: if the lighthouse does not answer.
    """
    torchft = _torchft(lighthouse)
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    group = torchft.ProcessGroupGloo(timeout=timeout)
    try:
        manager = torchft.Manager(
            pg=group,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=min_replicas,
            use_async_quorum=False,
            timeout=timeout,
            quorum_timeout=timedelta(seconds=quorum_timeout_s),
            connect_timeout=timeout,
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"peer{peer}",
            hostname=host,
            checkpoint_transport=StateOverGroup(group),
        )
    except (RuntimeError, TimeoutError) as error:
        raise QuorumError(
            f"lighthouse={lighthouse!r}: must answer within {timeout_s:g} s ({error}); start torchft_lighthouse there"
        ) from error
    try:
        yield ManagedGroup(manager, group, peer=peer)
    finally:
        manager.shutdown(wait=False)
        group.shutdown()


def pack(state_dict: dict[str, Any]) -> bytes:
    """What a manager sends to one that is behind, as one file of safetensors."""
    from safetensors.torch import save

    state: StateDict = state_dict["user"][_STATE]
    tensors = {path: value.detach().cpu().contiguous() for path, value in state.items() if isinstance(value, Tensor)}
    plain = {path: value for path, value in state.items() if path not in tensors}
    return save(tensors, metadata={"plain": json.dumps(plain), "torchft": json.dumps(state_dict["torchft"])})


def unpack(data: bytes) -> dict[str, Any]:
    """The opposite of :func:`pack`.

    Raises:
        CheckpointError: if the bytes are not such a file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        plain, counters = json.loads(header["plain"]), json.loads(header["torchft"])
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"state={len(data)} bytes: must be shared state ({error}); start this peer anew"
        ) from error
    return {"user": {_STATE: {**plain, **tensors}}, "torchft": counters}


def _bytes(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))


def _torchft(lighthouse: str) -> Any:
    try:
        return importlib.import_module("torchft")
    except ImportError as error:
        raise ConfigError(
            f'lighthouse={lighthouse!r}: needs torchft, which is not installed; run: pip install "sparseloco[torchft]"'
        ) from error
