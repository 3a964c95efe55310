"""Closing a round: from one's own frame to the manifest that everybody follows.

Rules 1 to 6 of docs/peers-protocol.md, as steps that do no input or output. All decisions follow from the outcomes that
were sent in, from the history, and from a monotonic clock of the reader's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sparseloco.errors import DivergenceError, QuorumError
from sparseloco.peers import deadline, paths
from sparseloco.peers.canonical import sha256
from sparseloco.peers.identity import Identity, peer_id_of
from sparseloco.peers.listing import list_round
from sparseloco.peers.manifest import (
    Drifted,
    Entry,
    History,
    LeftOut,
    Manifest,
    Refusal,
    judge,
    manifest_limit,
    seal,
)
from sparseloco.peers.operations import (
    Bad,
    Create,
    Done,
    DriftError,
    Found,
    Get,
    Good,
    Inspect,
    Inspected,
    Missing,
    Object,
    Refused,
    Steps,
    Tell,
    TooLarge,
    Unavailable,
    Upload,
    VoidedError,
    Wait,
)  # fmt: skip
from sparseloco.peers.policy import Policy
from sparseloco.peers.run_file import Amendment, voids_of

MAX_TRIES = 3
"""Frames of one peer that are looked at in a round: one, and another if it was refused and the peer started over."""

ABSTAINED = "abstained, since its numbers were not finite"
"""Why a frame without a contribution is left out."""

STRANGERS = 4
"""Frames of peers without a lease are looked at up to so many times ``max_peers``, however many ids somebody makes."""

_MORE_PEERS = "start another peer, or let the owner amend policy.min_peers, which helps this very round"


@dataclass(slots=True)
class Seen:
    """What a peer has learned of an open round so far; all of its memory between two passes."""

    attempt: int = 0
    is_open: bool = False
    posted: bool = False
    first: float | None = None
    frames: dict[str, Object] = field(default_factory=dict)
    late_s: dict[str, float] = field(default_factory=dict)
    verdicts: dict[str, Good | Bad] = field(default_factory=dict)
    tried: dict[str, set[str]] = field(default_factory=dict)
    deadline: deadline.Decision | None = None
    said: set[str] = field(default_factory=set)


@dataclass(kw_only=True)
class Round:
    """One round of one fragment, as one peer goes through it.

    Attributes:
        history: What the verdicts depend on.
        me: The own key.
        own: Hash and size of the own frame, saved durably before (write-ahead); None if there is none.
        live: Peers with a lease that holds, at the moment of the call; those first that are known longest.
        last_seen: Seconds since each known peer's lease changed, for what is said.
        now: Monotonic seconds.
        amendments: All by number that this peer knows and has checked; may grow while the round is open.
        arrivals: Of past rounds, for an adaptive deadline.
        poll_s: Seconds between two looks.
        give_up_s: Seconds after which waiting ends in an error; None waits on.
        seen: What has been learned so far.
        amended: Those that the own manifest would acknowledge, the same for a whole pass.
        policy: The policy by which that manifest would be judged, and so the one that this peer acts by.
    """

    history: History
    me: Identity
    own: tuple[str, int] | None
    live: Callable[[], Collection[str]]
    now: Callable[[], float]
    last_seen: Callable[[], Mapping[str, float]] = dict
    amendments: Sequence[Amendment] = ()
    arrivals: Sequence[float] = ()
    poll_s: float = 1.0
    give_up_s: float | None = None
    seen: Seen = field(default_factory=Seen)
    amended: tuple[Amendment, ...] = field(init=False)
    policy: Policy = field(init=False)

    def __post_init__(self) -> None:
        self._learn()

    def _learn(self) -> None:
        """Take note of what the owner has signed meanwhile."""
        voids = voids_of(self.amendments)
        if voids != self.history.voids:
            self.history = replace(self.history, voids=voids)
        self.amended = self.history.unacknowledged(self.amendments)
        self.policy = self.history.run_under(self.amended).policy

    def run(self) -> Steps[Manifest]:
        """Post, wait and close until there is a manifest; there is no other way out (rule 2).

        Returns:
            The manifest that counts.

        Raises:
            DriftError: if it contradicts the own state.
            VoidedError: if the owner has voided a round that led to the own state.
            QuorumError: after ``give_up_s``, naming who is missing and since when.
        """
        started = self.now()
        while (manifest := (yield from self.one_pass())) is None:
            if self.give_up_s is not None and self.now() - started >= self.give_up_s:
                raise QuorumError(f"{self._where}: {self._stuck_text()}")
            yield Wait(self.poll_s)
        return manifest

    def one_pass(self) -> Steps[Manifest | None]:
        """One look at the store, and what follows from it; between two passes, all memory is in ``seen``."""
        self._learn()
        manifest = yield from self.follow()
        if manifest is None:
            yield from self.post()
            yield from self.look()
            if self.policy.may_write(self.me.public):
                manifest = yield from self.close()
            elif self._waited() >= self.policy.deadline_s:
                yield from self._tell_once("waiting", self._stuck_text())
        if manifest is not None:
            listed = f"{len(manifest.entries)} frames, attempt {manifest.attempt}, by {manifest.writer[:8]}"
            left = "".join(f"; {one.peer[:8]} left out: {one.reason}" for one in manifest.left_out)
            yield self._tell("closed", f"closed with {listed}{left}")
        return manifest

    def follow(self) -> Steps[Manifest | None]:
        """The first attempt that is valid, from where this peer stands; None if the next one is not there."""
        if void := self.history.voided:
            raise VoidedError(
                f"{self._where}: the owner has voided round {void.round}, which this peer has applied; start over from "
                "an anchor"
            )
        limit = manifest_limit(self.history.policy)
        while self.seen.attempt <= paths.MAX_ATTEMPT:
            place = paths.Manifest(self.history.round, self.history.fragment, self.seen.attempt)
            outcome = yield Get(str(place), limit)
            if isinstance(outcome, Found):
                verdict = judge(outcome.data, place, self.history)
            elif isinstance(outcome, TooLarge):
                verdict = Refusal(f"manifest: more than {limit} bytes; refuse it")
            else:
                self.seen.is_open = isinstance(outcome, Missing)
                if not self.seen.is_open:
                    yield from self._tell_once("waiting", f"waiting for the store to answer: {_line(outcome)}")
                return None
            if isinstance(verdict, Manifest):
                return verdict
            if isinstance(verdict, Drifted):
                raise DriftError(
                    f"{self._where}: manifest says {verdict.reason}; replay from the newest anchor before going on"
                )
            yield from self._tell_once("skipped", f"attempt {self.seen.attempt} counts for nobody: {verdict.reason}")
            self.seen.attempt += 1
        raise DivergenceError(
            f"{self._where}: none of {self.seen.attempt} manifests is valid; take away write permission from whoever "
            "writes them"
        )

    def post(self) -> Steps[None]:
        """Put the own frame, again until the store says that it has it; same bytes, same path, so twice is once."""
        if self.own is None or self.seen.posted:
            return
        outcome = yield Upload(self._own_path(self.own[0]), self.own[0])
        self.seen.posted = isinstance(outcome, Done)
        if self.seen.posted:
            self._first_frame()
        else:
            yield from self._tell_once("waiting", f"the own frame is not in the store yet: {_line(outcome)}")

    def close(self) -> Steps[Manifest | None]:
        """If the round can be closed, write a manifest and follow what is there then."""
        decision = deadline.decide(self.policy, self.arrivals)
        if decision != self.seen.deadline:
            self.seen.deadline = decision
            yield self._tell("deadline", f"deadline {decision.why}")
        entries = yield from self.choose()
        return None if entries is None else (yield from self.propose(entries))

    def look(self) -> Steps[None]:
        """Take note of new frames, and check each before it can be listed."""
        policy, live = self.policy, self.live()
        # Those first that are known longest: ids that sort first can be made by the thousand.
        known = [self.me.peer_id, *[*filter(policy.admits, live)][: STRANGERS * policy.max_peers]]
        for named, size in (yield from list_round(self.history.round, self.history.fragment, known)) or ():
            if not isinstance(named, paths.Frame) or not policy.admits(named.peer):
                continue
            if named.peer in live or len(self.seen.frames) < STRANGERS * policy.max_peers:
                self._note(named, size)
        asked = sorted(self._admitted(self.seen.frames) - set(self.verdicts()))
        if not asked:
            return
        outcome = yield Inspect(tuple(self.seen.frames[peer] for peer in asked), self.history.digest)
        if isinstance(outcome, Inspected):
            for peer, verdict in zip(asked, outcome.verdicts, strict=True):
                if not isinstance(verdict, Unavailable):
                    self.seen.verdicts[peer] = verdict

    def _note(self, frame: paths.Frame, size: int) -> None:
        """Take a frame as its peer's: the first one, or one of a few more if those before were bad."""
        seen = self.seen
        tried = seen.tried.setdefault(frame.peer, set())
        settled = frame.peer in seen.frames and not isinstance(self._verdict(frame.peer), Bad)
        if settled or frame.hash in tried or len(tried) >= MAX_TRIES:
            return
        tried.add(frame.hash)
        self._first_frame()
        seen.frames[frame.peer] = Object(str(frame), size, frame.hash)
        seen.verdicts.pop(frame.peer, None)
        seen.late_s.setdefault(frame.peer, self.now() - (seen.first or 0.0))
        if frame.part:
            seen.verdicts[frame.peer] = Bad(f"part={frame.part}: must be 0")

    def verdicts(self) -> dict[str, Good | Bad]:
        """Admitted peers whose frames are checked, each with the verdict under the policy of this pass."""
        found = {peer: self._verdict(peer) for peer in self._admitted(self.seen.frames)}
        return {peer: verdict for peer, verdict in sorted(found.items()) if verdict is not None}

    def _verdict(self, peer: str) -> Good | Bad | None:
        """What is known of a frame; an amended policy may judge what was found otherwise than the one before."""
        size, verdict, policy = self.seen.frames[peer].size, self.seen.verdicts.get(peer), self.policy
        if not isinstance(verdict, Bad) and not 1 <= size <= policy.max_frame_bytes:
            return Bad(f"size={size}: must be from 1 to {policy.max_frame_bytes}")
        if isinstance(verdict, Good) and not verdict.weight:
            return Bad(ABSTAINED)
        if isinstance(verdict, Good) and not 1 <= verdict.weight <= policy.max_tokens_per_round:
            return Bad(f"weight={verdict.weight}: must be from 1 to {policy.max_tokens_per_round}")
        return verdict

    def _admitted(self, peers: Collection[str]) -> set[str]:
        ids = self.policy.member_ids
        return set(peers) if ids is None else set(peers) & ids

    def choose(self) -> Steps[list[Entry] | None]:
        """The entries of a manifest that may be written now; None if the round stays open (rules 1 and 6)."""
        policy, seen = self.policy, self.seen
        assert seen.deadline is not None
        good = [peer for peer, verdict in self.verdicts().items() if isinstance(verdict, Good)]
        late = seen.first is not None and self.now() - seen.first >= seen.deadline.seconds
        in_vain = self._is_in_vain(len(good))
        if not late and not in_vain and (self.awaited() or len(good) < policy.min_peers):
            return None
        if len(good) >= policy.min_peers:
            return self._entries(good)
        empty = in_vain or policy.no_quorum == "train"
        ending = "an empty round: all keep their payloads" if empty else "waiting goes on"
        remedy = "lower the learning rate or clip gradients" if in_vain else _MORE_PEERS
        yield from self._tell_once("no-quorum", f"{self.missing_text()}; {ending}; {remedy}")
        return [] if empty else None

    def _is_in_vain(self, good: int) -> bool:
        """Whether enough peers are here, but too many abstained: they send nothing else, so waiting would not end."""
        abstained = sum(verdict == Bad(ABSTAINED) for verdict in self.verdicts().values())
        return good < self.policy.min_peers <= good + abstained and not self.awaited()

    def awaited(self) -> list[str]:
        """Live peers whose frames have not been seen and checked."""
        expected = {*self.live(), *self.seen.frames} | ({self.me.peer_id} if self.own else set())
        return sorted(self._admitted(expected) - set(self.verdicts()))

    def propose(self, entries: Sequence[Entry]) -> Steps[Manifest | None]:
        """Create the next attempt, and follow what is there whatever the outcome says (rule 1)."""
        manifest = Manifest(
            run=self.history.run.run,
            round=self.history.round,
            fragment=self.history.fragment,
            attempt=self.seen.attempt,
            previous=self.history.previous,
            digest=self.history.digest,
            amendments=len(self.history.amendments) + len(self.amended),
            amended=self.amended,
            entries=tuple(entries),
            left_out=self._left_out({entry.peer for entry in entries}),
            state_sha256=self.history.state_sha256 if self.history.wants_state_hash else "",
            writer=self.me.public,
        )
        place = paths.Manifest(self.history.round, self.history.fragment, self.seen.attempt)
        outcome = yield Create(str(place), seal(manifest, self.me))
        if isinstance(outcome, Refused):
            yield from self._tell_once("cannot-write", f"the store refuses a manifest of this peer: {_line(outcome)}")
        return (yield from self.follow())

    @property
    def _where(self) -> str:
        return f"round {self.history.round}, fragment {self.history.fragment}"

    def _own_path(self, hash: str) -> str:
        return str(paths.Frame(self.history.round, self.history.fragment, self.me.peer_id, 0, hash))

    def _first_frame(self) -> None:
        if self.seen.first is None:
            self.seen.first = self.now()

    def _entries(self, good: Sequence[str]) -> list[Entry]:
        """Entries of these peers; if they are too many, another choice in each round, so that nobody is always last."""
        by_lot = sorted(good, key=lambda peer: sha256(f"{self.history.round} {peer}".encode()))
        entries: list[Entry] = []
        for peer in sorted(by_lot[: self.policy.max_peers]):
            frame, verdict = self.seen.frames[peer], self._verdict(peer)
            assert isinstance(verdict, Good)
            entries.append(Entry(peer=peer, size=frame.size, hash=frame.hash, weight=verdict.weight))
        return entries

    def _left_out(self, listed: Collection[str]) -> tuple[LeftOut, ...]:
        reasons: dict[str, str] = {}
        verdicts = self.verdicts()
        for peer in sorted({*self.awaited(), *verdicts}):
            verdict = verdicts.get(peer)
            if isinstance(verdict, Bad):
                reasons[peer] = verdict.reason
            elif isinstance(verdict, Good):
                reasons[peer] = "no quorum" if not listed else "the round was full"
            else:
                reasons[peer] = "could not be fetched in time" if peer in self.seen.frames else "had not posted"
        rest = [peer for peer in reasons if peer not in listed]
        return tuple(LeftOut(peer=peer, reason=_line(reasons[peer])) for peer in rest[: self.policy.max_peers])

    def missing_text(self) -> str:
        """How many of how many are here, who is missing, and since when (C-33)."""
        verdicts = self.verdicts()
        good = sum(isinstance(verdict, Good) for verdict in verdicts.values())
        ages = self.last_seen()
        missing = [f"{peer[:8]} last seen {ages[peer]:.1f} s ago" for peer in ages if peer not in self.seen.frames]
        missing += [f"{peer[:8]} posted, not fetched" for peer in self.awaited() if peer in self.seen.frames]
        missing += [
            f"{peer[:8]} refused: {verdict.reason}" for peer, verdict in verdicts.items() if isinstance(verdict, Bad)
        ]
        return (
            f"only {good} of at least {self.policy.min_peers} peers arrived within {self._waited():.1f} s "
            f"(missing: {', '.join(missing[:16]) or 'nobody else is known'})"
        )

    def _stuck_text(self) -> str:
        """Why there is no manifest, and what to do."""
        policy = self.policy
        good = sum(isinstance(verdict, Good) for verdict in self.verdicts().values())
        if good < policy.min_peers:
            return f"{self.missing_text()}; {_MORE_PEERS}"
        ages, writers = self.last_seen(), [peer_id_of(key) for key in policy.writers]
        seen = [
            f"{peer[:8]} last seen {ages[peer]:.1f} s ago" if peer in ages else f"{peer[:8]} never" for peer in writers
        ]
        return (
            f"{good} peers arrived, but no manifest within {self._waited():.1f} s (writers: "
            f"{', '.join(seen[:16]) or 'everybody'}); start a writer, or let the owner name others"
        )

    def _waited(self) -> float:
        return 0.0 if self.seen.first is None else self.now() - self.seen.first

    def _tell(self, kind: str, text: str) -> Tell:
        return Tell(kind, self.history.round, self.history.fragment, f"{self._where}: {text}")

    def _tell_once(self, kind: str, text: str) -> Steps[None]:
        if f"{kind} {self.seen.attempt}" not in self.seen.said:
            self.seen.said.add(f"{kind} {self.seen.attempt}")
            yield self._tell(kind, text)


def _line(what: object) -> str:
    """At most 200 printable characters, for people."""
    text = what if isinstance(what, str) else getattr(what, "reason", "") or type(what).__name__.lower()
    return ascii(text)[1:-1][:200] or "unknown"
