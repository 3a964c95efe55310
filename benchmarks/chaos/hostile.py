"""What a hostile peer does within its own prefix: it follows the run, and in each round puts something else."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sparseloco.errors import StoreError, WireError
from sparseloco.peers import paths
from sparseloco.peers.canonical import sha256
from sparseloco.peers.frames import seal_envelope
from sparseloco.peers.identity import Identity
from sparseloco.peers.manifest import Manifest, seal
from sparseloco.peers.run_file import RunFile
from sparseloco.peers.store import Store
from sparseloco.types import Envelope, Key

_STRANGER = Identity(b"stranger".ljust(32))


class HostileStore:
    """The way to the store of the hostile peer: its honest frames are replaced on it.

    Attributes:
        envelope: What the peer is about to put.
    """

    def __init__(self, store: Store, me: Identity, run: RunFile, seed: int) -> None:
        self.store, self.me, self.run, self.seed = store, me, run, seed
        self.envelope: Envelope | None = None
        self._last: bytes = b""
        self._acts: dict[str, Callable[[paths.Frame, bytes], None]] = {
            "deleted once it is listed": self._put,
            "overwritten once it is listed": self._put,
            "rubbish": self._rubbish,
            "forged": self._forged,
            "replayed": self._replayed,
            "overweight": lambda frame, _: self._changed(frame, weight=2**20),
            "tampered": self._tampered,
            "of another state": lambda frame, _: self._changed(frame, digest="0" * 32),
            "of another algorithm": lambda frame, _: self._changed(frame, fingerprint="0" * 16),
            "of another round": lambda frame, _: self._changed(frame, key=Key(frame.round + 1, frame.fragment)),
            "a manifest of its own": self._manifest,
            "nothing": lambda frame, data: None,
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def act(self, number: int) -> str:
        """What it does in a round."""
        return random.Random(f"{self.seed}/hostile/{number}").choice(list(self._acts))

    def put(self, path: str, data: bytes) -> None:
        """All but frames as it is."""
        place = paths.parse(path) if path.endswith(".frame") else None
        if isinstance(place, paths.Frame):
            return self._acts[self.act(place.round)](place, data)
        return self.store.put(path, data)

    def get(self, path: str, *, limit: int) -> bytes:
        """As it is; but once a manifest is there, the frame that it lists is taken away."""
        data = self.store.get(path, limit=limit)
        with contextlib.suppress(WireError, StoreError):
            place = paths.parse(path)
            if isinstance(place, paths.Manifest):
                self._take_away(place)
        return data

    def _take_away(self, place: paths.Manifest) -> None:
        act = self.act(place.round)
        if "once it is listed" not in act:
            return
        for entry in self.store.list(f"{paths.round_prefix(place.round, place.fragment)}{self.me.peer_id}"):
            if act.startswith("deleted"):
                self.store.delete(entry.path)
            elif act.startswith("overwritten"):
                self.store.put(entry.path, b"no frame")

    def _put(self, frame: paths.Frame, data: bytes) -> None:
        self._last = data
        self.store.put(str(replace(frame, hash=sha256(data))), data)

    def _rubbish(self, frame: paths.Frame, data: bytes) -> None:
        for size in (0, 1, len(data), 20 * len(data)):
            rubbish = random.Random(f"{self.seed}/{frame.round}/{size}").randbytes(size)
            self.store.put(str(replace(frame, hash=sha256(rubbish))), rubbish)

    def _forged(self, frame: paths.Frame, data: bytes) -> None:
        assert self.envelope is not None
        self.store.put(str(frame), seal_envelope(self.envelope, self.run.run, _STRANGER))

    def _replayed(self, frame: paths.Frame, data: bytes) -> None:
        self.store.put(str(replace(frame, hash=sha256(self._last))), self._last)

    def _changed(self, frame: paths.Frame, **changes: Any) -> None:
        assert self.envelope is not None
        data = seal_envelope(replace(self.envelope, **changes), self.run.run, self.me)
        self.store.put(str(replace(frame, hash=sha256(data))), data)

    def _tampered(self, frame: paths.Frame, data: bytes) -> None:
        self._changed_byte(frame, data, random.Random(f"{self.seed}/{frame.round}/byte").randrange(len(data)))

    def _changed_byte(self, frame: paths.Frame, data: bytes, place: int) -> None:
        wrong = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        self.store.put(str(replace(frame, hash=sha256(wrong))), wrong)

    def _manifest(self, frame: paths.Frame, data: bytes) -> None:
        """Whoever can write everywhere, which a bucket's permissions should not allow, can put one first."""
        assert self.envelope is not None
        manifest = Manifest(
            run=self.run.run,
            round=frame.round,
            fragment=frame.fragment,
            attempt=0,
            previous="0" * 64,
            digest=self.envelope.digest,
            amendments=0,
            writer=self.me.public,
        )
        with contextlib.suppress(StoreError):
            self.store.create(str(paths.Manifest(frame.round, frame.fragment, 0)), seal(manifest, self.me))
