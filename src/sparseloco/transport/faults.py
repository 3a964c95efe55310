"""Faults by script, around any store and any transport: what a network does to a run, repeatable.

A :class:`Script` decides by a seed and the number of an operation what goes wrong; what went wrong is recorded, so that
a failure found by chance is replayed by :meth:`Script.replay`. For tests of this library and of what is built on it.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from sparseloco.errors import ConfigError, Unavailable, check_choice
from sparseloco.peers.store import PAGE, Listed, Page, Store
from sparseloco.replica import Replica
from sparseloco.transport.base import Traffic, Transport
from sparseloco.types import Envelope, Key

_T = TypeVar("_T")

WRITES = ("create", "put", "delete", "post")
READS = ("get", "get_range", "size", "list", "collect", "connect")
VERBS = WRITES + READS

KINDS = {
    "delay": VERBS,  # `amount` seconds before the operation
    "drop": VERBS,  # the request never arrives: nothing is done, and the caller sees a broken connection
    "lost": VERBS,  # the operation is done, and its answer is lost
    "busy": VERBS,  # this operation and the `amount` - 1 after it are answered 503
    "duplicate": ("create", "put", "delete", "post", "collect"),  # done twice; the second answer is given
    "truncate": ("get", "get_range"),  # the answer ends early, without an error
    "corrupt": ("get", "get_range"),  # one bit of the answer is wrong
    "stale": ("list",),  # the listing as it was `amount` operations ago
    "lose_one": ("collect",),  # one envelope is missing
    "crash_before": VERBS,
    "crash_during": VERBS,  # stores are atomic: the operation is done as a whole, or not at all
    "crash_after": VERBS,
}
"""Every fault, with the operations that it can befall."""


class Crash(BaseException):
    """The process that used the store ends here. Not an Exception: nothing that a peer does may catch it."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong. What ``amount`` counts depends on ``kind``: see :data:`KINDS`."""

    kind: str
    amount: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what does not exist."""
        check_choice("kind", self.kind, KINDS)
        if self.amount < 0:
            raise ConfigError(f"amount={self.amount!r}: must not be negative; use 0 or more")


@dataclass(frozen=True)
class Rate:
    """How often a fault comes: each of ``verbs`` meets it with ``probability``.

    Raises:
        ConfigError: if the probability is not in 0 to 1, or the fault cannot befall one of the verbs.
    """

    fault: Fault
    probability: float
    verbs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot happen; no verbs stand for all that the fault can befall."""
        if not 0 <= self.probability <= 1:
            raise ConfigError(f"probability={self.probability!r}: must be between 0 and 1; use a share of operations")
        for verb in self.verbs:
            check_choice(f"verbs of {self.fault.kind!r}", verb, KINDS[self.fault.kind])
        if not self.verbs:
            object.__setattr__(self, "verbs", KINDS[self.fault.kind])


class Event(NamedTuple):
    """A fault that happened: at which operation of this wrapper, counted from 0, to what."""

    number: int
    verb: str
    path: str
    fault: Fault


