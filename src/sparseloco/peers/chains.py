"""The manifests of a fragment as a reader without shared state can verify them, one after the other from the first.

Signature, place, order, limits and the hash of the manifest before are checked as by any peer. What a manifest says of
the shared state is told, not checked: where several attempts differ in nothing else, the one counts that the next round
names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from sparseloco.errors import NotFound, TooLarge, WireError
from sparseloco.peers import anchors, canonical
from sparseloco.peers.claims import attempts
from sparseloco.peers.manifest import History, Manifest, judge_claim, manifest_limit
from sparseloco.peers.run_file import RunFile, Void
from sparseloco.peers.store import Store

MAX_TALLIED = 4096
"""Peers whose sums are kept; in an open run keys are free, so further ones are shown in their rounds only."""
_VOUCHED = 64
_TOLD = 16
"""Attempts of a round that count for nobody and are told one by one."""
Reader = Callable[[str, int], bytes | None]
"""Bytes of an object of at most so many bytes, or None if it is not there; other failures are raised."""


def strict_reader(store: Store) -> Reader:
    """Read from a store; an object that is too large is nothing of ours, and empty."""

    def read(path: str, limit: int) -> bytes | None:
        try:
            return store.get(path, limit=limit)
        except NotFound:
            return None
        except TooLarge:
            return b""

    return read


@dataclass(frozen=True)
class Link:
    """A round that is closed.

    Attributes:
        manifest: What counts.
        nbytes: Size of its object.
        skipped: Attempts before it or beside it that do not count, each with the reason.
    """

    manifest: Manifest
    nbytes: int
    skipped: tuple[str, ...] = ()


@dataclass(slots=True)
class Tally:
    """What one peer did in all rounds of a chain.

    Attributes:
        rounds: Rounds that list a frame of it.
        tokens: Sum of its weights.
        nbytes: Sum of the sizes of its frames.
        last_round: The newest of those rounds; None if there is none.
        left_out: Rounds that left it out.
        reason: Of the last time, with the round.
    """

    rounds: int = 0
    tokens: int = 0
    nbytes: int = 0
    last_round: int | None = None
    left_out: int = 0
    reason: str = ""


@dataclass
class Chain:
    """One fragment's rounds, up to the newest that is closed.

    Attributes:
        run: ``run.json``.
        fragment: Which.
        keep: Rounds that are kept whole; of older ones only sums are.
        history: What the verdict on the next manifest depends on.
        links: The newest rounds.
        tallies: Sums by peer.
        listed_bytes: Frames of all rounds.
        vouched: Paths of the newest anchors that manifests name.
    """

    run: RunFile
    fragment: int
    keep: int
    history: History = field(init=False)
    links: deque[Link] = field(init=False)
    tallies: dict[str, Tally] = field(init=False)
    listed_bytes: int = field(init=False)
    vouched: deque[str] = field(init=False)

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.history = History(run=self.run, round=0, fragment=self.fragment, digest="")
        self.links = deque(maxlen=self.keep)
        self.tallies, self.listed_bytes = {}, 0
        self.vouched = deque(maxlen=_VOUCHED)

    def learn(self, voids: tuple[Void, ...]) -> None:
        """Take note of what the owner has voided; if rounds up to here are among it, begin anew."""
        if replace(self.history, voids=voids).voided:
            self._begin()
        self.history = replace(self.history, voids=voids)

    @property
    def closed(self) -> int:
        """Rounds that are closed, which is the number of the open one."""
        return self.history.round

    def follow(self, read: Reader) -> list[str]:
        """Go on to the newest manifest.

        Returns:
            What keeps the open round from having one although attempts are there, each as a line; mostly nothing.

        Raises:
            StoreError: if the store does not answer; what was verified so far stays.
        """
        while True:
            found, skipped = _candidates(read, self.history)
            if not found:
                return skipped
            link = found[0]
            if len(found) > 1:
                named = [one for one in found if _candidates(read, self.history.after(one.manifest, ""))[0]]
                if not named:
                    count = f"{len(found)} manifests are in order but for the shared state, and only peers know that"
                    return [*skipped, f"{count}; the next round will name one"]
                link = named[0]
            taken = (
                f"in order but for the shared state; attempt {link.manifest.attempt} is one that the next round names"
            )
            beside = [f"attempt {one.manifest.attempt}: {taken}" for one in found if one != link]
            self._take(replace(link, skipped=(*skipped, *beside)))

    def _take(self, link: Link) -> None:
        manifest = link.manifest
        for entry in manifest.entries:
            self.listed_bytes += entry.size
            if tally := self._tally(entry.peer):
                tally.rounds, tally.last_round = tally.rounds + 1, manifest.round
                tally.tokens, tally.nbytes = tally.tokens + entry.weight, tally.nbytes + entry.size
        for one in manifest.left_out:
            if tally := self._tally(one.peer):
                tally.left_out, tally.reason = tally.left_out + 1, f"round {manifest.round}: {one.reason}"
        if manifest.state_sha256:
            self.vouched.append(anchors.path_of(manifest))
        self.links.append(link)
        self.history = self.history.after(manifest, "")

    def _tally(self, peer: str) -> Tally | None:
        if peer not in self.tallies and len(self.tallies) >= MAX_TALLIED:
            return None
        return self.tallies.setdefault(peer, Tally())


def _candidates(read: Reader, history: History) -> tuple[list[Link], list[str]]:
    """Attempts of a round that are in order but for the shared state, and why the others are not."""
    limit = manifest_limit(history.policy)
    found: list[Link] = []
    skipped: list[str] = []
    for place, data in attempts(read, history, limit):
        attempt = place.attempt
        try:
            told = canonical.decode(data, Manifest, what="manifest", limit=limit)
        except WireError as error:
            skipped.append(f"attempt {attempt}: {error}")
            continue
        verdict = judge_claim(data, place, history, told)
        if isinstance(verdict, Manifest):
            found.append(Link(verdict, len(data)))
        else:
            skipped.append(f"attempt {attempt}: {verdict.reason}")
    if len(skipped) > _TOLD:
        skipped[_TOLD:] = [f"and {len(skipped) - _TOLD} more attempts"]
    return found, skipped
