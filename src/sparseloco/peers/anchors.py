"""Anchors in the store: a fragment's shared state before a round, vouched for by the signed manifest of that round."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from sparseloco import rejoin
from sparseloco.errors import CheckpointError, NotFound, WireError
from sparseloco.lane import StateDict
from sparseloco.peers import pages, paths
from sparseloco.peers.manifest import Manifest
from sparseloco.peers.store import Store
from sparseloco.peers.tensors import pack, sha256_of, unpack
from sparseloco.replica import Replica
from sparseloco.types import Key

_FOLDER = "anchors/"
MAX_ANCHORS = 4096
"""Objects in the folder of a round that are looked at: one for each fragment, and some that nobody vouches for."""
MAX_ROUNDS = 1024
"""Rounds whose anchors are looked at where more are claimed."""
KEPT = 2
"""Anchors that are kept, the newest, and all rounds since the older of them."""
_MOST_TIMES_ANCHOR = 4
"""Outer and compressor state take at most three times the anchor: two moments and a little."""
_HEAD_BYTES = 1 << 16
_HEAD_BYTES_PER_BLOCK = 1 << 11


def facts_of(run: str, key: Key, fingerprint: str) -> dict[str, str | int]:
    """What an anchor says about itself."""
    return {"format": 1, "run": run, "round": key.round, "fragment": key.fragment, "fingerprint": fingerprint}


def state_hash(replica: Replica, run: str, key: Key) -> str:
    """SHA-256 of the serialized shared state of a fragment, equal at all peers that agree."""
    return sha256_of(rejoin.fragment_state(replica, key.fragment), facts_of(run, key, replica.fingerprint))


def serialize(replica: Replica, run: str, key: Key) -> bytes:
    """The bytes of an anchor: a safetensors file."""
    return pack(rejoin.fragment_state(replica, key.fragment), facts_of(run, key, replica.fingerprint))


def path_of(manifest: Manifest) -> str:
    """Where the anchor lies that a manifest vouches for."""
    assert manifest.state_sha256
    return str(paths.Anchor(manifest.round, manifest.digest, f"{manifest.state_sha256}.safetensors"))


def turn_of(manifest: Manifest, peer: str, every: int) -> int | None:
    """How many listed peers come before ``peer`` in writing the anchor of this round; None if it is not listed."""
    names = [entry.peer for entry in manifest.entries]
    if peer not in names:
        return None
    return (names.index(peer) - manifest.round // every) % len(names)


def write(store: Store, manifest: Manifest, data: bytes) -> bool:
    """Put an anchor and read it back.

    Returns:
        Whether it lies there whole.

    Raises:
        StoreError: if the store does not take it.
    """
    path = path_of(manifest)
    if not is_whole(store, path, len(data), manifest.state_sha256):
        store.put(path, data)
    return is_whole(store, path, len(data), manifest.state_sha256)


def is_whole(store: Store, path: str, size: int, sha256: str) -> bool:
    """Whether just these bytes lie there."""
    try:
        if store.size(path) != size:
            return False
        return hashlib.sha256(store.get(path, limit=size)).hexdigest() == sha256
    except NotFound:
        return False


def listed(store: Store) -> list[paths.Anchor]:
    """Anchors, the newest round first; names that nobody of ours makes are left out.

    Every member may write here. If somebody floods the folder, only the newest rounds that are closed are given.
    """
    found: list[paths.Anchor] = []
    for entry in pages.listed(store, _FOLDER, share=MAX_ANCHORS, known=_newest_rounds(store)):
        with contextlib.suppress(WireError):
            place = paths.parse(entry.path)
            if isinstance(place, paths.Anchor):
                found.append(place)
    if len({place.round for place in found}) > MAX_ROUNDS:
        newest = {int(name) for name in _newest_rounds(store)}
        found = [place for place in found if place.round in newest]
    return sorted(found, key=lambda place: -place.round)


def _newest_rounds(store: Store) -> Iterator[str]:
    """Folders of the newest rounds; since manifests stay, the last one is found by halving."""
    low, high = -1, 1
    while high < paths.MAX_ROUND and _is_closed(store, high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _is_closed(store, middle) else (low, middle)
    yield from (f"{number:08}" for number in range(max(low - MAX_ROUNDS, -1) + 1, low + 1))


def _is_closed(store: Store, number: int) -> bool:
    try:
        store.size(str(paths.Manifest(number, 0, 0)))
    except NotFound:
        return False
    return True


def read(store: Store, replica: Replica, manifest: Manifest) -> StateDict:
    """Shared state that a manifest vouches for.

    Args:
        store: Where it lies.
        replica: Its model and algorithm say how large the state may be.
        manifest: Signed by somebody who may write manifests.

    Raises:
        NotFound: if it is not there.
        TooLarge: before it is fetched.
        CheckpointError: if the bytes are others than those vouched for, or of another place.
    """
    key = Key(manifest.round, manifest.fragment)
    path = path_of(manifest)
    data = store.get(path, limit=limit_of(replica, key.fragment))
    if hashlib.sha256(data).hexdigest() != manifest.state_sha256:
        raise CheckpointError(
            f"{path}: content does not match the hash in the manifest of round {key.round}; take an older anchor"
        )
    state, facts = unpack(data)
    if facts != facts_of(manifest.run, key, replica.fingerprint):
        raise CheckpointError(f"{path}: says {facts}; must be of this run, round, fragment and algorithm")
    return state


def limit_of(replica: Replica, fragment: int) -> int:
    """Bytes of the largest anchor that a fragment can have."""
    blocks = replica.lanes[fragment].state.anchor
    return (
        _MOST_TIMES_ANCHOR * sum(block.nbytes for block in blocks) + _HEAD_BYTES + _HEAD_BYTES_PER_BLOCK * len(blocks)
    )


@dataclass
class Retention:
    """What a peer removes of its own objects: nothing that somebody who joins could need.

    A fragment's chain can be replayed from any anchor, so all rounds from the older of the two newest anchors on that
    this peer has itself found whole are kept, and those two.

    Attributes:
        store: Where they are.
        peer: Own peer id.
    """

    store: Store
    peer: str
    _whole: dict[int, list[int]] = field(default_factory=dict)
    _written: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    _next: dict[int, int] = field(default_factory=dict)

    def found_whole(self, key: Key, path: str, *, written: bool) -> None:
        """Note an anchor that was read and checked; ``written``: by this peer."""
        rounds = self._whole.setdefault(key.fragment, [])
        if key.round not in rounds:
            rounds.append(key.round)
            rounds.sort()
        if written:
            self._written.setdefault(key.fragment, []).append((key.round, path))

    def oldest_kept(self, fragment: int) -> int:
        """First round of a fragment that is needed."""
        rounds = self._whole.get(fragment, [])
        return rounds[-KEPT] if len(rounds) >= KEPT else 0

    def clean(self, fragment: int) -> None:
        """Remove own frames, relays and wants of older rounds, and own anchors that are older.

        Raises:
            StoreError: if the store refuses; what is left is tried again the next time.
        """
        first = self.oldest_kept(fragment)
        for number in range(self._next.get(fragment, 0), first):
            folder = f"{paths.round_prefix(number, fragment)}{self.peer}"
            for entry in self.store.page(folder).entries:  # only oneself writes there, and not very much
                self.store.delete(entry.path)
            self._next[fragment] = number + 1
        written = self._written.get(fragment, [])
        for number, path in [entry for entry in written if entry[0] < first]:
            self.store.delete(path)
            written.remove((number, path))
