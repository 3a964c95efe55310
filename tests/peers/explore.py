"""Three peers over a store in memory: every interleaving up to a bound, or many at random, against the invariants.

What the world does, besides answering: it loses answers, drops or delays writes, refuses them, lets peers crash and
come back, lets a deadline pass, and lays garbage where a manifest belongs. Each costs a unit of a budget.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sparseloco.peers import paths
from sparseloco.peers.canonical import sha256
from sparseloco.peers.manifest import Entry, Manifest, seal
from sparseloco.peers.operations import (
    Create,
    Delete,
    Done,
    Fetch,
    Found,
    Get,
    Inspect,
    List,
    Listing,
    Missing,
    Operation,
    Outcome,
    Put,
    Unavailable,
    Upload,
)  # fmt: skip
from sparseloco.peers.run_file import run_at
from tests.peers.machine import CONTENT, WEIGHT, Local, Machine, Rules, accepted_of, in_flight
from tests.peers.runs import identity
from tests.peers.verdicts import cached_seal
from tests.peers.world_store import Store, frames_of, read_frames, write


class Violation(AssertionError):
    """What an invariant says, and the way there."""


class Budget(NamedTuple):
    """What the world may still do."""

    crashes: int = 0
    faults: int = 0
    garbage: int = 0
    deletions: int = 0
    restores: int = 0
    ghosts: int = 0


class World(NamedTuple):
    """Everything there is, as a value."""

    store: Store
    peers: tuple[Local, ...]
    budget: Budget
    pending: frozenset[tuple[str, bytes, bool]] = frozenset()
    restored: bool = False
    signed: int = 0
    """Amendments that the owner has put."""
    ghost: tuple[str, bytes] | None = None
    """A frame that a manifest lists and its peer puts and takes away as it likes."""


class Move(NamedTuple):
    """One step of the world."""

    what: str
    peer: int = -1


@dataclass
class Checker:
    """Explores worlds of three machines."""

    rules: Rules = field(default_factory=Rules)
    budget: Budget = field(default_factory=Budget)
    drifted: int | None = None
    stranger: bool = False

    def __post_init__(self) -> None:
        self.machines = [Machine(index, self.rules) for index in range(3)]
        self.taken: Counter[str] = Counter()
        self._good: set[World] = set()
        self._busy = ("close", "fetch", "serve", "done") if self.rules.serve else ("close", "fetch")
        self._sound: set[tuple[Local, bool]] = set()
        self._answers: dict[Any, tuple[Any, Any, Any]] = {}
        policy = run_at(self.machines[0].run, self.machines[0].amendments, 0).policy
        self._known_writers = {i for i in range(3) if policy.may_write(self.machines[i].me.public)}

    def start(self) -> World:
        peers = [
            machine.start(*(["d" * 32] if index == self.drifted else [])) for index, machine in enumerate(self.machines)
        ]
        return World(Store.of({}), tuple(peers), self.budget)

    # What can happen.

    def moves(self, world: World) -> Iterator[Move]:
        for index, local in enumerate(world.peers):
            stage = local.base.stage
            if stage.startswith("down"):
                yield Move("restart", index)
                if world.budget.restores and local.base.backup and local.base.backup.round >= 0:
                    yield Move("restore", index)
                continue
            if stage in self._busy:
                yield Move("answer", index)
                yield from (Move(fault, index) for fault in self._faults(world, self.machines[index], local))
            if self.machines[index].may_wait(local):
                yield Move("deadline", index)
            if may_learn(world, local):
                yield Move("learn", index)
            if world.budget.crashes and stage in ("close", "fetch", "serve"):
                yield Move("crash", index)
        possible = {
            "deliver": world.pending,
            "amend": world.signed < len(self.rules.changes),
            "garbage": world.budget.garbage,
            "delete frame": world.budget.deletions and frames_of(world.store),
            "ghost": world.budget.ghosts and self._haunted(world),
            "appear": world.ghost and world.ghost[0] not in world.store.data,
            "vanish": world.ghost and world.ghost[0] in world.store.data,
        }
        yield from (Move(what) for what, may_happen in possible.items() if may_happen)

    def _faults(self, world: World, machine: Machine, local: Local) -> list[str]:
        if not world.budget.faults:
            return []
        operation = machine.operation(local)
        if isinstance(operation, Create | Upload | Put):
            return ["refuse", "lose answer", "drop", "delay"]
        return ["no answer"] if isinstance(operation, Get | List) else []

    # What it leads to.

    def after(self, world: World, move: Move) -> World:
        if move.what == "deliver":
            one = min(world.pending)
            store = (world.store.create if one[2] else world.store.put)(one[0], one[1])
            return self._checked(world._replace(store=store, pending=world.pending - {one}))
        if move.what == "amend":
            return world._replace(signed=world.signed + 1)
        if move.what == "garbage":
            return self._litter(world)
        if move.what == "ghost":
            return self._haunt(world)
        if move.what in ("appear", "vanish"):
            assert world.ghost
            store = world.store.put(*world.ghost) if move.what == "appear" else world.store.delete(world.ghost[0])
            return world._replace(store=store)
        if move.what == "delete frame":
            budget = world.budget._replace(deletions=world.budget.deletions - 1)
            return world._replace(store=world.store.delete(frames_of(world.store)[0]), budget=budget)
        machine, local = self.machines[move.peer], world.peers[move.peer]
        budget = world.budget
        if move.what == "crash":
            world = world._replace(budget=budget._replace(crashes=budget.crashes - 1))
        elif move.what == "restore":
            world = world._replace(budget=budget._replace(restores=budget.restores - 1), restored=True)
        if move.what in ("crash", "restart", "restore", "deadline", "learn"):
            return self._moved(world, move.peer, machine.changed(local, move.what))
        return self._answer(world, move, machine, local)

    def _answer(self, world: World, move: Move, machine: Machine, local: Local) -> World:
        if move.what != "answer":
            world = world._replace(budget=world.budget._replace(faults=world.budget.faults - 1))
        key = (world.store, local, move.what, world.budget.deletions > 0)
        if key not in self._answers:
            self._answers[key] = self._run(machine, *key)
        store, moved, late = self._answers[key]
        pending = world.pending | {late} if late else world.pending
        return self._moved(world._replace(store=store, pending=pending), move.peer, moved)

    def _run(self, machine: Machine, store: Store, local: Local, what: str, deletions: bool) -> tuple[Any, Any, Any]:
        """One operation, and those after it that only read content-addressed bytes.

        The latter commute with everything but deletions, so they need no turn of their own.
        """
        operation = machine.operation(local)
        store, outcome, late = self._outcome(store, what, operation, local)
        moved = machine.sent(local, outcome)
        while not deletions and moved.base.stage in self._busy:
            operation = machine.operation(moved)
            if not isinstance(operation, Inspect | Fetch):
                break
            _, outcome, _ = self._outcome(store, "answer", operation, moved)
            following = machine.sent(moved, outcome)
            if not following.outcomes and following.base == moved.base:
                break  # a pass that changed nothing: let others move
            moved = following
        return store, moved, late

    def _outcome(self, store: Store, what: str, operation: Operation, local: Local) -> tuple[Store, Outcome, Any]:
        if what == "no answer":
            return store, Unavailable(), None
        if isinstance(operation, Create | Upload | Put):
            return write(store, what, operation, local)
        if isinstance(operation, Get):
            data = store.data.get(operation.path)
            return store, Missing() if data is None else Found(data), None
        if isinstance(operation, List):
            items = sorted((path, len(data)) for path, data in store.items if path.startswith(operation.prefix))
            return store, Listing(tuple(items)), None
        if isinstance(operation, Delete):
            return store.delete(operation.path), Done(), None
        return store, read_frames(store.data, operation, self.rules.check_digest), None

    def _litter(self, world: World) -> World:
        """Something that is no manifest where the next one belongs: rubbish, or a stranger's."""
        round = max(local.base.durable.round for local in world.peers)
        taken = world.store.data
        attempt = next(n for n in range(9) if str(paths.Manifest(round, 0, n)) not in taken)
        place = paths.Manifest(min(round, self.rules.num_rounds - 1), 0, attempt)
        data = b"garbage"
        if self.stranger:
            local = next(local for local in world.peers if local.base.durable.round == round)
            durable = local.base.durable
            data = seal(
                Manifest(
                    run=self.machines[0].run.run, round=place.round, fragment=0, attempt=attempt,
                    previous=durable.previous, digest=durable.digest, amendments=0, writer=identity(50).public,
                ),
                identity(50),
            )  # fmt: skip
        budget = world.budget._replace(garbage=world.budget.garbage - 1)
        return world._replace(store=world.store.create(str(place), data), budget=budget)

    def _haunted(self, world: World) -> list[tuple[Local, str]]:
        """Peers in the round that can be voided, and a frame that a hostile writer may list beside a ghost."""
        there = [local for local in world.peers if local.base.durable.round == self.rules.amends]
        frames = [path for path in frames_of(world.store) if path.startswith(paths.round_prefix(self.rules.amends, 0))]
        return [(there[0], path) for path in frames[:1]] if there else []

    def _haunt(self, world: World) -> World:
        """A manifest that is in order, of a hostile member, and lists a frame that is nowhere."""
        local, path = self._haunted(world)[0]
        hostile, durable = identity(51), local.base.durable
        frame = {"peer": hostile.peer_id, "digest": durable.digest, "weight": WEIGHT, "tokens": []}
        data = json.dumps(frame).encode()
        CONTENT[sha256(data)] = data.decode()
        place = paths.Frame(durable.round, 0, hostile.peer_id, 0, sha256(data))
        listed = [(str(place), data), (path, world.store.data[path])]
        entries = sorted((paths.parse(name).peer, sha256(body), len(body)) for name, body in listed)
        attempt = next(n for n in range(9) if str(paths.Manifest(durable.round, 0, n)) not in world.store.data)
        manifest = Manifest(
            run=self.machines[0].run.run, round=durable.round, fragment=0, attempt=attempt, previous=durable.previous,
            digest=durable.digest, amendments=durable.acknowledged, state_sha256="" if durable.round else "e" * 64,
            entries=tuple(Entry(peer=peer, hash=hash, size=size, weight=WEIGHT) for peer, hash, size in entries),
            writer=hostile.public,
        )  # fmt: skip
        store = world.store.create(str(paths.Manifest(durable.round, 0, attempt)), cached_seal(manifest, hostile))
        return world._replace(
            store=store, ghost=(str(place), data), budget=world.budget._replace(ghosts=world.budget.ghosts - 1)
        )

    def _moved(self, world: World, index: int, local: Local) -> World:
        peers = tuple(local if i == index else other for i, other in enumerate(world.peers))
        changed = world._replace(peers=peers)
        return self._checked(changed) if local.base != world.peers[index].base else changed

    # What must hold.

    def _checked(self, world: World) -> World:
        histories = [
            local.base.durable.applied
            for machine, local in zip(self.machines, world.peers, strict=True)
            if not machine.follows_on_a_void(local.base.durable, world.signed)
        ]
        for round in range(self.rules.num_rounds):
            lists = [history[round] for history in histories if len(history) > round]
            if any(other is not lists[0] and other != lists[0] for other in lists):
                raise Violation(f"round {round}: peers applied different lists")
        for index, local in enumerate(world.peers):
            if (local, world.restored) not in self._sound:
                self._check_ledger(world, index, local)
                self._check_digests(local.base.durable.applied)
                self._sound.add((local, world.restored))
        return world

    def _check_ledger(self, world: World, index: int, local: Local) -> None:
        durable = local.base.durable
        accepted = accepted_of(self.machines[index].me.peer_id, durable)
        if len(accepted) != len(set(accepted)):
            raise Violation(f"peer {index}: a delta was applied twice")
        kept = durable.residual | (in_flight(durable) if local.base.stage not in ("down, untrained",) else frozenset())
        if durable.round < self.rules.num_rounds and len(durable.applied) > durable.round:
            kept = durable.residual  # settled, not trained yet
        if twice := kept & set(accepted):
            raise Violation(f"peer {index}: {min(twice)} was applied and is kept as well")
        if world.restored or durable.over:
            return
        if durable.dropped:
            raise Violation(f"peer {index}: {min(durable.dropped)} was dropped although nothing was restored")
        if durable.produced != kept | set(accepted) | durable.dropped:
            raise Violation(f"peer {index}: the ledger does not close")

    def _check_digests(self, history: tuple[tuple[tuple[str, str], ...], ...]) -> None:
        for entries in history:
            if len({json.loads(frame)["digest"] for _, frame in entries}) > 1:
                raise Violation("a frame made from another state was applied")

    # Exploring.

    def everything(self, most: int) -> int:
        """All worlds, each once, at most ``most``; from each of them peers get on. Returns how many there are."""
        start = self.start()
        seen, frontier = {start}, [start]
        while frontier:
            world = frontier.pop()
            self.progresses(world)
            for move in self.moves(world):
                following = self.after(world, move)
                if following not in seen:
                    seen.add(following)
                    frontier.append(following)
            if len(seen) > most:
                raise RuntimeError(f"more than {most} worlds")
        return len(seen)

    def walk(self, seed: int, steps: int) -> World:
        """Some calm sweeps, a random way in which peers move in bursts, and a fair end."""
        draw = random.Random(seed)
        burst, last = draw.choice([0.0, 0.5, 0.9]), -1
        world = self.start()
        for _ in range(draw.randrange(4)):
            world = self._sweep(world, False)
        for _ in range(steps):
            moves = list(self.moves(world))
            if not moves:
                break
            again = [move for move in moves if move.peer == last and last >= 0]
            move = draw.choice(again if again and draw.random() < burst else moves)
            last = move.peer
            self.taken[move.what] += 1
            world = self.after(world, move)
        self.progresses(world)
        return world

    def progresses(self, world: World) -> None:
        """With faults and crashes at an end, whoever is up finishes all rounds, if a writer is among them."""
        path: list[World] = []
        writers_up = any(not world.peers[i].base.stage.startswith(("down", "drifted")) for i in self._known_writers)
        everybody = not writers_up or self.budget.deletions > 0 or world.ghost is not None
        for _ in range(60):
            if world in self._good:
                break
            path.append(world)
            before, world = world, self._sweep(world, everybody)
            if all(local.base.stage in ("done", "drifted") or local.base.stage[:4] == "down" for local in world.peers):
                self._check_voids(world)
                break
            if world == before:
                stuck = [i for i, local in enumerate(world.peers) if local.base.stage in ("close", "fetch")]
                raise Violation(f"peers {stuck} are stuck although a writer lives")
        else:
            raise Violation("peers go round and round although a writer lives")
        self._good.update(path)

    def _check_voids(self, world: World) -> None:
        for index, local in enumerate(world.peers):
            durable, known = local.base.durable, local.base.known
            if local.base.stage == "done" and self.machines[index].follows_on_a_void(durable, known):
                raise Violation(f"peer {index}: keeps a round that was voided")

    def _sweep(self, world: World, everybody: bool) -> World:
        """Each peer makes a pass and its deadline passes; nothing goes wrong, and the owner has helped."""
        while world.pending:
            world = self.after(world, Move("deliver"))
        world = world._replace(signed=len(self.rules.changes))
        for index in range(3):
            if world.peers[index].base.stage.startswith("down") and everybody:
                world = self.after(world, Move("restart", index))
            while may_learn(world, world.peers[index]):
                world = self.after(world, Move("learn", index))
            for _ in range(30):
                if world.peers[index].base.stage not in self._busy:
                    break
                world = self.after(world, Move("answer", index))
                if not world.peers[index].outcomes:
                    break
            if self.machines[index].may_wait(world.peers[index]):
                world = self.after(world, Move("deadline", index))
        return world


def may_learn(world: World, local: Local) -> bool:
    """Whether a peer may come to know of one more amendment: between two passes, or in one that only reads."""
    between = local.base.stage in ("fetch", "done") or (local.base.stage == "close" and not local.outcomes)
    return between and local.base.known < world.signed
