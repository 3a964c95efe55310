"""One round of one fragment from the own frame to the checked frames of all, for a peer with a real store.

Everything that a peer uses in every round is in :class:`Desk`; what belongs to one round in :class:`Order`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace

from sparseloco.errors import CheckpointError, DivergenceError, WireError
from sparseloco.peers import paths
from sparseloco.peers.clipping import clip_to_median
from sparseloco.peers.deadline import Arrivals, Decision, decide
from sparseloco.peers.driver import Driver, Teller
from sparseloco.peers.fates import Fate, own_fate
from sparseloco.peers.frames import Expected, Frames
from sparseloco.peers.identity import Identity
from sparseloco.peers.manifest import Entry, History, Manifest, void_of
from sparseloco.peers.operations import Object, Tell
from sparseloco.peers.policy import Policy
from sparseloco.peers.relays import Fetching
from sparseloco.peers.rounds import Round
from sparseloco.peers.run_file import Amendment, voids_of
from sparseloco.peers.store import Store
from sparseloco.types import Envelope, Key, Payload, foreign_number, name_of

_IN_MEMORY = 2
"""Rounds whose frames are held in memory; older ones are on the disk."""


class BehindError(DivergenceError):
    """This peer is so far behind that it has to start from a newer anchor."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to be closed.

    Attributes:
        history: What verdicts depend on.
        expected: What frames must be like.
        own: Hash and size of the own frame, which is held; None if there is none.
        number: Own number, for the own envelope.
        norm: 2-norm of a payload, for clipping.
    """

    history: History
    expected: Expected
    own: tuple[str, int] | None
    number: int
    norm: Callable[[Payload], float]

    @property
    def key(self) -> Key:
        """Round and fragment."""
        return self.expected.key


@dataclass(frozen=True)
class Closed:
    """A round that has its manifest.

    Attributes:
        manifest: The accepted one.
        inbox: What to apply, in the order of the manifest.
        fate: What became of the own payload.
    """

    manifest: Manifest
    inbox: list[Envelope]
    fate: Fate


@dataclass(kw_only=True)
class Desk:
    """What a peer needs to close rounds.

    Attributes:
        store: With patience around it.
        me: The own key.
        pool: For requests.
        tell: Is given what is to be logged.
        live: Peers whose lease holds.
        last_seen: Seconds since each peer's lease changed.
        clock: Monotonic seconds.
        meanwhile: Called while catching up waits, when nothing else may run that learns of a void or of a signal.
        newer_anchor: Whether a fragment can be taken up at a later round than this.
        poll_s: Seconds between two looks at a round.
        give_up_s: Seconds after which an open round is an error; None waits on.
        amendments: All that are known, by number.
        frames: What is held.
        fetching: The last rounds, for serving others.
    """

    store: Store
    me: Identity
    pool: Executor
    tell: Teller
    live: Callable[[], Collection[str]]
    last_seen: Callable[[], Mapping[str, float]]
    clock: Callable[[], float]
    meanwhile: Callable[[], None] = lambda: None
    newer_anchor: Callable[[Key], bool]
    poll_s: float
    give_up_s: float | None = None
    amendments: list[Amendment] = field(default_factory=list)
    frames: Frames = field(default_factory=Frames)
    stop: threading.Event = field(default_factory=threading.Event)
    _served: dict[int, list[Fetching]] = field(default_factory=dict)
    _turn: int = 0
    _arrivals: dict[int, Arrivals] = field(default_factory=dict)

    def close(self, order: Order) -> Closed:
        """Post, wait, close or follow, and fetch; returns with all that is to be applied.

        Raises:
            DriftError: if the manifest contradicts the own shared state.
            VoidedError: if the owner has voided a round that led to that state.
            BehindError: if the round is so old that its frames are removed.
            QuorumError: after ``give_up_s``.
            Interrupted: if the peer leaves.
        """
        driver, steps = self.driver(order.key, order.expected), self._round(order)
        arrivals = self._arrivals.setdefault(order.key.fragment, Arrivals())
        closed = None
        while closed is None:
            closed = self.finish(order, driver.run(steps.run()))
        missing = len(set(steps.awaited()) - set(steps.seen.frames))
        arrivals.record(steps.seen.late_s, missing, steps.policy.deadline_s)
        return closed

    def follow(self, order: Order) -> Closed | None:
        """What came of a round that others have closed, for a peer that catches up and has nothing else to do there.

        Returns:
            What to apply; None if the round turns out to be open, since what lies there counts for nobody, or the owner
            has voided it meanwhile. Others may then wait for this very peer.

        Raises:
            DriftError: if the manifest contradicts the own shared state.
            VoidedError: if the owner has voided a round that led to that state.
            BehindError: if the round is so old that its frames are removed.
            Interrupted: if the peer leaves.
        """
        driver, steps = self.driver(order.key, order.expected), self._round(order)
        while (manifest := driver.run(steps.follow())) is None:
            if steps.seen.is_open:
                return None
            self.idle(driver)
        return self.finish(order, manifest, self.meanwhile)

    def idle(self, driver: Driver) -> None:
        """Wait a little while catching up.

        Raises:
            Interrupted: if the peer leaves, or was asked to.
        """
        self.meanwhile()
        driver.pause(self.poll_s)

    def finish(self, order: Order, manifest: Manifest, meanwhile: Callable[[], None] = lambda: None) -> Closed | None:
        """Fetch what an accepted manifest lists; nobody goes on without (rule 3).

        Returns:
            What to apply; None if the owner has voided the manifest meanwhile.

        Raises:
            BehindError: if it cannot be had, since rounds before a newer anchor are removed.
        """
        driver = self.driver(order.key, order.expected)
        fetching = Fetching(manifest=manifest, me=self.me.peer_id, held=self.frames.hashes(), poll_s=self.poll_s)
        while not driver.run(fetching.one_pass()):
            if void_of(manifest, voids_of(self.amendments)):
                driver.run(fetching.clear())
                return None
            if self.newer_anchor(order.key):
                raise BehindError(
                    f"round {order.key.round}, fragment {order.key.fragment}: frames are gone and a newer anchor is "
                    "there; start from that"
                )
            meanwhile()
            driver.pause(self.poll_s)
        policy = order.history.run_under(manifest.amended).policy
        self._serve_later(fetching, policy.anchor_every)
        opened = self._open(order, manifest)
        failed = {entry.hash for entry in manifest.entries} - set(opened)
        fate = own_fate(manifest, self.me.peer_id, order.own[0] if order.own else None, failed)
        inbox: list[Envelope] = []
        for entry in manifest.entries:
            number = order.number if self._is_mine(entry, fate) else foreign_number(entry.peer)
            if entry.hash in opened:
                inbox.append(replace(opened[entry.hash], peer=number))
        inbox = self._clip(order, inbox, policy.clip_norm_ratio)
        return Closed(manifest, inbox, fate)

    def prefetch(self, manifest: Manifest) -> list[Future[object]]:
        """Start to fetch what a manifest lists; what cannot be had is left for later."""
        key = Key(manifest.round, manifest.fragment)
        driver = self.driver(key, None)
        objects = [
            Object(str(paths.Frame(*key, entry.peer, entry.part, entry.hash)), entry.size, entry.hash)
            for entry in manifest.entries
        ]
        return [self.pool.submit(driver.fetch, one) for one in objects if self.frames.get(one.hash) is None]

    def deadline(self, fragment: int, policy: Policy) -> Decision:
        """The deadline of an open round of a fragment, from the arrivals of those before."""
        return decide(policy, self._arrivals.get(fragment, Arrivals()).known())

    def serve(self) -> None:
        """Put frames again for peers that cannot fetch them: those of the last rounds, and of an older one in turn."""
        for fragment, served in list(self._served.items()):
            older = served[:-_IN_MEMORY]
            self._turn += 1
            for fetching in [*older[self._turn % len(older) :][:1], *served[-_IN_MEMORY:]] if older else list(served):
                self.driver(Key(fetching.manifest.round, fragment), None).run(fetching.serve())

    def driver(self, key: Key, expected: Expected | None) -> Driver:
        """The world as a round of one fragment sees it."""
        return Driver(self.store, self.frames, self.pool, key, expected, self.tell, self.stop)

    def _round(self, order: Order) -> Round:
        return Round(
            history=order.history,
            me=self.me,
            own=order.own,
            live=self.live,
            now=self.clock,
            last_seen=self.last_seen,
            amendments=self.amendments,
            arrivals=self._arrivals.get(order.key.fragment, Arrivals()).known(),
            poll_s=self.poll_s,
            give_up_s=self.give_up_s,
        )

    def _serve_later(self, fetching: Fetching, anchor_every: int) -> None:
        """Keep frames that others may still need: two rounds in memory, and on the disk as far as the last two anchors.

        A peer that was killed starts from an anchor, and needs what it has applied since, like those who come late.
        """
        manifest = fetching.manifest
        key = Key(manifest.round, manifest.fragment)
        with contextlib.suppress(OSError):  # without space on the disk it goes on like one that keeps nothing
            self.frames.keep(key, [entry.hash for entry in manifest.entries])
        oldest = Key(key.round - 2 * anchor_every, key.fragment)
        served = self._served.setdefault(key.fragment, [])
        served[:] = [one for one in served if one.manifest.round >= oldest.round] + [fetching]
        self.frames.remove_before(oldest)
        self.frames.forget_before(Key(served[-_IN_MEMORY:][0].manifest.round, key.fragment))

    def _clip(self, order: Order, inbox: list[Envelope], ratio: float) -> list[Envelope]:
        """Scale down what is too long; every norm goes into the log, so that one can see who bends the run (C-68)."""
        inbox, norms, most = clip_to_median(inbox, order.norm, ratio)
        key = order.key
        where = f"round {key.round}, fragment {key.fragment}"
        if norms:
            each = ", ".join(f"{self._name(order, number)} {norm:.3g}" for number, norm in norms.items())
            self.tell(Tell("norms", key.round, key.fragment, f"{where}: norms, of which {most:.3g} may be: {each}"))
        for number, norm in norms.items():
            if norm > most:
                what = f"what {self._name(order, number)} sent is scaled by {most / norm:.3g}"
                text = f"{where}: {what}, since it is longer than clip_norm_ratio allows"
                kind = "clipped" if number == order.number else "clipped-other"
                self.tell(Tell(kind, key.round, key.fragment, text))
        return inbox

    @staticmethod
    def _name(order: Order, number: int) -> str:
        return "this peer" if number == order.number else str(name_of(number))

    def _is_mine(self, entry: Entry, fate: Fate) -> bool:
        return entry.peer == self.me.peer_id and fate == Fate.ACCEPTED

    def _open(self, order: Order, manifest: Manifest) -> dict[str, Envelope]:
        """Envelopes of listed frames that pass every check; who fails one weighs nothing for anybody (rule 3)."""
        opened: dict[str, Envelope] = {}
        for entry in manifest.entries:
            data = self.frames.get(entry.hash)
            if data is None:
                raise CheckpointError(
                    f"frame={entry.hash[:16]}: must stay in this peer's folder while it runs; look at the disk, and "
                    "start this peer again"
                )
            try:
                envelope = order.expected.open(data, entry.peer)
                if envelope.weight != entry.weight:
                    raise WireError(f"weight={envelope.weight}: must be the {entry.weight} that the manifest lists")
            except WireError as error:
                key = order.key
                text = f"round {key.round}, fragment {key.fragment}: frame of {entry.peer[:8]} weighs nothing: {error}"
                self.tell(Tell("bad-frame", key.round, key.fragment, text))
            else:
                opened[entry.hash] = envelope
        return opened
