"""Replicas of which several processes hold the same: HSDP, ``replicate`` and plain data parallelism; four ranks.

One process of each speaks. As in ``shards.py`` all processes of a replica see the same batch where bits are compared.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sparseloco import ProcessGroup, Replica, SparseLocoError, Speaker, advance, presets, settle, synchronize
from sparseloco.sharding import local_views
from sparseloco.transport import collect_early, drain, post_due
from tests import toy
from tests.one_path import shards


@dataclass(frozen=True)
class Copy:
    """What one process holds at the end, with its place and the bytes that it sent to other replicas."""

    outcome: shards.Outcome
    place: tuple[int, ...]
    sent: int


def mesh_of(*sizes: int) -> DeviceMesh:
    """A mesh of peers, copies and shards."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("peers", "replicate", "shards"))


def wrapped(model: Any, mesh: DeviceMesh, wrapper: str) -> nn.Module:
    """The model as copies: with HSDP, with DDP, or with the composable ``replicate``."""
    if wrapper == "hsdp":
        inside = mesh["replicate", "shards"]
        for layer in model.model.layers:
            fully_shard(layer, mesh=inside)
        return fully_shard(model, mesh=inside)
    if wrapper == "ddp":
        return DistributedDataParallel(model, process_group=mesh.get_group("replicate"))
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(model, mesh=mesh["replicate"])


def speaker_of(mesh: DeviceMesh) -> Speaker:
    with warnings.catch_warnings(action="ignore"):  # a mesh of one peer is a case here
        return Speaker(ProcessGroup(mesh.get_group("peers")), mesh.get_group("replicate"))


def place_in(mesh: DeviceMesh) -> tuple[int, ...]:
    place = mesh.get_coordinate()
    assert place is not None
    return tuple(place)


def train(rank: int, name: str, sizes: tuple[int, int, int], panels: int, wrapper: str) -> Copy:
    mesh = mesh_of(*sizes)
    transport, place = speaker_of(mesh), place_in(mesh)
    model = wrapped(shards.llama(), mesh, wrapper)
    outcome = shards.run(model, shards.method(name, panels), transport, place[0])
    return Copy(outcome, place, transport.traffic(place[0]).sent)


