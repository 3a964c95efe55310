"""N replicas over one shared model object: parameters, buffers and random state are swapped, without threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sparseloco.algorithm import Algorithm
from sparseloco.errors import ConfigError
from sparseloco.keys import derive_key
from sparseloco.replica import Replica
from sparseloco.transport import Loopback, advance, settle

if TYPE_CHECKING:
    from sparseloco.settings import RunConfig  # not at run time, since simulations of one's own need no files

_RNG_SALT = 0x5EED


@dataclass
class _Seat:
    """One replica's own copy of everything in the model that changes."""

    replica: Replica
    tensors: list[Tensor]
    rng: Tensor


class Cohort:
    """``num_replicas`` replicas of ``model``, all starting from its present values.

    The model object is only a stage: inside ``with cohort.turn(i)`` it holds the parameters, buffers and random
    state of replica i. Gradients do not outlive a turn of :meth:`advance`.

    Args:
        model: Any module; its values are copied.
        algorithm: What all replicas run.
        num_replicas: R.
        seed: Seed of the replicas; each draws from its own stream.
        nonfinite: As of :class:`~sparseloco.replica.Replica`.

    Example:
        >>> from sparseloco import presets, sgd
        >>> model = nn.Linear(2, 1)
        >>> cohort = Cohort(model, presets.local_sgd(inner_steps=1, inner=sgd(0.1)), num_replicas=2)
        >>> for step in range(3):
        ...     for i in range(2):
        ...         with cohort.turn(i):
        ...             model(torch.ones(1, 2) * i).sum().backward()
        ...             cohort.advance(i)
        ...     cohort.settle()
        >>> cohort.replicas[0].digest() == cohort.replicas[1].digest()
        True
    """

    def __init__(
        self, model: nn.Module, algorithm: Algorithm, num_replicas: int, *, seed: int = 0, nonfinite: str = "abstain"
    ) -> None:
        self.model = model
        self.transport = Loopback(num_replicas)
        self._stage = [*model.parameters(), *model.buffers()]
        start = [t.data for t in self._stage]
        self._seats: list[_Seat] = []
        for peer in range(num_replicas):
            tensors = [t.clone() for t in start]
            self._swap_in(tensors)
            replica = Replica(model, algorithm, peer=peer, seed=seed, nonfinite=nonfinite)
            self.transport.connect(replica)
            self._seats.append(_Seat(replica, tensors, replica_rng_state(seed, peer)))
        self._swap_in(start)
        self._on_stage: int | None = None

    @property
    def replicas(self) -> list[Replica]:
        """The replicas, by peer number."""
        return [seat.replica for seat in self._seats]

    @property
    def is_main(self) -> bool:
        """A simulation is one process, and that is the one that writes."""
        return True

    @property
    def evaluates(self) -> bool:
        """It holds all replicas, whole."""
        return True

    def mean(self, value: float) -> float:
        """Mean over processes: there is one."""
        return value

    @property
    def stands_alone(self) -> bool:
        """A run of its own is all that it is."""
        return False

    @property
    def num_slots(self) -> int:
        """As many as replicas."""
        return len(self._seats)

    def slot(self, index: int) -> int:
        """The number of the peer."""
        return index

    def must_hurry(self, index: int) -> bool:
        """All wait for all."""
        del index
        return False

    def note_loss(self, index: int, loss: float | None) -> None:
        """It is in the log."""

    def catch_up(self) -> int:
        """Nobody goes on without the others."""
        return self._seats[0].replica.step

    @contextmanager
    def turn(self, peer: int) -> Iterator[Replica]:
        """The model is replica ``peer`` inside this block; afterwards it is what it was before."""
        seat = self._seats[peer]
        outer, self._on_stage = self._on_stage, peer
        before, rng = [t.data for t in self._stage], torch.get_rng_state()
        self._swap_in(seat.tensors)
        torch.set_rng_state(seat.rng)
        try:
            yield seat.replica
        finally:
            seat.tensors = [t.data for t in self._stage]
            seat.rng = torch.get_rng_state()
            torch.set_rng_state(rng)
            self._swap_in(before)
            self._on_stage = outer

    def advance(self, peer: int) -> None:
        """Inner step and post of one replica; call it inside its turn, after ``backward``.

        Raises:
            ConfigError: if another replica is on the stage, or none.
        """
        if self._on_stage != peer:
            raise ConfigError(f"peer={peer}: must be on the stage; call advance inside `with cohort.turn({peer})`")
        advance(self._seats[peer].replica, self.transport)

    def settle(self) -> None:
        """Collect and apply for all replicas; call it after all have advanced."""
        for peer, seat in enumerate(self._seats):
            if seat.replica.due():
                with self.turn(peer):
                    settle(seat.replica, self.transport)

    def _swap_in(self, tensors: list[Tensor]) -> None:
        for stage, tensor in zip(self._stage, tensors, strict=True):
            stage.data = tensor


def replica_rng_state(seed: int, peer: int, shard: int = 0) -> Tensor:
    """State of the CPU generator that replica ``peer`` starts with; the same in a process of its own.

    The first shard has that of a replica that is not sharded, each other one a state of its own.
    """
    generator = torch.Generator()
    generator.manual_seed(derive_key(seed, peer, _RNG_SALT, *([shard] if shard else [])))
    return generator.get_state()


def check_simulated(config: RunConfig) -> None:
    """Refuse shards in one process.

    Raises:
        ConfigError: if the settings ask for them.
    """
    if config.train.shards > 1:
        raise ConfigError(
            f"train.shards={config.train.shards}: must be 1 where all replicas live in one process; add --processes, "
            "or start one rank per shard with torchrun"
        )
