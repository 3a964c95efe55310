"""One peer as a value: what it remembers, what it asks of the store next, and what it is after an answer.

The protocol's generators cannot be copied, but they are functions of their memory and of the outcomes sent in. A pass
is run again from its start for every new outcome, and all memory between two passes is made hashable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple

from sparseloco.peers import manifest as manifests
from sparseloco.peers.canonical import sha256
from sparseloco.peers.fates import Fate, own_fate
from sparseloco.peers.identity import Identity
from sparseloco.peers.manifest import NO_HASH, History, Manifest, void_of
from sparseloco.peers.operations import DriftError, Fetched, Good, Inspected, Operation, Outcome, Tell
from sparseloco.peers.relays import Fetching
from sparseloco.peers.rounds import Round, Seen
from sparseloco.peers.run_file import Amendment, voids_of
from tests.peers.runs import OWNER, identity, make_run
from tests.peers.verdicts import read_manifest

WEIGHT = 7
LATE = 10_000
"""Seconds that pass at once, far beyond the deadline."""


class Durable(NamedTuple):
    """What survives a crash, written before a frame is put."""

    round: int
    life: int
    previous: str
    digest: str
    residual: frozenset[str]
    frame: bytes
    applied: tuple[tuple[tuple[str, str], ...], ...]
    held: frozenset[str]
    produced: frozenset[str]
    dropped: frozenset[str]
    manifests: tuple[bytes, ...] = ()
    acknowledged: int = 0
    over: bool = False
    """It has started over, so that what it had made before is lost and in no ledger."""


class Base(NamedTuple):
    """A peer between two passes. ``stage``: close, serve (others that want a frame), fetch, done, down or drifted.

    ``known`` amendments are read anew in each life; those that manifests acknowledged are in ``durable``.
    """

    durable: Durable
    stage: str
    memory: Any
    clock: int = 0
    manifest: bytes = b""
    backup: Durable | None = None
    known: int = 0


class Local:
    """A peer in the middle of a pass. One object per value and machine, so that comparing is cheap."""

    __slots__ = ("base", "outcomes")

    def __init__(self, base: Base, outcomes: tuple[Outcome, ...] = ()) -> None:
        self.base, self.outcomes = base, outcomes


def in_flight(durable: Durable) -> frozenset[str]:
    return frozenset(json.loads(durable.frame)["tokens"]) if durable.frame else frozenset()


def accepted_of(peer: str, durable: Durable) -> list[str]:
    """Tokens of a peer in all that it has applied, as often as they were."""
    return [token for entries in durable.applied for name, frame in entries if name == peer for token in tokens(frame)]


@cache
def tokens(frame: str) -> tuple[str, ...]:
    return tuple(json.loads(frame)["tokens"])


def freeze(value: Any) -> Any:
    if isinstance(value, dict):
        return ("dict", tuple(sorted((key, freeze(inner)) for key, inner in value.items())))
    return ("set", frozenset(value)) if isinstance(value, set) else value


def thaw(value: Any) -> Any:
    if isinstance(value, tuple) and len(value) == 2 and value[0] == "dict":
        return {key: thaw(inner) for key, inner in value[1]}
    return set(value[1]) if isinstance(value, tuple) and len(value) == 2 and value[0] == "set" else value


def snapshot(state: Any, names: list[str]) -> tuple[Any, ...]:
    return tuple(freeze(getattr(state, name)) for name in names)


# Without what is only said or shown, which decides nothing.
SEEN = [field.name for field in fields(Seen) if field.name not in ("said", "late_s")]
FETCHING = ["wanted", "relayed"]


@dataclass(frozen=True)
class Rules:
    """The protocol under test; a mutant replaces one part."""

    round_class: type[Round] = Round
    fetching_class: type[Fetching] = Fetching
    fate: Callable[[Manifest, str, str | None], Fate] = own_fate
    write_ahead: bool = True
    check_digest: bool = True
    num_rounds: int = 1
    writers: tuple[int, ...] = ()
    no_quorum: str = "train"
    serve: bool = False
    min_peers: int = 2
    changes: tuple[dict[str, Any], ...] = ()
    """What the owner amends, one after the other, at any time."""
    amends: int = 0
    """The round that these amendments name."""
    notices_voids: bool = True
    starts_over: bool = True


class Machine:
    """The life of peer ``index`` under ``rules``; pure but for caches."""

    def __init__(self, index: int, rules: Rules) -> None:
        self.rules = rules
        self.me: Identity = identity(index)
        self.run = make_run(
            writers=tuple(sorted(identity(i).public for i in rules.writers)),
            no_quorum=rules.no_quorum,
            min_peers=rules.min_peers,
            anchor_every=100,
        )
        self.amendments = tuple(
            Amendment(run=self.run.run, n=n, round=rules.amends, changes=changes).signed(identity(OWNER))
            for n, changes in enumerate(rules.changes)
        )
        self.peers = [identity(i).peer_id for i in range(3)]
        self._locals: dict[tuple[Base, tuple[Outcome, ...]], Local] = {}
        self._passes: dict[Local, Operation | Base] = {}
        self._sent: dict[tuple[Local, Outcome], Local] = {}
        self._changed: dict[tuple[Local, str], Local] = {}

    @property
    def num_states(self) -> int:
        return len(self._locals)

    def local(self, base: Base, outcomes: tuple[Outcome, ...] = ()) -> Local:
        return self._locals.setdefault((base, outcomes), Local(base, outcomes))

    def changed(self, local: Local, what: str) -> Local:
        """The peer after "crash", "restart", "restore", "deadline" or "learn"."""
        if (local, what) not in self._changed:
            self._changed[local, what] = self.local(self._CHANGES[what](self, local))
        return self._changed[local, what]

    def start(self, digest: str = "a" * 32) -> Local:
        none: frozenset[str] = frozenset()
        return self.local(self.train(Durable(-1, 0, NO_HASH, digest, none, b"", (), none, none, none)))

    def train(self, before: Durable) -> Base:
        """A round of training, and the state that is saved before its frame is put."""
        round = before.round + 1
        if round == self.rules.num_rounds:
            return Base(before._replace(round=round, frame=b""), "done", ())
        new = [f"{self.me.peer_id[:4]}.{round}.{before.life}.{half}" for half in "ab"]
        frame = {
            "peer": self.me.peer_id, "round": round, "digest": before.digest, "weight": WEIGHT,
            "tokens": sorted([*before.residual, new[0]]),
        }  # fmt: skip
        data = json.dumps(frame).encode()
        saved = before._replace(
            round=round,
            residual=frozenset(new[1:]),
            frame=data,
            held=before.held | {sha256(data)},
            produced=before.produced | set(new),
        )
        return Base(saved, "close", snapshot(Seen(), SEEN), 0, b"", before)

    def _crashed(self, local: Local) -> Base:
        base, held = local.base, local.base.durable.held | inspected(local)
        if self.rules.write_ahead or base.stage == "done" or base.backup is None:
            durable, stage = base.durable, "down"
        else:
            durable, stage = base.backup, "down, untrained"
        return Base(durable._replace(held=held, life=base.durable.life + 1), stage, (), 0, b"", base.backup)

    def _restarted(self, local: Local) -> Base:
        durable, backup = local.base.durable, local.base.backup
        if local.base.stage == "down, untrained":
            return self.train(durable)
        if durable.round == self.rules.num_rounds:
            return Base(durable, "done", ())
        return Base(durable, "close", snapshot(Seen(), SEEN), 0, b"", backup)

    def _restored(self, local: Local) -> Base:
        """Start from private state that is older than the frame that was put, as from a backup."""
        backup, durable = local.base.backup, local.base.durable
        assert backup is not None
        return self.train(backup._replace(life=durable.life, held=durable.held))

    def may_wait(self, local: Local) -> bool:
        """Whether the deadline of this peer can still pass."""
        base = local.base
        started = base.stage == "close" and base.memory[SEEN.index("first")] is not None
        return started and base.clock == 0 and not local.outcomes

    def _later(self, local: Local) -> Base:
        return local.base._replace(clock=LATE)

    def _learned(self, local: Local) -> Base:
        base = local.base._replace(known=local.base.known + 1)
        voids = voids_of(self.amendments[: base.known])
        if self.rules.starts_over and self.follows_on_a_void(base.durable, base.known):
            none: frozenset[str] = frozenset()
            durable = base.durable
            anew = Durable(-1, durable.life + 1, NO_HASH, "a" * 32, none, b"", (), durable.held, none, none, over=True)
            return self.train(anew)._replace(known=base.known)
        if base.stage == "fetch" and self.rules.notices_voids and void_of(read_manifest(base.manifest), voids):
            return base._replace(stage="close", memory=snapshot(Seen(), SEEN), manifest=b"")
        return base

    def follows_on_a_void(self, durable: Durable, known: int) -> bool:
        """Whether a peer's chain counts no more, given so many amendments."""
        history = self._history(durable.round, durable.digest, durable.previous, durable.acknowledged)
        return replace(history, voids=voids_of(self.amendments[:known])).voided is not None

    _CHANGES: ClassVar = {
        "crash": _crashed, "restart": _restarted, "restore": _restored, "deadline": _later, "learn": _learned
    }  # fmt: skip

    def operation(self, local: Local) -> Operation:
        found = self._pass(local)
        assert not isinstance(found, Base)
        return found

    def sent(self, local: Local, outcome: Outcome) -> Local:
        if (local, outcome) not in self._sent:
            after = self.local(local.base, (*local.outcomes, outcome))
            found = self._pass(after)
            while isinstance(found, Base):
                after = self.local(found)
                if found.stage != "fetch":
                    break
                found = self._pass(after)  # nothing to fetch: the pass is over before it asks for anything
            self._sent[local, outcome] = after
        return self._sent[local, outcome]

    def _pass(self, local: Local) -> Operation | Base:
        if local not in self._passes:
            self._passes[local] = self._run(local)
        return self._passes[local]

    def _run(self, local: Local) -> Operation | Base:
        base = local.base
        state, steps, names = self._steps(base)
        waiting = list(local.outcomes)
        try:
            operation = next(steps)
            while isinstance(operation, Tell) or waiting:
                operation = steps.send(None if isinstance(operation, Tell) else waiting.pop(0))
            return operation
        except StopIteration as ended:
            held = base.durable.held | inspected(local) | (state.held if isinstance(state, Fetching) else frozenset())
            memory = snapshot(state, names) if names else base.memory
            known = base._replace(durable=base.durable._replace(held=held), memory=memory)
            return self._next(known, ended.value)
        except DriftError:
            return base._replace(stage="drifted", memory=())

    def _steps(self, base: Base) -> tuple[Any, Any, list[str]]:
        durable = base.durable
        if base.stage == "close":
            seen = Seen(**{name: thaw(value) for name, value in zip(SEEN, base.memory, strict=True)})
            one = self.rules.round_class(
                history=self._history(durable.round, durable.digest, durable.previous, durable.acknowledged),
                me=self.me,
                own=(sha256(durable.frame), len(durable.frame)),
                live=lambda: self.peers,
                now=lambda: base.clock,
                amendments=self.amendments[: base.known],
                seen=seen,
            )
            return one.seen, one.one_pass(), SEEN
        if base.stage in ("serve", "done"):
            return None, self._serve(durable), []
        manifest = read_manifest(base.manifest)
        memory = {name: thaw(value) for name, value in zip(FETCHING, base.memory, strict=True)}
        fetching = self.rules.fetching_class(manifest=manifest, me=self.me.peer_id, held=set(durable.held), **memory)
        return fetching, fetching.one_pass(), FETCHING

    @cache  # noqa: B019  # machines live as long as the tests
    def _history(self, round: int, digest: str, previous: str, acknowledged: int) -> History:
        return History(
            run=self.run,
            round=round,
            fragment=0,
            digest=digest,
            previous=previous,
            amendments=self.amendments[:acknowledged],
            state_sha256="" if round else "e" * 64,
        )

    def _serve(self, durable: Durable) -> Iterator[Any]:
        for data in durable.manifests:
            held = set(durable.held)
            yield from self.rules.fetching_class(manifest=read_manifest(data), me=self.me.peer_id, held=held).serve()

    def _next(self, base: Base, result: Any) -> Base:
        """What follows on a pass that ended with ``result``."""
        if base.stage == "close":
            if result is None:
                return base._replace(stage="serve") if self.rules.serve and base.durable.manifests else base
            fresh = Fetching(manifest=result, me="", held=set())
            return base._replace(
                stage="fetch", memory=snapshot(fresh, FETCHING), manifest=manifests.canonical.encode(result)
            )
        if base.stage == "serve":
            return base._replace(stage="close")
        return self.settle(base) if base.stage == "fetch" and result else base

    def settle(self, base: Base) -> Base:
        manifest, durable = read_manifest(base.manifest), base.durable
        applied = tuple(
            (entry.peer, frame)
            for entry in manifest.entries
            if (frame := CONTENT.get(entry.hash, "")) and entry.hash in durable.held
            if checked(frame.encode(), manifest.digest if self.rules.check_digest else None) == Good(entry.weight)
        )
        own = sha256(durable.frame) if durable.frame else None
        fate = self.rules.fate(manifest, self.me.peer_id, own)
        residual, dropped = durable.residual, durable.dropped
        if fate == Fate.CREDITED:
            residual |= in_flight(durable)
        elif fate == Fate.STALE:
            dropped |= residual | in_flight(durable)
            residual = frozenset()
        after = durable._replace(
            previous=manifest.sha256,
            digest=sha256(f"{durable.digest}{applied}".encode())[:32],
            residual=residual,
            dropped=dropped,
            applied=(*durable.applied, applied),
            manifests=(*durable.manifests, base.manifest) if self.rules.serve else (),
            acknowledged=manifest.amendments,
        )
        return self.train(after)._replace(known=base.known)


CONTENT: dict[str, str] = {}
"""Bytes of every frame that was ever put, by hash."""


def inspected(local: Local) -> frozenset[str]:
    """Hashes whose bytes were fetched in this pass and are on the disk."""
    found: set[str] = set()
    for outcome in local.outcomes:
        if isinstance(outcome, Fetched):
            found |= outcome.hashes
        elif isinstance(outcome, HeldInspected):
            found |= outcome.held
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class HeldInspected(Inspected):
    """Verdicts, and the hashes whose bytes the peer has now."""

    held: frozenset[str] = frozenset()


def checked(data: bytes, digest: str | None) -> Good | manifests.Refusal:
    """The deterministic checks of a frame, all of which here is its digest."""
    try:
        frame = json.loads(data)
    except ValueError:
        return manifests.Refusal("not a frame")
    if digest is not None and frame["digest"] != digest:
        return manifests.Refusal("another digest")
    return Good(frame["weight"])