def data_parallel(rank: int, name: str, compiled: bool = False) -> tuple[dict[str, Tensor], str, int, list[float]]:
    """Two replicas of two DDP ranks that see different batches; parameters, digest, bytes sent and losses.

    The running means of the model are private, and those of the first copy, as DDP has it.
    """
    mesh = mesh_of(2, 2, 1)
    model: Any = DistributedDataParallel(toy.batch_norm_net(), process_group=mesh.get_group("replicate"))
    if compiled:
        torch._dynamo.reset()
        model = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    transport = speaker_of(mesh)
    settings = {"num_fragments": 2, "fragment_by": "size"} if name == "streaming_diloco" else {}
    algorithm = getattr(presets, name)(inner_steps=2, **settings)
    losses: list[float] = []
    with (
        warnings.catch_warnings(action="ignore"),  # of buffers that stay private, and of dynamo
        synchronize(model, optimizer, algorithm, transport) as replica,
    ):
        for step in range(1, 9):
            loss = toy.loss_of(model, toy.batch(step, rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    live = {name: p.detach().clone() for name, p in replica.params.items()}
    return live, replica.digest(), transport.traffic(transport.rank or 0).sent, losses


def gradient_method(rank: int, name: str, copies: bool) -> tuple[dict[str, Tensor], str]:
    """A method that sends gradients at every step, on whole replicas or on two copies of each."""
    model: nn.Module = toy.net()
    if copies:
        mesh = mesh_of(2, 2, 1)
        transport: Any = speaker_of(mesh)
        model = DistributedDataParallel(model, process_group=mesh.get_group("replicate"))
    else:
        transport = ProcessGroup()
    replica = Replica(model, getattr(presets, name)(), peer=transport.rank)
    for step in range(1, 6):
        toy.loss_of(model, toy.batch(step, transport.rank)).backward()
        advance(replica, transport)
        settle(replica, transport)
    return {name: p.detach().clone() for name, p in replica.params.items()}, replica.digest()


def early(rank: int) -> tuple[int, str]:
    """Messages that are collected early, as for a checkpoint, and settled later."""
    mesh = mesh_of(2, 2, 1)
    transport = speaker_of(mesh)
    replica = Replica(toy.net(), presets.sparseloco(inner_steps=2, delay=1), peer=transport.rank or 0)
    transport.connect(replica)
    with torch.no_grad():
        for param in replica.params.values():
            param.sub_(0.1 * (1 + replica.peer))
    replica.stepped()
    replica.stepped()
    post_due(replica, transport)
    inboxes = collect_early(replica, transport)
    drain(replica, transport)
    return sum(map(len, inboxes.values())), replica.digest()


DRIFTS = {"drift": 1.0, "nan": float("nan")}
"""What is added to a parameter of the second copies alone."""


def refusal(rank: int, case: str) -> str:
    """Text of the error at this rank."""
    mesh = mesh_of(2, 2, 1)
    copy = place_in(mesh)[1]
    model: Any = toy.net()
    if case in ("silent", "group", "gradients"):
        model = fully_shard(model, mesh=mesh["replicate", "shards"])
    if case == "start" and copy:
        torch.nn.init.ones_(model[2].bias)
    algorithm = presets.demo() if case == "gradients" else presets.sparseloco(inner_steps=1)
    if case == "table" and copy:
        algorithm = presets.sparseloco(inner_steps=2)
    algorithm = replace(algorithm, sync_buffers=case == "buffers")
    peers: Any = ProcessGroup(mesh.get_group("replicate" if case == "group" else "peers"))
    transport: Any = Speaker(peers, mesh.get_group("peers" if case == "group" else "replicate"))
    try:
        replica = Replica(model, algorithm, peer=transport.rank, nonfinite="stop")
        (peers if case == "silent" else transport).connect(replica)
        if case in DRIFTS and copy:
            with torch.no_grad():
                model[2].bias.add_(DRIFTS[case])
        one_message(replica, transport, case == "lost")
    except SparseLocoError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def abstention(rank: int) -> tuple[list[int], str]:
    """Weights of what this rank applies, where a number of the second copies alone is not finite; its digest."""
    mesh = mesh_of(2, 2, 1)
    peer, copy = place_in(mesh)[:2]
    model: Any = toy.net()
    transport = Speaker(ProcessGroup(mesh.get_group("peers")), mesh.get_group("replicate"))
    replica = Replica(model, presets.sparseloco(inner_steps=1), peer=peer)
    transport.connect(replica)
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        for param in model.parameters():
            param.add_(0.1)
        if copy and peer:
            model[2].bias.add_(float("nan"))
        replica.stepped()
        post_due(replica, transport)
        (key,) = replica.due()
        inbox = transport.collect(key)
        replica.apply(key, inbox)
    return [envelope.weight for envelope in inbox], replica.digest()


def one_message(replica: Replica, transport: Any, lost: bool) -> None:
    """Post and collect; what rank 0 should get may be lost."""

    def broken(key: Any) -> None:
        raise SparseLocoError("the message was lost")

    replica.stepped()
    with torch.no_grad():
        post_due(replica, transport)
    if lost and torch.distributed.get_rank() == 0:
        transport._transport.collect = broken
    (key,) = replica.due()
    transport.collect(key)


def same_state(rank: int) -> list[bool]:
    """Copies of HSDP have one state: what copy 0 saved is loaded by copy 1, and trains on as it does."""
    mesh = mesh_of(1, 2, 2)
    model = fully_shard(toy.net(), mesh=mesh["replicate", "shards"])
    replica = Replica(model, presets.sparseloco(inner_steps=1, k=3, tile=4, panels=2))
    with torch.no_grad():
        for view in local_views(model).values():
            view.tensor.mul_(0.5)
    replica.stepped()
    for envelope in replica.outbox():
        replica.apply(envelope.key, [envelope])
    found: list[Any] = [None] * 4
    torch.distributed.all_gather_object(found, (replica.digest(), replica.shared_state()))
    place = place_in(mesh)
    other = found[2 * (1 - place[1]) + place[2]]
    replica.load_shared_state(other[1])
    return [replica.digest() == other[0], len({digest for digest, _ in found}) == 2]
