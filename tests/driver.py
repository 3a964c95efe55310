"""Runs of the library on the toy model, and one row of settings per preset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from sparseloco import adamw, muon, presets
from sparseloco.algorithm import Algorithm
from sparseloco.replica import Replica
from sparseloco.simulate import Cohort
from sparseloco.types import Envelope, Key
from tests import toy

INNER = adamw(1e-2)

ROWS: dict[str, Callable[[], Algorithm]] = {
    "ddp": lambda: presets.ddp(inner=INNER, clip_norm=0.5),
    "local_sgd": lambda: presets.local_sgd(inner_steps=4, inner=INNER),
    "diloco": lambda: presets.diloco(inner_steps=4, inner=INNER, clip_norm=1.0),
    "streaming_diloco": lambda: presets.streaming_diloco(inner_steps=4, fragment_by="size", inner=INNER),
    "sparseloco": lambda: presets.sparseloco(inner_steps=4, k=3, tile=4, inner=INNER),
    "demo": lambda: presets.demo(lr=1e-2, k=3, tile=4, weight_decay=0.1),
    "ef_signsgd": lambda: presets.ef_signsgd(lr=1e-2),
    "powersgd": lambda: presets.powersgd(lr=1e-2, rank=2),
    "qsparse_local_sgd": lambda: presets.qsparse_local_sgd(inner_steps=4, k=3, chunk_size=16, inner=INNER),
    "sparseloco_delayed": lambda: presets.sparseloco(inner_steps=4, k=3, tile=4, delay=2, inner=INNER),
    "sparseloco_muon": lambda: presets.sparseloco(inner_steps=4, k=3, tile=4, inner=muon(1e-2)),
}
"""Every preset on the toy model, SparseLoCo with its messages in flight for two steps, and with Muon inside."""


def with_synced_buffers(algorithm: Algorithm) -> Algorithm:
    return replace(algorithm, sync_buffers=True)


def train(
    algorithm: Algorithm,
    *,
    peers: int,
    steps: int,
    model: nn.Module | None = None,
    dtype: torch.dtype = torch.float32,
    weights: Sequence[int] | None = None,
    same_data: bool = False,
) -> Cohort:
    """A cohort after ``steps`` inner steps."""
    cohort = Cohort(model or toy.net(dtype), algorithm, peers)
    for replica, weight in zip(cohort.replicas, weights or [1] * peers, strict=True):
        replica.weight = weight
    for step in range(1, steps + 1):
        for peer in range(peers):
            with cohort.turn(peer):
                toy.loss_of(cohort.model, toy.batch(step, 0 if same_data else peer, dtype)).backward()
                cohort.advance(peer)
        cohort.settle()
    return cohort


def anchor(cohort: Cohort) -> list[Tensor]:
    """The agreed parameters in the order of the model's; all replicas must have the same."""
    first, *rest = (replica.digest() for replica in cohort.replicas)
    assert all(digest == first for digest in rest), "replicas differ"
    found = cohort.replicas[0].anchor()
    return [found[name] for name, _ in cohort.model.named_parameters()]


def residual(replica: Replica) -> dict[str, Tensor]:
    """Residual blocks by path."""
    return {path: value for path, value in replica.private_state().items() if path.startswith("residual/")}


class Peer:
    """A replica with a model of its own, driven by hand: the test carries the messages."""

    def __init__(
        self, algorithm: Algorithm, peer: int = 0, model: nn.Module | None = None, nonfinite: str = "abstain"
    ) -> None:
        self.model = model or toy.net()
        self.replica = Replica(self.model, algorithm, peer=peer, nonfinite=nonfinite)
        self.dtype = next(self.model.parameters()).dtype

    def step(self) -> list[Envelope]:
        """Forward, backward, inner step; what it wants to send."""
        toy.loss_of(self.model, toy.batch(self.replica.step + 1, self.replica.peer, self.dtype)).backward()
        self.replica.local_step()
        return self.replica.outbox()

    def settle(self, mail: dict[Key, list[Envelope]]) -> None:
        """Apply what is due."""
        for key in self.replica.due():
            self.replica.apply(key, mail[key])


def lockstep(peers: Sequence[Peer], steps: int, mail: dict[Key, list[Envelope]]) -> None:
    """All peers make ``steps`` steps; ``mail`` holds every message ever sent, also those still in flight."""
    for _ in range(steps):
        for peer in peers:
            for envelope in peer.step():
                mail.setdefault(envelope.key, []).append(envelope)
        for peer in peers:
            peer.settle(mail)
