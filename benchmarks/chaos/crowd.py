"""All peers at once: as threads of this process with every fault but death, or as processes that are killed with -9."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import resource
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from benchmarks.chaos.hostile import HostileStore
from benchmarks.chaos.peer import CRASHES, HONEST, PEERS, Seat, live_in_process
from sparseloco.errors import StoreError, WireError
from sparseloco.peers import canonical
from sparseloco.peers.claims import next_claim, reader_of
from sparseloco.peers.manifest import History, Manifest
from sparseloco.peers.run_file import RunFile
from sparseloco.peers.store import Store, open_store
from sparseloco.transport.faults import FaultyStore

LOOK_S = 0.1
MOST_DOWN_S = 4.0
"""A peer that was killed comes back after at most this; the others do not wait longer than half of it."""
STUCK_S = 180.0
"""Seconds without a closed round after which the benchmark gives up; no figure depends on it."""


@dataclass
class Chain:
    """The rounds that are closed, read from outside, without faults.

    Attributes:
        manifests: Those that count, in order.
    """

    store: Store
    history: History
    manifests: list[Manifest] = field(default_factory=list)

    @classmethod
    def of(cls, url: str, run: RunFile) -> Chain:
        return cls(open_store(url), History(run=run, round=0, fragment=0, digest=""))

    def look(self) -> int:
        """How many there are now."""
        while (manifest := next_claim(reader_of(self.store), self.history)) is not None:
            self.manifests.append(manifest)
            self.history = self.history.after(manifest, "")
        return len(self.manifests)


@dataclass
class Watch:
    """Says how far a run has come, and keeps the most memory that a process had in each half of it."""

    label: str
    rounds: int
    chain: Chain
    peaks: dict[bool, int] = field(default_factory=dict)
    said: int = 0
    moved: float = field(default_factory=time.monotonic)
    seen: int = 0

    def look(self, pids: list[int]) -> int:
        """Rounds that are closed.

        Raises:
            RuntimeError: if none was for a long time.
        """
        closed = self.chain.look()
        if closed > self.seen:
            self.seen, self.moved = closed, time.monotonic()
        elif time.monotonic() - self.moved > STUCK_S:
            raise RuntimeError(f"{self.label}: no round was closed after round {closed} within {STUCK_S} s")
        late = 2 * closed >= self.rounds
        if 10 * closed >= self.rounds:  # before that, things are used for the first time
            self.peaks[late] = max([self.peaks.get(late, 0), *map(_resident_bytes, pids)])
        if closed >= self.said + max(1, self.rounds // 20):
            self.said = closed
            sys.stderr.write(f"{self.label}: {closed} of {self.rounds} rounds closed\n")
        return closed

    def growth(self) -> float:
        """Peak of the second half over that of the first, minus one."""
        return self.peaks[True] / self.peaks[False] - 1


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def in_threads(seats: list[Seat], watch: Watch, pid: int) -> Counter[str]:
    """Run all peers in this process; what befell them, by kind."""
    over = threading.Event()
    errors: list[BaseException] = []
    stores: list[FaultyStore] = []
    restarts: Counter[str] = Counter()

    def life_of(seat: Seat) -> None:
        raw = open_store(seat.url)
        try:
            for life in range(10**6):
                faulty = FaultyStore(raw, seat.script(life, None, 0))
                stores.append(faulty)
                store: Any = faulty if seat.is_honest else HostileStore(raw, seat.me, seat.run, seat.seed)
                with contextlib.suppress(StoreError, WireError):
                    return seat.live(store, over.is_set)
                restarts["restarts"] += 1
        except BaseException as error:  # noqa: BLE001  # raised by the caller
            errors.append(error)

    threads = [threading.Thread(target=life_of, args=(seat,), daemon=True) for seat in seats]
    for thread in threads:
        thread.start()
    try:
        while not all(seat.ledger.has_ended for seat in seats[:HONEST]) and not errors:
            watch.look([pid])
            time.sleep(LOOK_S)
    finally:
        over.set()
    for thread in [] if errors else threads:
        thread.join(60)
    if errors:
        raise errors[0]
    watch.look([pid])
    return restarts + Counter(event.fault.kind for store in stores for event in store.events)


@dataclass
class _Chair:
    """A seat, and the process that has it now; ``crash`` is how this one is to die."""

    seat: Seat
    process: ForkServerProcess
    crash: tuple[str, str] | None
    back_at: float | None = None
    life: int = 0


def prepare() -> None:
    """Start the process of which all peers are forked, with what they import; it takes long, so in the background."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "benchmarks.chaos.peer"])  # the first is what optimizers load
    forkserver.ensure_running()


