"""One peer of the run, from its start to its end or to its death, in a thread or in a process of its own."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.chaos import task
from benchmarks.chaos.hostile import HostileStore
from benchmarks.chaos.ledger import Ledger, decoded, delta_of, flat
from sparseloco.errors import StoreError, WireError
from sparseloco.peers.canonical import sha256
from sparseloco.peers.frames import seal_envelope
from sparseloco.peers.identity import Identity
from sparseloco.peers.journal import Journal
from sparseloco.peers.member import tensor_table
from sparseloco.peers.operations import Tell
from sparseloco.peers.patience import Patience
from sparseloco.peers.policy import Policy
from sparseloco.peers.run_file import RunFile, run_id
from sparseloco.peers.store import Store, open_store
from sparseloco.replica import Replica
from sparseloco.transport.base import settle
from sparseloco.transport.faults import Crash, Fault, FaultyStore, Rate, Script
from sparseloco.transport.object_store import ObjectStore

HONEST = 5
HOSTILE = HONEST
"""Number of the one peer that is not honest."""
PEERS = HONEST + 1
WEIGHT = task.BATCH * task.INNER_STEPS
POLL_S = 0.03
SLOW_BYTES_PER_S = 200_000.0
"""Link of the last honest peer."""

FAULTS = (
    Rate(Fault("delay", 0.05), 0.02),
    Rate(Fault("drop"), 0.01),
    Rate(Fault("lost"), 0.02, ("create", "put", "delete")),
    Rate(Fault("duplicate"), 0.02),
    Rate(Fault("truncate"), 0.01),
    Rate(Fault("corrupt"), 0.01),
    Rate(Fault("stale", 20), 0.03),
    Rate(Fault("busy", 3), 0.003),
)
"""All kinds but crashes; each try of a request meets one with about a tenth of chance."""

CRASHES = [(f"crash_{when}", verb) for verb in ("create", "put", "get", "list", "size", "delete", "get_range")
           for when in ("before", "during", "after")]  # fmt: skip
_PER_ROUND = {"create": 0.5, "put": 2, "get": 15, "list": 10, "size": 8, "delete": 0.5, "get_range": 8}
"""About how often a peer does it in a round, so that lives that end at different operations are of like length."""


def identity(name: str) -> Identity:
    """The same key for the same name, for this benchmark only."""
    return Identity(hashlib.sha256(f"chaos {name}".encode()).digest())


def identities() -> list[Identity]:
    """Keys of all peers."""
    return [identity(f"peer {number}") for number in range(PEERS)]


def make_run(seed: int) -> RunFile:
    """``run.json``: all are members, the honest ones may write manifests."""
    owner, replica = identity("owner"), Replica(task.net(), task.algorithm())
    nonce = f"{seed:032x}"
    publics = [one.public for one in identities()]
    return RunFile(
        run=run_id("chaos", nonce, owner.public),
        name="chaos",
        nonce=nonce,
        owner=owner.public,
        algorithm={"preset": "sparseloco"},
        model={},
        data={},
        train={},
        tensors=tensor_table(replica.specs),
        fingerprint=replica.fingerprint,
        tokenizer="0" * 64,
        policy=Policy(
            admission="allow-list",
            members=tuple(sorted(publics)),
            writers=tuple(sorted(publics[:HONEST])),
            min_peers=2,
            deadline_s=2.0,
            lease_s=2.0,
            max_tokens_per_round=WEIGHT,
            anchor_every=5,
        ),
    ).signed(owner)


@dataclass(frozen=True, kw_only=True)
class Seat:
    """What outlives a peer, and makes it again."""

    number: int
    seed: int
    rounds: int
    run: RunFile
    url: str
    folder: Path

    @property
    def is_honest(self) -> bool:
        return self.number != HOSTILE

    @property
    def me(self) -> Identity:
        return identities()[self.number]

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.folder / "ledger")

    def journal(self) -> tuple[int, str] | None:
        """Round and hash of the last frame that was written down."""
        posted = Journal(self.folder / self.run.run / self.me.peer_id, self.run.run).read(0)
        return None if posted is None else (posted.key.round, posted.hash)

    def script(self, life: int, crash: tuple[str, str] | None, rounds_to_live: int) -> Script:
        """What goes wrong in a life of this peer, and at which kind of operation it ends."""
        rates = FAULTS
        if crash is not None:
            kind, verb = crash
            rates = (Rate(Fault(kind), 1 / (_PER_ROUND[verb] * rounds_to_live), (verb,)), *FAULTS)
        slow = SLOW_BYTES_PER_S if self.number == HONEST - 1 else None
        return Script(seed=1000 * (100 * self.seed + self.number) + life, rates=rates, bytes_per_s=slow)

    def live(self, store: Store, over: Callable[[], bool]) -> None:
        """Join or rejoin, train to the end, and stay for the others' sake until it is over for all.

        Raises:
            StoreError: if too much went wrong at once; start again.
            WireError: if what was read at the start was damaged; start again.
        """
        model = task.net()
        replica = Replica(model, task.algorithm(), peer=self.number)
        replica.weight = WEIGHT
        self.ledger.begin(self.journal())

        def tell(told: Tell) -> None:
            self.ledger.say(told.kind, told.round, replica.digest() if told.kind == "closed" else "")

        transport = ObjectStore(
            store,
            self.me,
            self.folder,
            run=self.run,
            poll_s=POLL_S,
            patience=Patience(base_s=0.01, cap_s=0.2, part_bytes=1024),
            tell=tell,
            progress=lambda _: None,
        )
        try:
            self._train(model, replica, transport, store)
            (lane,) = replica.lanes
            self.ledger.end(flat(lane.state.residual), replica.digest(), task.held_out(replica.anchor()))
            while not over():
                time.sleep(0.05)
        finally:
            with contextlib.suppress(StoreError):
                transport.leave()

    def _train(self, model: nn.Module, replica: Replica, transport: ObjectStore, store: Store) -> None:
        (lane,) = replica.lanes
        while True:
            transport.connect(replica)
            if replica.step >= self.rounds * task.INNER_STEPS:
                return
            task.loss_of(model, replica.step + 1, self.number).backward()
            replica.local_step()
            delta, residual = delta_of(replica), flat(lane.state.residual)
            for envelope in replica.outbox():
                frame = seal_envelope(envelope, self.run.run, self.me)
                sent = decoded(replica, envelope.payload)
                self.ledger.write(envelope.key.round, sha256(frame), delta=delta, residual=residual, sent=sent)
                if isinstance(store, HostileStore):
                    store.envelope = envelope
                transport.post(envelope)
            settle(replica, transport)


class Mortal:
    """A store at which a crash is the end of the process, as with kill -9."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self.store, name)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return verb(*args, **kwargs)
            except Crash:
                os.kill(os.getpid(), signal.SIGKILL)

        return guarded


def live_in_process(seat: Seat, life: int, crash: tuple[str, str] | None, rounds_to_live: int, over: Path) -> None:
    """Body of a process."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    raw = open_store(seat.url)
    if seat.is_honest:
        store: Any = Mortal(FaultyStore(raw, seat.script(life, crash, rounds_to_live)))
    else:
        store = HostileStore(raw, seat.me, seat.run, seat.seed)
    with contextlib.suppress(StoreError, WireError):  # it is started again
        seat.live(store, over.exists)
