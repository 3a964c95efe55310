"""Getting hold of every listed frame, and helping others to (rule 3).

A peer that cannot fetch a listed frame says so with a ``want`` object; whoever holds the bytes puts them again as a
``relay``. So a peer that takes its frame away after it was listed stalls nobody. Nobody goes on without a listed frame.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sparseloco.peers import paths
from sparseloco.peers.listing import Seen, list_round
from sparseloco.peers.manifest import Entry, Manifest
from sparseloco.peers.operations import Delete, Done, Fetch, Fetched, Object, Put, Steps, Tell, Upload, Wait

MAX_RELAYS = 8
"""Frames of a round that one peer puts again at most, so that wants of a hostile peer cost the others little."""


@dataclass(kw_only=True)
class Fetching:
    """All frames of a manifest, for one peer.

    Attributes:
        manifest: The accepted one.
        me: Own peer id.
        held: Hashes whose bytes this peer has; grows.
        poll_s: Seconds between two looks.
        wanted: Hashes it has put a want for.
        relayed: Hashes it has put again for others.
    """

    manifest: Manifest
    me: str
    held: set[str]
    poll_s: float = 1.0
    wanted: set[str] = field(default_factory=set)
    relayed: set[str] = field(default_factory=set)
    said: bool = False

    def run(self) -> Steps[None]:
        """Fetch until nothing is missing; serves others meanwhile, so that two peers never wait for each other."""
        while not (yield from self.one_pass()):
            yield Wait(self.poll_s)

    def one_pass(self) -> Steps[bool]:
        """One try at what is missing.

        Returns:
            Whether everything is there.
        """
        yield from self._fetch([_object_of(self.manifest, entry) for entry in self.missing()])
        if self.missing():
            yield from self._ask()
        done = not self.missing()
        if done:
            yield from self.clear()
        return done

    def missing(self) -> list[Entry]:
        """Entries whose bytes are not here."""
        return [entry for entry in self.manifest.entries if entry.hash not in self.held]

    def serve(self) -> Steps[None]:
        """Put frames again that others want and this peer holds; to be called for the last rounds now and then."""
        yield from self._serve((yield from self._look()))

    def _look(self) -> Steps[list[Seen]]:
        """What lies in the round, those in any case who posted in it and so may hold its frames."""
        peers = [entry.peer for entry in self.manifest.entries]
        return (yield from list_round(self.manifest.round, self.manifest.fragment, peers)) or []

    def _ask(self) -> Steps[None]:
        for entry in self.missing():
            if entry.hash not in self.wanted:
                outcome = yield Put(str(self._want(entry.hash)), b"")
                if isinstance(outcome, Done):
                    self.wanted.add(entry.hash)
        there = yield from self._look()
        sizes = {entry.hash: entry.size for entry in self.missing()}
        relays = [
            Object(str(named), size, named.hash)
            for named, size in there
            if isinstance(named, paths.Relay) and sizes.get(named.hash) == size
        ]
        yield from self._fetch(relays)
        yield from self._serve(there)
        if not self.said and self.missing():
            self.said = True
            names = ", ".join(f"{entry.peer[:8]}'s {entry.hash[:8]}" for entry in self.missing()[:8])
            where = f"round {self.manifest.round}, fragment {self.manifest.fragment}"
            text = f"{where}: cannot fetch {names}; asked the others for it, and waiting goes on"
            yield Tell("waiting", self.manifest.round, self.manifest.fragment, text)

    def _fetch(self, objects: list[Object]) -> Steps[None]:
        if objects:
            outcome = yield Fetch(tuple(objects))
            if isinstance(outcome, Fetched):
                self.held.update(outcome.hashes & {one.hash for one in objects})

    def _serve(self, there: list[Seen]) -> Steps[None]:
        """Frames that are gone from their place first, then those that most peers want."""
        mine = {named.hash for named, _ in there if isinstance(named, paths.Relay) and named.peer == self.me}
        self.relayed |= mine  # also those of a life before this one
        listed = {entry.hash: entry for entry in self.manifest.entries}
        in_place = {named.hash for named, _ in there if isinstance(named, paths.Frame)}
        wants = [named for named, _ in there if isinstance(named, paths.Want) and named.peer != self.me]
        counts = {want.hash: sum(other.hash == want.hash for other in wants) for want in wants}
        askable = [hash for hash in counts if hash in listed and hash in self.held and hash not in self.relayed]
        for hash in sorted(askable, key=lambda hash: (hash in in_place, -counts[hash], hash)):
            if len(self.relayed) >= MAX_RELAYS:
                return
            relay = paths.Relay(self.manifest.round, self.manifest.fragment, self.me, hash)
            outcome = yield Upload(str(relay), hash)
            if isinstance(outcome, Done):
                self.relayed.add(hash)

    def clear(self) -> Steps[None]:
        """Take the own wants away."""
        for hash in sorted(self.wanted):
            yield Delete(str(self._want(hash)))
        self.wanted.clear()

    def _want(self, hash: str) -> paths.Want:
        return paths.Want(self.manifest.round, self.manifest.fragment, self.me, hash)


def _object_of(manifest: Manifest, entry: Entry) -> Object:
    place = paths.Frame(manifest.round, manifest.fragment, entry.peer, entry.part, entry.hash)
    return Object(str(place), entry.size, entry.hash)
