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
        skipped_bytes: What of that the first replica was not there for, which counts for nothing.
    """

    def __init__(self, world: World, skipped_bytes: int = 0) -> None:
        self._world = world
        self.skipped_bytes = skipped_bytes
        self.traffic = Traffic(0, 0)
        # After a resume one shard may go on counting for all, so the first call asks.
        self._seen: tuple[Traffic, int] | None = None
        self.dense_bytes = 0

    def read(self) -> None:
        """Count anew; shards ask each other only where something was sent or received, which is at the same steps."""
        replica = self._world.replicas[0]
        own = self._world.transport.traffic(replica.peer)
        if (own, replica.rounds) != self._seen:  # over a store, bytes of a round may go and come after it was posted
            self._seen = own, replica.rounds
            sent, received, dense = map(int, sums(replica, *own, replica.dense_bytes()))
            self.traffic, self.dense_bytes = Traffic(sent, received), dense - self.skipped_bytes

    def skip(self) -> None:
        """Leave out the rounds that were closed without the first replica since bytes were last read."""
        replica = self._world.replicas[0]
        self.skipped_bytes = int(sums(replica, replica.dense_bytes())[0]) - self.dense_bytes

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
