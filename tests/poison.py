"""Inner steps that go wrong at one replica, the same one in every world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from sparseloco.algorithm import Algorithm
from sparseloco.local import InnerSteps
from sparseloco.simulate import replica_rng_state


@dataclass(frozen=True)
class Poisoned(InnerSteps):
    """After step ``at``, a parameter of replica ``peer`` is not a number.

    A local phase does not know whose it is; but each replica draws from a stream of its own, the same in every world.
    """

    at: int = 1
    peer: int = 1

    def step_(self, params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None, step: int) -> None:
        super().step_(params, optimizer, step)
        stream = torch.Generator()
        stream.set_state(replica_rng_state(0, self.peer))
        if step == self.at and stream.initial_seed() == torch.initial_seed():
            next(iter(params.values())).data.view(-1)[0] = float("nan")


def poisoned(algorithm: Algorithm, at: int) -> Algorithm:
    """The same algorithm with :class:`Poisoned` inner steps."""
    local = algorithm.local
    assert isinstance(local, InnerSteps)
    return replace(algorithm, local=Poisoned(local.optimizer, local.clip_norm, at=at))
