"""What a whole replica has sent and received, and what it would have sent without compression."""

from __future__ import annotations

from sparseloco.algorithm import Algorithm
from sparseloco.evaluation import World
from sparseloco.local import InnerSteps, OptimizerSpec
from sparseloco.schedule import value_at
from sparseloco.transport import Traffic
from sparseloco.whole import sums


class Meter:
    """Bytes of the first replica of a process, all its shards together.

    Attributes:
        traffic: Frame bytes since the start.
        dense_bytes: Float32 bytes of all that was posted.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.traffic = Traffic(0, 0)
        self._seen: Traffic | None = None  # after a resume one shard may go on counting for all, so the first asks
        self.dense_bytes = 0

    def read(self) -> None:
        """Count anew; shards ask each other only where something was sent or received, which is at the same steps."""
        replica = self._world.replicas[0]
        own = self._world.transport.traffic(replica.peer)
        if own != self._seen:
            self._seen = own
            sent, received, self.dense_bytes = map(int, sums(replica, *own, replica.dense_bytes()))
            self.traffic = Traffic(sent, received)

    @property
    def compression(self) -> float | None:
        """Dense bytes over bytes sent; None before the first round."""
        return self.dense_bytes / self.traffic.sent if self.traffic.sent else None


def learning_rate(algorithm: Algorithm, step: int) -> float | None:
    """Learning rate of the local phase, or of the outer optimizer where gradients are sent."""
    local, outer = algorithm.local, algorithm.outer
    spec: OptimizerSpec | None = local.optimizer if isinstance(local, InnerSteps) else getattr(outer, "spec", None)
    rate = spec.lr if spec is not None else getattr(outer, "lr", None)
    return None if rate is None else value_at(rate, step)
