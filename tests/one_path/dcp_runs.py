"""Runs that checkpoint with ``torch.distributed.checkpoint``: saved by shards, loaded by another number of them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sparseloco import ProcessGroup, SparseLocoError, Speaker, presets
from sparseloco.dcp import ReplicaState
from sparseloco.replica import Replica
from sparseloco.sharding import local_views
from sparseloco.transport import drain, post_due, settle
from tests import toy

METHODS: dict[str, dict[str, Any]] = {
    "sparseloco": {"k": 3, "tile": 4},
    "diloco": {},
}


@dataclass
class Run:
    """One process of a run, with a loop and an optimizer of its own. Plain SGD, so that no state is missing later."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    replica: Replica
    transport: ProcessGroup | Speaker
    mesh: Any

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            toy.loss_of(self.model, toy.batch(step, self.replica.peer)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            with torch.no_grad():
                self.replica.stepped()
                post_due(self.replica, self.transport)
                settle(self.replica, self.transport)


@dataclass
class End:
    """What a process holds: digest, all its state that is shared and private, and its live parameters."""

    digest: str
    residual: float
    live: dict[str, Tensor]


def run_of(shards: int, name: str, delay: int = 0, copies: int = 1, wrapper: str = "fsdp") -> Run:
    """Two peers of so many shards; a learning rate that is a power of two makes steps of short shards exact."""
    model = toy.net()
    sizes = (dist.get_world_size() // shards // copies, copies, shards)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("peers", "replicate", "shards"))
    if copies > 1 and wrapper == "ddp":
        model = DistributedDataParallel(model, process_group=mesh.get_group("replicate"))
    elif shards * copies > 1:
        model = fully_shard(model, mesh=mesh["replicate", "shards"] if copies > 1 else mesh["shards"])
    settings = METHODS[name] | ({"delay": delay} if delay else {})
    algorithm = getattr(presets, name)(inner_steps=2, panels=2, **settings)
    transport: Any = ProcessGroup(mesh.get_group("peers"))
    if copies > 1:
        transport = Speaker(transport, mesh.get_group("replicate"))
    replica = Replica(model, algorithm, peer=transport.rank)  # pyright: ignore
    transport.connect(replica)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, foreach=False)  # pyright: ignore
    return Run(model, optimizer, replica, transport, mesh)  # pyright: ignore


def end_of(run: Run) -> End:
    live = {name: view.tensor.detach().clone() for name, view in local_views(run.model).items()}
    return End(run.replica.digest(), run.replica.residual_norm(), live)


def save(state: dict[str, Any], folder: str, **options: Any) -> None:
    with warnings.catch_warnings(action="ignore"):  # of DCP, about itself
        dcp.save(state, checkpoint_id=folder, **options)


def load(state: dict[str, Any], folder: str, **options: Any) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp.load(state, checkpoint_id=folder, **options)


def save_and_go_on(
    rank: int, name: str, shards: int, folder: str, steps: int, copies: int = 1, wrapper: str = "fsdp"
) -> tuple[End, End]:
    """Save after so many steps; what was there then, and two rounds later."""
    run = run_of(shards, name, copies=copies, wrapper=wrapper)
    run.train(1, steps)
    saved = end_of(run)
    save({"replica": ReplicaState(run.replica)}, folder)
    run.train(steps + 1, steps + 4)
    return saved, end_of(run)


def load_and_go_on(rank: int, name: str, shards: int, folder: str, steps: int) -> tuple[End, End]:
    """Load into a run that is new; what is there then, and two rounds later."""
    run = run_of(shards, name)
    load({"replica": ReplicaState(run.replica)}, folder)
    loaded = end_of(run)
    assert run.replica.step == steps
    run.train(steps + 1, steps + 4)
    return loaded, end_of(run)


def join(rank: int, name: str, folder: str) -> tuple[End, dict[str, Tensor]]:
    """Take the shared part alone; what is there then, and the anchor."""
    run = run_of(1, name)
    load({"replica": ReplicaState(run.replica, private=False)}, folder)
    return end_of(run), run.replica.anchor()


def save_in_the_background(rank: int, name: str, folder: str) -> tuple[End, End]:
    """Train on while DCP writes; what was saved, and what was read back."""
    run = run_of(2, name)
    run.train(1, 5)
    saved = end_of(run)
    with warnings.catch_warnings(action="ignore"):
        writing = dcp.async_save({"replica": ReplicaState(run.replica)}, checkpoint_id=folder)
    with torch.no_grad():
        for view in local_views(run.model).values():
            view.tensor.zero_()
    run.replica.stepped()
    post_due(run.replica, run.transport)
    settle(run.replica, run.transport)
    writing.result()
    again = run_of(2, name)
    load({"replica": ReplicaState(again.replica)}, folder)
    return saved, end_of(again)


def each_in_its_folder(rank: int, name: str, folder: str) -> tuple[End, End]:
    """Every replica saves with its own process group, so that no folder is shared."""
    run = run_of(2, name)
    run.train(1, 3)
    saved = end_of(run)
    place, group = f"{folder}/{run.transport.rank}", run.mesh.get_group("shards")
    save({"replica": ReplicaState(run.replica)}, place, process_group=group)
    again = run_of(2, name)
    load({"replica": ReplicaState(again.replica)}, place, process_group=group)
    return saved, end_of(again)


def in_flight(rank: int, folder: str) -> tuple[str, str]:
    """Saving between post and settle, and after draining; the errors."""
    run = run_of(1, "sparseloco", delay=1)
    run.train(1, 2)
    texts: list[str] = []
    for _ in range(2):
        try:
            ReplicaState(run.replica).state_dict()
            texts.append("no error")
        except SparseLocoError as error:
            texts.append(str(error))
        drain(run.replica, run.transport)
    return texts[0], texts[1]
