"""Held-out loss of the agreed parameters or of any model, and the world in which replicas live.

A *world* holds the replicas of this process: all of them in a simulation, one of them in a process of a group.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from sparseloco.data import Dataset, evaluation_batches
from sparseloco.errors import DivergenceError
from sparseloco.model import next_token_loss
from sparseloco.replica import Replica
from sparseloco.settings import RunConfig, TrainConfig, optimizer_keys
from sparseloco.sharding import local_views, reshard
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
        """Whether this process writes the run folder."""
        ...

    @property
    def evaluates(self) -> bool:
        """Whether this process holds the replica whose anchor is evaluated, or a shard of it."""
        ...

    def turn(self, index: int, /) -> AbstractContextManager[Replica]:
        """The model is replica ``replicas[index]`` inside this block."""
        ...

    def mean(self, value: float) -> float:
        """Mean over all processes of the run."""
        ...

    @property
    def stands_alone(self) -> bool:
        """Whether the replica of this process may stop by itself, at any round border, since others do without it."""
        ...

    @property
    def num_slots(self) -> int:
        """Places among which the samples of a step are dealt out; one replica has one of them."""
        ...

    def slot(self, index: int, /) -> int:
        """The place of ``replicas[index]``, below ``num_slots``."""
        ...

    def must_hurry(self, index: int, /) -> bool:
        """Asked before every step: whether ``replicas[index]`` should post what it has instead of making this step."""
        ...

    def note_loss(self, index: int, loss: float | None, /) -> None:
        """Told the loss of every step that ``replicas[index]`` made, for whoever looks on; None: it was not finite."""
        ...

    def catch_up(self) -> int:
        """Go where the other replicas are, if they went on without those here; returns the step that is made then."""
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
    """Loss of the agreed parameters on held-out text, the first windows of the split.

    All processes that evaluate must call it; each of them sees all windows, so the figure is that of the whole model.
    """
    with world.turn(0) as replica, anchored(world.model, replica):
        return evaluate_split(world.model, dataset, split, settings)


def evaluate_split(model: nn.Module, dataset: Dataset, split: str, settings: TrainConfig) -> Evaluation:
    """Loss of a model as it is on the first windows of a split."""
    batches = evaluation_batches(
        dataset.split(split), settings.sequence_length, settings.batch_size, settings.evaluation_tokens
    )
    nats, tokens, num_bytes = 0.0, 0, 0
    for batch in batches:
        nats += _nats(model, batch, settings)
        tokens += batch[:, 1:].numel()
        num_bytes += int(dataset.token_bytes[batch[:, 1:]].sum())
    return _figures(nats, tokens, num_bytes)


def evaluate_text(
    model: nn.Module,
    encode: Callable[[str], Sequence[int]],
    end_token: int,
    texts: Iterable[str],
    settings: TrainConfig,
) -> Evaluation:
    """Loss of a model on whole documents, with any tokenizer.

    Every token of every document and the end token behind it is predicted once, in windows of ``sequence_length``;
    the bits are over all bytes of these documents.

    Args:
        model: In evaluation mode.
        encode: The tokenizer, without special tokens.
        end_token: What stands between documents, and before the first.
        texts: Documents; no further one is taken once there are ``evaluation_tokens`` tokens.
        settings: Lengths, batch size and precision.
    """
    row, num_bytes = [end_token], 0
    for text in texts:
        row += [*encode(text), end_token]
        num_bytes += len(text.encode())
        if len(row) > settings.evaluation_tokens:
            break
    length, nats = settings.sequence_length, 0.0
    starts = range(0, len(row) - 1, length)
    whole = [start for start in starts if start + length < len(row)]
    for first in range(0, len(whole), settings.batch_size):
        windows = [row[start : start + length + 1] for start in whole[first : first + settings.batch_size]]
        nats += _nats(model, torch.tensor(windows), settings)
    if len(whole) < len(starts):
        nats += _nats(model, torch.tensor([row[starts[-1] :]]), settings)
    return _figures(nats, len(row) - 1, num_bytes)


@torch.no_grad()
def _nats(model: nn.Module, batch: Tensor, settings: TrainConfig) -> float:
    """Sum of the losses of all predicted tokens."""
    with autocast(settings):
        loss = next_token_loss(model, batch)
    return float(loss) * batch[:, 1:].numel()


def _figures(nats: float, tokens: int, num_bytes: int) -> Evaluation:
    return Evaluation(nats / tokens, nats / max(1, num_bytes) / math.log(2), tokens)


def check_finite(name: str, loss: float, where: str, config: RunConfig) -> None:
    """Refuse to go on with a loss that is not finite.

    Raises:
        DivergenceError: naming the settings of this run that may help.
    """
    if math.isfinite(loss):
        return
    raise DivergenceError(f"{name}={loss} {where}: must be finite; {calmer(config)}")


def calmer(config: RunConfig) -> str:
    """Settings of a run that may keep its numbers finite, as advice."""
    used = optimizer_keys(config.algorithm.preset)
    rates = ["optimizer.lr"] if "lr" in used else []
    rates += [f"algorithm.{key}" for key in ("lr", "outer_lr") if key in config.algorithm.settings]
    clip = " or set optimizer.clip_norm" if "clip_norm" in used else ""
    return f"lower {' or '.join(rates)}, lengthen optimizer.warmup_steps{clip}"


def autocast(settings: TrainConfig) -> torch.autocast:
    """Mixed precision around forward passes, if the settings say so."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=settings.autocast == "bf16")


@contextlib.contextmanager
def anchored(model: nn.Module, replica: Replica) -> Iterator[None]:
    """The model holds the anchor inside this block, in evaluation mode; on a shard, what that shard holds of it."""
    was_training = model.training
    put_back = _copied_in(model, replica) if replica.shards.count > 1 else _swapped_in(model, replica)
    model.eval()
    try:
        yield
    finally:
        put_back()
        model.train(was_training)


def _swapped_in(model: nn.Module, replica: Replica) -> Callable[[], None]:
    """Exchange storage for that of the anchor, without a copy where it has the same type."""
    anchor = replica.anchor()
    # Synced buffers are in the anchor under their own names.
    tensors = [(name, tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()] if name in anchor]
    before = [(tensor, tensor.data) for _, tensor in tensors]
    for name, tensor in tensors:
        tensor.data = anchor[name].to(tensor.device, tensor.dtype)

    def put_back() -> None:
        for tensor, data in before:
            tensor.data = data

    return put_back


def _copied_in(model: nn.Module, replica: Replica) -> Callable[[], None]:
    """Write the anchor into the memory of the shards, where FSDP2 gathers from, and let go of what it has gathered."""
    anchor = replica.anchor()
    locals_ = [(view.tensor.data, anchor[name]) for name, view in local_views(model).items() if name in anchor]
    before = [local.clone() for local, _ in locals_]
    for local, value in locals_:
        local.copy_(value)

    def put_back() -> None:
        reshard(model)
        for (local, _), data in zip(locals_, before, strict=True):
            local.copy_(data)

    return put_back
