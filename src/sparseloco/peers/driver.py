"""Runs the protocol's steps against a real store: every operation becomes a request, every answer an outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from sparseloco.errors import AlreadyExists, Denied, Interrupted, NotFound, StoreError, WireError
from sparseloco.errors import TooLarge as TooLargeError
from sparseloco.peers import operations as op
from sparseloco.peers.canonical import sha256
from sparseloco.peers.frames import Expected, Frames
from sparseloco.peers.manifest import is_signed
from sparseloco.peers.store import Store, get_steady
from sparseloco.types import Key

_T = TypeVar("_T")
Teller = Callable[[op.Tell], None]


@dataclass(frozen=True)
class Driver:
    """The world that one round of one fragment sees.

    Attributes:
        store: With patience around it.
        frames: What this peer holds.
        pool: For requests that may run at the same time; not the pool in which the driver itself runs.
        key: Round and fragment.
        expected: What frames must be like; None where none are inspected.
        tell: Is given what is to be logged.
        stop: Once set, waiting ends in ``Interrupted``.
    """

    store: Store
    frames: Frames
    pool: Executor
    key: Key
    expected: Expected | None
    tell: Teller
    stop: threading.Event

    def run(self, steps: op.Steps[_T]) -> _T:
        """What the steps return.

        Raises:
            Interrupted: if this peer leaves meanwhile.
        """
        try:
            operation = next(steps)
            while True:
                operation = steps.send(self._do(operation))
        except StopIteration as end:
            return end.value

    def pause(self, seconds: float) -> None:
        """Wait.

        Raises:
            Interrupted: if this peer leaves meanwhile.
        """
        if self.stop.wait(seconds):
            raise Interrupted(f"round {self.key.round}: must be closed before going on; this peer is leaving")

    def _do(self, operation: op.Operation) -> op.Outcome:  # one line per operation
        match operation:
            case op.Wait():
                self.pause(operation.seconds)
                return op.Done()
            case op.Tell():
                self.tell(operation)
                return op.Done()
            case op.Inspect():
                return op.Inspected(tuple(self.pool.map(self._inspect, operation.frames)))
            case op.Fetch():
                fetched = self.pool.map(self.fetch, operation.objects)
                hashes = (one.hash for one, outcome in zip(operation.objects, fetched, strict=True) if outcome is None)
                return op.Fetched(frozenset(hashes))
            case _:
                pass
        try:
            return self._request(operation)
        except StoreError as error:
            return outcome_of(error)

    def _request(self, operation: op.Operation) -> op.Outcome:
        match operation:
            case op.List():
                page = self.store.page(operation.prefix, after=operation.after)
                return op.Listing(tuple((entry.path, entry.size) for entry in page.entries), page.rest)
            case op.Get():
                # All peers must come to one verdict on what lies there, so damage on the way must not enter it.
                return op.Found(get_steady(self.store, operation.path, is_signed, limit=operation.limit))
            case op.Create():
                self.store.create(operation.path, operation.data)
            case op.Put():
                self.store.put(operation.path, operation.data)
            case op.Delete():
                self.store.delete(operation.path)
            case op.Upload():
                data = self.frames.get(operation.hash)
                if data is None:
                    return op.Unavailable("its bytes are not here any more")
                self.store.put(operation.path, data)
            case _:
                raise AssertionError(f"{operation} is no request")
        return op.Done()

    def fetch(self, one: op.Object) -> op.Outcome | None:
        """Get hold of an object's bytes; None if they are here."""
        if self.frames.get(one.hash) is not None:
            return None
        try:
            data = get_steady(self.store, one.path, lambda data: sha256(data) == one.hash, limit=one.size)
        except StoreError as error:
            return outcome_of(error)
        if len(data) != one.size or sha256(data) != one.hash:
            return op.Missing()
        self.frames.put(self.key, data)
        return None

    def _inspect(self, one: op.Object) -> op.Good | op.Bad | op.Unavailable:
        assert self.expected is not None
        if one.size > self.expected.largest:
            return op.Bad(f"size={one.size}: must be at most {self.expected.largest}, the longest frame of this round")
        outcome = self.fetch(one)
        if isinstance(outcome, op.Missing | op.TooLarge):
            return op.Bad("its bytes do not match the hash in its path, or are gone")
        data = self.frames.get(one.hash)
        if data is None:
            return op.Unavailable(getattr(outcome, "reason", ""))
        try:
            return op.Good(self.expected.check(data, one.path.rpartition("/")[0].rpartition("/")[2]))
        except WireError as error:
            return op.Bad(str(error))


def outcome_of(error: StoreError) -> op.Exists | op.Missing | op.TooLarge | op.Refused | op.Unavailable:
    """What an error of a store says to the protocol."""
    match error:
        case AlreadyExists():
            return op.Exists()
        case NotFound():
            return op.Missing()
        case TooLargeError():
            return op.TooLarge()
        case Denied():
            return op.Refused(str(error))
        case _:
            return op.Unavailable(str(error))
