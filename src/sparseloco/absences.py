"""Peers that contributed nothing to a round: counted, named in the log, and said aloud."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator

from sparseloco.books import Books
from sparseloco.errors import AllAbstainedError
from sparseloco.evaluation import World, calmer, check_finite
from sparseloco.replica import Replica
from sparseloco.settings import RunConfig
from sparseloco.types import Key, name_of
from sparseloco.writers import FanOut

LOSS = "train_loss"
"""What a replica names as not finite if no tensor of it was looked at."""

MOST_IN_VAIN = 3
"""Rounds in a row without a contribution after which a peer that the others do without gives up."""

logger = logging.getLogger(__name__)


def step_if_finite(replica: Replica, loss: float, step: int, config: RunConfig) -> float | None:
    """Finish an inner step whose gradients lie in the parameters; all shards of a replica must ask.

    Returns:
        The loss, or None if it is not finite here or at another shard: then the replica abstains.

    Raises:
        DivergenceError: instead, if the settings say ``stop``.
    """
    if config.train.nonfinite == "stop":
        with replica.shards.jointly(LOSS):
            check_finite(LOSS, loss, f"at step {step} of peer {replica.peer}, round {replica.rounds}", config)
    if replica.shards.agree(math.isfinite(loss)):
        replica.local_step()
        return loss
    replica.abstain(LOSS)
    replica.stepped()
    return None


def note_absences(world: World, books: Books, log: FanOut | None, config: RunConfig) -> None:
    """Count and log who was absent from the rounds just applied; all processes must ask.

    Raises:
        AllAbstainedError: if the replica of this process, which the others do without, had nothing to give for so
            many rounds that it never will.
    """
    first = world.replicas[0]
    causes = [LOSS, *(f"delta of {spec.name}" for spec in first.table)]
    here = {replica.peer for replica in world.replicas}
    known = {(a.peer, a.key): causes.index(a.cause) for r in world.replicas for a in r.absent if a.cause}
    for peer, key, _ in first.absent:
        # Only the peer itself knows; a mean over those who do is what they say. After a resume it may not be there.
        number = known.get((peer, key))
        told = world.mean(float(number is not None))
        cause = causes[round(world.mean(float(number or 0)) / told)] if told else None
        books.abstentions += 1
        if log is not None:
            where = {"round": key.round, "fragment": key.fragment, "peer": name_of(peer)}
            log.write("abstained", step=books.step, **where, cause=cause)
        why = f"since {cause} was not finite" if cause else "for a cause that no peer here knows"
        text = f"peer {name_of(peer)}, round {key.round}: contributed nothing, {why}"
        logger.info("%s", text)
        if world.is_main and peer not in here:  # those here have warned themselves
            warnings.warn(text, stacklevel=2)
        if world.stands_alone and peer in here:
            _check_hope(books, key, config)
    for replica in world.replicas:
        replica.absent.clear()


def _check_hope(books: Books, key: Key, config: RunConfig) -> None:
    """Count rounds in a row without a contribution of one's own; a number that is bad once may be good again."""
    last, before = books.in_vain.get(key.fragment, (-2, 0))
    count = before + 1 if key.round == last + 1 else 1
    books.in_vain[key.fragment] = key.round, count
    if count >= MOST_IN_VAIN:
        raise AllAbstainedError(
            f"round {key.round}, fragment {key.fragment}=no contribution: must have one of this peer, whose numbers "
            f"were not finite in {count} rounds in a row; look at this machine and its text, or, if other peers "
            f"fail alike, start another run and {calmer(config)}"
        )


@contextlib.contextmanager
def advised(config: RunConfig) -> Iterator[None]:
    """A round to which nobody contributes ends the run, with advice in the words of its settings."""
    try:
        yield
    except AllAbstainedError as error:
        raise AllAbstainedError(f"{str(error).partition(';')[0]}; {calmer(config)}") from error
