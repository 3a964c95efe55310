"""Patience with a store: tries again with jitter, gives up for lack of progress, and fetches long objects in parts.

Clock, sleep and randomness are handed in. What a transfer may take as a whole is never limited: on a thin link a large
object takes long, and a lost one is noticed by the bytes that do not come.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from sparseloco.errors import AlreadyExists, ConfigError, NotFound, StoreError, TooLarge, Unavailable, check_whole
from sparseloco.peers.store import PAGE, Listed, Page, Store

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long and how hard to try.

    Attributes:
        max_tries: Tries of one request, the first included; of one part where an object comes in parts.
        base_s: A try that failed is followed by a random wait of at most this; the bound doubles with every try.
        cap_s: Largest bound of such a wait.
        stall_s: Seconds without progress after which a transfer has failed, whatever tries are left. Every part that
            arrives starts it anew.
        part_bytes: Objects that are longer are fetched in parts of this size.
        threads: Parts of one object that are fetched at the same time.
    """

    max_tries: int = 8
    base_s: float = 0.25
    cap_s: float = 20.0
    stall_s: float = 120.0
    part_bytes: int = 8 << 20
    threads: int = 4

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name in ("max_tries", "part_bytes", "threads"):
            value = getattr(self, name)
            check_whole(name, value)
            if value < 1:
                raise ConfigError(f"{name}={value!r}: must be at least 1; leave it out for the default")
        for name in ("base_s", "cap_s", "stall_s"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name}={value!r}: must be 0 or more seconds; leave it out for the default")


class Usage(NamedTuple):
    """What one verb cost so far: tries, those that failed, and bytes of content that went and came."""

    operations: int = 0
    failures: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class Meter:
    """Counts what goes through a store, by verb. Safe to share between threads and stores.

    Bytes are those of contents, as they were handed over or received; those of a try that failed are not known.

    Example:
        >>> meter = Meter()
        >>> meter.count("put", sent=10)
        >>> meter.total().sent_bytes
        10
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._usage: dict[str, Usage] = {}

    def count(self, verb: str, *, sent: int = 0, received: int = 0, failed: bool = False) -> None:
        """Add one try."""
        with self._lock:
            old = self._usage.get(verb, Usage())
            self._usage[verb] = Usage(
                old.operations + 1, old.failures + failed, old.sent_bytes + sent, old.received_bytes + received
            )

    def by_verb(self) -> dict[str, Usage]:
        """A copy of the counts."""
        with self._lock:
            return dict(self._usage)

    def total(self) -> Usage:
        """All verbs together."""
        return Usage(*(sum(column) for column in zip(Usage(), *self.by_verb().values(), strict=True)))


class _Progress:
    """When bytes of one transfer last arrived, over all its threads, and whether it is lost."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self.cause: BaseException | None = None

    def mark(self) -> None:
        self._since = self._clock()

    def lose(self, cause: BaseException) -> None:
        self.cause = self.cause or cause

    def idle_s(self) -> float:
        return self._clock() - self._since


