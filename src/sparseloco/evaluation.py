"""Held-out loss of the agreed parameters, and the world in which replicas live.

A *world* holds the replicas of this process: all of them in a simulation, one of them in a process of a group.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from sparseloco.data import Dataset, evaluation_batches
from sparseloco.model import next_token_loss
from sparseloco.replica import Replica
from sparseloco.settings import TrainConfig
from sparseloco.transport import Transport


class World(Protocol):
    """The replicas of this process and the way to the others."""

    @property
    def model(self) -> nn.Module:
        """The stage on which replicas take turns."""
        ...

    @property
    def transport(self) -> Transport:
        """The way to the other replicas."""
        ...

    @property
    def replicas(self) -> list[Replica]:
        """Replicas that live here, by peer number."""
        ...

    @property
    def is_main(self) -> bool:
        """Whether this process evaluates and writes the run folder."""
        ...

    def turn(self, index: int, /) -> AbstractContextManager[Replica]:
        """The model is replica ``replicas[index]`` inside this block."""
        ...

    def mean(self, value: float) -> float:
        """Mean over all processes of the run."""
        ...


@dataclass
class Evaluation:
    """Held-out loss of an anchor.

    Attributes:
        loss: Nats per token.
        bits_per_byte: The same per byte of text, comparable across tokenizers.
        tokens: Predicted tokens.
    """

    loss: float
    bits_per_byte: float
    tokens: int


def evaluate_anchor(world: World, dataset: Dataset, split: str, settings: TrainConfig) -> Evaluation:
    """Loss of the agreed parameters on held-out text, the first windows of the split."""
    nats, tokens, num_bytes = 0.0, 0, 0
    batches = evaluation_batches(
        dataset.split(split), settings.sequence_length, settings.batch_size, settings.evaluation_tokens
    )
    with world.turn(0) as replica, anchored(world.model, replica), torch.no_grad():
        for batch in batches:
            with autocast(settings):
                loss = next_token_loss(world.model, batch)
            count = batch[:, 1:].numel()
            nats += float(loss) * count
            tokens += count
            num_bytes += int(dataset.token_bytes[batch[:, 1:]].sum())
    return Evaluation(nats / tokens, nats / max(1, num_bytes) / math.log(2), tokens)


def autocast(settings: TrainConfig) -> torch.autocast:
    """Mixed precision around forward passes, if the settings say so."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=settings.autocast == "bf16")


@contextlib.contextmanager
def anchored(model: nn.Module, replica: Replica) -> Iterator[None]:
    """The model holds the anchor inside this block, in evaluation mode."""
    was_training = model.training
    anchor = replica.anchor()
    # Synced buffers are in the anchor under their own names.
    tensors = [*model.named_parameters(), *model.named_buffers()]
    before = [(tensor, tensor.data) for name, tensor in tensors if name in anchor]
    for name, tensor in tensors:
        if name in anchor:
            tensor.data = anchor[name].to(tensor.dtype)
    model.eval()
    try:
        yield
    finally:
        for param, data in before:
            param.data = data
        model.train(was_training)
