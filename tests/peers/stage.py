"""A run in a store without any training: manifests, frames and leases as peers put them, at times of one's choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from sparseloco.errors import StoreError
from sparseloco.peers import canonical, paths
from sparseloco.peers.frames import seal_envelope
from sparseloco.peers.identity import Identity
from sparseloco.peers.leases import Lease
from sparseloco.peers.manifest import Entry, History, LeftOut, Manifest, seal
from sparseloco.peers.run_file import Amendment
from sparseloco.peers.store import PAGE, Listed, Page, Store, open_store
from sparseloco.types import Envelope, Key, Payload
from tests.peers.runs import OWNER, identity, make_run

NOW = 1_800_000_000.0
ME = sorted((identity(number) for number in range(8)), key=lambda one: one.peer_id)
"""Keys whose peer ids ascend."""
IDS = [one.peer_id for one in ME]


class Dated:
    """A store in memory whose objects have the times that a test gives them, and that fails where it says so."""

    def __init__(self) -> None:
        self.store: Store = open_store("memory://")
        self.clock = NOW
        self.times: dict[str, float] = {}
        self.fails: dict[str, StoreError] = {}
        self.got: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def put(self, path: str, data: bytes) -> None:
        self.times[path] = self.clock
        self.store.put(path, data)

    def create(self, path: str, data: bytes) -> None:
        self.store.create(path, data)
        self.times[path] = self.clock

    def get(self, path: str, *, limit: int) -> bytes:
        self.got.append(path)
        if path in self.fails:
            raise self.fails[path]
        return self.store.get(path, limit=limit)

    def list(self, prefix: str, *, after: str = "") -> list[Listed]:
        if prefix in self.fails:
            raise self.fails[prefix]
        return self._dated(self.store.list(prefix, after=after))

    def page(self, prefix: str, *, after: str = "", limit: int = PAGE) -> Page:
        found = self.store.page(prefix, after=after, limit=limit)
        return Page(self._dated(found.entries), found.rest)

    def _dated(self, found: list[Listed]) -> list[Listed]:
        return [entry._replace(modified_s=self.times[entry.path]) for entry in found]


class Stage:
    """A run of which a test decides what lies where."""

    def __init__(self, **policy: Any) -> None:
        self.store = Dated()
        self.run = make_run(**{"anchor_every": 1000, **policy})
        self.store.put("run.json", canonical.encode(self.run))
        self.histories: dict[int, History] = {}

    def at(self, seconds: float) -> Stage:
        """What follows is put so many seconds before ``NOW``."""
        self.store.clock = NOW - seconds
        return self

    def frame(self, peer: int, round: int, digest: str = "a" * 32, fragment: int = 0) -> Entry:
        """A frame that says it was made from this state, with nothing in it."""
        envelope = Envelope(
            key=Key(round, fragment),
            peer=peer,
            weight=0,
            fingerprint=self.run.fingerprint,
            digest=digest,
            payload=Payload((), {}),
        )
        data = seal_envelope(envelope, self.run.run, ME[peer])
        entry = Entry(peer=IDS[peer], size=len(data), hash=canonical.sha256(data), weight=7)
        self.store.put(str(paths.Frame(round, fragment, entry.peer, 0, entry.hash)), data)
        return entry

    def close(
        self,
        *peers: int,
        fragment: int = 0,
        attempt: int = 0,
        left_out: Mapping[int, str] | None = None,
        **changes: Any,
    ) -> Manifest:
        """Put the frames of some peers and the manifest that lists them; the next round is open then."""
        history = self.histories.get(fragment) or History(run=self.run, round=0, fragment=fragment, digest="a" * 32)
        entries = tuple(self.frame(peer, history.round, history.digest, fragment) for peer in sorted(peers))
        manifest = self.manifest(history, entries, attempt=attempt, left_out=left_out, **changes)
        manifest = self.put(manifest)
        self.histories[fragment] = replace(history.after(manifest, "a" * 32), digest="a" * 32)
        return manifest

    def manifest(
        self,
        history: History,
        entries: Sequence[Entry],
        *,
        left_out: Mapping[int, str] | None = None,
        **changes: Any,
    ) -> Manifest:
        """What would count in this place, but for the changes."""
        amended: tuple[Amendment, ...] = changes.pop("amended", ())
        fields: dict[str, Any] = {
            "run": self.run.run, "round": history.round, "fragment": history.fragment, "attempt": 0,
            "previous": history.previous, "digest": history.digest, "amended": amended, "entries": tuple(entries),
            "amendments": len(history.amendments) + len(amended), "writer": ME[0].public,
            "left_out": tuple(LeftOut(peer=IDS[peer], reason=why) for peer, why in sorted((left_out or {}).items())),
            "state_sha256": "e" * 64 if history.wants_state_hash else "",
        }  # fmt: skip
        return Manifest(**(fields | changes))

    def put(self, manifest: Manifest, writer: Identity = ME[0]) -> Manifest:
        """Put it where it says it belongs; returns it with its signature."""
        place = paths.Manifest(manifest.round, manifest.fragment, manifest.attempt)
        data = seal(manifest, writer)
        self.store.put(str(place), data)
        return canonical.decode(data, Manifest, what="manifest", limit=len(data))

    def lease(
        self,
        peer: int,
        *,
        counter: int = 1,
        round: int = 0,
        left: bool = False,
        signer: int | None = None,
        loss: bytes | None = None,
    ) -> None:
        """Put a lease; ``loss`` is the JSON that it says."""
        signing = ME[peer if signer is None else signer]
        lease = Lease(
            run=self.run.run,
            peer=IDS[peer],
            counter=counter,
            session="0" * 16,
            round=round,
            left=left,
            loss=msgspec.UNSET if loss is None else msgspec.Raw(loss),
            public=signing.public,
        )
        self.store.put(str(paths.Lease(IDS[peer])), canonical.encode(lease.signed(signing)))

    def amendment(self, n: int, round: int, **changes: Any) -> Amendment:
        one = Amendment(run=self.run.run, n=n, round=round, changes=changes).signed(identity(OWNER))
        self.store.put(str(paths.Amend(n)), canonical.encode(one))
        return one
