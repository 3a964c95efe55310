"""What the frames of a round must be like: the checks that all readers make alike, and the bytes that are held."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass

from sparseloco import wire
from sparseloco.errors import ConfigError, WireError
from sparseloco.peers import paths, sealed
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

    Safe to share between threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, bytes] = {}
        self._keys: dict[str, Key] = {}

    def put(self, key: Key, data: bytes) -> str:
        """Keep an object; returns its hash."""
        hash_ = hashlib.sha256(data).hexdigest()
        with self._lock:
            self._held[hash_], self._keys[hash_] = data, key
        return hash_

    def get(self, hash_: str) -> bytes | None:
        """The bytes with that hash, if they are here."""
        with self._lock:
            return self._held.get(hash_)

    def hashes(self) -> set[str]:
        """All that is here."""
        with self._lock:
            return set(self._held)

    def forget_before(self, key: Key) -> None:
        """Drop objects of that fragment's earlier rounds."""
        with self._lock:
            for hash_, place in list(self._keys.items()):
                if place.fragment == key.fragment and place.round < key.round:
                    del self._held[hash_], self._keys[hash_]


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
