"""What a run saves and how it continues: its books, its replicas, and the proof that it is the same run.

Between the training loop and the checkpoints on the disk; knows no file format and no training step.
"""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sparseloco.algorithm import Algorithm
from sparseloco.checkpoint import Checkpoint, CheckpointFolder
from sparseloco.data import Dataset
from sparseloco.errors import CheckpointError
from sparseloco.evaluation import Evaluation, World
from sparseloco.model import known_by_content
from sparseloco.replica import Replica
from sparseloco.settings import RunConfig, TrainConfig, to_table
from sparseloco.transport import Traffic, collect_early
from sparseloco.types import Envelope, Key
from sparseloco.writers import FanOut

_MUST_EQUAL = ("algorithm", "model", "data", "train", "optimizer")
_MAY_DIFFER = {
    "train.workers",
    "train.processes",
    "train.log_every",
    "train.evaluate_every",
    "train.nonfinite",
    "data.path",
}
"""Settings that a resumed run may change; a corpus is known by its hash, not by its place."""
_MOST_NAMED = 4
_PLAIN = (
    "step",
    "tokens",
    "data_step",
    "update_norm",
    "delta_norm",
    "residual_norm",
    "round_bytes",
    "counted",
    "ended",
)


@dataclass
class Clock:
    """Seconds of training, and those spent on encoding, exchanging and applying; a pause between runs is left out."""

    start: float = field(default_factory=time.perf_counter)
    in_sync: float = 0.0

    @property
    def total(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self.start

    @contextlib.contextmanager
    def sync(self) -> Iterator[None]:
        """Count this block as synchronization."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self.in_sync += time.perf_counter() - before


@dataclass
class Books:
    """What the loop remembers from one step to the next, beside its replicas.

    Attributes:
        losses: Since the last line of the log, one list per replica of this process.
        step: Steps made.
        tokens: Tokens that all replicas have seen.
        data_step: Steps of the order of samples that are used up.
        update_norm: Of the last round; the norms are None before the first.
        delta_norm: At the last line of the log, as is ``residual_norm``.
        round_bytes: Sent by one replica in the last round.
        counted: Rounds and bytes when a round was last posted.
        ended: Sources of text whose first epoch has ended.
        abstentions: Messages without a contribution, of all peers.
        validation: Last evaluation.
    """

    losses: list[list[float]]
    step: int = 0
    tokens: int = 0
    data_step: int = 0
    update_norm: float | None = None
    delta_norm: float | None = None
    residual_norm: float | None = None
    round_bytes: int = 0
    counted: tuple[int, int] = (0, 0)
    ended: list[str] = field(default_factory=list)
    abstentions: int = 0
    validation: Evaluation | None = None
    clock: Clock = field(default_factory=Clock)

    def next_step(self, settings: TrainConfig) -> None:
        """Count the step that begins."""
        self.step += 1
        self.data_step += 1
        self.tokens += settings.workers * settings.batch_size * settings.sequence_length

    def shared(self) -> dict[str, Any]:
        """What is the same at every process, as plain values."""
        seen = self.validation
        return {
            **{name: getattr(self, name) for name in (*_PLAIN, "abstentions")},
            "validation": [seen.loss, seen.bits_per_byte, seen.tokens] if seen else None,
            "seconds": self.clock.total,
            "seconds_in_sync": self.clock.in_sync,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`shared`."""
        for name in _PLAIN:
            setattr(self, name, state[name])
        self.abstentions = state.get("abstentions", 0)  # an earlier version had none
        self.validation = Evaluation(*state["validation"]) if state["validation"] else None
        self.clock = Clock(time.perf_counter() - state["seconds"], state["seconds_in_sync"])


class Keeper:
    """Saves a run at the steps that its settings name, and continues it.

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
        self.world = world
        self.saved_step: int | None = None
        specs = world.replicas[0].specs
        self._identity = {
            **identity(config, dataset),
            "tensors": {spec.name: f"{spec.dtype} {list(spec.shape)}" for spec in specs},
            "fixed": world.replicas[0].fixed_digests(),
            "parts": _flat("algorithm", algorithm.describe(specs).parts),
        }
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
        """Write a checkpoint; one that cannot be written is warned about and costs nothing else."""
        if self.saved_step == books.step:
            return True
        inboxes = collect_early(self.world.replicas[0], self.world.transport)
        try:
            for index, replica in enumerate(self.world.replicas):
                with self.world.turn(index):
                    private = {
                        "replica": replica.private_state(),
                        "losses": books.losses[index],
                        "traffic": self.world.transport.traffic(replica.peer),
                    }
                self.folder.write_part(books.step, _part_of(replica.peer), private, in_turn=not self.world.is_main)
            if self.world.is_main:
                self._finish(books, log, inboxes)
        except CheckpointError as error:
            last = f"that of step {self.saved_step} stays" if self.saved_step else "there is no other of this start"
            warnings.warn(f"{error}; {last}", stacklevel=2)
            return False
        self.saved_step = books.step
        return True

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
        shared = checkpoint.part("shared")
        inboxes = [(Key(*key), rows) for key, rows in shared["inboxes"]]
        books.load(shared["books"])
        for index, replica in enumerate(self.world.replicas):
            with self.world.turn(index):
                replica.load_shared_state(shared["replica"])
                if replica.peer < workers:
                    private = checkpoint.part(_part_of(replica.peer))
                    replica.load_private_state(private["replica"])
                    books.losses[index] = private["losses"]
                    self.world.transport.set_traffic(replica.peer, Traffic(*private["traffic"]))
            if replica.digest() != checkpoint.facts["digest"]:
                raise CheckpointError(f"{checkpoint.path}: shared state does not match its digest; remove that folder")
            for key, rows in inboxes:
                self.world.transport.put_back(key, [_as_envelope(key, row, replica) for row in rows])
        if workers != self.config.train.workers:
            self._move(workers, books)
        return checkpoint.read("metrics.jsonl") if self.world.is_main else b""

    def _move(self, before: int, books: Books) -> None:
        """Another number of workers: no window is seen twice, and what happens to residuals is said."""
        settings = self.config.train
        books.data_step = -(-books.data_step * before // settings.workers)  # rounded up
        if not self.world.is_main:
            return
        if settings.workers > before:
            fate = (
                f"peers {before} to {settings.workers - 1} are new and start from the shared state without a residual"
            )
        else:
            fate = f"residuals of peers {settings.workers} to {before - 1} are dropped"
        warnings.warn(f"train.workers={settings.workers}: the checkpoint has {before}; {fate}", stacklevel=3)

    def _finish(self, books: Books, log: FanOut | None, inboxes: Mapping[Key, list[Envelope]]) -> None:
        first, workers = self.world.replicas[0], self.config.train.workers
        shared = {
            "replica": first.shared_state(),
            "inboxes": [[list(key), [_as_state(each) for each in inbox]] for key, inbox in inboxes.items()],
            "books": books.shared(),
        }
        self.folder.write_part(books.step, "shared", shared)
        self.folder.finish(
            books.step,
            parts=["shared", *map(_part_of, range(workers))],
            facts={
                "workers": workers,
                "tokens": books.tokens,
                "round": first.rounds,
                "digest": first.digest(),
                "identity": self._identity,
            },
            files={"metrics.jsonl": log.content() if log is not None else b""},
        )


def identity(config: RunConfig, dataset: Dataset) -> dict[str, dict[str, Any]]:
    """Settings and text that a resumed run must have in common with what it was."""
    table = to_table(config)
    settings = {f"{section}.{key}": value for section in _MUST_EQUAL for key, value in table[section].items()}
    settings |= known_by_content(config)
    return {
        "settings": {
            **{name: value for name, value in settings.items() if name not in _MAY_DIFFER},
            "corpus.sha256": dataset.corpus_sha256,
            "corpus.vocab_size": dataset.vocab_size,
        }
    }


def check_identity(checkpoint: Checkpoint, mine: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a checkpoint of another run.

    Args:
        checkpoint: Where to continue.
        mine: What the run is now, in groups; of the groups that differ only the first is named.

    Raises:
        CheckpointError: naming what differs.
    """
    theirs = checkpoint.facts["identity"]
    for group, now in json.loads(json.dumps(mine)).items():
        told = _differences(theirs.get(group, now), now)  # an earlier version saved fewer groups
        if told:
            more = f", and {len(told) - _MOST_NAMED} more" if len(told) > _MOST_NAMED else ""
            raise CheckpointError(
                f"{checkpoint.path}: must come from this run, but {', '.join(told[:_MOST_NAMED])}{more}; "
                "resume with the same settings, text and model, or start anew in another folder"
            )


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    if "algorithm.preset" in names:  # other presets have other keywords
        names = [name for name in names if name == "algorithm.preset" or not name.startswith("algorithm.")]
    return [f"{name} is {there.get(name)!r} there and {here.get(name)!r} here" for name in names]


def _flat(prefix: str, part: Any) -> dict[str, Any]:
    """Nested settings of an algorithm by dotted name."""
    if isinstance(part, Mapping):
        return {name: value for key, item in part.items() for name, value in _flat(f"{prefix}.{key}", item).items()}
    return {prefix: part}


def _part_of(peer: int) -> str:
    return f"peer-{peer:04}"


def _as_state(envelope: Envelope) -> dict[str, Any]:
    """An envelope as tensors and plain values; the table of its payload follows from the algorithm."""
    names = ("peer", "weight", "fingerprint", "digest", "covers")
    return {**{name: getattr(envelope, name) for name in names}, "tensors": dict(envelope.payload.tensors)}


def _as_envelope(key: Key, state: Mapping[str, Any], replica: Replica) -> Envelope:
    plain = {name: value for name, value in state.items() if name != "tensors"}
    return Envelope(key=key, payload=replica.payload_of(key, state["tensors"]), **plain)
