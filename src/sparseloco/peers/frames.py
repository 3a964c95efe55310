"""What the frames of a round must be like: the checks that all readers make alike, and the bytes that are held."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sparseloco import wire
from sparseloco.errors import ConfigError, WireError
from sparseloco.peers import paths, sealed
from sparseloco.peers.canonical import sha256
from sparseloco.peers.identity import Identity
from sparseloco.types import Coding, Envelope, Key, PartSpec

_ANY_HASH = "0" * 64


def seal_envelope(envelope: Envelope, run: str, me: Identity) -> bytes:
    """The object of an envelope: a compact frame, sealed.

    Args:
        envelope: What to send.
        run: Run id, 16 hex digits.
        me: The sender.

    Raises:
        DivergenceError: if a float is not finite.
    """
    frame = wire.encode(envelope, bytes.fromhex(run), Coding.COMPACT)
    return sealed.seal_frame(frame, me, run, *envelope.key)[1]


@dataclass(frozen=True)
class Expected:
    """What the frames of one round of one fragment must be like.

    Attributes:
        run: Run id, 16 hex digits.
        key: Round and fragment.
        fingerprint: Of algorithm and model, 16 hex digits.
        digest: Of the shared state before the round, 32 hex digits (rule 4).
        specs: Table of the parts of this round's payload.
    """

    run: str
    key: Key
    fingerprint: str
    digest: str
    specs: tuple[PartSpec, ...]

    @property
    def largest(self) -> int:
        """Bytes of the longest object that can pass."""
        return max(wire.frame_bytes(self.specs, coding) for coding in Coding) + sealed.TRAILER_BYTES

    def open(self, data: bytes, peer: str) -> Envelope:
        """The envelope of an object in the folder of ``peer``; a pure function of the bytes.

        Raises:
            WireError: with the reason for which it counts for nobody.
        """
        if len(data) > self.largest:
            raise WireError(f"size={len(data)}: must be at most {self.largest}, the longest frame of this fragment")
        frame = sealed.open_frame(data, paths.Frame(*self.key, peer, 0, _ANY_HASH), self.run)
        envelope = wire.decode(bytes(frame), self.specs, self.fingerprint, bytes.fromhex(self.run))
        if envelope.key != self.key:
            raise WireError(f"frame of round {envelope.key.round}, fragment {envelope.key.fragment}: must be of here")
        if envelope.digest != self.digest:
            raise WireError(f"digest={envelope.digest}: must be {self.digest}, the shared state before the round")
        return envelope

    def check(self, data: bytes, peer: str) -> int:
        """Weight of an object that passes all checks.

        Raises:
            WireError: as :meth:`open`.
        """
        return self.open(data, peer).weight


class Frames:
    """Bytes of the objects of the last rounds, by hash; for relays, and so that nothing is fetched twice.

    What is kept on a local disk outlives this process. Else a frame that its peer took away, and that was held by peers
    alone that were killed, would be lost, and nobody goes on without it. Safe to share between threads.

    Args:
        folder: A local directory for what is kept; None keeps nothing.
        room: Bytes that are held in memory; with a folder, what is beyond goes to the disk at once, so that many who
            post long frames in an open run cannot fill the memory.
    """

    def __init__(self, folder: Path | None = None, room: int = 2**28) -> None:
        self._lock = threading.Lock()
        self._room = room
        self._held: dict[str, bytes] = {}
        self._keys: dict[str, Key] = {}
        self._folder = folder
        self._kept: dict[str, Key] = {}
        for path in folder.glob("*-*-*") if folder else ():
            number, fragment, hash_ = path.name.split("-")
            self._kept[hash_] = Key(int(number), int(fragment))

    def put(self, key: Key, data: bytes) -> str:
        """Hold an object; returns its hash."""
        hash_ = sha256(data)
        with self._lock:
            is_full = sum(map(len, self._held.values())) + len(data) > self._room
        if is_full and self._folder:
            with contextlib.suppress(OSError):  # without space on the disk, memory has to do
                self._write(key, hash_, data)
                return hash_
        with self._lock:
            self._held[hash_], self._keys[hash_] = data, key
        return hash_

    def get(self, hash_: str) -> bytes | None:
        """The bytes with that hash, if they are here."""
        with self._lock:
            data, key = self._held.get(hash_), self._kept.get(hash_)
        if data is None and key is not None:
            with contextlib.suppress(OSError):
                data = self._path(key, hash_).read_bytes()
            if data is None or sha256(data) != hash_:
                return None
        return data

    def hashes(self) -> set[str]:
        """All that is here."""
        with self._lock:
            return {*self._held, *self._kept}

    def keep(self, key: Key, hashes: Iterable[str]) -> None:
        """Write these objects of a closed round to the disk, and drop others of that round from it.

        Raises:
            OSError: if they cannot be written.
        """
        listed = set(hashes)
        with self._lock:
            for hash_ in [one for one, at in self._kept.items() if at == key and one not in listed]:
                self._path(self._kept.pop(hash_), hash_).unlink(missing_ok=True)
        for hash_ in listed if self._folder else ():
            data = self._held.get(hash_)
            if data is not None and hash_ not in self._kept:
                self._write(key, hash_, data)

    def _write(self, key: Key, hash_: str, data: bytes) -> None:
        path = self._path(key, hash_)
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f".{hash_}-{threading.get_ident()}.tmp")
        half.write_bytes(data)  # the disk need not have it at once: what is damaged is not used
        half.rename(path)
        with self._lock:
            self._kept[hash_] = key

    def forget_before(self, key: Key) -> None:
        """Drop objects of that fragment's earlier rounds from memory."""
        with self._lock:
            for hash_ in _of_rounds_before(key, self._keys):
                del self._held[hash_], self._keys[hash_]

    def remove_before(self, key: Key) -> None:
        """Drop objects of that fragment's earlier rounds from the disk."""
        with self._lock:
            for hash_ in _of_rounds_before(key, self._kept):
                self._path(self._kept.pop(hash_), hash_).unlink(missing_ok=True)

    def _path(self, key: Key, hash_: str) -> Path:
        return (self._folder or Path()) / f"{key.round:08}-{key.fragment:04}-{hash_}"


def _of_rounds_before(key: Key, keys: dict[str, Key]) -> list[str]:
    return [hash_ for hash_, at in keys.items() if at.fragment == key.fragment and at.round < key.round]


def check_weight_within(weight: int, most: int) -> None:
    """Refuse to post what every other peer would leave out.

    Raises:
        ConfigError: naming both numbers.
    """
    if weight > most:
        raise ConfigError(
            f"weight={weight}: must be at most policy.max_tokens_per_round={most}, or nobody lists the frame; "
            "take fewer tokens per round, or let the owner raise the limit"
        )
