"""Catching up: an anchor, and every round since, applied as the others applied it.

For a peer that joins, one that was away, one that is late, and one that has drifted. Frames are fetched ahead; each
manifest is judged by the state that the replay has made, so a replay that goes wrong is noticed in the next round.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from sparseloco import rejoin
from sparseloco.errors import CheckpointError, DivergenceError, QuorumError, StoreError
from sparseloco.peers import anchors
from sparseloco.peers.claims import Reader, claim_at, claim_named, closed_since, reader_of
from sparseloco.peers.closing import BehindError
from sparseloco.peers.fates import Fate, fate_since
from sparseloco.peers.journal import Posted
from sparseloco.peers.manifest import History, Manifest
from sparseloco.peers.member import Member
from sparseloco.peers.operations import DriftError, Tell, VoidedError
from sparseloco.peers.run_file import Void
from sparseloco.types import Key

_AHEAD = 8
"""Rounds whose frames are fetched before they are needed."""
_MAX_TURNS = 1000


class Progress(NamedTuple):
    """How far a replay has come (C-30).

    Attributes:
        rounds: Replayed so far, over all fragments.
        total: Known so far to be replayed.
        received_bytes: Since the start, anchors included.
        bytes_per_s: Over that time.
        left_s: Seconds until the end at this rate; None before the first round.
    """

    rounds: int
    total: int
    received_bytes: int
    bytes_per_s: float
    left_s: float | None


@dataclass
class CatchUp:
    """Brings the replica of a member to where the others are.

    Attributes:
        member: Whose.
        received: Bytes received so far.
        progress: Is told after each round.
        clock: Monotonic seconds.
        started_over: Is told when everything is made anew from anchors, and what was in flight before is nothing now.
    """

    member: Member
    received: Callable[[], int]
    progress: Callable[[Progress], None]
    clock: Callable[[], float] = time.monotonic
    started_over: Callable[[], None] = lambda: None
    _journals: dict[int, Posted] = field(default_factory=dict)
    _used: dict[int, int] = field(default_factory=dict)
    _failed: set[tuple[int, int]] = field(default_factory=set)
    _exhausted: set[int] = field(default_factory=set)
    _open: dict[int, int] = field(default_factory=dict)
    _started: float = 0.0
    _before: int = 0
    _done: int = 0

    def remember(self) -> None:
        """Read what this peer wrote down before it was stopped, where that is newer than what the replica has.

        Raises:
            CheckpointError: if it is damaged.
        """
        for fragment, lane in enumerate(self.member.replica.lanes):
            posted = self.member.journal.read(fragment)
            if posted is None:
                continue
            if posted.key.round >= lane.round:
                self._journals[fragment] = posted
            elif posted.key.round in lane.in_flight:
                self.member.hold(posted.key, posted.frame)

    def run(self) -> bool:
        """Replay until there is nothing left to replay, and count steps like the others.

        Returns:
            Whether anything changed.

        Raises:
            DivergenceError: if no start leads to what the others have.
            CheckpointError: if the store has fewer rounds than this peer has seen (C-09).
        """
        self._started, self._before, self._done = self.clock(), self.received(), 0
        self._forget_failures()
        moved = False
        for _ in range(_MAX_TURNS):
            for fragment in range(len(self.member.replica.lanes)):
                if fragment not in self.member.chains:
                    self._begin(fragment)
            if void := self.member.voided():
                self._start_over(void)
                moved = True
            claims = [self._closed_since(chain) for _, chain in sorted(self.member.chains.items())]
            closed = [self.member.chains[f].round + len(found) for f, found in enumerate(claims)]
            self._check_not_behind(closed)
            step = self._step_to_join(closed)
            todo = self._todo(step, closed)
            if not todo:
                return self._rejoin(step) or moved
            moved = True
            with contextlib.suppress(VoidedError):  # told in the next turn
                self._replay(todo, claims)
        raise DivergenceError("replay: must come to an end; look for a peer that rewrites the rounds of this run")

    def again(self, key: Key) -> None:
        """Make a fragment's shared state before a round again, from an anchor (C-42).

        Raises:
            DivergenceError: if there is no anchor that leads there.
        """
        self._forget_failures()
        self._from_anchor(key.fragment, key.round)
        while (chain := self.member.chains[key.fragment]).round < key.round:
            self._applies(Key(chain.round, key.fragment), key.round)
        self._restore(key.fragment)
        lane = self.member.replica.lanes[key.fragment]
        if key.round not in lane.in_flight:
            lane.in_flight[key.round] = lane.awaited(None)
            lane.round = key.round + 1

    def _forget_failures(self) -> None:
        self._used.clear()
        self._failed.clear()
        self._exhausted.clear()
        self._open.clear()

    def _start_over(self, void: Void) -> None:
        """Make all fragments anew from anchors, as a peer that joins with nothing of its own.

        Raises:
            DivergenceError: if a fragment has none that still counts.
        """
        text = (
            f"round {void.round}, fragment {void.fragment}: the owner has voided what this peer had applied; it starts "
            "over from an anchor, and what it had not sent yet is dropped"
        )
        self._say("voided", Key(void.round, void.fragment), text)
        self.member.forget()
        self._journals.clear()
        self._forget_failures()
        for fragment in range(len(self.member.replica.lanes)):
            self._from_anchor(fragment, None)
        self.started_over()

    def leap(self, key: Key) -> None:
        """Go on from an anchor after that round, whose frames are gone.

        Raises:
            DivergenceError: if none can be used.
        """
        self._forget_failures()
        self._from_anchor(key.fragment, None, above=key.round)
        self.run()

    # -- where to start --------------------------------------------------------------------------------------

    @property
    def _read(self) -> Reader:
        return reader_of(self.member.desk.store)

    def _begin(self, fragment: int) -> None:
        """Where the chain of a fragment is taken up: the newest anchor, if it is ahead of the replica."""
        here = rejoin.num_applied(self.member.replica, fragment)
        newest = max((place.round for place in anchors.listed(self.member.desk.store)), default=-1)
        if newest > here:
            try:
                return self._from_anchor(fragment, None, above=here)
            except DivergenceError:
                pass  # none of this fragment can be used, but maybe all rounds are there
        self.member.chains[fragment] = self._chain_here(fragment, here)

    def _chain_here(self, fragment: int, here: int) -> History:
        """The history of a replica that has applied ``here`` rounds already."""
        start = self.member.start_of(fragment)
        if not here:
            return start
        if found := claim_at(self._read, start, here):
            return found[1]
        if found := claim_at(self._read, start, here - 1):
            return found[1].after(found[0], "")
        if (unknown := replace(start, round=here)).voided:
            return unknown  # what it has applied counts for nobody any more, and it starts over
        raise CheckpointError(
            f"round {here}, fragment {fragment}: the store knows neither this round nor the one before; resume from a "
            "checkpoint of this run, or start anew"
        )

    def _from_anchor(self, fragment: int, until: int | None, above: int = -1) -> None:
        """Take over the newest anchor that is whole and of an accepted manifest."""
        tried: list[str] = []
        replica, store = self.member.replica, self.member.desk.store
        rounds = {place.round for place in anchors.listed(store)}
        for number in sorted(rounds, reverse=True):
            if number <= above or (until is not None and number > until) or (fragment, number) in self._failed:
                continue
            found = claim_at(self._read, self.member.start_of(fragment), number)
            if found is None or not found[0].state_sha256:
                continue
            manifest, chain = found
            try:
                state = anchors.read(store, replica, manifest)
                self._settle_private(fragment, manifest)
                self._set_aside(fragment)
                rejoin.adopt(replica, fragment, state, number)
                if rejoin.fragment_digest(replica, fragment) != manifest.digest:
                    raise CheckpointError(f"{anchors.path_of(manifest)}: has not the digest that its manifest says")
            except (StoreError, CheckpointError) as error:
                tried.append(str(error))
                self._say("anchor-refused", Key(number, fragment), str(error))
                continue
            self.member.retention.found_whole(Key(number, fragment), anchors.path_of(manifest), written=False)
            self.member.chains[fragment] = chain
            self._used[fragment] = number
            return
        raise DivergenceError(
            f"fragment {fragment}: there is no anchor to start from ({'; '.join(tried) or 'none in the store'}); "
            "start all peers from the same values, or ask a peer that is in the run to stay until the next anchor"
        )

    # -- how far ---------------------------------------------------------------------------------------------

    def _closed_since(self, chain: History) -> list[Manifest]:
        found = closed_since(self._read, self.member.desk.pool, chain)
        return [manifest for manifest in found if manifest.round < self._open.get(chain.fragment, manifest.round + 1)]

    def _check_not_behind(self, closed: list[int]) -> None:
        for fragment, posted in list(self._journals.items()):
            if posted.key.round > closed[fragment]:
                if any(void.fragment == fragment for void in self.member.start_of(fragment).voids):
                    del self._journals[fragment]  # sent in a round that followed on a voided one
                    self._say("residual-dropped", posted.key, "followed on a round that the owner has voided")
                    continue
                raise CheckpointError(
                    f"round {closed[fragment]}, fragment {fragment}: is the first open one in the store, but this peer "
                    f"has posted in round {posted.key.round}; the store was set back, so ask the run's owner"
                )

    def _step_to_join(self, closed: list[int]) -> int:
        schedule = self.member.replica.algorithm.schedule
        open_posts = [p.key for f, p in self._journals.items() if p.key.round == closed[f]]
        return max(rejoin.step_to_join(self.member.replica, closed), *(schedule.post_step(*k) for k in open_posts), 0)

    def _todo(self, step: int, closed: list[int]) -> list[Key]:
        """Closed rounds that are applied by then, in the order in which peers apply them."""
        schedule = self.member.replica.algorithm.schedule
        keys = [
            Key(number, f)
            for f, chain in self.member.chains.items()
            for number in range(chain.round, min(closed[f], schedule.num_collected(step, f)))
        ]
        return sorted(keys, key=lambda key: (schedule.collect_step(*key), key.fragment))

    # -- applying --------------------------------------------------------------------------------------------

    def _replay(self, todo: list[Key], claims: list[list[Manifest]]) -> None:
        by_key = {Key(m.round, m.fragment): m for found in claims for m in found}
        ahead: deque[list[Future[object]]] = deque()
        waiting = deque(todo)
        total = self._done + len(todo)
        for key in todo:
            while waiting and len(ahead) < _AHEAD:
                ahead.append(self.member.desk.prefetch(by_key[waiting.popleft()]))
            for fetched in ahead.popleft():
                fetched.result()
            if not self._applies(key):
                return
            self._done += 1
            self._report(total)

    def _applies(self, key: Key, until: int | None = None) -> bool:
        """Apply one closed round; where it contradicts the state, start again from another anchor (C-42)."""
        try:
            if not self._apply(key, until):
                self._open[key.fragment] = key.round  # and this peer takes part in closing it
                return False
        except DriftError as error:
            self._say("drifted", key, str(error))
            self._start_again(key.fragment, until)
            return False
        except BehindError as error:
            self._say("behind", key, str(error))
            self._from_anchor(key.fragment, until, above=key.round)
            return False
        return True

    def _start_again(self, fragment: int, until: int | None) -> None:
        """Another anchor; if all lead to the same, the manifests that contradict them are skipped, as by everybody.

        Raises:
            DivergenceError: if there was no anchor at all.
        """
        if fragment in self._used:
            self._failed.add((fragment, self._used[fragment]))
        try:
            self._from_anchor(fragment, until)
        except DivergenceError:
            if fragment not in self._used:
                raise
            self._exhausted.add(fragment)

    def _apply(self, key: Key, until: int | None) -> bool:
        """Judge, fetch and apply one closed round; False if it is open after all, and nobody has to be there later."""
        self._restore(key.fragment)
        order, desk = self.member.order(key, replayed=key.fragment in self._exhausted), self.member.desk
        closed = desk.follow(order) if until is None else desk.close(order)
        if closed is not None:
            self.member.accept(order, closed)
            rejoin.replay(self.member.replica, key, closed.inbox)
        return closed is not None

    def _rejoin(self, step: int) -> bool:
        """Count like the others; messages that were on their way are again."""
        for fragment in range(len(self.member.replica.lanes)):
            self._restore(fragment)
        changed = step != self.member.replica.step
        rejoin.catch_up_to(self.member.replica, step)
        return changed

    def _restore(self, fragment: int) -> None:
        """If the chain has come to the message that was written down, it is in flight again."""
        posted = self._journals.get(fragment)
        if posted is None or posted.key.round != self.member.chains[fragment].round:
            return
        del self._journals[fragment]
        rejoin.restore(self.member.replica, posted.key, self.member.payload_of(posted), posted.residual)
        self.member.hold(posted.key, posted.frame)

    def _set_aside(self, fragment: int) -> None:
        """A message in flight waits where it was written down until the replay has come to its round."""
        lane = self.member.replica.lanes[fragment]
        posted = self.member.journal.read(fragment) if lane.in_flight else None
        if posted is not None and posted.key.round in lane.in_flight:
            self._journals[fragment] = posted
        lane.in_flight = {}

    def _settle_private(self, fragment: int, manifest: Manifest) -> None:
        """What became of the last own message, if the replay starts after its round, with this manifest."""
        lane = self.member.replica.lanes[fragment]
        posted = self._journals.get(fragment) or (self.member.journal.read(fragment) if lane.in_flight else None)
        if posted is None or posted.key.round >= manifest.round:
            return
        fate, payload = self._fate_since(posted, manifest), self.member.payload_of(posted)
        if self._journals.pop(fragment, None):
            rejoin.set_residual(self.member.replica, fragment, posted.residual)
        if fate == Fate.STALE or (fate == Fate.CREDITED and any(lane.state.codec)):
            rejoin.set_residual(self.member.replica, fragment, [])
            self._say("residual-dropped", posted.key, "what was not sent yet is older than what was, and is dropped")
        elif fate == Fate.CREDITED and payload is not None:
            lane.channel.credit_(payload, lane.state)

    def _fate_since(self, posted: Posted, later: Manifest) -> Fate:
        """Fate of a message by the manifests since; one that cannot be read is waited for, as it decides (rule 2).

        Raises:
            QuorumError: after ``give_up_s``; nothing has changed then.
            Interrupted: if this peer was asked to stop.
        """
        desk, key, began, said = self.member.desk, posted.key, self.clock(), False
        named = partial(claim_named, self._read, self.member.start_of(key.fragment))
        what = "the manifests since cannot be read, which say whether what this peer sent was applied"
        text = f"round {key.round}, fragment {key.fragment}: {what}"
        while (fate := fate_since(key.round, posted.hash, desk.me.peer_id, later, named)) is None:
            if desk.give_up_s is not None and self.clock() - began >= desk.give_up_s:
                raise QuorumError(f"{text}; look at the store, and start this peer again")
            if not said:
                self._say("waiting", key, f"{text}; waiting goes on")
            said = True
            desk.idle(desk.driver(key, None))
        return fate

    def _report(self, total: int) -> None:
        spent, received = self.clock() - self._started, self.received() - self._before
        left = (total - self._done) * spent / self._done if self._done else None
        self.progress(Progress(self._done, total, received, received / spent if spent else 0.0, left))

    def _say(self, kind: str, key: Key, text: str) -> None:
        self.member.desk.tell(Tell(kind, key.round, key.fragment, text))
