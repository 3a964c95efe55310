"""A store over obstore: S3 and compatibles, Google, Azure, a directory, memory.

The one place that knows obstore, and what its errors look like. Their texts hold addresses, and what a server says of a
request that it refused holds keys and signatures, so none of that text goes further: an error of ours is made of the
verb, the path, and the number and code of the answer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import unquote

from sparseloco.errors import (
    AlreadyExists,
    ConfigError,
    Denied,
    NotFound,
    StoreError,
    TooLarge,
    Unavailable,
    check_choice,
)
from sparseloco.peers import folder as folders
from sparseloco.peers.store import PAGE, Listed, Page, check_path, check_prefix, past

UPLOAD_PART_BYTES = 5 << 20
"""Size of a part of an upload, the least that S3 takes. What is longer is sent in parts."""

UPLOAD_THREADS = 2
"""Parts of one upload that are sent at the same time. Few, because on a thin link they share it."""

UPLOAD_RETRIES = 8
"""How often a part of an upload is sent again, so that one bad moment does not cost the parts that have arrived."""

UPLOAD_BACKOFF_S = 0.25
"""First wait before a part is sent again; the next are longer."""

MAX_LISTED = 100_000
"""Objects in one listing. A hostile peer may write any number of them."""

MAX_LEVELS = 4
"""A folder so many below the store is left out if a name in it is no path: nothing of a run lies in folders of it."""

_ODD_FOLDER = 100
"""Objects that a page has less for each folder that had to be looked into by itself."""

_CHUNK_BYTES = 1 << 20
_ENVIRONMENT = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
_CLIENT_FLAGS = ("allow_http", "allow_invalid_certificates")
_CLIENT_TEXTS = ("proxy_url", "proxy_excludes")

_STATUS = re.compile(r"status code: (\d{3})\b")
_CODE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>|\(code: ([A-Za-z]{1,64})\)")
_OS_DENIED = re.compile(r"kind: PermissionDenied|^\[Errno 13\]")
_OS_ERROR = re.compile(r"(?:\(os error |^\[Errno )(\d{1,4})[)\]]")
_BUSY = {408, 425, 429}
# A request for many objects is answered 200, with a code for each object that it failed for.
_BUSY_CODES = {"ConditionalRequestConflict", "InternalError", "OperationAborted", "ServiceUnavailable", "SlowDown"}

_T = TypeVar("_T")


class Bucket:
    """A :class:`~sparseloco.peers.store.Store` over one store object of obstore.

    Args:
        store: What obstore made. It must not retry by itself.
        uploads: The same place for long objects, which are sent in parts, each tried again by itself; None where a
            long object is written like a short one.
        folder: The same place as a directory of this machine, which is listed by its names; None for all others.
    """

    def __init__(self, store: Any, *, uploads: Any = None, folder: Path | None = None) -> None:
        self._obstore = _load("obstore")
        self._errors = _load("obstore.exceptions")
        self._store = store
        self._uploads = uploads
        self._folder = folder

    def create(self, path: str, data: bytes) -> None:
        """Conditional put, in one request whatever the size."""
        check_path(path, "create")
        self._call("create", path, lambda: self._obstore.put(self._store, path, data, mode="create"))

    def put(self, path: str, data: bytes) -> None:
        """Put, in parts if it is long; it appears as a whole."""
        check_path(path, "put")
        parts = self._uploads is not None and len(data) > UPLOAD_PART_BYTES
        store = self._uploads if parts else self._store
        options = {"use_multipart": parts, "chunk_size": UPLOAD_PART_BYTES, "max_concurrency": UPLOAD_THREADS}
        self._call("put", path, lambda: self._obstore.put(store, path, data, **options))

    def get(self, path: str, *, limit: int) -> bytes:
        """One request; its head says the size, and a body that gets longer than that is cut off."""
        check_path(path, "get")
        result = self._call("get", path, lambda: self._obstore.get(self._store, path))
        size = result.meta["size"]
        if size > limit:
            raise TooLarge(f"get {path}: {size} bytes are more than the {limit} accepted; leave it or raise the limit")
        return self._call("get", path, lambda: _read(result.stream(_CHUNK_BYTES), size, path))

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """One request for a range."""
        check_path(path, "get_range")
        if length <= 0:
            return b""
        found = self._obstore.get_range
        data = self._call("get_range", path, lambda: found(self._store, path, start=start, length=length), past_end=b"")
        return bytes(data)

    def size(self, path: str) -> int:
        """One request, without the content."""
        check_path(path, "size")
        return int(self._call("size", path, lambda: self._obstore.head(self._store, path)["size"]))

    def list(self, prefix: str, *, after: str = "") -> list[Listed]:
        """One request for 1000 objects, until all are there."""
        found = self.page(prefix, after=after, limit=MAX_LISTED + 1)
        if found.rest:
            raise TooLarge(
                f"{_named('list', check_prefix(prefix))}: more than {MAX_LISTED} objects; list a folder further down, "
                "or start later"
            )
        return found.entries

    def page(self, prefix: str, *, after: str = "", limit: int = PAGE) -> Page:
        """One request for 1000 objects. Where a name is no path at all, folder by folder, without that folder."""
        folder = check_prefix(prefix)
        if limit < 1:
            raise ConfigError(f"limit={limit!r}: must be at least 1; leave it out for {PAGE}")
        if (root := self._folder) is not None:
            return self._call("list", folder, lambda: folders.page(root, folder, after, limit))
        return self._call("list", folder, lambda: self._page(folder, after, limit))

    def delete(self, path: str) -> None:
        """One request."""
        check_path(path, "delete")
        try:
            self._call("delete", path, lambda: self._obstore.delete(self._store, path))
        except NotFound:
            return

    def _page(self, folder: str, after: str, limit: int) -> Page:
        found: list[Listed] = []
        looked, last = 0, ""
        for path, entry in self._entries(folder, after, min(limit, PAGE)):
            if entry is not None and _is_path(path):  # stores may sort other names as they like
                if path <= last:
                    raise StoreError(
                        f"{_named('list', folder)}: the store lists out of order; use one that sorts by name, as S3 "
                        "does"
                    )
                last = path
            if path <= after:
                continue  # some stores ignore where to start
            looked += _ODD_FOLDER if entry is None else 1
            if path == last and entry is not None:
                found.append(Listed(path, entry["size"], entry["e_tag"] or "", entry["last_modified"].timestamp()))
            if looked >= limit:
                return Page(found, path)
        return Page(found)

    def _entries(self, folder: str, after: str, chunk: int) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
        """Objects in order, asked for when they are needed; None where a folder was looked into by itself."""
        last = after
        try:
            for page in self._obstore.list(self._store, folder or None, offset=last or None, chunk_size=chunk):
                for entry in page:
                    last = entry["path"]
                    yield last, entry
            return
        except self._errors.InvalidPathError:
            objects, folders = self._look_into(folder)
        level = [(entry["path"], entry) for entry in objects] + [(f"{name}/", None) for name in folders]
        for path, entry in sorted(level, key=lambda one: one[0]):
            if entry is not None and path > last:
                yield path, entry
            elif entry is None and past(path) > last:
                yield from self._entries(path[:-1], last, chunk)
                yield past(path), None

    def _look_into(self, folder: str) -> tuple[list[Mapping[str, Any]], list[str]]:
        """Objects and folders directly in a folder; nothing of one that holds a name which is no path."""
        if folder.count("/") >= MAX_LEVELS - 1:
            return [], []
        try:
            level = self._obstore.list_with_delimiter(self._store, folder or None)
        except self._errors.InvalidPathError:
            return [], []
        return level["objects"], level["common_prefixes"]

    def _call(self, verb: str, path: str, request: Callable[[], _T], past_end: _T | None = None) -> _T:
        try:
            return request()
        except (self._errors.BaseError, OSError, ValueError) as error:
            name, text = type(error).__name__, str(error)
        # Outside of that block, or obstore's text would hang on as the context of ours.
        if past_end is not None and _is_past_end(text):
            return past_end
        raise _failure(verb, path, name, text)


def _read(chunks: Iterator[bytes], size: int, path: str) -> bytes:
    read: list[bytes] = []
    room = size
    for chunk in chunks:
        room -= len(chunk)
        if room < 0:
            raise TooLarge(f"get {path}: more than the announced {size} bytes arrived; use another store")
        read.append(bytes(chunk))
    if room:
        raise Unavailable(f"get {path}: {size - room} of {size} bytes arrived; try again")
    return b"".join(read)


def _is_path(path: str) -> bool:
    try:
        check_path(path)
    except ConfigError:
        return False
    return True


def _named(verb: str, path: str) -> str:
    return f"{verb} {path}".rstrip()


def _is_past_end(text: str) -> bool:
    return "StartTooLarge" in text or ((match := _STATUS.search(text)) is not None and match[1] == "416")


def _failure(verb: str, path: str, name: str, text: str) -> StoreError:
    """The error of ours that stands for one of obstore's, with nothing of its text but numbers and codes."""
    request = _named(verb, path)
    status = int(match[1]) if (match := _STATUS.search(text)) else 0
    code = (match[1] or match[2]) if (match := _CODE.search(text)) else ""
    answer = " ".join(filter(None, [str(status or ""), code])) or name
    if "/latest/api/token" in text or "/computeMetadata/" in text or "/metadata/identity" in text:
        return Denied(f"{request}: no credentials were found; set those of the store in the environment")
    if code in _BUSY_CODES or status in _BUSY or status >= 500:
        return Unavailable(f"{request}: the store answered {answer}; try again")
    if name in ("AlreadyExistsError", "PreconditionError"):
        return AlreadyExists(f"{request}: the object is there already; read it and follow what it says")
    if status == 404 or name == "FileNotFoundError":
        what = "bucket" if code == "NoSuchBucket" else "object"
        return NotFound(f"{request}: there is no such {what}; check the path and the store's URL")
    if status in (401, 403) or code == "AccessDenied" or _OS_DENIED.search(text):
        return Denied(f"{request}: the store refused it ({answer}); check credentials and permissions")
    if "BadScheme" in text:
        return Denied(f"{request}: the endpoint has no TLS; use https, or set AWS_ALLOW_HTTP=true")
    if not status and "HttpError" in text:
        return Unavailable(f"{request}: the store did not answer, or broke off; try again")
    if match := _OS_ERROR.search(text):
        return StoreError(f"{request}: the store failed ({os.strerror(int(match[1]))}); mend that and try again")
    return StoreError(f"{request}: the store failed ({answer}); check that it does conditional puts, ranges and lists")


