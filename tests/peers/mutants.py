"""The protocol with one rule taken out each; the checker must find what goes wrong then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparseloco.peers import paths
from sparseloco.peers.fates import Fate, own_fate
from sparseloco.peers.manifest import Entry, Manifest, manifest_limit
from sparseloco.peers.operations import Exists, Found, Get, Steps
from sparseloco.peers.relays import Fetching
from sparseloco.peers.rounds import Round
from tests.peers.machine import LATE
from tests.peers.verdicts import cached_judge, read_manifest


class TrustsItsPut(Round):
    """Rule 1 without the GET after a put: whatever did not fail for sure is taken as done."""

    def propose(self, entries: Sequence[Entry]) -> Steps[Manifest | None]:
        steps = super().propose(entries)
        create = next(steps)
        outcome = yield create
        if isinstance(outcome, Exists):
            return (yield from self.follow())
        return read_manifest(create.data)  # pyright: ignore[reportAttributeAccessIssue]


class StopsAtRubbish(Round):
    """Rule 1 without further attempts: an invalid manifest is waited on."""

    def follow(self) -> Steps[Manifest | None]:
        place = paths.Manifest(self.history.round, self.history.fragment, 0)
        outcome = yield Get(str(place), manifest_limit(self.history.policy))
        verdict = cached_judge(outcome.data, place, self.history) if isinstance(outcome, Found) else None
        return verdict if isinstance(verdict, Manifest) else None


class JudgesByItself(Round):
    """Rule 1 with a verdict that depends on the reader: a manifest without the own frame counts for nothing."""

    def follow(self) -> Steps[Manifest | None]:
        while (manifest := (yield from super().follow())) is not None:
            if manifest.entry_of(self.me.peer_id):
                return manifest
            self.seen.attempt += 1
        return None


class WaitsForTheNextRound(Round):
    """Amendments that hold from the round after the one that acknowledges them only."""

    def _learn(self) -> None:
        super()._learn()
        self.policy = self.history.policy


class JudgesByWhatItKnows(Round):
    """A verdict by the amendments that a reader has seen, and not by those that the manifest acknowledges."""

    def follow(self) -> Steps[Manifest | None]:
        while (manifest := (yield from super().follow())) is not None:
            if not manifest.entries or len(manifest.entries) >= self.policy.min_peers:
                return manifest
            self.seen.attempt += 1
        return None


class TakesAnyOther(Round):
    """A void that skips the manifest that is there, and asks nothing of the one that takes its place."""

    def _learn(self) -> None:
        super()._learn()
        if self.history.voids and not self.seen.attempt:
            self.seen.attempt = 1
        self.history = replace(self.history, voids=())


class KeepsWhatItApplied(Round):
    """A void that holds for those who wait, and not for those who have applied the manifest."""

    def _learn(self) -> None:
        super()._learn()
        here = tuple(void for void in self.history.voids if void.round == self.history.round)
        self.history = replace(self.history, voids=here)


class CreditsWithoutManifest(Round):
    """Rule 2 left out: after the deadline a peer takes the round as empty, and moves on."""

    def one_pass(self) -> Steps[Manifest | None]:
        manifest = yield from super().one_pass()
        if manifest is None and self.now() >= LATE:
            history = self.history
            return Manifest(
                run=history.run.run, round=history.round, fragment=history.fragment, attempt=self.seen.attempt,
                previous=history.previous, digest=history.digest, amendments=0, writer=self.me.public,
            )  # fmt: skip
        return manifest


class TrustsOtherClocks(Round):
    """Rule 6 left out: the round starts when the clock of another machine, hours ahead, says."""

    def _first_frame(self) -> None:
        self.seen.first = 9 * LATE


class SkipsWhatIsGone(Fetching):
    """Rule 3 left out: what cannot be fetched is not applied."""

    def one_pass(self) -> Steps[bool]:
        yield from super().one_pass()
        return True


class NeverRelays(Fetching):
    """Rule 3 without help: nobody puts the frame of another again."""

    def _serve(self, there: object) -> Steps[None]:
        yield from ()


def never_credits(manifest: Manifest, peer: str, in_flight: str | None) -> Fate:
    """Rule 5 left out: what was sent is taken as delivered."""
    fate = own_fate(manifest, peer, in_flight)
    return Fate.ACCEPTED if fate == Fate.CREDITED else fate


def loses_empty_rounds(manifest: Manifest, peer: str, in_flight: str | None) -> Fate:
    """Rule 2 left out: an empty manifest credits nobody."""
    return own_fate(manifest, peer, in_flight) if manifest.entries else Fate.ACCEPTED


def keeps_old_residual(manifest: Manifest, peer: str, in_flight: str | None) -> Fate:
    """Rule 5 left out: private state from before the last accepted frame is used on."""
    fate = own_fate(manifest, peer, in_flight)
    return Fate.CREDITED if fate == Fate.STALE else fate
