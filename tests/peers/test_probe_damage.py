"""A read that was damaged on its way does not condemn a store; one that lies is refused as ever."""

from __future__ import annotations

from typing import Any

import pytest

from sparseloco.errors import StoreError
from sparseloco.peers.store import Store, open_store, probe

READS = 4
"""Whole objects and parts that a probe reads and compares."""


class Damaging:
    """A store whose reads of these numbers come back with a flipped bit."""

    def __init__(self, damaged: set[int]) -> None:
        self.store: Store = open_store("memory://")
        self.damaged, self.reads = damaged, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def get(self, path: str, *, limit: int) -> bytes:
        return self._read(self.store.get(path, limit=limit))

    def get_range(self, path: str, start: int, length: int) -> bytes:
        return self._read(self.store.get_range(path, start, length))

    def _read(self, data: bytes) -> bytes:
        self.reads += 1
        return bytes([data[0] ^ 1]) + data[1:] if self.reads - 1 in self.damaged else data


@pytest.mark.parametrize("number", range(READS))
def test_one_damaged_read_is_read_again(number: int) -> None:
    store = Damaging({number})
    assert probe(store).latency_s.keys() >= {"create", "get", "get_range"}
    assert store.reads == READS + 1
    assert store.list("") == [], "nothing is left behind"


def test_a_store_that_always_gives_other_bytes_is_refused() -> None:
    with pytest.raises(
        StoreError, match=r"^get probe/\w+-create: the store gave other bytes than those just created; use"
    ):
        probe(Damaging(set(range(100))))


class Overwriting(Damaging):
    """One that ignores the condition of a create, and damages the first reads as well."""

    def create(self, path: str, data: bytes) -> None:
        self.store.put(path, data)


@pytest.mark.parametrize("number", range(2))
def test_a_store_that_overwrites_is_refused_whatever_is_damaged(number: int) -> None:
    with pytest.raises(StoreError, match=r"^create probe/\w+-create: the store wrote over an object that was there"):
        probe(Overwriting({number}))
