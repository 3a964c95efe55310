"""Runs for tests: an owner, peers with keys in order, and the loop that each peer goes through."""

from __future__ import annotations

import hashlib
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparseloco import advance, settle
from sparseloco.algorithm import Algorithm
from sparseloco.errors import SparseLocoError
from sparseloco.peers.identity import Identity
from sparseloco.peers.member import tensor_table
from sparseloco.peers.operations import Tell
from sparseloco.peers.patience import Patience
from sparseloco.peers.policy import Policy
from sparseloco.peers.run_file import RunFile, run_id
from sparseloco.peers.store import Store
from sparseloco.replica import Replica
from sparseloco.simulate import Cohort
from sparseloco.transport.object_store import ObjectStore
from tests import toy

POLL_S = 0.01


def identity(name: str) -> Identity:
    """The same key for the same name, for tests only."""
    return Identity(hashlib.sha256(name.encode()).digest())


def identities(count: int) -> list[Identity]:
    """Keys whose peer ids ascend, so that a manifest's order is that of peer numbers."""
    return sorted((identity(f"peer {number}") for number in range(count)), key=lambda one: one.peer_id)


OWNER = identity("owner")


def make_run(algorithm: Algorithm, model: nn.Module, *, name: str = "test", **policy: Any) -> RunFile:
    """A signed ``run.json`` for a model and an algorithm."""
    replica = Replica(model, algorithm)
    nonce = "0" * 32
    return RunFile(
        run=run_id(name, nonce, OWNER.public),
        name=name,
        nonce=nonce,
        owner=OWNER.public,
        algorithm={"preset": "sparseloco"},
        model={"width": 9},
        data={"path": "stdlib"},
        train={"steps": 10},
        tensors=tensor_table(replica.specs),
        fingerprint=replica.fingerprint,
        tokenizer="0" * 64,
        policy=Policy(**{"min_peers": 2, "deadline_s": 60.0, "lease_s": 5.0, "anchor_every": 2} | policy),
    ).signed(OWNER)


class Clock:
    """Seconds that pass when a test says so: a peer that is slow is waited for, and one that is gone is not."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Peer:
    """One peer: its model, its replica, its way to the store."""

    run: RunFile
    algorithm: Algorithm
    store: Store
    me: Identity
    folder: Path
    number: int
    model: nn.Module = field(default_factory=toy.net)
    said: list[Tell] = field(default_factory=list)
    give_up_s: float | None = 60.0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.replica = Replica(self.model, self.algorithm, peer=self.number)
        self.transport = ObjectStore(
            self.store,
            self.me,
            self.folder,
            run=self.run,
            poll_s=POLL_S,
            # A clock that a test moves says nothing about how long a peer has really waited.
            give_up_s=self.give_up_s if self.clock is time.monotonic else None,
            patience=Patience(base_s=0.01, cap_s=0.1),
            tell=self.said.append,
            clock=self.clock,
        )
        self.digests: dict[int, str] = {}

    def train(self, until: int) -> None:
        """Inner steps until the shared step is ``until``."""
        self.arrive()
        while self.replica.step < until:
            self.step()
            self.arrive()

    def arrive(self) -> None:
        """Join, or look whether the others have gone on."""
        self.transport.connect(self.replica)
        self.digests[self.replica.step] = self.replica.digest()

    def step(self) -> None:
        """One inner step and what is due after it."""
        toy.loss_of(self.model, toy.batch(self.replica.step + 1, self.number)).backward()
        advance(self.replica, self.transport)
        settle(self.replica, self.transport)

    def kinds(self) -> set[str]:
        return {tell.kind for tell in self.said}


def miss(peers: Sequence[Peer], until: int, clock: Clock) -> None:
    """Let time pass for peers that train, so that they wait for nobody who is gone; both are needed in every round."""
    while any(peer.replica.step < until for peer in peers):
        clock.now += 10.0
        time.sleep(0.02)


def together(*jobs: Callable[[], None]) -> None:
    """Run jobs at the same time; the first error of one is raised."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001  # raised by the caller
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def train_all(peers: Sequence[Peer], until: int) -> None:
    """All peers at the same time."""
    together(*[lambda peer=peer: peer.train(until) for peer in peers])


def loopback(algorithm: Algorithm, peers: int, steps: int) -> Cohort:
    """The same training in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cohort = Cohort(toy.net(), algorithm, peers)
    for step in range(1, steps + 1):
        for peer in range(peers):
            with cohort.turn(peer):
                toy.loss_of(cohort.model, toy.batch(step, peer)).backward()
                cohort.advance(peer)
        cohort.settle()
    return cohort


__all__ = ["OWNER", "Peer", "SparseLocoError", "identities", "identity", "loopback", "make_run", "together", "torch"]
