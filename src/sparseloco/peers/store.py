"""What a run needs of a store of objects, how one is opened, and the probe that a store must pass.

Nothing here knows what the objects mean. The store behind a URL is made in :mod:`sparseloco.peers.bucket`.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from sparseloco.errors import AlreadyExists, ConfigError, NotFound, StoreError, TooLarge

MAX_PATH_BYTES = 900
"""Longest path. S3 allows 1024 bytes with the prefix of the run."""

PAGE = 1000
"""Objects in a page of a listing: what S3 and its like give in one answer."""

_MOST_READS = 4
_T = TypeVar("_T")
_SEGMENT = re.compile(r"(?!\.+$)[A-Za-z0-9._=@+-]+")


class Listed(NamedTuple):
    """One object of a listing.

    ``size`` is in bytes. ``etag`` changes with the content; it is empty where the store has none. ``modified_s`` is the
    store's own time of the last write, in seconds since 1970, None if it tells none: for people, never for decisions.
    """

    path: str
    size: int
    etag: str
    modified_s: float | None = None


class Page(NamedTuple):
    """A part of a listing. ``rest`` is where the next one starts, to be given as ``after``; empty at the end."""

    entries: list[Listed]
    rest: str = ""


class Store(Protocol):
    """Objects by path. Every write is atomic: a reader sees the whole object or none.

    Paths are relative, such as ``rounds/00000007/0000/manifest-0000.json``: see :func:`check_path`. Every verb raises
    :class:`~sparseloco.errors.StoreError` or one of its kinds; :class:`~sparseloco.errors.Unavailable` leaves open
    whether a write was done.
    """

    def create(self, path: str, data: bytes) -> None:
        """Write an object that is not there yet.

        Raises:
            AlreadyExists: if it is there; nothing has changed then.
        """
        ...

    def put(self, path: str, data: bytes) -> None:
        """Write an object, over what was there."""
        ...

    def get(self, path: str, *, limit: int) -> bytes:
        """Read a whole object of at most ``limit`` bytes.

        Raises:
            TooLarge: if it has more bytes, before they are fetched.
            NotFound: if it is not there.
        """
        ...

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """Read ``length`` bytes from ``start`` on; fewer where the object ends, none after its end."""
        ...

    def size(self, path: str) -> int:
        """Bytes of an object.

        Raises:
            NotFound: if it is not there.
        """
        ...

    def list(self, prefix: str, *, after: str = "") -> list[Listed]:
        """Objects in the folder ``prefix`` and below ("" for all), sorted by path; only paths greater than ``after``.

        For folders in which nobody writes very much. Names that :func:`check_path` refuses are left out: peers write
        such names only to do harm.

        Raises:
            TooLarge: if there are very many. :mod:`sparseloco.peers.pages` reads folders that others may fill.
        """
        ...

    def page(self, prefix: str, *, after: str = "", limit: int = PAGE) -> Page:
        """The beginning of :meth:`list`: what ``limit`` names give, those that are left out counted too.

        It costs as much as it looks at, however much there is.
        """
        ...

    def delete(self, path: str) -> None:
        """Remove an object; nothing happens if it is not there."""
        ...


def check_path(path: str, verb: str = "use") -> str:
    """Refuse a path that some store would read otherwise than another.

    Segments hold letters, digits and ``. _ = @ + -``, none is empty or made of dots only, and there is no slash at
    either end.

    Raises:
        ConfigError: naming the path, with what is not printable escaped.

    Example:
        >>> check_path("peers/3f/lease.json")
        'peers/3f/lease.json'
        >>> check_path("../run.json")
        Traceback (most recent call last):
        sparseloco.errors.ConfigError: path='../run.json': must be ... to use it; ...
    """
    if len(path) > MAX_PATH_BYTES or not all(_SEGMENT.fullmatch(segment) for segment in path.split("/")):
        shown = path if len(path) <= 100 else f"{path[:100]}..."
        raise ConfigError(
            f"path={shown!a}: must be relative, of letters, digits and ._=@+- between single slashes, and have at most "
            f"{MAX_PATH_BYTES} bytes to {verb} it; take paths as `list` gives them"
        )
    return path


def check_prefix(prefix: str) -> str:
    """A folder to list, without its last slash; "" for the whole store.

    Raises:
        ConfigError: as :func:`check_path`.
    """
    return check_path(prefix.removesuffix("/"), "list") if prefix else ""


def past(folder: str) -> str:
    """Behind all that a folder can hold, whatever its names: as ``after``, it leaves the rest of that folder out.

    So is an object of just this name left out, of which a run has none.

    Example:
        >>> "a/b/\U0010ffff" < past("a/b") == "a/b0"
        True
    """
    return f"{folder.removesuffix('/')}0"  # the letter after the slash


def open_store(url: str, *, stall_s: float = 120.0, options: Mapping[str, str] | None = None) -> Store:
    """Open the store that a URL or a directory names.

    ``s3://bucket/run``, ``gs://bucket/run``, ``az://container/run``, ``file:///srv/run`` or just a directory (made if
    it is not there), and ``memory://`` (a new, empty one). Credentials, endpoint and region come from the environment,
    as other tools of that store read it: ``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ``AWS_REGION`` and so on.
    Requests are signed unless ``AWS_SKIP_SIGNATURE`` or the option ``skip_signature`` says otherwise; an endpoint
    without TLS needs ``AWS_ALLOW_HTTP=true``. Nothing but a part of a long upload is tried twice here: see
    :class:`~sparseloco.peers.patience.Patient`.

    Args:
        url: Where the run is. It holds no key, no password and no signature.
        stall_s: Seconds without one byte received after which a request has failed. It is not a limit on the whole
            transfer. Of an upload, two parts of 5 MiB have to be sent in this time, or the whole of a `create`.
        options: Settings that go before the environment, by the names of obstore, for example ``endpoint``, ``region``,
            ``virtual_hosted_style_request``, ``access_key_id``, ``secret_access_key``, ``allow_http``.

    Raises:
        ConfigError: if the URL or an option is not understood, or the extra ``peers`` is not installed.

    Example:
        >>> store = open_store("memory://")
        >>> store.create("run.json", b"{}")
        >>> store.get("run.json", limit=100)
        b'{}'
    """
    from sparseloco.peers.bucket import open_bucket

    return open_bucket(url, stall_s=stall_s, options=options or {})


def get_steady(store: Store, path: str, is_right: Callable[[bytes], bool], *, limit: int) -> bytes:
    """The bytes of an object; what is not right is read again, since it may have been damaged on its way.

    Args:
        store: Where it lies.
        path: Its path.
        is_right: Whether bytes are beyond doubt, because they match a hash or a signature.
        limit: As of :meth:`Store.get`.

    Returns:
        Bytes that are right, or that came twice in a row; of an object that keeps changing, the last.

    Raises:
        StoreError: as :meth:`Store.get`.
    """
    return steady(lambda: store.get(path, limit=limit), is_right)


def steady(read: Callable[[], bytes], is_right: Callable[[bytes], bool]) -> bytes:
    """The same for any way to read."""
    data = read()
    for _ in range(_MOST_READS):
        if is_right(data):
            break
        before, data = data, read()
        if data == before:
            break
    return data


@dataclass(frozen=True)
class Facts:
    """What a probe saw.

    Attributes:
        latency_s: Seconds that the fastest request of each verb took.
        clock_skew_s: The store's clock minus ours, None where the store tells no time; for information.
    """

    latency_s: Mapping[str, float]
    clock_skew_s: float | None


class _Timed:
    """Runs requests and keeps the fastest of each verb."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.fastest: dict[str, float] = {}

    def __call__(self, verb: str, request: Callable[[], _T]) -> _T:
        start = self.clock()
        try:
            return request()
        finally:
            took = self.clock() - start
            self.fastest[verb] = min(took, self.fastest.get(verb, took))


