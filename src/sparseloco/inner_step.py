"""One inner step of one replica: its share of the batch, its gradients, and its optimizer."""

from __future__ import annotations

from torch import Tensor, nn

from sparseloco.absences import step_if_finite
from sparseloco.books import Books
from sparseloco.data import TrainSampler
from sparseloco.evaluation import World, autocast
from sparseloco.model import next_token_loss
from sparseloco.replica import Replica
from sparseloco.settings import RunConfig, TrainConfig
from sparseloco.whole import sums


def inner_step(world: World, index: int, sampler: TrainSampler, books: Books, config: RunConfig) -> float | None:
    """Train a replica, in its turn, for the step that ``books`` has counted; all its shards must.

    Args:
        world: Where it lives.
        index: Its place in ``world.replicas``.
        sampler: Of the train split.
        books: Count steps and samples.
        config: Settings of the run.

    Returns:
        Its loss; None if it sits out the rest of the round and only counts steps, since its numbers were bad or the
        others are about to close the round.

    Raises:
        DivergenceError: if the loss is not finite and the settings say ``stop``.
    """
    replica = world.replicas[index]
    hurries = world.must_hurry(index)
    if hurries:
        books.tokens -= config.train.batch_size * config.train.sequence_length
    if hurries or replica.is_abstaining:
        replica.stepped()
        return None
    places = _places_of(replica, world.slot(index), config.train)
    batch = sampler.batch(places, books.data_step - 1, config.train.batch_size * world.num_slots)
    loss = accumulate_gradients(world.model, batch, config.train)
    given = step_if_finite(replica, sums(replica, loss)[0] / replica.shards.count, books.step, config)
    world.note_loss(index, given)
    return given


def accumulate_gradients(model: nn.Module, batch: Tensor, settings: TrainConfig) -> float:
    """Gradient of the mean loss over ``batch`` in ``accumulation`` equal parts; returns that loss."""
    total = 0.0
    for part in batch.chunk(settings.accumulation):
        with autocast(settings):
            loss = next_token_loss(model, part) / settings.accumulation
        loss.backward()
        total += float(loss.detach())
    return total


def _places_of(replica: Replica, slot: int, settings: TrainConfig) -> range:
    """Places in the order of samples of what this replica sees in a step, or this shard of it."""
    share = settings.batch_size // replica.shards.count
    first = slot * settings.batch_size + replica.shards.rank * share
    return range(first, first + share)
