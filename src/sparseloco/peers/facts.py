"""Single facts about a run, from its objects and verified chains; :mod:`sparseloco.peers.looking` joins them."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor

from sparseloco import wire
from sparseloco.errors import ConfigError, StoreError, WireError
from sparseloco.peers import paths
from sparseloco.peers.chains import Chain, Reader, Tally
from sparseloco.peers.leases import Lease
from sparseloco.peers.objects import Objects
from sparseloco.peers.run_file import AMENDMENT_LIMIT, Amendment, RunFile, apply_amendment, read_amendment
from sparseloco.peers.status import Agreement, Amended, Anchor, Bytes, Round
from sparseloco.peers.store import Store
from sparseloco.types import Key

MAX_PEEKS = 256
"""Headers of frames that one look reads; they never change, so the next look reads further ones."""
MAX_AMENDMENTS = 64
MAX_ANCHORS = 64
MAX_LOSSES = 64
"""Losses that are remembered of a peer, the newest."""
_MAX_LINE = 300
_NO_FRAME = "not a frame of this round"


def printable(text: str) -> str:
    """A line of printable ASCII: what is not is escaped, what is too long is cut."""
    shown = "".join(letter if " " <= letter <= "~" else ascii(letter)[1:-1] for letter in text[:_MAX_LINE])
    return shown if len(shown) <= _MAX_LINE else f"{shown[:_MAX_LINE]}..."


def late(times: Sequence[float | None]) -> list[float | None]:
    """Seconds after the first of these times; unknown for all if one is, since that may have been the first."""
    if any(time_s is None for time_s in times):
        return [None] * len(times)
    known = [time_s for time_s in times if time_s is not None]
    return [time_s - min(known) for time_s in known]


def sum_tallies(chains: Iterable[Chain]) -> dict[str, Tally]:
    """What each peer did, over all fragments."""
    found: dict[str, Tally] = {}
    for chain in chains:
        for peer, one in chain.tallies.items():
            total = found.setdefault(peer, Tally())
            rounds = [number for number in (total.last_round, one.last_round) if number is not None]
            found[peer] = Tally(
                rounds=total.rounds + one.rounds,
                tokens=total.tokens + one.tokens,
                nbytes=total.nbytes + one.nbytes,
                last_round=max(rounds, default=None),
                left_out=total.left_out + one.left_out,
                reason=one.reason or total.reason,
            )
    return found


def amendments(run: RunFile, chains: Iterable[Chain], objects: Objects, read: Reader) -> Iterator[Amended]:
    """What the owner has changed, by number; what is not signed by the owner is nothing."""
    newest = max(chains, key=lambda chain: len(chain.history.amendments)).history
    for one in newest.amendments:
        state = "in force" if one.round <= newest.round else "acknowledged"
        try:
            changed = apply_amendment(run, one)
            run = changed if one.round <= newest.round else run
        except ConfigError:
            state = "breaks a rule, so it changes nothing"
        yield _amended(one, state)
    for n in range(len(newest.amendments), len(newest.amendments) + MAX_AMENDMENTS):
        path = str(paths.Amend(n))
        data = read(path, AMENDMENT_LIMIT) if path in objects.listed else None
        if data is None:
            return
        with contextlib.suppress(WireError):
            yield _amended(read_amendment(data, run, n), "not acknowledged")


def _amended(one: Amendment, state: str) -> Amended:
    return Amended(n=one.n, round=one.round, state=state, changes=printable(json.dumps(one.changes, sort_keys=True)))


def anchors(objects: Objects, chains: Iterable[Chain], age: Callable[[float | None], float | None]) -> Iterator[Anchor]:
    """Anchors in the store, those that manifests name first, then the newest first."""
    vouched = {path for chain in chains for path in chain.vouched}
    found = sorted(objects.anchors, key=lambda pair: (pair[1].path not in vouched, -pair[0].round, pair[1].path))
    for place, entry in found[:MAX_ANCHORS]:
        yield Anchor(
            round=place.round,
            digest=place.digest,
            nbytes=entry.size,
            vouched=entry.path in vouched,
            age_s=age(entry.modified_s),
        )


class Courses:
    """Losses that peers have said in their leases while a reader looked. Only peers that have a lease are kept."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, tuple[float, ...]]] = {}

    def saw(self, leases: Mapping[str, Lease]) -> None:
        """Take in all leases of a look; one that has not changed says nothing new."""
        before, self._known = self._known, {}
        for peer, lease in leases.items():
            mark, losses = before.get(peer, ("", ()))
            new, loss = f"{lease.session}{lease.counter}", lease.said_loss
            if new != mark and loss is not None:
                losses = (*losses, loss)[-MAX_LOSSES:]
            self._known[peer] = (new, losses)

    def of(self, peer: str) -> tuple[float, ...]:
        """The losses of a peer, the last one at the end."""
        return self._known.get(peer, ("", ()))[1]


def bytes_of(objects: Objects, chains: Iterable[Chain]) -> Bytes:
    """Sums of the sizes in a complete listing."""
    sums: Counter[type] = Counter()
    for place, entry in objects.listed.values():
        sums[type(place)] += entry.size
    count, foreign, _ = objects.foreign
    total = sums.total() + foreign
    frames, relays, manifests, kept = (sums[kind] for kind in (paths.Frame, paths.Relay, paths.Manifest, paths.Anchor))
    return Bytes(
        listed=sum(chain.listed_bytes for chain in chains),
        frames=frames,
        relays=relays,
        manifests=manifests,
        anchors=kept,
        other=total - frames - relays - manifests - kept,
        total=total,
        objects=len(objects.listed) + count,
    )


class Headers:
    """What frames say they were made from. Frames never change, so each is read once.

    Args:
        store: Where they are.
        run: Run id.
    """

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._run = store, run
        self._said: dict[str, str] = {}

    def agreement(
        self, rounds: Iterable[Round], frames: Mapping[tuple[int, int], Mapping[str, str]], pool: Executor
    ) -> tuple[Agreement, ...]:
        """Who says what in some rounds.

        Args:
            rounds: The rounds.
            frames: By round and fragment: path of the frame that is there, by peer.
            pool: For requests.
        """
        rounds = [one for one in rounds if frames.get((one.round, one.fragment))]
        places = {
            path: Key(one.round, one.fragment) for one in rounds for path in frames[one.round, one.fragment].values()
        }
        self._said = {path: said for path, said in self._said.items() if path in places}
        unknown = [path for path in places if path not in self._said][:MAX_PEEKS]
        answers = pool.map(lambda path: self._ask(path, places[path]), unknown)
        self._said |= {path: said for path, said in zip(unknown, answers, strict=True) if said}
        return tuple(filter(None, (self._of(one, frames[one.round, one.fragment]) for one in rounds)))

    def _of(self, one: Round, frames: Mapping[str, str]) -> Agreement | None:
        said = {peer: self._said[path] for peer, path in sorted(frames.items()) if path in self._said}
        if not said:
            return None
        digest = one.digest or Counter(said.values()).most_common(1)[0][0]
        return Agreement(
            round=one.round,
            fragment=one.fragment,
            digest=digest,
            same=tuple(peer for peer, its in said.items() if its == digest),
            other=tuple((peer, its) for peer, its in said.items() if its != digest),
        )

    def _ask(self, path: str, key: Key) -> str:
        """Digest in the header of a frame; "" if it cannot be had now."""
        try:
            said = wire.says(self._store.get_range(path, 0, wire.HEADER_BYTES))
        except StoreError:
            return ""
        return said[2] if said is not None and said[:2] == (self._run, key) else _NO_FRAME
