"""The training loop of the main job: one for all methods and for both worlds.

The loop advances each replica of this process, then settles each; it knows no method and no transport.
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sparseloco.absences import advised, note_absences, step_if_finite
from sparseloco.algorithm import Algorithm
from sparseloco.checkpoint import Checkpoint, CheckpointFolder
from sparseloco.data import Dataset, check_windows, train_sampler
from sparseloco.errors import Interrupted
from sparseloco.evaluation import Evaluation, World, anchored, autocast, check_finite, evaluate_anchor
from sparseloco.local import InnerSteps, OptimizerSpec
from sparseloco.metrics import Status, named_errors, write_atomically
from sparseloco.model import MODEL_FOLDER, build_run_model, check_tokens, next_token_loss, save_model
from sparseloco.replica import Replica
from sparseloco.resume import Books, Keeper
from sparseloco.schedule import value_at
from sparseloco.settings import RunConfig, TrainConfig, to_toml
from sparseloco.simulate import Cohort
from sparseloco.transport import Traffic, drain, post_due, settle
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
        DivergenceError: if numbers are not finite at all replicas in the same round, at one with
            ``train.nonfinite="stop"``, or in an evaluation.
        Interrupted: if ``stop`` said so.
    """
    check_windows(dataset, config.train.sequence_length)
    if world is None:
        model = build_run_model(config, dataset.vocab_size)
        world = Cohort(model, algorithm, config.train.workers, seed=config.train.seed, nonfinite=config.train.nonfinite)
    check_tokens(config, world.model, dataset)
    books = Books([[] for _ in world.replicas])
    keeper = log = None
    if out is not None:
        folder = CheckpointFolder(out / CHECKPOINTS, config.checkpoint.keep)
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
            if keep_model:
                with world.turn(0) as replica, anchored(world.model, replica):
                    save_model(world.model, dataset.tokenizer, dataset.end_token, out / MODEL_FOLDER)
    return summary


