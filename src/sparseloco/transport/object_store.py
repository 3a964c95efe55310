"""Peers that meet in a store of objects: no server of ours, no open port, and peers that come and go.

What a round is made of is agreed on by signed manifests (docs/peers.md). Everything waits in threads: with a schedule
that has a ``delay``, uploads, the closing of the round and downloads run beside the inner steps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from sparseloco.errors import ConfigError, Interrupted, NotFound, WireError
from sparseloco.peers import anchors, canonical, paths
from sparseloco.peers.aloud import log_aloud, log_progress
from sparseloco.peers.claims import anchored_after, known_amendments, reader_of
from sparseloco.peers.closing import BehindError, Closed, Desk, Order
from sparseloco.peers.frames import Frames
from sparseloco.peers.identity import Identity
from sparseloco.peers.journal import Journal
from sparseloco.peers.leases import Heart
from sparseloco.peers.listing import PER_PEER
from sparseloco.peers.member import Member, check_run
from sparseloco.peers.membership import Leases
from sparseloco.peers.operations import DriftError, Tell, VoidedError
from sparseloco.peers.pages import listed
from sparseloco.peers.patience import Meter, Patience, Patient
from sparseloco.peers.replay import CatchUp, Progress
from sparseloco.peers.run_file import RUN_LIMIT, RunFile, read_run, run_at
from sparseloco.peers.store import Store, open_store, probe
from sparseloco.replica import Replica
from sparseloco.transport.base import Traffic, settle
from sparseloco.types import Envelope, Key

_LOG = logging.getLogger("sparseloco.peers")
_REQUESTS = 8
_ERRANDS = 2
_GLANCE_S = 0.5
"""Seconds between two looks at whether this peer was asked to stop while it waits."""
_EARLY_FRACTION = 0.75
"""Share of a round's deadline after which a peer that has not posted is late."""
_LAST_WAIT_S = 5.0
"""Seconds for which a peer that was asked to stop still waits for its round to close."""