class Killed:
    """Peers as processes; some are killed from outside, some by themselves at a certain operation, all come back.

    Args:
        seats: Whose.
        watch: Looks on.
        kills: From outside, spread over the rounds.
        over: A path that is made when the run is over for all.
    """

    def __init__(self, seats: list[Seat], watch: Watch, kills: int, over: Path) -> None:
        self.watch, self.over = watch, over
        self.chance = random.Random(f"{seats[0].seed}/kills")
        rounds = seats[0].rounds
        self.moments = sorted(self.chance.sample(range(1, rounds), min(kills, rounds - 1)))
        self.crashes = self.chance.sample(CRASHES, min(len(CRASHES), max(2, rounds // 3)))
        self.rounds_to_live = max(2, rounds // 20)
        self.befell: Counter[str] = Counter()
        self._context = multiprocessing.get_context("forkserver")
        self.chairs = [_Chair(seat, *self._start(seat, 0)) for seat in seats]

    def run(self) -> Counter[str]:
        """Until all honest peers are at the end; what befell them, by kind."""
        try:
            while not all(chair.seat.ledger.has_ended for chair in self.chairs[:HONEST]):
                closed = self.watch.look([chair.process.pid or 0 for chair in self.chairs[:HONEST]])
                while self.moments and self.moments[0] <= closed:
                    self.moments.pop(0)
                    self._kill(self.chance.choice(self.chairs[:HONEST]))
                for chair in self.chairs:
                    self._look_after(chair)
                time.sleep(LOOK_S)
            self.watch.look([])
            self.over.touch()
            for chair in self.chairs:
                chair.process.join(60)
        finally:
            for chair in self.chairs:
                chair.process.kill()
                chair.process.join()
        return self.befell

    def _start(self, seat: Seat, life: int) -> tuple[ForkServerProcess, tuple[str, str] | None]:
        crash = self.crashes.pop() if seat.is_honest and self.crashes else None
        process = self._context.Process(
            target=live_in_process, args=(seat, life, crash, self.rounds_to_live, self.over), daemon=True
        )
        process.start()
        return process, crash

    def _kill(self, chair: _Chair) -> None:
        if chair.process.is_alive() and not chair.seat.ledger.has_ended:
            chair.process.kill()
            chair.process.join()
            self.befell["killed at a moment"] += 1
            self._down(chair, chair.crash)

    def _look_after(self, chair: _Chair) -> None:
        if chair.back_at is not None:
            if time.monotonic() >= chair.back_at:
                chair.back_at, chair.life = None, chair.life + 1
                chair.process, chair.crash = self._start(chair.seat, chair.life)
            return
        code = chair.process.exitcode
        if code is None:
            return
        if code == -signal.SIGKILL and chair.crash:
            self.befell["killed: {}, {}".format(*chair.crash)] += 1
            self._down(chair, None)
        elif code:
            raise RuntimeError(f"peer {chair.seat.number}: ended with {code}")
        else:
            self.befell["restarts"] += 1
            self._down(chair, chair.crash)

    def _down(self, chair: _Chair, crash: tuple[str, str] | None) -> None:
        """For a while; a death that did not come is the next life's."""
        if crash:
            self.crashes.append(crash)
        most_s = min(MOST_DOWN_S, chair.seat.rounds / 10)
        chair.back_at = time.monotonic() + self.chance.uniform(0, most_s)


def seats_in(folder: Path, seed: int, rounds: int, run: RunFile) -> list[Seat]:
    """Six peers over a directory, with a folder each."""
    url = str(folder / "store")
    open_store(url).create("run.json", canonical.encode(run))
    first = Seat(number=0, seed=seed, rounds=rounds, run=run, url=url, folder=folder / "peer-0")
    return [replace(first, number=number, folder=folder / f"peer-{number}") for number in range(PEERS)]
