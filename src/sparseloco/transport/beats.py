"""Signs of life: every rank says in the rendezvous store what it is doing, and survivors read there who is gone.

A daemon thread publishes name, phase and a counter. Whether a rank still lives is judged by the reader's monotonic
clock alone, since it saw the last change. Knows a store with three verbs; must not know what a collective is.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Protocol, TextIO

from sparseloco.errors import PeerLostError, SparseLocoError
from sparseloco.transport.deadline import Deadline

_FOLLOWED = "PeerLostError"
"""How a rank ends that has lost another: it is not to blame."""
_REMEDY = "look at what it printed, then continue with --resume"


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used here."""

    def set(self, key: str, value: str, /) -> None:
        """Publish."""
        ...

    def get(self, key: str, /) -> bytes:
        """Read; waits for a key that nobody has set."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all of them are set."""
        ...


class _Here:
    """What this process is doing."""

    def __init__(self) -> None:
        self.shown = self.base = "start"
        self.since = time.monotonic()
        self.changed = threading.Event()

    def show(self, name: str) -> None:
        if name != self.shown:
            self.shown, self.since = name, time.monotonic()
            self.changed.set()


_here = _Here()


def enter(name: str) -> None:
    """This process does ``name`` from now on, for example ``step 12``."""
    _here.base = name
    _here.show(name)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """This process does ``name`` inside the block; after an error that is still what it did last."""
    before, _here.base = _here.base, name
    _here.show(name)
    try:
        yield
    finally:
        _here.base = before
    _here.show(before)


def present_phase() -> str:
    """What this process is doing."""
    return _here.shown


@dataclass(frozen=True)
class Sign:
    """What a rank last said of itself.

    Attributes:
        name: Who it is among peers and shards.
        beat: Counts up while it lives.
        phase: What it was doing.
        phase_s: For how long.
        end: Empty while it lives; else the error it has ended with, or "no error".
        why: Text of that error.
    """

    name: str
    beat: int
    phase: str
    phase_s: float = 0.0
    end: str = ""
    why: str = ""


