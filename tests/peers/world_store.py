"""A store in memory as a value, and what its operations come to, whatever goes wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sparseloco.peers.canonical import sha256
from sparseloco.peers.operations import (
    Bad,
    Create,
    Done,
    Exists,
    Fetch,
    Fetched,
    Good,
    Inspect,
    Operation,
    Outcome,
    Put,
    Refused,
    Unavailable,
    Upload,
)  # fmt: skip
from tests.peers.machine import CONTENT, HeldInspected, Local, checked


class Store:
    """Objects by path. One object per value, so that comparing is cheap."""

    _all: ClassVar[dict[frozenset[tuple[str, bytes]], Store]] = {}

    def __init__(self, items: frozenset[tuple[str, bytes]]) -> None:
        self.items = items
        self.data = dict(items)
        self._after: dict[tuple[str, bytes | None], Store] = {}

    @classmethod
    def of(cls, data: Mapping[str, bytes]) -> Store:
        items = frozenset(data.items())
        return cls._all.setdefault(items, cls(items))

    def put(self, path: str, data: bytes) -> Store:
        if (path, data) not in self._after:
            self._after[path, data] = Store.of({**self.data, path: data})
        return self._after[path, data]

    def create(self, path: str, data: bytes) -> Store:
        return self if path in self.data else self.put(path, data)

    def delete(self, path: str) -> Store:
        if (path, None) not in self._after:
            self._after[path, None] = Store.of({name: data for name, data in self.data.items() if name != path})
        return self._after[path, None]


def frames_of(store: Store) -> list[str]:
    return sorted(path for path in store.data if path.endswith(".frame") and "relay" not in path)


def write(store: Store, what: str, operation: Create | Upload | Put, local: Local) -> tuple[Store, Outcome, Any]:
    only_new = isinstance(operation, Create)
    data = operation.data if not isinstance(operation, Upload) else CONTENT.get(operation.hash, "").encode()
    if isinstance(operation, Upload) and not data:
        data = local.base.durable.frame
        CONTENT[sha256(data)] = data.decode()
    if what == "refuse":
        return store, Refused("no"), None
    if what == "drop":
        return store, Unavailable(), None
    if what == "delay":
        return store, Unavailable(), (operation.path, data, only_new)
    there = operation.path in store.data
    store = (store.create if only_new else store.put)(operation.path, data)
    if what == "lose answer":
        return store, Unavailable(), None
    return store, Exists() if there and only_new else Done(), None


def read_frames(store: dict[str, bytes], operation: Operation, check_digest: bool) -> Outcome:
    if isinstance(operation, Fetch):
        good = [one for one in operation.objects if sha256(store.get(one.path, b"")) == one.hash]
        return Fetched(frozenset(one.hash for one in good))
    assert isinstance(operation, Inspect)
    verdicts: list[Good | Bad | Unavailable] = []
    for one in operation.frames:
        data = store.get(one.path)
        if data is None:
            verdicts.append(Unavailable("gone"))
            continue
        verdict = checked(data, operation.digest if check_digest else None)
        verdicts.append(verdict if isinstance(verdict, Good) else Bad(verdict.reason))
    held = [one.hash for one, verdict in zip(operation.frames, verdicts, strict=True) if isinstance(verdict, Good)]
    return HeldInspected(tuple(verdicts), frozenset(held))