class Patient:
    """Any :class:`~sparseloco.peers.store.Store`, with :class:`Patience`. It is a store itself.

    Only :class:`~sparseloco.errors.Unavailable` is tried again. A store that limits the silence of a single request, as
    :func:`~sparseloco.peers.store.open_store` makes it, is needed below: no thread is ever left behind a request.

    Args:
        store: The store to use.
        patience: Limits.
        meter: Counts every try.
        rng: Source of the jitter, so that peers which fail together do not come back together.
        clock: Seconds that never go back.
        sleep: Waits for that many seconds.

    Example:
        >>> from sparseloco.peers.store import open_store
        >>> store = Patient(open_store("memory://"), Patience(max_tries=3))
        >>> store.create_or_same("a", b"mine"), store.create_or_same("a", b"mine"), store.create_or_same("a", b"other")
        (True, True, False)
    """

    def __init__(
        self,
        store: Store,
        patience: Patience | None = None,
        *,
        meter: Meter | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.store = store
        self.patience = patience or Patience()
        self.meter = meter or Meter()
        self._rng = rng or random.Random()
        self._clock = clock
        self._sleep = sleep

    def create(self, path: str, data: bytes) -> None:
        """As :meth:`Store.create`, also when an answer was lost: then what is there is read and compared.

        Raises:
            AlreadyExists: if the object was there before, or holds other bytes after a try whose answer was lost.
        """
        lost = self._create(path, data)
        if lost and not self._holds(path, data):
            raise AlreadyExists(f"create {path}: another object is there; read it and follow what it says")

    def create_or_same(self, path: str, data: bytes) -> bool:
        """Create an object unless it is there, and say whether it now holds these bytes.

        For paths that are made of the content's hash, True is the only answer; for others, False means that somebody
        else was first.
        """
        try:
            lost = self._create(path, data)
        except AlreadyExists:
            lost = True
        return not lost or self._holds(path, data)

    def put(self, path: str, data: bytes) -> None:
        """Put, from its start at every try."""
        self._try("put", path, lambda: self.store.put(path, data), sent=len(data))

    def get(self, path: str, *, limit: int) -> bytes:
        """As :meth:`Store.get`; a long object comes in parts, so it must be one that is never overwritten."""
        if limit <= self.patience.part_bytes:
            return self._try("get", path, lambda: self.store.get(path, limit=limit))
        size = self.size(path)
        if size > limit:
            raise TooLarge(f"get {path}: {size} bytes are more than the {limit} accepted; leave it or raise the limit")
        if size <= self.patience.part_bytes:
            return self._try("get", path, lambda: self.store.get(path, limit=limit))
        return self._get_parts(path, size)

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """As the store does it."""
        return self._try("get_range", path, lambda: self.store.get_range(path, start, length))

    def size(self, path: str) -> int:
        """As the store does it."""
        return self._try("size", path, lambda: self.store.size(path))

    def list(self, prefix: str, *, after: str = "") -> list[Listed]:
        """As the store does it."""
        return self._try("list", prefix, lambda: self.store.list(prefix, after=after))

    def page(self, prefix: str, *, after: str = "", limit: int = PAGE) -> Page:
        """As the store does it."""
        return self._try("list", prefix, lambda: self.store.page(prefix, after=after, limit=limit))

    def delete(self, path: str) -> None:
        """As the store does it."""
        self._try("delete", path, lambda: self.store.delete(path))

    def _create(self, path: str, data: bytes) -> bool:
        """Create; True if the object is there and an answer had been lost before, so that it may be ours."""
        lost = False

        def request() -> bool:
            nonlocal lost
            try:
                self.store.create(path, data)
            except Unavailable:
                lost = True
                raise
            except AlreadyExists:
                if not lost:
                    raise
                return True
            return False

        return self._try("create", path, request, sent=len(data))

    def _holds(self, path: str, data: bytes) -> bool:
        try:
            return self.get(path, limit=len(data)) == data
        except TooLarge:
            return False
        except NotFound:
            raise Unavailable(f"create {path}: the object was there and is gone; try again") from None

    def _get_parts(self, path: str, size: int) -> bytes:
        """All parts of an object, several at a time; nothing is kept of them if one cannot be had."""
        step = self.patience.part_bytes
        progress = _Progress(self._clock)

        def fetch(start: int) -> bytes:
            length = min(step, size - start)
            try:
                return self._try("get_range", path, lambda: self._part(path, start, length), progress=progress)
            except BaseException as error:
                progress.lose(error)
                raise

        starts = range(0, size, step)
        with ThreadPoolExecutor(min(self.patience.threads, len(starts))) as pool:
            parts = pool.map(fetch, starts)
            try:
                return b"".join(parts)
            except BaseException as error:  # noqa: BLE001  # raised again below
                progress.lose(error)
        # Frames hold the parts that came, and an error holds frames: whoever keeps the error must not keep the parts.
        del parts
        cause, progress.cause = progress.cause, None
        assert cause is not None
        try:
            raise cause.with_traceback(None)
        finally:
            del cause

    def _part(self, path: str, start: int, length: int) -> bytes:
        data = self.store.get_range(path, start, length)
        if len(data) != length:
            raise Unavailable(f"get_range {path}: {len(data)} of {length} bytes arrived; try again")
        return data

    def _try(
        self, verb: str, path: str, request: Callable[[], _T], *, sent: int = 0, progress: _Progress | None = None
    ) -> _T:
        """One request until it is done, cannot be done, or patience is at its end."""
        progress = progress or _Progress(self._clock)
        tries = 0
        while True:
            tries += 1
            try:
                result = request()
            except StoreError as error:
                self.meter.count(verb, failed=True)
                if not isinstance(error, Unavailable) or progress.cause:
                    raise
                reason = str(error)
            else:
                self.meter.count(verb, sent=sent, received=len(result) if isinstance(result, bytes) else 0)
                progress.mark()
                return result
            self._wait(f"{verb} {path}".rstrip(), tries, progress, reason)

    def _wait(self, request: str, tries: int, progress: _Progress, reason: str) -> None:
        """Sleep before the next try.

        Raises:
            Unavailable: if there is no next try.
        """
        patience = self.patience
        pause = self._rng.uniform(0, min(patience.cap_s, patience.base_s * 2 ** min(tries - 1, 60)))
        if tries >= patience.max_tries:
            limit = f"in {tries} tries; raise max_tries"
        elif progress.idle_s() + pause > patience.stall_s:
            limit = f"within {patience.stall_s} s; raise stall_s"
        else:
            return self._sleep(pause)
        raise Unavailable(f"{request}: no progress {limit} or mend the link (last: {reason})")
