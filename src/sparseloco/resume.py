"""What a run saves and how it continues: its books and its replicas, on any number of peers and shards.

Between the training loop and the checkpoints on the disk; knows no file format and no training step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from sparseloco.algorithm import Algorithm
from sparseloco.background import Background
from sparseloco.books import Books
from sparseloco.checkpoint import Checkpoint, CheckpointFolder
from sparseloco.data import Dataset
from sparseloco.errors import CheckpointError
from sparseloco.evaluation import World
from sparseloco.identity import check_identity, whole_identity
from sparseloco.part_file import Packed, packed
from sparseloco.replica import Replica
from sparseloco.reshard_state import Cuts, cuts_of, reshard_inboxes, reshard_private, reshard_shared
from sparseloco.settings import RunConfig
from sparseloco.sharding import local_views
from sparseloco.simulate import replica_rng_state
from sparseloco.transport import Traffic, collect_early
from sparseloco.types import Envelope, Key
from sparseloco.whole import digest_of
from sparseloco.writers import FanOut


class Keeper:
    """Saves a run at the steps that its settings name, and continues it.

    A part of a checkpoint is written by the process whose state it is: the shared state by the shards of peer 0, the
    private state of each peer by its own shards.

    Args:
        folder: Where checkpoints are; the same for all processes of the run.
        config: Settings of the run.
        algorithm: What its replicas run.
        dataset: Its text.
        world: Replicas of this process.
        resume: Where the run will continue, by :meth:`load`; None if it starts anew. :meth:`begin` comes after that.

    Raises:
        CheckpointError: if ``resume`` belongs to another run; it says what differs, and nothing was touched.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        config: RunConfig,
        algorithm: Algorithm,
        dataset: Dataset,
        world: World,
        resume: Checkpoint | None = None,
    ) -> None:
        self.folder = folder
        self.config = config
        self.algorithm = algorithm
        self.world = world
        self.saved_step: int | None = None
        self._writer = Background()
        self._begun: int | None = None
        self._identity = whole_identity(config, algorithm, dataset, world.replicas[0])
        if resume is not None:
            check_identity(resume, self._identity)
            if resume.path.parent == folder.root:
                self.saved_step = resume.step

    def begin(self) -> None:
        """Remove what is not of this run's past, once every process has accepted where it continues."""
        self.world.mean(0.0)
        if self.world.is_main:
            self.folder.begin(self.saved_step)
        self.world.mean(0.0)  # no process writes before that

    def is_due(self, step: int) -> bool:
        """Whether the settings ask for a checkpoint after ``step``."""
        return self.config.checkpoint.every > 0 and step % self.config.checkpoint.every == 0

    def save(self, books: Books, log: FanOut | None) -> bool:
        """Write a checkpoint, or begin to; one that cannot be written is warned about and costs nothing else.

        What is saved is as it is now. Where the settings say so, only the copying is done here and a thread writes, one
        checkpoint at a time; :meth:`wait` ends that.
        """
        self.wait()
        if self.saved_step == books.step:
            return True
        inboxes = collect_early(self.world.replicas[0], self.world.transport)
        content = log.content() if log is not None else b""
        write = partial(self._write, books.step, self._facts(books), content)
        if not self.config.checkpoint.asynchronous:
            return self._try(books.step, partial(write, self._parts(books, inboxes)))
        self._writer.start(partial(write, list(self._parts(books, inboxes))))
        self._begun = books.step
        return True

    def wait(self) -> bool:
        """Let a checkpoint that was begun be written; False if that failed, which is then warned about."""
        if self._begun is None:
            return True
        step, self._begun = self._begun, None
        return self._try(step, self._writer.wait)

    def load(self, checkpoint: Checkpoint, books: Books) -> bytes:
        """Continue from a checkpoint; returns the metrics until then.

        Raises:
            CheckpointError: if it is damaged, or samples would be seen twice; nothing has changed then.
        """
        workers = checkpoint.facts["workers"]
        if workers != self.config.train.workers and self.config.data.per_worker == "source":
            raise CheckpointError(
                f"train.workers={self.config.train.workers}: must be {workers} as in the checkpoint, since "
                "data.per_worker='source' deals the sources to the workers; go on with that number"
            )
        with self.world.replicas[0].shards.jointly("resume"):
            self._load_states(checkpoint, books)
        for replica in self.world.replicas:
            if digest_of(replica) != checkpoint.facts["digest"]:
                raise CheckpointError(f"{checkpoint.path}: shared state does not match its digest; remove that folder")
        self._move(checkpoint, books)
        return checkpoint.read("metrics.jsonl") if self.world.is_main else b""

    def _load_states(self, checkpoint: Checkpoint, books: Books) -> None:
        saved = _Saved(checkpoint, self._cuts())
        shared = saved.shared()
        inboxes = [(Key(*key), rows) for key, rows in shared["inboxes"]]
        books.load(shared["books"])
        for index, replica in enumerate(self.world.replicas):
            with self.world.turn(index):
                replica.load_shared_state(shared["replica"])
                if replica.peer < checkpoint.facts["workers"]:
                    private = saved.private(replica)
                    replica.load_private_state(private["replica"])
                    books.losses[index] = private["losses"]
                    self.world.transport.set_traffic(replica.peer, Traffic(*private["traffic"]))
            for key, rows in inboxes:
                self.world.transport.put_back(key, [_as_envelope(key, row, replica) for row in rows])

    def _cuts(self) -> Cuts:
        places = {name: view.place for name, view in local_views(self.world.model).items()}
        return cuts_of(self.algorithm, self.world.replicas[0].specs, places)

    def _move(self, checkpoint: Checkpoint, books: Books) -> None:
        """Another number of workers: no window is seen twice, and what happens to residuals is said."""
        settings = self.config.train
        before, shards = checkpoint.facts["workers"], checkpoint.facts.get("shards", 1)
        if before != settings.workers:
            books.data_step = -(-books.data_step * before // settings.workers)  # rounded up
        if not self.world.is_main:
            return
        if shards != settings.shards:
            warnings.warn(
                f"train.shards={settings.shards}: the checkpoint has {shards}; all state is dealt out anew, and from "
                "here on the run equals one of that number up to rounding",
                stacklevel=4,
            )
        if settings.workers > before:
            fate = (
                f"peers {before} to {settings.workers - 1} are new and start from the shared state without a residual"
            )
        else:
            fate = f"residuals of peers {settings.workers} to {before - 1} are dropped"
        if settings.workers != before:
            warnings.warn(f"train.workers={settings.workers}: the checkpoint has {before}; {fate}", stacklevel=4)

    def _parts(self, books: Books, inboxes: Mapping[Key, list[Envelope]]) -> Iterator[tuple[str, Packed, str]]:
        """Name, state and digest of every part that this process writes, one at a time."""
        for index, replica in enumerate(self.world.replicas):
            with self.world.turn(index):
                private = {
                    "replica": replica.private_state(),
                    "losses": books.losses[index],
                    "traffic": self.world.transport.traffic(replica.peer),
                }
            name = _part(_peer(replica.peer), replica.shards.rank, replica.shards.count)
            yield name, packed(name, private), ""
        if self.world.evaluates:
            first = self.world.replicas[0]
            shared = {
                "replica": first.shared_state(),
                "inboxes": [[list(key), [_as_state(each) for each in inbox]] for key, inbox in inboxes.items()],
                "books": books.shared(),
            }
            name = _part("shared", first.shards.rank, first.shards.count)
            yield name, packed(name, shared), first.digest()

    def _facts(self, books: Books) -> dict[str, Any]:
        settings = self.config.train
        return {
            "workers": settings.workers,
            "shards": settings.shards,
            "tokens": books.tokens,
            "round": self.world.replicas[0].rounds,
            "identity": self._identity,
        }

    def _write(
        self, step: int, facts: dict[str, Any], content: bytes, parts: Iterable[tuple[str, Packed, str]]
    ) -> None:
        for name, part, digest in parts:
            self.folder.write_part(step, name, part, in_turn=not self.world.is_main, digest=digest)
        if self.world.is_main:
            kinds = ["shared", *map(_peer, range(facts["workers"]))]
            names = [_part(kind, shard, facts["shards"]) for kind in kinds for shard in range(facts["shards"])]
            self.folder.finish(step, parts=names, facts=facts, files={"metrics.jsonl": content})

    def _try(self, step: int, write: Callable[[], None]) -> bool:
        try:
            write()
        except CheckpointError as error:
            last = f"that of step {self.saved_step} stays" if self.saved_step else "there is no other of this start"
            warnings.warn(f"{error}; {last}", stacklevel=3)
            return False
        self.saved_step = step
        return True


class _Saved:
    """The parts of a checkpoint as the shard at ``cuts`` continues from them."""

    def __init__(self, checkpoint: Checkpoint, cuts: Cuts) -> None:
        self.checkpoint = checkpoint
        self.cuts = cuts
        self.count: int = checkpoint.facts.get("shards", 1)  # an earlier version knew of none

    def shared(self) -> dict[str, Any]:
        if self.count == self.cuts.count:
            return self._own("shared")
        states = self._all("shared")
        return {
            "replica": reshard_shared([state["replica"] for state in states], self.cuts),
            "inboxes": reshard_inboxes([state["inboxes"] for state in states], self.cuts),
            "books": states[0]["books"],
        }

    def private(self, replica: Replica) -> dict[str, Any]:
        if self.count == self.cuts.count:
            return self._own(_peer(replica.peer))
        states = self._all(_peer(replica.peer))
        mine = reshard_private([state["replica"] for state in states], self.cuts)
        if self.cuts.shard >= self.count:
            mine["rng"] = replica_rng_state(replica.seed, replica.peer, self.cuts.shard)
        # Bytes are those of the whole replica, so it does not matter which shard goes on counting them.
        traffic = [sum(each) for each in zip(*(state["traffic"] for state in states), strict=True)]
        return {
            "replica": mine,
            "losses": states[0]["losses"],
            "traffic": traffic if self.cuts.shard == 0 else [0] * len(traffic),
        }

    def _own(self, kind: str) -> Any:
        return self.checkpoint.part(_part(kind, self.cuts.shard, self.count))

    def _all(self, kind: str) -> list[Any]:
        return [self.checkpoint.stored_part(_part(kind, shard, self.count)) for shard in range(self.count)]


def _peer(number: int) -> str:
    return f"peer-{number:04}"


def _part(kind: str, shard: int, count: int) -> str:
    """Name of a part; one of a replica that is not sharded has no number of a shard."""
    return f"{kind}-shard-{shard:04}" if count > 1 else kind


def _as_state(envelope: Envelope) -> dict[str, Any]:
    """An envelope as tensors and plain values; the table of its payload follows from the algorithm."""
    names = ("peer", "weight", "fingerprint", "digest", "covers")
    return {**{name: getattr(envelope, name) for name in names}, "tensors": dict(envelope.payload.tensors)}


def _as_envelope(key: Key, state: Mapping[str, Any], replica: Replica) -> Envelope:
    plain = {name: value for name, value in state.items() if name != "tensors"}
    return Envelope(key=key, payload=replica.payload_of(key, state["tensors"]), **plain)