def accumulate_gradients(model: nn.Module, batch: Tensor, settings: TrainConfig) -> float:
    """Gradient of the mean loss over ``batch`` in ``accumulation`` equal parts; returns that loss."""
    total = 0.0
    for part in batch.chunk(settings.accumulation):
        with autocast(settings):
            loss = next_token_loss(model, part) / settings.accumulation
        loss.backward()
        total += float(loss.detach())
    return total


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
        self.sampler = train_sampler(
            dataset,
            self.settings.sequence_length,
            self.settings.seed,
            num_workers=self.settings.workers,
            per_worker=config.data.per_worker,
        )

    @property
    def first(self) -> Replica:
        return self.world.replicas[0]

    @property
    def traffic(self) -> Traffic:
        return self.world.transport.traffic(self.first.peer)

    def loop(self) -> None:
        books, steps = self.books, self.settings.steps
        train_loss = math.nan
        if not books.step:
            self._evaluate()
        while books.step < steps:
            books.next_step(self.settings)
            step = books.step
            train_loss = self._advance(step)
            self._note_epochs(step)
            if step % self.settings.log_every == 0 or step == steps:
                self._log_step(step)
            self._settle()
            if step % self.settings.evaluate_every == 0 and step != steps:
                self._evaluate()
            self._report(step, train_loss)
            if step != steps:
                self._pause(step)
        self._drain()
        if self.keeper is not None:
            self.keeper.save(books, self.log)
        self._evaluate()
        self._report(steps, train_loss)  # again, for the last evaluation

    def _pause(self, step: int) -> None:
        """Save if it is time to, and stop if that was asked for."""
        stopping = self._must_stop(step)
        saved = False
        if self.keeper is not None and (stopping or self.keeper.is_due(step)):
            saved = self.keeper.save(self.books, self.log)
        if stopping:
            if self.log is not None:  # for whoever watches; the checkpoint's log, with which a resume starts, lacks it
                self.log.write("interrupted", step=step, saved=saved)
            self.world.mean(0.0)  # a process that ends may take those with it that still write
            raise Interrupted(f"stopped at step {step} " + ("after saving" if saved else "without a checkpoint"))

    def _must_stop(self, step: int) -> bool:
        """Whether any process was asked to stop; only round borders ask, since the answer must be the same for all."""
        every = self.first.algorithm.schedule.every
        border = every * math.ceil(_BORDER_STEPS / every)
        return self.stop is not None and step % border == 0 and self.world.mean(float(self.stop())) > 0

    def _advance(self, step: int) -> float:
        """Inner step and post of every replica here; returns the mean loss of those that train."""
        losses: list[float] = []
        for index, replica in enumerate(self.world.replicas):
            with self.world.turn(index):
                loss = self._inner_step(replica, step)
                with self.books.clock.sync():
                    post_due(replica, self.world.transport)
            if loss is not None:
                self.books.losses[index].append(loss)
                losses.append(loss)
        self._count_round()
        return sum(losses) / len(losses) if losses else math.nan

    def _inner_step(self, replica: Replica, step: int) -> float | None:
        """Loss of one inner step; None of a replica that sits out the rest of the round and only counts steps."""
        batch_size, num_slots = self.settings.batch_size, self.settings.batch_size * self.settings.workers
        if not replica.is_abstaining:
            slots = range(replica.peer * batch_size, (replica.peer + 1) * batch_size)
            batch = self.sampler.batch(slots, self.books.data_step - 1, num_slots)
            loss = accumulate_gradients(self.world.model, batch, self.settings)
            return step_if_finite(replica, loss, step, self.config)
        replica.stepped()
        return None

    def _count_round(self) -> None:
        rounds, sent = self.first.rounds, self.traffic.sent
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
                    norm = settle(replica, self.world.transport)
                self.books.update_norm = norm if index == 0 else self.books.update_norm
                for key in keys:
                    where = (replica.peer, key.round, key.fragment)
                    logger.info("peer %d, round %d, fragment %d: applied, update norm %.4g", *where, norm)
        note_absences(self.world, self.books, self.log)

    def _drain(self) -> None:
        """Collect early what is still in flight, so that the last anchor holds every message."""
        for index, replica in enumerate(self.world.replicas):
            with self.world.turn(index), self.books.clock.sync(), advised(self.config):
                drain(replica, self.world.transport)
        note_absences(self.world, self.books, self.log)

    def _evaluate(self) -> None:
        if not self.world.is_main:
            return
        self.books.validation = self._evaluated("validation")

    def _evaluated(self, split: str) -> Evaluation:
        result = evaluate_anchor(self.world, self.dataset, split, self.settings)
        check_finite(f"{split}_loss", result.loss, f"at step {self.books.step}", self.config)
        if self.log is not None:
            self.log.write(
                "evaluation",
                split=split,
                step=self.books.step,
                round=self.first.rounds,
                tokens=self.books.tokens,
                bytes_sent=self.traffic.sent,
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
        if not self.world.is_main:
            return
        with self.world.turn(0) as replica:
            self.books.delta_norm, self.books.residual_norm = replica.delta_norm(), replica.residual_norm()
        if self.log is None:
            return
        self.log.write(
            "step",
            step=step,
            round=self.first.rounds,
            tokens=self.books.tokens,
            train_loss=train_loss,
            lr=_learning_rate(self.first, step),
            bytes_sent=self.traffic.sent,
            bytes_received=self.traffic.received,
            round_bytes=self.books.round_bytes,
            compression=self._compression(),
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
                bytes_sent=self.traffic.sent,
                seconds_left=elapsed / step * (steps - step),
                round=self.first.rounds,
                round_bytes=self.books.round_bytes,
                compression=self._compression(),
                delta_norm=self.books.delta_norm,
                residual_norm=self.books.residual_norm,
                update_norm=self.books.update_norm,
                sync_fraction=self.books.clock.in_sync / elapsed,
            )
        )

    def _compression(self) -> float | None:
        sent = self.traffic.sent
        return self.first.dense_bytes() / sent if sent else None

    def summary(self, label: str, algorithm: Algorithm) -> dict[str, Any]:
        """Figures of the finished run; the test split is read here for the first time."""
        seconds, in_sync = self.books.clock.total, self.books.clock.in_sync
        if not self.world.is_main:
            return {}
        assert self.books.validation is not None
        held_out = self._evaluated("test")
        traffic = self.traffic
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
            "parameters": sum(spec.numel for spec in self.first.specs),
            "bytes_sent_per_replica": traffic.sent,
            "bytes_received_per_replica": traffic.received,
            "dense_bytes_per_replica": self.first.dense_bytes(),
            "compression": self._compression(),
            "seconds": seconds,
            "seconds_in_sync": in_sync,
            "corpus": self.corpus[0],
            "corpus_sha256": self.corpus[1],
            "digest": self.first.digest(),
            "settings": dict(recipe.settings) if recipe else {},
        }


def _learning_rate(replica: Replica, step: int) -> float | None:
    """Learning rate of the local phase, or of the outer optimizer where gradients are sent."""
    local, outer = replica.algorithm.local, replica.algorithm.outer
    spec: OptimizerSpec | None = local.optimizer if isinstance(local, InnerSteps) else getattr(outer, "spec", None)
    rate = spec.lr if spec is not None else getattr(outer, "lr", None)
    return None if rate is None else value_at(rate, step)
