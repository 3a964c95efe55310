"""Looks at a run in a store, again and again, and says what is there. It reads, needs no key, and trusts nobody.

What is damaged or foreign becomes a line among the problems and hides nothing else. Nothing is decided here, so ages
may come from the store's times; what peers decide by, how long a lease has not changed in one's sight, is told beside.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from sparseloco.errors import ConfigError, StoreError, WireError
from sparseloco.peers import paths
from sparseloco.peers.chains import Chain, Link, Tally, strict_reader
from sparseloco.peers.claims import known_amendments
from sparseloco.peers.facts import Courses, Headers, amendments, anchors, bytes_of, late, printable, sum_tallies
from sparseloco.peers.identity import peer_id_of
from sparseloco.peers.leases import LEASE_LIMIT, Lease, read_lease
from sparseloco.peers.membership import Leases, Sighting
from sparseloco.peers.objects import Ahead, Objects, Place, list_objects
from sparseloco.peers.policy import Policy
from sparseloco.peers.run_file import RUN_LIMIT, Amendment, RunFile, Void, read_run, voids_of
from sparseloco.peers.status import Amended, Missing, Peer, Round, Sent, Status
from sparseloco.peers.store import Store

MAX_FRAGMENTS = 1024
MAX_LEASES = 4096
_MAX_PROBLEMS = 50
_REQUESTS = 8
_LONG_GONE = 20
"""A peer whose lease is so many lease times old is not called missing any more."""
_STATES = ("live", "silent", "left", "no lease")


@dataclass
class _Look:
    """What one look has found so far."""

    now: float
    wall: float
    objects: Objects
    leases: dict[str, tuple[Lease, float | None]] = field(default_factory=dict[str, tuple[Lease, float | None]])
    problems: list[str] = field(default_factory=list[str])

    def age(self, modified_s: float | None) -> float | None:
        return None if modified_s is None else max(0.0, self.wall - modified_s)

    def say(self, text: str) -> None:
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(printable(text))


class Viewer:
    """One reader of one run.

    Args:
        store: Where the run is, with patience around it.
        owner: Public key of the run's owner; None takes the file's own word.
        keep: The newest rounds of each fragment that are shown.
        clock: Seconds that never go back.
        wall_clock: Seconds since 1970.

    Raises:
        WireError: if ``run.json`` is not what its owner signed.
        StoreError: if it cannot be read.
        ConfigError: if ``keep`` is out of range.
    """

    def __init__(
        self,
        store: Store,
        *,
        owner: str | None = None,
        keep: int = 16,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        if not 1 <= keep <= 1000:
            raise ConfigError(f"rounds={keep}: must be from 1 to 1000; use 16")
        self.store, self.keep = store, keep
        self.run: RunFile = read_run(store.get(str(paths.Run()), limit=RUN_LIMIT), owner)
        self._clock, self._wall_clock = clock, wall_clock
        self._chains: dict[int, Chain] = {}
        self._known: list[Amendment] = []
        self._leases = Leases(self.run.policy.lease_s, MAX_LEASES)
        self._read: dict[str, tuple[str, Lease]] = {}
        self._courses = Courses()
        self._headers = Headers(store, self.run.run)

    def look(self) -> Status:
        """What is there now.

        Raises:
            StoreError: if the store cannot be listed.
        """
        objects = list_objects(self.store)
        look = _Look(self._clock(), self._wall_clock(), objects)
        if objects.foreign[0]:
            count, _, first = objects.foreign
            look.say(f"{count} objects have names that no peer makes, such as {first!a}; they are left alone")
        if not objects.complete:
            look.say("the store holds too many objects to list at once, so sums of bytes are left out")
        with ThreadPoolExecutor(_REQUESTS, "sparseloco-look") as pool:
            open_notes = self._follow(look, pool)
            self._look_at_leases(look, pool)
            rounds = [*self._rounds(look, open_notes)]
            ends = [one for one in rounds if one.round >= self._chains[one.fragment].closed - 1]
            agreement = self._headers.agreement(ends, _frames_of(look, ends), pool)
            amended = self._amendments(look)
        newest = self._chains[0].history
        return Status(
            run=self.run.run,
            name=self.run.name,
            owner=self.run.owner,
            preset=printable(str(self.run.algorithm["preset"])),
            steps=_whole(self.run.train.get("steps")),
            inner_steps=_whole(self.run.algorithm.get("inner_steps")),
            policy=msgspec.to_builtins(newest.policy),
            seconds=look.wall,
            closed={fragment: chain.closed for fragment, chain in self._chains.items()},
            rounds=tuple(sorted(rounds, key=lambda one: (-one.round, one.fragment))),
            peers=self._peers(look),
            agreement=agreement,
            amendments=amended,
            anchors=tuple(anchors(objects, self._chains.values(), look.age)),
            bytes=bytes_of(objects, self._chains.values()) if objects.complete else None,
            problems=tuple(look.problems),
        )

    # -- manifests ---------------------------------------------------------------------------------------------

    def _follow(self, look: _Look, pool: ThreadPoolExecutor) -> dict[int, list[str]]:
        """Go on in the chains of all fragments; returns what is wrong in their open rounds."""
        notes: dict[int, list[str]] = {}
        voids = self._voids(look)
        for fragment in range(MAX_FRAGMENTS):
            chain = self._chains.setdefault(fragment, Chain(self.run, fragment, self.keep))
            chain.learn(voids)
            try:
                notes[fragment] = [printable(note) for note in chain.follow(Ahead(self.store, pool, look.objects))]
            except StoreError as error:
                look.say(f"fragment {fragment}: what is shown may be old ({error})")
            if not chain.closed:
                if fragment and not look.objects.rounds.get((0, fragment)):
                    del self._chains[fragment]
                break  # a fragment without any round is the last that is believed in
        for fragment in sorted(notes.keys() & self._chains.keys()):
            for line in notes[fragment]:
                look.say(f"round {self._chains[fragment].closed}, fragment {fragment}: {line}")
        return notes

    def _voids(self, look: _Look) -> tuple[Void, ...]:
        read = strict_reader(self.store)
        with contextlib.suppress(StoreError):  # what cannot be read is told with the amendments
            self._known = known_amendments(
                lambda path, limit: read(path, limit) if path in look.objects.listed else None, self.run, self._known
            )
        return voids_of(self._known)

    def _rounds(self, look: _Look, open_notes: dict[int, list[str]]) -> Iterator[Round]:
        for chain in self._chains.values():
            for link in chain.links:
                yield self._closed(look, link)
            yield self._open(look, chain, tuple(open_notes.get(chain.fragment, ())))

    def _closed(self, look: _Look, link: Link) -> Round:
        manifest = link.manifest
        key = (manifest.round, manifest.fragment)
        there = look.objects.look_into(self.store, *key)
        times = {entry.path: entry.modified_s for _, entry in there or []}
        frames = [times.get(str(paths.Frame(*key, one.peer, one.part, one.hash))) for one in manifest.entries]
        delays = late(frames)
        closed_s = times.get(str(paths.Manifest(*key, manifest.attempt)))
        known = [time_s for time_s in frames if time_s is not None]
        took_s = max(0.0, closed_s - min(known)) if closed_s is not None and len(known) == len(frames) > 0 else None
        return Round(
            round=manifest.round,
            fragment=manifest.fragment,
            closed=True,
            attempt=manifest.attempt,
            writer=peer_id_of(manifest.writer),
            digest=manifest.digest,
            sent=tuple(
                Sent(peer=one.peer, hash=one.hash, nbytes=one.size, tokens=one.weight, late_s=late_s)
                for one, late_s in zip(manifest.entries, delays, strict=True)
            ),
            left_out=tuple((one.peer, printable(one.reason)) for one in manifest.left_out),
            listed_bytes=sum(one.size for one in manifest.entries),
            stored_bytes=look.objects.bytes_in(*key),
            took_s=took_s,
            skipped=tuple(map(printable, link.skipped)),
        )

    def _open(self, look: _Look, chain: Chain, skipped: tuple[str, ...]) -> Round:
        there = look.objects.look_into(self.store, chain.closed, chain.fragment)
        policy = chain.history.policy
        frames: dict[str, Place] = {}
        for place, entry in there or []:
            if isinstance(place, paths.Frame) and policy.admits(place.peer):
                frames.setdefault(place.peer, (place, entry))
        ordered = [frames[peer] for peer in sorted(frames)[: policy.max_peers]]
        delays = late([entry.modified_s for _, entry in ordered])
        times = [entry.modified_s for _, entry in ordered if entry.modified_s is not None]
        return Round(
            round=chain.closed,
            fragment=chain.fragment,
            closed=False,
            sent=tuple(
                Sent(peer=place.peer, hash=place.hash, nbytes=entry.size, tokens=None, late_s=late_s)
                for (place, entry), late_s in zip(ordered, delays, strict=True)
                if isinstance(place, paths.Frame)
            ),
            missing=tuple(self._missing(look, frames, policy)) if frames else (),
            listed_bytes=sum(entry.size for _, entry in ordered),
            stored_bytes=look.objects.bytes_in(chain.closed, chain.fragment),
            took_s=look.age(min(times)) if times else None,
            skipped=skipped,
        )

    # -- peers -------------------------------------------------------------------------------------------------

    def _look_at_leases(self, look: _Look, pool: ThreadPoolExecutor) -> None:
        """Read the leases that changed; what is no lease of its peer is left out."""

        def read(found: tuple[paths.Lease, str]) -> Lease | str:
            place, etag = found
            known = self._read.get(place.peer)
            if known is not None and etag and known[0] == etag:
                return known[1]
            try:
                return read_lease(self.store.get(str(place), limit=LEASE_LIMIT), self.run.run, place.peer)
            except (StoreError, WireError) as error:
                return str(error)

        there = look.objects.leases[:MAX_LEASES]
        leases = pool.map(read, [(place, entry.etag) for place, entry in there])
        fresh: dict[str, tuple[str, Lease]] = {}
        for (place, entry), lease in zip(there, leases, strict=True):
            if isinstance(lease, str):
                look.say(lease)
                continue
            fresh[place.peer] = (entry.etag, lease)
            look.leases[place.peer] = (lease, look.age(entry.modified_s))
        self._read = fresh
        self._courses.saw({peer: lease for peer, (_, lease) in fresh.items()})
        sightings = [
            Sighting(peer, f"{lease.session}{lease.counter}", lease.left) for peer, (_, lease) in fresh.items()
        ]
        self._leases.lease_s = self._chains[0].history.policy.lease_s
        self._leases.saw(sightings, look.now)

    def _missing(self, look: _Look, frames: Iterable[str], policy: Policy) -> Iterator[Missing]:
        unchanged = self._leases.last_seen(look.now)
        for peer, (lease, age_s) in sorted(look.leases.items()):
            gone = max(age_s or 0.0, unchanged.get(peer, 0.0)) > _LONG_GONE * policy.lease_s
            if peer not in frames and not lease.left and not gone and policy.admits(peer):
                yield Missing(peer=peer, age_s=age_s, unchanged_s=unchanged.get(peer, 0.0))

    def _peers(self, look: _Look) -> tuple[Peer, ...]:
        tallies = sum_tallies(self._chains.values())
        unchanged, live = self._leases.last_seen(look.now), self._leases.live(look.now)
        policy = self._chains[0].history.policy
        writers = {peer_id_of(link.manifest.writer) for chain in self._chains.values() for link in chain.links}
        found: list[Peer] = []
        for peer in {*tallies, *look.leases}:
            lease, age_s = look.leases.get(peer, (None, None))
            tally = tallies.get(peer, Tally())
            state = "no lease"
            if lease is not None:
                awake = peer in live and (age_s is None or age_s <= policy.lease_s)
                state = "left" if lease.left else "live" if awake else "silent"
            found.append(
                Peer(
                    peer=peer,
                    state=state,
                    round=lease.round if lease is not None and 0 <= lease.round <= paths.MAX_ROUND else None,
                    age_s=age_s,
                    unchanged_s=unchanged.get(peer),
                    writes=policy.may_write(lease.public) if lease is not None else True if peer in writers else None,
                    rounds=tally.rounds,
                    tokens=tally.tokens,
                    nbytes=tally.nbytes,
                    last_round=tally.last_round,
                    left_out=tally.left_out,
                    reason=printable(tally.reason),
                    loss=lease.said_loss if lease is not None else None,
                    losses=self._courses.of(peer),
                )
            )
        return tuple(sorted(found, key=lambda one: (_STATES.index(one.state), one.peer)))

    # -- the owner ---------------------------------------------------------------------------------------------

    def _amendments(self, look: _Look) -> tuple[Amended, ...]:
        try:
            return tuple(amendments(self.run, self._chains.values(), look.objects, strict_reader(self.store)))
        except StoreError as error:
            look.say(f"amendments: {error}")
            return ()


def _whole(value: object) -> int | None:
    """A number of steps, if it is one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**53 else None


def _frames_of(look: _Look, rounds: Iterable[Round]) -> dict[tuple[int, int], dict[str, str]]:
    """By round and fragment: path of the frame that counts or may count, by peer, where it is still there."""
    found: dict[tuple[int, int], dict[str, str]] = {}
    for one in rounds:
        key = (one.round, one.fragment)
        named = {sent.peer: str(paths.Frame(*key, sent.peer, 0, sent.hash)) for sent in one.sent}
        found[key] = {peer: path for peer, path in named.items() if path in look.objects.listed}
    return found
