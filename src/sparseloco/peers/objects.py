"""All objects of a run as one look finds them, sorted by what they are, and manifests read ahead of a walk."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field

from sparseloco.errors import StoreError, TooLarge, WireError
from sparseloco.peers import paths
from sparseloco.peers.anchors import MAX_ANCHORS
from sparseloco.peers.chains import strict_reader
from sparseloco.peers.leases import PER_ID
from sparseloco.peers.listing import PER_PEER
from sparseloco.peers.pages import Walk, listed, read
from sparseloco.peers.store import Listed, Store

_AHEAD, _AHEAD_BLIND = 64, 8
_FOLDERS = {"amend/": 1, "anchors/": MAX_ANCHORS, "peers/": PER_ID}
"""With how many objects of each of their folders are looked at."""
Place = tuple[paths.RunPath, Listed]


@dataclass
class Objects:
    """What lies in a store.

    Attributes:
        complete: Whether all of it was listed. If there is too much, rounds are listed one by one.
        listed: By path; only names that a peer of ours makes.
        rounds: By round and fragment.
        anchors: All anchors.
        leases: All leases.
        whole: Rounds that were listed one by one, and all of them.
        foreign: Names that no peer of ours makes: how many, how many bytes, and the first.
    """

    complete: bool = True
    listed: dict[str, Place] = field(default_factory=dict[str, Place])
    rounds: dict[tuple[int, int], list[Place]] = field(default_factory=dict[tuple[int, int], list[Place]])
    anchors: list[tuple[paths.Anchor, Listed]] = field(default_factory=list[tuple[paths.Anchor, Listed]])
    leases: list[tuple[paths.Lease, Listed]] = field(default_factory=list[tuple[paths.Lease, Listed]])
    whole: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    foreign: tuple[int, int, str] = (0, 0, "")

    def add(self, entry: Listed) -> None:
        """Sort an object in."""
        try:
            place = paths.parse(entry.path)
        except WireError:
            count, nbytes, first = self.foreign
            self.foreign = (count + 1, nbytes + entry.size, first or entry.path)
            return
        self.listed[entry.path] = (place, entry)
        match place:
            case paths.Anchor():
                self.anchors.append((place, entry))
            case paths.Lease():
                self.leases.append((place, entry))
            case paths.Frame() | paths.Relay() | paths.Want() | paths.Manifest():
                self.rounds.setdefault((place.round, place.fragment), []).append((place, entry))
            case _:
                pass

    def look_into(self, store: Store, round: int, fragment: int) -> list[Place] | None:
        """Objects of a round; None if they cannot be listed."""
        key = (round, fragment)
        if not self.complete and key not in self.rounds:
            walk = Walk(paths.round_prefix(round, fragment), PER_PEER)
            try:
                for entry in read(store, walk):
                    self.add(entry)
            except StoreError:
                self.rounds.pop(key, None)
                return None
            if walk.whole:
                self.whole.add(key)
        return self.rounds.get(key, [])

    def bytes_in(self, round: int, fragment: int) -> int | None:
        """Of all objects in a round that was looked into; None if not all are known."""
        key = (round, fragment)
        known = self.complete or key in self.whole
        return sum(entry.size for _, entry in self.rounds.get(key, ())) if known else None


def list_objects(store: Store) -> Objects:
    """List the whole store, or, if it holds too much for that, everything but the rounds, and of that a share.

    Raises:
        StoreError: if the store does not answer.
    """
    found = Objects()
    try:
        for entry in store.list(""):
            found.add(entry)
        return found
    except TooLarge:
        found = Objects(complete=False)
    for folder, share in _FOLDERS.items():
        for entry in listed(store, folder, share=share):
            found.add(entry)
    return found


class Ahead:
    """A reader of manifests that fetches those of the next rounds at the same time.

    Args:
        store: Where they are.
        pool: For requests.
        objects: A complete listing says what need not be asked for.
    """

    def __init__(self, store: Store, pool: Executor, objects: Objects) -> None:
        self._read, self._pool = strict_reader(store), pool
        self._listed: Mapping[str, Place] | None = objects.listed if objects.complete else None
        self._got: dict[str, bytes | StoreError | None] = {}

    def __call__(self, path: str, limit: int) -> bytes | None:
        """Bytes of a manifest, None if it is not there.

        Raises:
            StoreError: if the store does not answer.
        """
        if not self._is_listed(path):
            return None
        if path not in self._got:
            self._fetch(path, limit)
        got = self._got.pop(path)
        if isinstance(got, StoreError):
            raise got
        return got

    def _fetch(self, path: str, limit: int) -> None:
        place = paths.parse(path)
        assert isinstance(place, paths.Manifest)
        wanted = [path]
        if not place.attempt:
            last = min(place.round + (_AHEAD_BLIND if self._listed is None else _AHEAD), paths.MAX_ROUND)
            later = (str(paths.Manifest(round, place.fragment, 0)) for round in range(place.round + 1, last))
            wanted += filter(self._is_listed, later)

        def read(path: str) -> bytes | StoreError | None:
            try:
                return self._read(path, limit)
            except StoreError as error:
                return error

        self._got.update(zip(wanted, self._pool.map(read, wanted), strict=True))

    def _is_listed(self, path: str) -> bool:
        return self._listed is None or path in self._listed
