"""A world of one replica per process, or of one shard of it; the processes are the ranks of a group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sparseloco.algorithm import Algorithm
from sparseloco.replica import Replica
from sparseloco.simulate import replica_rng_state
from sparseloco.transport import ProcessGroup


class Solo:
    """One replica over ``shards`` processes; shard r of peer p is rank ``p * shards + r``.

    Args:
        build: Makes the model, the same at every rank.
        algorithm: What all replicas run.
        seed: As in a simulation.
        shards: Processes of one replica, which divide the ranks of the group.
        nonfinite: As of :class:`~sparseloco.replica.Replica`.
        facts: As in :class:`sparseloco.ProcessGroup`.

    Raises:
        ConfigError: if the algorithm or the edges of its panels do not fit the shards.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        algorithm: Algorithm,
        *,
        seed: int,
        shards: int = 1,
        nonfinite: str = "abstain",
        facts: Mapping[str, str] | None = None,
    ) -> None:
        self.model = build()
        if shards == 1:
            self.transport = ProcessGroup(facts=facts)
        else:
            ranks = torch.distributed.get_world_size()
            mesh = init_device_mesh("cpu", (ranks // shards, shards), mesh_dim_names=("peers", "shards"))
            _shard(self.model, mesh["shards"])
            self.transport = ProcessGroup(mesh.get_group("peers"), facts=facts)
        self._replica = Replica(self.model, algorithm, peer=self.transport.rank, seed=seed, nonfinite=nonfinite)
        self.transport.connect(self._replica)
        torch.set_rng_state(replica_rng_state(seed, self.transport.rank, self._replica.shards.rank))

    @property
    def replicas(self) -> list[Replica]:
        """The one of this process."""
        return [self._replica]

    @property
    def is_main(self) -> bool:
        """Rank 0 writes."""
        return self.evaluates and self._replica.shards.rank == 0

    @property
    def evaluates(self) -> bool:
        """All shards of peer 0 run the model together."""
        return self._replica.peer == 0

    @property
    def stands_alone(self) -> bool:
        """All ranks stop together."""
        return False

    @property
    def num_slots(self) -> int:
        """As many as replicas."""
        return torch.distributed.get_world_size() // self._replica.shards.count

    def slot(self, index: int) -> int:
        """The number of the peer, whichever shard of it this is."""
        del index  # there is one
        return self._replica.peer

    def must_hurry(self, index: int) -> bool:
        """All wait for all."""
        del index
        return False

    def note_loss(self, index: int, loss: float | None) -> None:
        """It is in the log."""

    def catch_up(self) -> int:
        """Nobody goes on without the others."""
        return self._replica.step

    def turn(self, index: int) -> AbstractContextManager[Replica]:
        """The model is always this process's replica."""
        return contextlib.nullcontext(self._replica)

    def mean(self, value: float) -> float:
        """Mean over all ranks: over the shards of each replica, then over the replicas in their order."""
        rows = self._replica.shards.gather(value)
        return self.transport.mean(sum(row[0] for row in rows) / len(rows))


def _shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model with FSDP2 in place: each of its layers by itself, then all that is left.

    Layers are what the outermost lists of modules hold, so that the experts in a layer stay one part with it.
    """
    from torch.distributed.fsdp import fully_shard  # it takes its time to import, and replicas of one process need none

    inside: list[str] = []
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in inside):
            inside.append(path)
            for layer in module:
                if any(True for _ in layer.parameters()) and not isinstance(layer, (nn.ModuleList, nn.ModuleDict)):
                    fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