def probe(
    store: Store,
    prefix: str = "probe",
    *,
    name: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
    wall_clock: Callable[[], float] = time.time,
) -> Facts:
    """Try every verb on two small objects and refuse a store that a run cannot be built on; leaves nothing behind.

    Some servers ignore the condition of a conditional put and overwrite. Two peers could then believe in different
    manifests of one round, so this is tried, not asked.

    Args:
        store: What to try.
        prefix: Folder for the two objects.
        name: Their common name; random by default, so that peers may probe at the same time.
        clock: Measures latencies.
        wall_clock: Is compared with the store's times.

    Raises:
        StoreError: naming what the store got wrong, or what it answered.
    """
    name = name or secrets.token_hex(8)
    once, often = f"{prefix}/{name}-create", f"{prefix}/{name}-put"
    timed = _Timed(clock)
    try:
        _probe_create(store, once, timed)
        skew = _probe_rest(store, once, often, timed, wall_clock)
        for path in (once, often):
            timed("delete", lambda path=path: store.delete(path))
            _expect_gone(store, path)
    finally:
        for path in (once, often):
            with contextlib.suppress(StoreError):
                store.delete(path)
    return Facts(timed.fastest, skew)


def _probe_create(store: Store, path: str, timed: _Timed) -> None:
    timed("create", lambda: store.create(path, b"first"))
    try:
        store.create(path, b"second")
    except AlreadyExists:
        refused = True
    else:
        refused = False
    found = timed("get", lambda: get_steady(store, path, lambda data: data == b"first", limit=64))
    if found == b"second":
        raise StoreError(
            f"create {path}: the store wrote over an object that was there, so two peers could write different "
            "manifests of one round; use a store that honours conditional puts (If-None-Match)"
        )
    _expect(refused, f"create {path}", "said that a second create had worked, and did not do it")
    _expect(found == b"first", f"get {path}", "gave other bytes than those just created")