@dataclass(frozen=True)
class Script:
    """What goes wrong, as a function of the seed and of the number and verb of an operation.

    Attributes:
        seed: Of all chance.
        rates: Faults by chance; the first that comes up counts.
        at: Faults at certain operations, before any by chance.
        bytes_per_s: Speed of the link; None for one that takes no time.

    Example:
        >>> script = Script(seed=1, rates=(Rate(Fault("drop"), 0.5, ("get",)),))
        >>> [script.fault(number, "get") is not None for number in range(6)]
        [False, True, True, True, True, False]
        >>> Script(at=((2, Fault("crash_after")),)).fault(2, "put")
        Fault(kind='crash_after', amount=1.0)
    """

    seed: int = 0
    rates: tuple[Rate, ...] = ()
    at: tuple[tuple[int, Fault], ...] = ()
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse a link that never delivers."""
        if self.bytes_per_s is not None and self.bytes_per_s <= 0:
            raise ConfigError(f"bytes_per_s={self.bytes_per_s!r}: must be above 0; leave it out for no limit")

    def replay(self, events: Iterable[Event]) -> Script:
        """This script with the faults that happened, at the same operations, and none by chance."""
        return replace(self, rates=(), at=tuple((event.number, event.fault) for event in events))

    def fault(self, number: int, verb: str) -> Fault | None:
        """What befalls operation ``number``; None for nothing."""
        for place, fault in self.at:
            if place == number and verb in KINDS[fault.kind]:
                return fault
        chance = self.chance(number)
        for rate in self.rates:
            if verb in rate.verbs and chance.random() < rate.probability:
                return rate.fault
        return None

    def chance(self, number: int, purpose: str = "which") -> random.Random:
        """Randomness of one operation."""
        return random.Random(f"{self.seed}/{number}/{purpose}")


class _Stage:
    """Numbers operations, lets a script befall them, and records what happened. Safe to use from several threads."""

    def __init__(self, script: Script, sleep: Callable[[float], None]) -> None:
        self.script = script
        self.sleep = sleep
        self.events: list[Event] = []
        self._lock = threading.Lock()
        self._number = 0
        self._busy_until = 0

    def enter(self, verb: str, path: str) -> tuple[int, Fault | None]:
        """The number of this operation, and its fault."""
        with self._lock:
            number, self._number = self._number, self._number + 1
            fault = self.script.fault(number, verb)
            if number < self._busy_until:
                fault = Fault("busy")
            elif fault is not None and fault.kind == "busy":
                self._busy_until = number + max(1, int(fault.amount))
            if fault is not None:
                self.events.append(Event(number, verb, path, fault))
        return number, fault

    def run(self, number: int, fault: Fault | None, request: str, operation: Callable[[], _T]) -> _T:
        """The operation, with what befalls its way there and back."""
        kind = fault.kind if fault is not None else ""
        if fault is not None and kind == "delay":
            self.sleep(fault.amount)
        if kind == "drop":
            raise Unavailable(f"{request}: the store did not answer, or broke off; try again")
        if kind == "busy":
            raise Unavailable(f"{request}: the store answered 503 SlowDown; try again")
        if kind == "crash_before":
            raise Crash(request)
        if kind == "crash_during" and self.script.chance(number, "during").random() < 0.5:
            raise Crash(request)
        result = operation()
        if kind == "duplicate":
            result = operation()
        if kind in ("crash_during", "crash_after"):
            raise Crash(request)
        if kind == "lost":
            raise Unavailable(f"{request}: the store did not answer, or broke off; try again")
        return result

    def take_time(self, size: int) -> None:
        """Let bytes cross the link."""
        if self.script.bytes_per_s is not None and size:
            self.sleep(size / self.script.bytes_per_s)


class FaultyStore:
    """A store that fails as a script says.

    Operations are numbered in the order in which they begin, each try of its own. With several threads that order is
    theirs, so replay with one thread.

    Args:
        store: What does the work.
        script: What goes wrong.
        sleep: Waits; hand in that of a fake clock and nothing takes time.

    Example:
        >>> from sparseloco.peers.store import open_store
        >>> store = FaultyStore(open_store("memory://"), Script(at=((0, Fault("lost")),)))
        >>> store.create("a", b"1")
        Traceback (most recent call last):
        sparseloco.errors.Unavailable: create a: the store did not answer, or broke off; try again
        >>> store.get("a", limit=9)
        b'1'
        >>> store.events
        [Event(number=0, verb='create', path='a', fault=Fault(kind='lost', amount=1.0))]
    """

    _REMEMBERED = 64
    _FOLDERS = 32

    def __init__(self, store: Store, script: Script, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.store = store
        self._stage = _Stage(script, sleep)
        self._listings: dict[tuple[str, str, int], deque[tuple[int, Page]]] = {}
        self._lock = threading.Lock()

    @property
    def events(self) -> list[Event]:
        """Every fault so far."""
        return list(self._stage.events)

    def create(self, path: str, data: bytes) -> None:
        """As the store does it, or not."""
        self._write("create", path, len(data), lambda: self.store.create(path, data))

    def put(self, path: str, data: bytes) -> None:
        """As the store does it, or not."""
        self._write("put", path, len(data), lambda: self.store.put(path, data))

    def delete(self, path: str) -> None:
        """As the store does it, or not."""
        self._write("delete", path, 0, lambda: self.store.delete(path))

    def get(self, path: str, *, limit: int) -> bytes:
        """As the store does it, or damaged."""
        return self._read("get", path, lambda: self.store.get(path, limit=limit))

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """As the store does it, or damaged."""
        return self._read("get_range", path, lambda: self.store.get_range(path, start, length))

    def size(self, path: str) -> int:
        """As the store does it, or not."""
        number, fault = self._stage.enter("size", path)
        return self._stage.run(number, fault, f"size {path}", lambda: self.store.size(path))

    def list(self, prefix: str, *, after: str = "") -> list[Listed]:
        """As the store does it, or as it was: what this wrapper listed so long ago, or nothing if it had not yet."""
        found = self._list((prefix, "", 0), lambda: Page(self.store.list(prefix)))
        return [entry for entry in found.entries if entry.path > after]

    def page(self, prefix: str, *, after: str = "", limit: int = PAGE) -> Page:
        """As :meth:`list`; what is old is the same page, as it was then."""
        return self._list((prefix, after, limit), lambda: self.store.page(prefix, after=after, limit=limit))

    def _list(self, asked: tuple[str, str, int], operation: Callable[[], Page]) -> Page:
        number, fault = self._stage.enter("list", asked[0])
        kept = self._kept_of(asked)
        if fault is not None and fault.kind == "stale":
            old = [page for place, page in kept if place <= number - fault.amount]
            return old[-1] if old else Page([])
        found = self._stage.run(number, fault, f"list {asked[0]}".rstrip(), operation)
        kept.append((number, found))
        return found

    def _kept_of(self, asked: tuple[str, str, int]) -> deque[tuple[int, Page]]:
        """Answers to this question so far; those to questions that nobody asks any more are forgotten."""
        with self._lock:
            kept = self._listings.pop(asked, None) or deque(maxlen=self._REMEMBERED)
            self._listings[asked] = kept
            for old in list(self._listings)[: -self._FOLDERS]:
                del self._listings[old]
        return kept

    def _write(self, verb: str, path: str, size: int, operation: Callable[[], None]) -> None:
        number, fault = self._stage.enter(verb, path)
        self._stage.take_time(size)
        self._stage.run(number, fault, f"{verb} {path}", operation)

    def _read(self, verb: str, path: str, operation: Callable[[], bytes]) -> bytes:
        number, fault = self._stage.enter(verb, path)
        data = self._stage.run(number, fault, f"{verb} {path}", operation)
        chance = self._stage.script.chance(number, "damage")
        if data and fault is not None and fault.kind == "truncate":
            data = data[: chance.randrange(len(data))]
        elif data and fault is not None and fault.kind == "corrupt":
            bit = chance.randrange(8 * len(data))
            data = data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]
        self._stage.take_time(len(data))
        return data


class FaultyTransport:
    """A transport that fails as a script says, for one peer.

    ``drop`` of a post loses the message on its way: the transport below never has it, and no error says so.
    ``lose_one`` takes one envelope out of an inbox, ``duplicate`` posts twice or delivers one envelope twice.

    Args:
        transport: What does the work.
        script: What goes wrong; operations are counted over ``connect``, ``post`` and ``collect``.
        sleep: Waits.
    """

    def __init__(self, transport: Transport, script: Script, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.transport = transport
        self._stage = _Stage(script, sleep)

    @property
    def events(self) -> list[Event]:
        """Every fault so far."""
        return list(self._stage.events)

    @property
    def rank(self) -> int | None:
        """That of the transport below."""
        return self.transport.rank

    def connect(self, replica: Replica) -> None:
        """As the transport does it, or not."""
        number, fault = self._stage.enter("connect", f"peer {replica.peer}")
        self._stage.run(number, fault, "connect", lambda: self.transport.connect(replica))

    def post(self, envelope: Envelope) -> None:
        """As the transport does it, or twice, or not."""
        number, fault = self._stage.enter("post", _address(envelope.key))
        if fault is not None and fault.kind == "drop":
            return
        self._stage.run(number, fault, f"post {_address(envelope.key)}", lambda: self.transport.post(envelope))

    def collect(self, key: Key) -> list[Envelope]:
        """As the transport does it, or with an envelope more or less."""
        number, fault = self._stage.enter("collect", _address(key))
        kind = fault.kind if fault is not None else ""
        passing = None if kind in ("lose_one", "duplicate") else fault
        inbox = self._stage.run(number, passing, f"collect {_address(key)}", lambda: self.transport.collect(key))
        if not inbox or kind not in ("lose_one", "duplicate"):
            return inbox
        place = self._stage.script.chance(number, "damage").randrange(len(inbox))
        again = [inbox[place]] * (2 if kind == "duplicate" else 0)
        return [*inbox[:place], *again, *inbox[place + 1 :]]

    def put_back(self, key: Key, inbox: list[Envelope]) -> None:
        """Always as the transport does it: nothing leaves the process."""
        self.transport.put_back(key, inbox)

    def traffic(self, peer: int) -> Traffic:
        """As the transport counts it."""
        return self.transport.traffic(peer)

    def set_traffic(self, peer: int, traffic: Traffic) -> None:
        """As the transport counts it."""
        self.transport.set_traffic(peer, traffic)


def _address(key: Key) -> str:
    return f"round {key.round}, fragment {key.fragment}"