def open_bucket(url: str, *, stall_s: float, options: Mapping[str, str]) -> Bucket:
    """See :func:`sparseloco.peers.store.open_store`."""
    if stall_s <= 0:
        raise ConfigError(f"stall_s={stall_s!r}: must be above 0; give the seconds of silence that mean failure")
    scheme, split, rest = url.partition("://")
    if not split:
        return _directory(url)
    if not url.isprintable() or re.search(r"[?#]|^[^/]*@", rest):
        raise ConfigError(
            f"url={scheme[:10] + '://...'!a}: must hold no password, query or control character; "
            "give credentials in the environment"
        )
    check_choice("url scheme", scheme, ["s3", "gs", "az", "file", "memory"])
    if scheme == "memory":
        return Bucket(_load("obstore.store").MemoryStore())
    if scheme == "file":
        if not rest.startswith("/"):
            raise ConfigError(f"url={url!r}: must name a directory of this machine; write file:///dir")
        return _directory(unquote(rest))
    store, uploads = (_remote(url, scheme, stall_s, options, num_retries=num) for num in (0, UPLOAD_RETRIES))
    return Bucket(store, uploads=uploads)


def _directory(path: str) -> Bucket:
    stores = _load("obstore.store")
    if not path:
        raise ConfigError("url='': must name a store; give a URL or a directory")
    try:
        folder = Path(path).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return Bucket(stores.LocalStore(folder), folder=folder)
    except OSError as error:
        raise ConfigError(f"url={path!r}: must be a directory, or one that can be made ({error.strerror})") from None


