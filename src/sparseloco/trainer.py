"""The training loop of the main job: one for all methods and for both worlds.

The loop advances each replica of this process, then settles each; it knows no method and no transport.
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sparseloco.absences import advised, note_absences
from sparseloco.algorithm import Algorithm
from sparseloco.books import Books
from sparseloco.checkpoint import Checkpoint, CheckpointFolder
from sparseloco.data import Dataset, check_windows, train_sampler
from sparseloco.errors import Interrupted
from sparseloco.evaluation import Evaluation, World, check_finite, evaluate_anchor
from sparseloco.inner_step import inner_step
from sparseloco.meter import Meter, learning_rate
from sparseloco.metrics import Status, named_errors, write_atomically
from sparseloco.model import MODEL_FOLDER, build_run_model, check_tokens, save_model
from sparseloco.replica import Replica
from sparseloco.resume import Keeper
from sparseloco.settings import RunConfig, to_toml
from sparseloco.simulate import Cohort, check_simulated
from sparseloco.transport import drain, post_due, settle
from sparseloco.transport.beats import enter, phase
from sparseloco.transport.deadline import Deadline
from sparseloco.whole import digest_of, norms, whole_model
from sparseloco.writers import FanOut, open_log

ProgressCallback = Callable[[Status], None]
StopCallback = Callable[[], bool]

CHECKPOINTS = "checkpoints"
"""Folder inside a run folder."""
_BORDER_STEPS = 10
"""Least number of steps between two moments at which a run may be stopped: asking is a small message to all."""

logger = logging.getLogger(__name__)


def train(
    config: RunConfig,
    algorithm: Algorithm,
    dataset: Dataset,
    out: Path | None,
    *,
    label: str,
    progress: ProgressCallback | None = None,
    world: World | None = None,
    resume: Checkpoint | None = None,
    stop: StopCallback | None = None,
    keep_model: bool = False,
) -> dict[str, Any]:
    """Train, evaluate the anchor, and write ``metrics.jsonl``, checkpoints, ``summary.json`` and, if kept, ``model/``.

    Args:
        config: Resolved settings of the run.
        algorithm: What every replica runs.
        dataset: Tokens; its vocabulary is that of the model.
        out: Folder for the files, which must exist and be the same for all processes; None writes nothing.
        label: Name of the run in reports.
        progress: Called after every inner step.
        world: Replicas of this process; None simulates all of them here.
        resume: Where to continue; ``out`` must be given as well, and nothing in it changes until all of the state has
            been loaded and accepted. Then ``config.toml`` is written with the settings as they are now.
        stop: Asked at round borders; once it says so at any process, all save and stop.
        keep_model: Write the last anchor and the tokenizer.

    Returns:
        The summary.

    Raises:
        CheckpointError: if ``resume`` belongs to another run, or the disk is full.
        ConfigError: if the text is too short or the model has another vocabulary.
        DivergenceError: if numbers are not finite at all replicas in the same round, at one that joined a run in
            several rounds in a row, at one with ``train.nonfinite="stop"``, or in an evaluation.
        Interrupted: if ``stop`` said so.
    """
    check_windows(dataset, config.train.sequence_length)
    if world is None:
        check_simulated(config)
        model = build_run_model(config, dataset.vocab_size)
        world = Cohort(model, algorithm, config.train.workers, seed=config.train.seed, nonfinite=config.train.nonfinite)
    check_tokens(config, world.model, dataset)
    books = Books([[] for _ in world.replicas])
    keeper = log = None
    if out is not None:
        patience_s = Deadline(config.transport.deadline_s).checkpoint_s
        folder = CheckpointFolder(out / CHECKPOINTS, config.checkpoint.keep, patience_s)
        keeper = Keeper(folder, config, algorithm, dataset, world, resume)
        metrics = keeper.load(resume, books) if resume is not None else b""
        keeper.begin()
        if resume is not None and world.is_main:
            with named_errors(out / "config.toml"):
                write_atomically(out / "config.toml", to_toml(config))  # some settings may change between two starts
        log = open_log(out, label, config, metrics, resume and resume.step) if world.is_main else None
    run = _Run(config, dataset, world, books, keeper, log, progress, stop)
    try:
        run.loop()
        summary = run.summary(label, algorithm)
    finally:
        if log is not None:
            log.close()
    if log is not None and out is not None:
        with named_errors(out):
            write_atomically(out / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
    if keep_model and out is not None and world.evaluates:
        with whole_model(world, partial(build_run_model, config, dataset.vocab_size)) as model:
            if world.is_main:
                save_model(model, dataset.tokenizer, dataset.end_token, out / MODEL_FOLDER)
    return summary


class _Run:
    """One run while it lasts."""

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        world: World,
        books: Books,
        keeper: Keeper | None,
        log: FanOut | None,
        progress: ProgressCallback | None,
        stop: StopCallback | None,
    ) -> None:
        self.config = config
        self.settings = config.train
        self.corpus = (dataset.corpus_name, dataset.corpus_sha256)
        self.dataset = dataset
        self.world = world
        self.books = books
        self.keeper = keeper
        self.log = log
        self.progress = progress
        self.stop = stop
        self.meter = Meter(world, books.skipped_bytes)
        self.sampler = train_sampler(
            dataset,
            self.settings.sequence_length,
            self.settings.seed,
            num_workers=world.num_slots,
            per_worker=config.data.per_worker,
        )

    @property
    def first(self) -> Replica:
        return self.world.replicas[0]

    def loop(self) -> None:
        books, steps = self.books, self.settings.steps
        train_loss = math.nan
        self._count_round()
        self._catch_up()
        if books.validation is None:
            self._evaluate()
        while not self._is_done():
            books.next_step(self.settings)
            step = books.step
            enter(f"step {step}")
            train_loss = self._advance(step)
            self._note_epochs(step)
            if step % self.settings.log_every == 0 or step == steps:
                self._log_step(step)
            self._settle()
            if self.first.step != step:  # a peer that started over, or was moved on, goes on from there
                self._catch_up()
                continue
            if step % self.settings.evaluate_every == 0 and step != steps:
                self._evaluate()
            self._report(step, train_loss)
            if step != steps:
                self._pause(step)
                self._catch_up()
        if self.keeper is not None:
            with phase(f"save step {steps}"):
                self.keeper.save(books, self.log)
                self.keeper.wait()
        self._evaluate()
        self._report(steps, train_loss)  # again, for the last evaluation

    def _is_done(self) -> bool:
        """Whether all steps are made and settled; settling the last may show that a peer has to start over."""
        steps = self.settings.steps
        if self.books.step == steps == self.first.step:
            self._drain()
        if self.books.step >= steps > self.first.step:
            self._catch_up()
        return self.books.step >= steps

    def _catch_up(self) -> None:
        """Where peers go on without one that is late or new, take the step from them."""
        step = self.world.catch_up()
        if step != self.books.step:
            if self.keeper is not None and step < self.books.step:
                self.keeper.saved_step = None  # what was saved is of a past that the run has left
            self.books.move_to(step)
            self.meter.skip()
            self.books.skipped_bytes = self.meter.skipped_bytes

    def _pause(self, step: int) -> None:
        """Save if it is time to, and stop if that was asked for."""
        stopping = self._must_stop(step)
        saved = False
        if self.keeper is not None and (stopping or self.keeper.is_due(step)):
            with phase(f"save step {step}"):
                saved = self.keeper.save(self.books, self.log)
                if stopping:
                    saved = self.keeper.wait() and saved
        if stopping:
            if self.log is not None:  # for whoever watches; the checkpoint's log, with which a resume starts, lacks it
                self.log.write("interrupted", step=step, saved=saved)
            self.world.mean(0.0)  # a process that ends may take those with it that still write
            raise Interrupted(f"stopped at step {step} " + ("after saving" if saved else "without a checkpoint"))

    def _must_stop(self, step: int) -> bool:
        """Whether any process was asked to stop; only round borders ask, since the answer must be the same for all."""
        every = self.first.algorithm.schedule.every
        border = every if self.world.stands_alone else every * math.ceil(_BORDER_STEPS / every)
        return self.stop is not None and step % border == 0 and self.world.mean(float(self.stop())) > 0

    def _advance(self, step: int) -> float:
        """Inner step and post of every replica here; returns the mean loss of those that train."""
        losses: list[float] = []
        for index, replica in enumerate(self.world.replicas):
            with self.world.turn(index):
                loss = inner_step(self.world, index, self.sampler, self.books, self.config)
                with self.books.clock.sync():
                    post_due(replica, self.world.transport)
            if loss is not None:
                self.books.losses[index].append(loss)
                losses.append(loss)
        self._count_round()
        return sum(losses) / len(losses) if losses else math.nan

    def _count_round(self) -> None:
        self.meter.read()
        rounds, sent = self.first.rounds, self.meter.traffic.sent
        if rounds > self.books.counted[0]:
            self.books.round_bytes = sent - self.books.counted[1]
            self.books.counted = (rounds, sent)

    def _note_epochs(self, step: int) -> None:
        """Say once for each source that its text has come to an end and starts again."""
        if not self.world.is_main:
            return
        num_slots = self.settings.batch_size * self.settings.workers
        for name, passes in self.sampler.passes(self.books.data_step, num_slots).items():
            if passes > 1 and name not in self.books.ended:
                self.books.ended.append(name)
                if self.log is not None:
                    self.log.write("epoch", source=name, step=step, tokens=self.books.tokens)
                warnings.warn(
                    f"data={name!r}: all of it was seen by step {step} of {self.settings.steps}, so it starts again in "
                    "another order",
                    stacklevel=2,
                )

    def _settle(self) -> None:
        for index, replica in enumerate(self.world.replicas):
            if keys := replica.due():
                with self.world.turn(index), self.books.clock.sync(), advised(self.config):
                    norm = norms(replica, settle(replica, self.world.transport))[0]
                self.books.update_norm = norm if index == 0 else self.books.update_norm
                for key in keys:
                    where = (replica.peer, key.round, key.fragment)
                    logger.info("peer %d, round %d, fragment %d: applied, update norm %.4g", *where, norm)
        note_absences(self.world, self.books, self.log, self.config)

    def _drain(self) -> None:
        """Collect early what is still in flight, so that the last anchor holds every message."""
        for index, replica in enumerate(self.world.replicas):
            with self.world.turn(index), self.books.clock.sync(), advised(self.config):
                drain(replica, self.world.transport)
        note_absences(self.world, self.books, self.log, self.config)

    def _evaluate(self) -> None:
        if not self.world.evaluates:
            return
        self.books.validation = self._evaluated("validation")

    def _evaluated(self, split: str) -> Evaluation:
        with phase("evaluate"):
            result = evaluate_anchor(self.world, self.dataset, split, self.settings)
        check_finite(f"{split}_loss", result.loss, f"at step {self.books.step}", self.config)
        if self.log is not None:
            self.log.write(
                "evaluation",
                split=split,
                step=self.books.step,
                round=self.first.rounds,
                tokens=self.books.tokens,
                bytes_sent=self.meter.traffic.sent,
                loss=result.loss,
                bits_per_byte=result.bits_per_byte,
                evaluated_tokens=result.tokens,
            )
        return result

    def _log_step(self, step: int) -> None:
        means = [sum(losses) / len(losses) for losses in self.books.losses if losses]
        trained = self.world.mean(float(len(means)))
        train_loss = self.world.mean(sum(means)) / trained if trained else math.nan
        self.books.losses = [[] for _ in self.books.losses]
        if not self.world.evaluates:
            return
        with self.world.turn(0) as replica:
            own = replica.delta_norm(), replica.residual_norm()
            self.books.delta_norm, self.books.residual_norm = norms(replica, *own)
        if self.log is None:
            return
        self.log.write(
            "step",
            step=step,
            round=self.first.rounds,
            tokens=self.books.tokens,
            train_loss=train_loss,
            lr=learning_rate(self.first.algorithm, step),
            bytes_sent=self.meter.traffic.sent,
            bytes_received=self.meter.traffic.received,
            round_bytes=self.books.round_bytes,
            compression=self.meter.compression,
            seconds=self.books.clock.total,
            seconds_in_sync=self.books.clock.in_sync,
            tokens_per_s=self.books.tokens / self.books.clock.total,
            delta_norm=self.books.delta_norm,
            residual_norm=self.books.residual_norm,
            update_norm=self.books.update_norm,
        )

    def _report(self, step: int, train_loss: float) -> None:
        if self.progress is None or not self.world.is_main:
            return
        elapsed, steps, validation = self.books.clock.total, self.settings.steps, self.books.validation
        self.progress(
            Status(
                step=step,
                steps=steps,
                train_loss=train_loss,
                validation_loss=validation.loss if validation else None,
                tokens_per_s=self.books.tokens / elapsed,
                bytes_sent=self.meter.traffic.sent,
                seconds_left=elapsed / step * (steps - step),
                round=self.first.rounds,
                round_bytes=self.books.round_bytes,
                compression=self.meter.compression,
                delta_norm=self.books.delta_norm,
                residual_norm=self.books.residual_norm,
                update_norm=self.books.update_norm,
                sync_fraction=self.books.clock.in_sync / elapsed,
            )
        )

    def summary(self, label: str, algorithm: Algorithm) -> dict[str, Any]:
        """Figures of the finished run; the test split is read here for the first time."""
        seconds, in_sync = self.books.clock.total, self.books.clock.in_sync
        self.meter.read()
        if not self.world.evaluates:
            return {}
        assert self.books.validation is not None
        held_out, digest = self._evaluated("test"), digest_of(self.first)
        if not self.world.is_main:
            return {}
        traffic = self.meter.traffic
        recipe = algorithm.recipe
        return {
            "label": label,
            "preset": recipe.preset if recipe else "custom",
            "held_out_loss": held_out.loss,
            "validation_loss": self.books.validation.loss,
            "bits_per_byte": held_out.bits_per_byte,
            "tokens": self.books.tokens,
            "rounds": self.first.rounds,
            "abstentions": self.books.abstentions,
            "steps": self.settings.steps,
            "workers": self.settings.workers,
            "shards": self.settings.shards,
            "parameters": sum(spec.numel for spec in self.first.specs),
            "bytes_sent_per_replica": traffic.sent,
            "bytes_received_per_replica": traffic.received,
            "dense_bytes_per_replica": self.meter.dense_bytes,
            "compression": self.meter.compression,
            "seconds": seconds,
            "seconds_in_sync": in_sync,
            "corpus": self.corpus[0],
            "corpus_sha256": self.corpus[1],
            "digest": digest,
            "settings": dict(recipe.settings) if recipe else {},
        }
