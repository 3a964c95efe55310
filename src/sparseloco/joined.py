"""A world of one replica whose peers meet in a store: every peer is main of its own run folder."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import nn

from sparseloco.algorithm import Algorithm
from sparseloco.keys import derive_key
from sparseloco.local import InnerSteps
from sparseloco.peers.member import check_run
from sparseloco.peers.slots import Claim, claim_slot
from sparseloco.replica import Replica
from sparseloco.schedule import value_at
from sparseloco.settings import TrainConfig
from sparseloco.simulate import replica_rng_state
from sparseloco.transport.object_store import ObjectStore

logger = logging.getLogger("sparseloco.peers")


class Joined:
    """One replica in this process, which joins a run in a store at its first :meth:`catch_up`.

    Until then its state may be that of a checkpoint. Learning rates follow the step that all peers share; after a step
    that was taken over from the others the inner one rises over ``policy.rejoin_warmup_steps``.

    Args:
        model: As it is at the start of the run.
        algorithm: That of the run.
        transport: Way to the others; whoever made it leaves it.
        settings: Of the training.

    Raises:
        ConfigError: if model or algorithm are not those of the run.
    """

    def __init__(self, model: nn.Module, algorithm: Algorithm, transport: ObjectStore, settings: TrainConfig) -> None:
        self.model = model
        self.transport = transport
        self._policy = transport.run.policy
        self._claim: Claim | None = None
        self._since = 0
        self._step_tokens = settings.batch_size * settings.sequence_length
        self._trained: deque[bool] = deque(maxlen=algorithm.schedule.every)
        seed = derive_key(settings.seed, int(transport.peer_id[:15], 16))
        mine = with_warmup(algorithm, self._warmth)
        self._replica = Replica(model, mine, seed=seed, nonfinite=settings.nonfinite)
        check_run(transport.run, self._replica)
        torch.set_rng_state(replica_rng_state(seed, 0))

    @property
    def replicas(self) -> list[Replica]:
        """The one of this process; here it is peer 0, the store knows it by its key."""
        return [self._replica]

    @property
    def is_main(self) -> bool:
        """It has a run folder of its own."""
        return True

    @property
    def evaluates(self) -> bool:
        """It holds a whole replica."""
        return True

    @property
    def stands_alone(self) -> bool:
        """The others go on without it, whenever it leaves."""
        return True

    @property
    def num_slots(self) -> int:
        """Data slots of the run, most of which may be nobody's."""
        return self._policy.slots

    def slot(self, index: int) -> int:
        """The data slot that this peer has claimed."""
        del index  # there is one
        if self._claim is None:
            self._claim = claim_slot(self.transport.store, self.transport.peer_id, self._policy.slots)
            if self._claim.shared:
                warnings.warn(
                    f"data slot {self._claim.slot}: may be read by another peer too ({self._claim.shared})",
                    stacklevel=2,
                )
        return self._claim.slot

    def turn(self, index: int) -> AbstractContextManager[Replica]:
        """The model is always this process's replica."""
        del index
        return contextlib.nullcontext(self._replica)

    def mean(self, value: float) -> float:
        """Mean over the processes that run this loop together: there is one, whose peers may be anywhere in time."""
        return value

    def must_hurry(self, index: int) -> bool:
        """Whether the deadline nears, once a step of this round was made; the weight is of the steps that were.

        A fragment posts what the last ``every`` steps have given, whichever fragment it is.
        """
        del index  # there is one
        every = self._replica.algorithm.schedule.every
        hurries = self._replica.step % every > 0 and any(self._trained) and self.transport.is_late
        if hurries and self._trained[-1]:
            text = f"round {self._replica.rounds}: posts after {self._replica.step % every} of {every} steps, in time"
            logger.info("%s", text)
        self._trained.append(not hurries)
        self._replica.weight = max(1, sum(self._trained)) * self._step_tokens
        return hurries

    def note_loss(self, index: int, loss: float | None) -> None:
        """Say it in this peer's lease."""
        del index  # there is one
        self.transport.report(loss=loss)

    def catch_up(self) -> int:
        """Join the run, or follow the others if they went on without this peer."""
        before = self._replica.step
        self.transport.connect(self._replica)
        if self._replica.step != before:
            self._trained.clear()
            self._since = self._replica.step
        return self._replica.step

    def _warmth(self, step: int) -> float:
        """Share of the inner learning rate at a step, counted from 1."""
        if step <= self._since or not self._since:
            return 1.0
        return min(1.0, (step - self._since) / (self._policy.rejoin_warmup_steps + 1))


def tokens_per_round(algorithm: Algorithm, settings: TrainConfig) -> int:
    """Tokens that one replica sees between two messages of a fragment: the weight of each of them."""
    return algorithm.schedule.every * settings.batch_size * settings.sequence_length


def with_warmup(algorithm: Algorithm, share: Callable[[int], float]) -> Algorithm:
    """The algorithm with a share of its inner learning rate at each step; one that sends gradients has none."""
    local = algorithm.local
    if not isinstance(local, InnerSteps) or local.optimizer is None:
        return algorithm
    rate = local.optimizer.lr
    optimizer = replace(local.optimizer, lr=lambda step: share(step) * value_at(rate, step))
    return replace(algorithm, local=replace(local, optimizer=optimizer))
