"""Figures and values of a whole replica from those of its shards; of one that is not sharded they are its own.

Whatever is here asks all shards of the replica, so all of them must call it at the same moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from sparseloco.bits import add_digests
from sparseloco.evaluation import World, anchored
from sparseloco.replica import Replica
from sparseloco.sharding import whole

_WORDS = range(0, 32, 8)
"""Where the 32-bit words of a digest begin in its hex digits; a float64 holds such a number exactly."""


def sums(replica: Replica, *values: float) -> list[float]:
    """The sum of each number over the shards."""
    return [sum(column) for column in zip(*replica.shards.gather(*values), strict=True)]


def norms(replica: Replica, *values: float) -> list[float]:
    """The 2-norm over all shards of what has these norms on each."""
    rows = replica.shards.gather(*values)
    return list(values) if len(rows) == 1 else [math.hypot(*column) for column in zip(*rows, strict=True)]


def digest_of(replica: Replica) -> str:
    """Digest of the shared state of the whole replica."""
    mine = replica.digest()
    rows = replica.shards.gather(*(int(mine[at : at + 8], 16) for at in _WORDS))
    return add_digests(["".join(f"{int(word):08x}" for word in row) for row in rows])


@contextmanager
def whole_model(world: World, build: Callable[[], nn.Module]) -> Iterator[nn.Module]:
    """A model that is not sharded with the anchor's values; at the process that writes, elsewhere without values.

    A sharded anchor is gathered tensor by tensor, and kept by that process alone.

    Args:
        world: All processes that evaluate must enter.
        build: Makes a model like that of the world, on no shards.
    """
    with world.turn(0) as replica, anchored(world.model, replica):
        yield world.model if replica.shards.count == 1 else _gathered(world, build)


@torch.no_grad()
def _gathered(world: World, build: Callable[[], nn.Module]) -> nn.Module:
    target = build() if world.is_main else nn.Module()
    for name, param in world.model.named_parameters():
        full = whole(param)
        if world.is_main:
            target.get_parameter(name).copy_(full)
    if world.is_main:
        for name, buffer in world.model.named_buffers():
            target.get_buffer(name).copy_(buffer)
    return target