def _probe_rest(store: Store, once: str, often: str, timed: _Timed, wall_clock: Callable[[], float]) -> float | None:
    for data in (b"0123456789", b"abcdefghij"):
        before = wall_clock()
        timed("put", lambda data=data: store.put(often, data))
        after = wall_clock()
        found = get_steady(store, often, lambda found, data=data: found == data, limit=64)
        _expect(found == data, f"get {often}", "gave other bytes than those just put")
    part = timed("get_range", lambda: steady(lambda: store.get_range(often, 3, 4), lambda data: data == b"defg"))
    _expect(part == b"defg", f"get_range {often}", "gave other bytes than those asked for")
    _expect(
        timed("size", lambda: store.size(often)) == 10, f"size {often}", "gave another size than that of the object"
    )
    try:
        store.get(often, limit=9)
    except TooLarge:
        pass
    else:
        _expect(False, f"get {often}", "gave more bytes than the limit")
    modified = _probe_list(store, once, often, timed)
    return None if modified is None else modified - (before + after) / 2


def _probe_list(store: Store, once: str, often: str, timed: _Timed) -> float | None:
    """List both objects; returns when the second was written."""
    # From just before these two on: whatever else somebody has put there is none of ours.
    folder, start = once.rpartition("/")[0], once.removesuffix("create")
    listed = {entry.path: entry for entry in timed("list", lambda: store.page(folder, after=start)).entries}
    sizes = [listed[path].size if path in listed else None for path in (once, often)]
    _expect(sizes == [5, 10], f"list {folder}", "lacks an object that was just written, or has its size wrong")
    first = store.page(folder, after=start, limit=1)
    _expect([entry.path for entry in first.entries] == [once], f"list {folder}", "gave more than was asked for")
    later = [entry.path for entry in store.page(folder, after=first.rest).entries]
    _expect(often in later and once not in later, f"list {folder}", "ignored where to start")
    return listed[often].modified_s


def _expect_gone(store: Store, path: str) -> None:
    try:
        store.get(path, limit=64)
    except NotFound:
        return
    _expect(False, f"get {path}", "gave an object that was just deleted")


def _expect(holds: bool, request: str, fault: str) -> None:
    if not holds:
        raise StoreError(f"{request}: the store {fault}; use a store that reads what was last written")