def _remote(url: str, scheme: str, stall_s: float, options: Mapping[str, str], *, num_retries: int) -> Any:
    stores = _load("obstore.store")
    given = dict(options)
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=min(stall_s, 10.0)),
        "read_timeout": timedelta(seconds=stall_s),
        "timeout": timedelta(days=365),  # a transfer that goes on is never late
    }
    for key in (*_CLIENT_FLAGS, *_CLIENT_TEXTS):
        value = given.pop(key, os.environ.get(f"{_ENVIRONMENT[scheme]}_{key.upper()}"))
        if value is not None:
            client[key] = value.lower() in ("1", "true", "yes", "on") if key in _CLIENT_FLAGS else value
    retry = {
        "max_retries": num_retries,
        "retry_timeout": timedelta(seconds=(1 + num_retries) * stall_s),
        "backoff": {"init_backoff": timedelta(seconds=UPLOAD_BACKOFF_S)},
    }
    try:
        return stores.from_url(url, config=given, client_options=client, retry_config=retry)
    except (_load("obstore.exceptions").BaseError, OSError, ValueError, TypeError) as error:
        reason = _setup_failure(str(error))
    raise ConfigError(f"url={url!r}: {reason}")


def _setup_failure(text: str) -> str:
    if match := re.search(r"Configuration key: '(\w{1,60})' is not valid", text):
        return f"has an option {match[1]!r} that its store does not know; see the names in obstore's documentation"
    if "MissingAccount" in text:
        return "needs the account of the container; set AZURE_STORAGE_ACCOUNT_NAME"
    return "must be scheme://bucket/folder with complete settings; check the URL and the store's environment variables"


def _load(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        _refuse_without_extra()


def _refuse_without_extra() -> NoReturn:
    raise ConfigError('obstore: is not installed; run pip install "sparseloco[peers]"') from None