class ObjectStore:
    """A transport over a store that all peers of a run can reach. It serves one replica.

    ``connect`` joins the run: it takes over the newest anchor and replays the rounds since. A peer that is stopped,
    with or without :meth:`leave`, goes on from there with the same ``folder``; nothing is applied or sent twice.

    Args:
        store: URL or directory of the run, or an opened store.
        identity: Key of this peer. One process at a time may use it.
        folder: A local directory of this peer, for what must survive a crash.
        run: ``run.json``; None reads it from the store.
        owner: Public key of the run's owner; None trusts the file's own word, which is logged.
        patience: Tries and timeouts.
        poll_s: Seconds between two looks at an open round.
        give_up_s: Seconds after which a round that does not close is an error; None waits on.
        tell: Is given what happens, for logs; None logs it.
        progress: Is told how far catching up has come; None logs it.
        clock: Seconds that never go back.
        stop: Asked while a round is waited for; once it says so, waiting ends after a few seconds more.

    Raises:
        ConfigError: if the store or the file cannot be used.
        WireError: if ``run.json`` is not what its owner signed.
        StoreError: if the store cannot be reached.
    """

    def __init__(
        self,
        store: str | Store,
        identity: Identity,
        folder: str | Path,
        *,
        run: RunFile | None = None,
        owner: str | None = None,
        patience: Patience | None = None,
        poll_s: float = 1.0,
        give_up_s: float | None = None,
        tell: Callable[[Tell], None] | None = None,
        progress: Callable[[Progress], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        self.meter = Meter()
        opened = open_store(store) if isinstance(store, str) else store
        self.store = Patient(opened, patience, meter=self.meter)
        self.identity = identity
        self.run = self._agreed_run(run, owner)
        self._folder = Path(folder) / self.run.run / identity.peer_id
        self._tell, self._progress = tell or log_aloud, progress or log_progress
        self._clock, self._stop = clock, stop
        self._requests = ThreadPoolExecutor(_REQUESTS, "sparseloco-request")
        self._errands = ThreadPoolExecutor(_ERRANDS, "sparseloco-anchor")
        self._closers: ThreadPoolExecutor | None = None
        self._heart = Heart(
            self.store,
            self.run.run,
            identity,
            session=os.urandom(8).hex(),
            leases=Leases(self.run.policy.lease_s),
            beat=self._beat,
            clock=clock,
        )
        self._desk = Desk(
            store=self.store,
            me=identity,
            pool=self._requests,
            tell=self._tell,
            live=self._heart.live,
            last_seen=self._heart.last_seen,
            clock=clock,
            meanwhile=self._while_it_catches_up,
            newer_anchor=lambda key: anchored_after(self.store, self._connected().start_of(key.fragment), key.round),
            poll_s=poll_s,
            give_up_s=give_up_s,
            frames=Frames(self._folder / "frames"),
        )
        self._member: Member | None = None
        self._catch_up: CatchUp | None = None
        self._open: dict[Key, tuple[Order, Future[Closed]]] = {}
        self._early: dict[Key, list[Envelope]] = {}
        self._sighted: dict[int, tuple[int, float]] = {}
        self._may_lag = False
        self._learning = threading.Lock()
        self._earlier = Traffic(0, 0)

    @property
    def rank(self) -> int | None:
        """None: the caller numbers its replica; the number stays with this peer."""
        return None

    @property
    def peer_id(self) -> str:
        """Name of this peer in the store, 32 hex digits."""
        return self.identity.peer_id

    def connect(self, replica: Replica) -> None:
        """Join with a replica, or look whether the others have gone on without it; returns when it is where they are.

        Shared state becomes that of the run. Parameters, counters and messages in flight follow; the inner optimizer
        stays as it is.

        Raises:
            ConfigError: if the replica is not of this run, or another one is connected.
            DivergenceError: if no anchor leads to what the others have.
            CheckpointError: if the store was set back, or the own folder is damaged.
        """
        if self._member is None:
            self._join(replica)
        elif self._member.replica is not replica:
            raise ConfigError(
                f"peer={replica.peer!r}: must be the replica that is connected; use one transport for each"
            )
        elif self._may_lag and not self._early:
            self._may_lag = False
            assert self._catch_up is not None
            if self._catch_up.run():
                self._resume()

    def post(self, envelope: Envelope) -> None:
        """Write the message down, then send it and close its round in the background."""
        member = self._connected()
        member.take_down(envelope)
        self._close_later(envelope.key)

    def collect(self, key: Key) -> list[Envelope]:
        """Wait for the round's manifest and all its frames.

        Returns:
            Envelopes in the order of the manifest: the own one with the own number, others with the number of their id.
            Empty if the replica was so late that it was moved to a newer anchor, or started over since the owner has
            voided a round; the key is not in flight then.

        Raises:
            DivergenceError: if the manifest contradicts the own shared state, and no replay explains it.
            QuorumError: after ``give_up_s``.
            Interrupted: if :meth:`leave` was called meanwhile, or ``stop`` said so.
        """
        if key in self._early:
            return self._early.pop(key)
        member = self._connected()
        if key not in self._open:
            self._close_later(key)
        assert self._catch_up is not None
        try:
            order, closed = self._closed(key)
        except BehindError as error:
            self._tell(Tell("behind", key.round, key.fragment, str(error)))
            self._catch_up.leap(key)
            self._resume()
            return []
        except VoidedError:
            self._catch_up.run()
            self._resume()
            return self.collect(key) if key in member.replica.in_flight() else []
        member.accept(order, closed)
        self._heart.round = key.round + 1
        self._may_lag = True
        return closed.inbox

    @property
    def is_late(self) -> bool:
        """Whether others posted so long ago, in a round in which this peer has not, that its deadline is near."""
        member = self._connected()
        for fragment, lane in enumerate(member.replica.lanes):
            number, seen = self._sighted.get(fragment, (-1, 0.0))
            if number == lane.round:
                deadline = self._desk.deadline(fragment, member.policy(fragment))
                if self._clock() - seen >= _EARLY_FRACTION * deadline.seconds:
                    return True
        return False

    def report(self, *, loss: float | None) -> None:
        """Say in the leases from now on what the last inner step gave, for `status`; training is not touched by it.

        Args:
            loss: ``loss.item()``. None, and what is not finite or beyond a million, is said as no loss.
        """
        self._heart.loss = None if loss is None else float(loss)

    def put_back(self, key: Key, inbox: list[Envelope]) -> None:
        """Keep an inbox for one later ``collect``."""
        if key in self._connected().replica.in_flight():
            self._early[key] = inbox

    def traffic(self, peer: int) -> Traffic:
        """Bytes of objects that this peer has sent and received, of whatever kind."""
        del peer  # there is one
        used = self.meter.total()
        return Traffic(self._earlier.sent + used.sent_bytes, self._earlier.received + used.received_bytes)

    def set_traffic(self, peer: int, traffic: Traffic) -> None:
        """Go on counting from here."""
        now = self.traffic(peer)
        self._earlier = Traffic(
            self._earlier.sent + traffic.sent - now.sent, self._earlier.received + traffic.received - now.received
        )

    def leave(self) -> None:
        """Stop all threads and release the lease, so that nobody waits for this peer. Calling it twice does nothing."""
        if self._desk.stop.is_set():
            return
        self._desk.stop.set()
        self._heart.stop()
        for pool in (self._closers, self._errands, self._requests):
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=pool is self._closers)
        if self._member is not None:
            self._heart.put(left=True)

    def __enter__(self) -> ObjectStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    # -- inside ----------------------------------------------------------------------------------------------

    def _agreed_run(self, given: RunFile | None, owner: str | None) -> RunFile:
        """The one run of this store (C-40)."""
        try:
            data = self.store.get(str(paths.Run()), limit=RUN_LIMIT)
        except NotFound:
            if given is None:
                raise
            return given
        run = read_run(data, owner)
        if given is not None and given.run != run.run:
            raise ConfigError(
                f"run={given.run}: must be {run.run}, the run that this store holds; use another folder of the store "
                "for each run"
            )
        if given is None and owner is None:
            _LOG.warning("run %s: owner %s is taken on trust; name the owner's key to be sure", run.run, run.owner)
        return run

    def _join(self, replica: Replica) -> None:
        check_run(self.run, replica)
        self._learn_amendments()
        newest = run_at(self.run, self._desk.amendments, paths.MAX_ROUND).policy
        if not (self.run.policy.admits(self.peer_id) or newest.admits(self.peer_id)):
            raise ConfigError(f"peer={self.peer_id}: must be a member of run {self.run.run}; ask its owner")
        probe(self.store, f"peers/{self.peer_id}")
        key = canonical.encode({"public": self.identity.public})
        self.store.create_or_same(str(paths.PublicKey(self.peer_id)), key)
        self._closers = ThreadPoolExecutor(len(replica.lanes) + 1, "sparseloco-round")
        retention = anchors.Retention(self.store, self.peer_id)
        journal = Journal(self._folder, self.run.run)
        self._member = Member(self.run, replica, journal, self._desk, self._errands, retention)
        self._catch_up = CatchUp(self._member, self._received, self._progress, self._clock, self._forget_open)
        self._catch_up.remember()
        self._catch_up.run()
        self._heart.round = max(chain.round for chain in self._member.chains.values())
        self._heart.start()
        self._resume()

    def _resume(self) -> None:
        """After a replay: forget what it has settled, send again what is in flight, and settle what was due."""
        member = self._connected()
        for table in (self._open, self._early):
            for key in [key for key in table if key.round < member.chains[key.fragment].round]:
                del table[key]
        replica = member.replica
        for key in replica.in_flight():
            if key not in self._open and key not in self._early:
                self._close_later(key)
        for envelope in replica.outbox():
            self.post(envelope)
        settle(replica, self)

    def _closed(self, key: Key) -> tuple[Order, Closed]:
        """A round that has its manifest, if need be after the own state was made again."""
        member = self._connected()
        order, closing = self._open.pop(key)
        try:
            return order, self._outcome(key, closing)
        except DriftError as error:
            self._tell(Tell("drifted", key.round, key.fragment, str(error)))
            assert self._catch_up is not None
            self._catch_up.again(key)
            order = member.order(key, replayed=True)
            return order, self._desk.close(order)

    def _forget_open(self) -> None:
        """Nobody waits any more for what is open; the threads that do end with their rounds, or with this peer."""
        assert self._closers is not None
        self._open.clear()
        self._early.clear()
        self._closers.shutdown(wait=False, cancel_futures=True)
        self._closers = ThreadPoolExecutor(len(self._connected().replica.lanes) + 1, "sparseloco-round")

    def _outcome(self, key: Key, closing: Future[Closed]) -> Closed:
        """Wait for a round, unless this peer was asked to stop: what it has posted is written down and in the store."""
        asked: float | None = None
        while self._stop is not None and not wait([closing], _GLANCE_S).done:
            asked = self._clock() if asked is None and self._stop() else asked
            if asked is not None and self._clock() - asked >= _LAST_WAIT_S:
                raise Interrupted(f"left while round {key.round} was open; what was sent in it stays in the store")
        return closing.result()

    def _close_later(self, key: Key) -> None:
        assert self._closers is not None
        if self._desk.stop.is_set():
            raise Interrupted(f"round {key.round}: cannot be closed any more, since this peer has left; connect anew")
        order = self._connected().order(key)
        self._open[key] = (order, self._closers.submit(self._desk.close, order))

    def _connected(self) -> Member:
        if self._member is None:
            raise ConfigError("transport=not connected: must know its replica; call connect first")
        return self._member

    def _received(self) -> int:
        return self.meter.total().received_bytes

    def _beat(self) -> None:
        """What is looked at with every lease."""
        self._learn_amendments()
        self._desk.serve()
        self._watch()

    def _watch(self) -> None:
        """Note when others have begun to post in the rounds that this peer is still working for."""
        member = self._connected()
        for fragment, lane in enumerate(member.replica.lanes):
            number = lane.round
            if self._sighted.get(fragment, (-1, 0.0))[0] == number:
                continue
            policy, here = member.policy(fragment), paths.round_prefix(number, fragment)
            for entry in listed(self.store, here, share=PER_PEER, known=self._heart.live()):
                with contextlib.suppress(WireError):
                    place = paths.parse(entry.path)
                    if not isinstance(place, paths.Frame) or place.peer == self.peer_id:
                        continue
                    if policy.admits(place.peer):
                        self._sighted[fragment] = number, self._clock()
                        break

    def _while_it_catches_up(self) -> None:
        if self._stop is not None and self._stop():
            raise Interrupted("left while it was catching up; nothing is lost")
        self._learn_amendments()

    def _learn_amendments(self) -> None:
        with self._learning:  # of two threads, each would add the same
            known = self._desk.amendments
            known += known_amendments(reader_of(self.store), self.run, known)[len(known) :]
