"""One inner step of one replica: its share of the batch, its gradients, and its optimizer."""

from __future__ import annotations

from torch import Tensor, nn

from sparseloco.absences import step_if_finite
from sparseloco.books import Books
from sparseloco.data import TrainSampler
from sparseloco.evaluation import autocast
from sparseloco.model import next_token_loss
from sparseloco.replica import Replica
from sparseloco.settings import RunConfig, TrainConfig
from sparseloco.whole import sums


def inner_step(
    model: nn.Module, replica: Replica, sampler: TrainSampler, books: Books, config: RunConfig
) -> float | None:
    """Train the replica for the step that ``books`` has counted; all its shards must.

    Returns:
        Its loss; None if it sits out the rest of the round and only counts steps.

    Raises:
        DivergenceError: if the loss is not finite and the settings say ``stop``.
    """
    if replica.is_abstaining:
        replica.stepped()
        return None
    batch = sampler.batch(
        _slots_of(replica, config.train), books.data_step - 1, config.train.batch_size * config.train.workers
    )
    loss = accumulate_gradients(model, batch, config.train)
    return step_if_finite(replica, sums(replica, loss)[0] / replica.shards.count, books.step, config)


def accumulate_gradients(model: nn.Module, batch: Tensor, settings: TrainConfig) -> float:
    """Gradient of the mean loss over ``batch`` in ``accumulation`` equal parts; returns that loss."""
    total = 0.0
    for part in batch.chunk(settings.accumulation):
        with autocast(settings):
            loss = next_token_loss(model, part) / settings.accumulation
        loss.backward()
        total += float(loss.detach())
    return total


def _slots_of(replica: Replica, settings: TrainConfig) -> range:
    """Places in the order of samples of what this replica sees in a step, or this shard of it."""
    share = settings.batch_size // replica.shards.count
    first = replica.peer * settings.batch_size + replica.shards.rank * share
    return range(first, first + share)
