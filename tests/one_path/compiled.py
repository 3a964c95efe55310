"""Compiled models, whole and sharded, with a backend that counts how often it is asked to compile.

The backend runs what was captured as it is, so bits are those of the model that is not compiled: the kernels of the
default backend round in their own way, which is the model's business and not that of a round.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import register_optimizer_step_post_hook

from sparseloco import ProcessGroup
from tests.one_path import shards

KINDS = {"layers": "plain", "whole": "shallow"}
"""What is compiled, of ``shards.llama``; tracing takes most of the time."""


class Counting:
    """Compile by taking the graph as it is.

    Attributes:
        graphs: How often it was asked.
    """

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def compiled(model: Any, mesh: Any, how: str, backend: Any) -> nn.Module:
    """The model with FSDP2, compiled layer by layer before or as a whole afterwards."""
    torch._dynamo.reset()
    if how == "layers":
        for number, layer in enumerate(model.model.layers):
            model.model.layers[number] = torch.compile(layer, backend=backend)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["shards"])
    fully_shard(model, mesh=mesh["shards"])
    return torch.compile(model, backend=backend) if how == "whole" else model  # pyright: ignore


def train(rank: int, how: str) -> tuple[shards.Outcome, list[int]]:
    """Two replicas of two shards; the outcome, and the graphs that were compiled by the end of each step."""
    mesh, backend = shards.mesh_of(2), Counting()
    model = compiled(shards.llama(KINDS[how]), mesh, how, backend)
    graphs: list[int] = []
    handle = register_optimizer_step_post_hook(lambda *_: graphs.append(backend.graphs))
    try:
        with warnings.catch_warnings(action="ignore"):  # dynamo looks at gradients of what has none
            outcome = shards.run(
                model, shards.method("sparseloco", 2), ProcessGroup(mesh.get_group("peers")), rank // 2
            )
    finally:
        handle.remove()
        torch._dynamo.reset()
    return outcome, graphs
