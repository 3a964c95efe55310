"""What the training loop remembers from one step to the next, beside its replicas, as plain values."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sparseloco.evaluation import Evaluation
from sparseloco.settings import TrainConfig

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
_LATER = ("abstentions", "skipped_bytes")
"""What checkpoints of an earlier version lack; 0 then."""


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
        skipped_bytes: Dense float32 bytes of the rounds that the first replica was not there for.
        in_vain: By fragment the last round without a contribution of this process, and how many there were in a row.
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
    skipped_bytes: int = 0
    in_vain: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    validation: Evaluation | None = None
    clock: Clock = field(default_factory=Clock)

    def next_step(self, settings: TrainConfig) -> None:
        """Count the step that begins."""
        self.step += 1
        self.data_step += 1
        self.tokens += settings.workers * settings.batch_size * settings.sequence_length

    def move_to(self, step: int) -> None:
        """Count on from ``step``: the steps up to there were made by others, on other samples."""
        self.data_step += step - self.step
        self.step = step

    def shared(self) -> dict[str, Any]:
        """What is the same at every process, as plain values."""
        seen = self.validation
        return {
            **{name: getattr(self, name) for name in (*_PLAIN, *_LATER)},
            "validation": [seen.loss, seen.bits_per_byte, seen.tokens] if seen else None,
            "seconds": self.clock.total,
            "seconds_in_sync": self.clock.in_sync,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`shared`."""
        for name in _PLAIN:
            setattr(self, name, state[name])
        for name in _LATER:
            setattr(self, name, state.get(name, 0))
        self.validation = Evaluation(*state["validation"]) if state["validation"] else None
        self.clock = Clock(time.perf_counter() - state["seconds"], state["seconds_in_sync"])