class Beats:
    """Signs of life of this rank, and a look at those of the others.

    Args:
        store: Where all ranks publish.
        rank: Of this process, among all.
        num_ranks: How many there are.
        deadline: For the pace, and for the watch over the own phase.
        stderr: Where stacks are printed; None for the process's own.

    Attributes:
        name: Who this rank is among peers and shards.
    """

    def __init__(
        self, store: Store, rank: int, num_ranks: int, deadline: Deadline, *, stderr: TextIO | None = None
    ) -> None:
        self.store = store
        self.name = f"peer {rank}"
        self.deadline = deadline
        self._rank = rank
        self._num_ranks = num_ranks
        self._prefix = f"sparseloco/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"  # a restart keeps the store
        self._stderr = stderr
        self._beat = 0
        self._reported: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sparseloco-beats", daemon=True)

    def start(self) -> None:
        """Publish now, and go on until :meth:`stop`."""
        self.publish()
        self._thread.start()

    def stop(self, error: BaseException | None = None, *, silent: bool = False) -> None:
        """End, and say with what error, unless ``silent`` since the store may be gone."""
        self._stopped.set()
        _here.changed.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(self.deadline.lost_s)
        if not silent:
            with contextlib.suppress(RuntimeError):  # of a store that is gone: nobody can read it any more
                self.publish(end=type(error).__name__ if error else "no error", why=str(error or ""))

    def publish(self, *, end: str = "", why: str = "") -> None:
        """Give one sign of life."""
        self._beat += 1
        sign = Sign(self.name, self._beat, _here.shown, time.monotonic() - _here.since, end, why)
        self.store.set(f"{self._prefix}/{self._rank}", json.dumps(asdict(sign)))

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """A collective that fails inside this block becomes an error that names who is gone.

        Raises:
            PeerLostError: instead of the ``RuntimeError`` of a collective.
        """
        try:
            yield
        except SparseLocoError:  # some are RuntimeErrors as well
            raise
        except RuntimeError as error:
            raise PeerLostError(self.explain(error)) from error

    def explain(self, error: RuntimeError) -> str:
        """One sentence about why a collective failed; watches the others for ``lost_s`` if need be."""
        try:
            signs, silent = self._watch()
        except RuntimeError:
            return (
                f"{self.name}=failed in phase {_here.shown!r} ({_first_line(error)}), and the store in which ranks "
                f"give signs of life is gone: must keep its host, rank 0 or torchrun; {_REMEDY}"
            )
        others = {rank: sign for rank, sign in signs.items() if rank != self._rank}
        if ended := [sign for sign in others.values() if sign.end and sign.end != _FOLLOWED]:
            return self._blame(ended, f"ended with {ended[0].end}")
        if lost := [others[rank] for rank in silent]:
            return self._blame(lost, f"no sign of life for {self.deadline.lost_s:g} s")
        if followed := [sign.why for sign in others.values() if sign.end]:
            return followed[0]
        return self._of_the_living(others, error)

    def _of_the_living(self, others: Mapping[int, Sign], error: RuntimeError) -> str:
        late = [sign for sign in others.values() if sign.phase != _here.shown]
        if late and "timed out" in str(error).lower():
            first = late[0]
            return (
                f"{first.name}=in phase {first.phase!r} for {first.phase_s:.0f} s while {self.name} waits in "
                f"{_here.shown!r}: must answer within {self._limit}; raise transport.deadline_s if it is slow, or look "
                "at what it printed if it is stuck"
            )
        return (
            f"{self.name}=failed in phase {_here.shown!r} ({_first_line(error)}) while every other rank gives signs of "
            "life: must reach all of them; check the network between them, then continue with --resume"
        )

    @property
    def _limit(self) -> str:
        return f"deadline_s={self.deadline.deadline_s:g}"

    def _blame(self, signs: list[Sign], what: str) -> str:
        names = " and ".join(sign.name for sign in signs)
        phases = ", ".join(dict.fromkeys(repr(sign.phase) for sign in signs))
        return f"{names}={what}, last in phase {phases}: must answer within {self._limit}; {_REMEDY}"

    def _watch(self) -> tuple[dict[int, Sign], list[int]]:
        """Signs of all ranks, and those that gave none while this one looked on; short if there is no doubt."""
        before = signs = self._read()
        silent = [rank for rank in range(self._num_ranks) if rank != self._rank]
        until = time.monotonic() + self.deadline.lost_s
        while silent and time.monotonic() < until:
            if any(sign.end not in ("", _FOLLOWED) for sign in signs.values()):
                break
            time.sleep(self.deadline.beat_s / 4)
            signs = self._read()
            silent = [rank for rank in silent if signs[rank] == before[rank] and not signs[rank].end]
        return signs, silent

    def _read(self) -> dict[int, Sign]:
        signs: dict[int, Sign] = {}
        for rank in range(self._num_ranks):
            key = f"{self._prefix}/{rank}"
            known = self.store.check([key])  # else the read would wait for it
            signs[rank] = Sign(**json.loads(self.store.get(key))) if known else Sign(f"peer {rank}", 0, "start")
        return signs

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it all who could read there
            while not self._stopped.is_set():
                self.publish()
                self.report_stall()
                _here.changed.wait(self.deadline.beat_s)
                _here.changed.clear()
                self._stopped.wait(self.deadline.beat_s / 8)  # steps may be short

    def report_stall(self) -> None:
        """Print the stacks of all threads, once for a phase that has lasted for ``stall_s``."""
        since, name = _here.since, _here.shown
        seconds = time.monotonic() - since
        if seconds < self.deadline.stall_s or self._reported == since:
            return
        self._reported = since
        file = self._stderr or sys.__stderr__
        if file is None:  # a process without a terminal or a file to write to
            return
        print(f"{self.name}=in phase {name!r} for {seconds:.0f} s; its threads are at:", file=file, flush=True)
        faulthandler.dump_traceback(file=file, all_threads=True)


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text.rpartition("] ")[2].partition(". ")[0]  # without the place in gloo's source, and its advice


Guard = Callable[[], contextlib.AbstractContextManager[None]]
"""What turns the failure of a collective into the name of who is gone."""
