"""A Llama-shaped model as replicas of two shards, and as whole ones: what both must have in common.

All shards of a replica see the same batch, so that the mean of their gradients is exact: ``(g + g) / 2 == g``. With
other data on each shard the sums of gloo would be as good, but not the bits of one process.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

from sparseloco import Loopback, ProcessGroup, SparseLocoError, Transport, presets, synchronize, wire
from sparseloco.algorithm import Algorithm
from sparseloco.replica import Replica
from sparseloco.sharding import local_views
from sparseloco.transport import drain, post_due, settle
from sparseloco.types import Coding
from tests import toy
from tests.one_path.experts import Expert, mixtral

VOCABULARY, HIDDEN, INNER_STEPS, ROUNDS = 128, 96, 3, 3

METHODS: dict[str, dict[str, Any]] = {
    "sparseloco": {"k": 8, "tile": 16},
    "sparseloco_delayed": {"k": 8, "tile": 16, "delay": 2},
    "diloco": {},
    "streaming_diloco": {},
}


@dataclass(frozen=True)
class Outcome:
    """What one process holds at the end.

    Attributes:
        live: Local parameters by name.
        digest: Of the shared state that it holds.
        fingerprint: Of algorithm and tensor table.
        losses: Of each step, and of each evaluation.
    """

    live: dict[str, Tensor]
    digest: str
    fingerprint: str
    losses: list[float]


def ready(rank: int) -> int:
    """For a first call: once it answers, a process has imported all that the others need."""
    return rank


SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "attn_implementation": "eager",
}


def llama(kind: str = "plain") -> Any:
    """A Llama, or a mixture of experts, with hidden size 96.

    Args:
        kind: ``plain``; ``shallow``, of one layer; ``tied`` embeddings; ``bf16`` parameters; with activation
            ``checkpointing``; ``experts`` in one tensor; experts that are ``modules``, or that are also sharded
            ``modules by themselves``.
    """
    torch.manual_seed(0)
    if kind == "experts" or kind.startswith("modules"):
        return mixtral(SHAPE, separate=kind != "experts")
    shape = {**SHAPE, "num_hidden_layers": 1} if kind == "shallow" else SHAPE
    model: Any = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=kind == "tied"))
    if kind == "checkpointing":
        with warnings.catch_warnings(action="ignore"):  # renamed in newer versions of transformers
            model.gradient_checkpointing_enable()
    return model.to(torch.bfloat16) if kind == "bf16" else model


def sharded(model: Any, mesh: DeviceMesh, kind: str = "plain") -> nn.Module:
    for module in model.modules():
        if kind == "modules by themselves" and isinstance(module, Expert):
            fully_shard(module, mesh=mesh["shards"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["shards"])
    return fully_shard(model, mesh=mesh["shards"])


def mesh_of(shards: int) -> DeviceMesh:
    world = torch.distributed.get_world_size()
    return init_device_mesh("cpu", (world // shards, shards), mesh_dim_names=("peers", "shards"))


def method(name: str, panels: int) -> Algorithm:
    preset = getattr(presets, name.removesuffix("_delayed"))
    return preset(inner_steps=INNER_STEPS, panels=panels, **METHODS[name])


def tokens(step: int, peer: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + peer)
    return torch.randint(VOCABULARY, (2, 16), generator=generator)


def loss_of(model: nn.Module, step: int, peer: int) -> Tensor:
    ids = tokens(step, peer)
    return model(input_ids=ids, labels=ids).loss


def evaluation(model: nn.Module) -> float:
    with torch.no_grad():
        return loss_of(model, 0, 0).item()


def train(rank: int, name: str, shards: int | None, panels: int, kind: str = "plain") -> Outcome:
    """One rank of a group whose replicas have so many shards; None means whole replicas without FSDP2."""
    model: nn.Module = llama(kind)
    group, peer = None, rank
    if shards is not None:
        mesh = mesh_of(shards)
        model, group, peer = sharded(model, mesh, kind), mesh.get_group("peers"), rank // shards
    return run(model, method(name, panels), ProcessGroup(group), peer)


def run(model: nn.Module, algorithm: Algorithm, transport: Transport, data: int) -> Outcome:
    """Three rounds, each with evaluations (a forward without backward): in the round, before it settles, and at last.

    A forward leaves parameters gathered; what is settled then must be seen by the next one all the same.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses: list[float] = []
    with synchronize(model, optimizer, algorithm, transport) as replica:
        for step in range(1, ROUNDS * INNER_STEPS + 1):
            loss = loss_of(model, step, data)
            loss.backward()
            losses.append(loss.item())
            if step % INNER_STEPS != 1:
                losses.append(evaluation(model))
            optimizer.step()
            optimizer.zero_grad()
            if step % INNER_STEPS == 1:
                losses.append(evaluation(model))
        losses.append(evaluation(model))
    losses.append(evaluation(model))  # messages in flight were settled at the end of the block
    live = {name: view.tensor.detach().clone() for name, view in local_views(model).items()}
    return Outcome(live, replica.digest(), replica.fingerprint, losses)


def in_one_process(name: str, peers: int, panels: int, kind: str = "plain") -> list[Outcome]:
    """The same training with whole replicas in one process."""
    models = [llama(kind) for _ in range(peers)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False) for model in models]
    replicas = [Replica(model, method(name, panels), peer=peer) for peer, model in enumerate(models)]
    transport = Loopback(peers)
    losses: list[list[float]] = [[] for _ in models]
    for replica in replicas:
        transport.connect(replica)
    for step in range(1, ROUNDS * INNER_STEPS + 1):
        for peer, (model, optimizer, replica) in enumerate(zip(models, optimizers, replicas, strict=True)):
            loss = loss_of(model, step, peer)
            loss.backward()
            losses[peer].append(loss.item())
            if step % INNER_STEPS != 1:
                losses[peer].append(evaluation(model))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                replica.stepped()
                post_due(replica, transport)
        for peer, (model, replica) in enumerate(zip(models, replicas, strict=True)):
            with torch.no_grad():
                settle(replica, transport)
            if step % INNER_STEPS == 1:
                losses[peer].append(evaluation(model))
    for peer, (model, replica) in enumerate(zip(models, replicas, strict=True)):
        losses[peer].append(evaluation(model))
        with torch.no_grad():
            drain(replica, transport)
        losses[peer].append(evaluation(model))
    return [
        Outcome({name: p.detach() for name, p in model.named_parameters()}, replica.digest(), replica.fingerprint, seen)
        for model, replica, seen in zip(models, replicas, losses, strict=True)
    ]


def outbox(rank: int, shards: int, panels: int) -> tuple[dict[str, Tensor], str]:
    """Parts of the first message of a replica, and its digest."""
    model: nn.Module = llama()
    peer = rank // shards
    if shards > 1:
        model = sharded(model, mesh_of(shards))
    replica = Replica(model, method("sparseloco", panels), peer=peer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(1, INNER_STEPS + 1):
        loss_of(model, step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.stepped()
    (envelope,) = replica.outbox()
    return dict(envelope.payload.tensors), envelope.digest


def uneven(rank: int, shards: int) -> tuple[dict[str, Tensor], str]:
    """Three rounds of one replica that hears only itself; its parameters and its digest.

    Of 11 and 5 rows, four shards hold 3, 3, 3, 2 and 2, 2, 1, 0. One bias is frozen. A learning rate that is a power of
    two makes steps exact, since elements at the end of a short shard are stepped by other instructions.
    """
    model = toy.net()
    model.get_parameter("0.bias").requires_grad_(False)
    if shards > 1:
        model = fully_shard(model, mesh=mesh_of(shards)["shards"])
    replica = Replica(model, presets.sparseloco(inner_steps=2, k=3, tile=4, panels=4), peer=0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.125, foreach=False)
    for step in range(1, 7):
        toy.loss_of(model, toy.batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            replica.stepped()
            for envelope in replica.outbox():
                frame = wire.encode(envelope, coding=Coding(step // 2 % 2))
                received = wire.decode(frame, envelope.payload.specs, replica.fingerprint)
                replica.apply(envelope.key, [received])
    return {name: view.tensor.detach().clone() for name, view in local_views(model).items()}, replica.digest()


TENSOR_PARALLEL = {
    "tensor parallel": {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()},
    "columns alone": {"up_proj": ColwiseParallel()},
}


def refusal(rank: int, case: str) -> str:
    """Text of the error with which a sharded replica is refused."""
    mesh = mesh_of(2)
    model: Any = llama()
    group = mesh.get_group("shards" if case == "group" else "peers")
    if case == "partly":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["shards"])
    elif case in TENSOR_PARALLEL:
        for layer in model.model.layers:
            parallelize_module(layer.mlp, mesh["shards"], TENSOR_PARALLEL[case])
    elif case == "columns":
        model = fully_shard(model, mesh=mesh["shards"], shard_placement_fn=lambda p: Shard(p.ndim - 1))
    else:
        model = sharded(model, mesh)
    algorithms = {
        "edges": lambda: presets.sparseloco(panels=3),
        "flat": presets.diloco,
        "statistical": lambda: presets.sparseloco(panels=2, values="statistical"),
        "gradients": presets.demo,
        "buffers": lambda: replace(presets.sparseloco(panels=2), sync_buffers=True),
    }
    algorithm = algorithms.get(case, lambda: presets.sparseloco(panels=2))()
    try:
        transport = ProcessGroup(group)
        transport.connect(Replica(model, algorithm, peer=transport.rank))
    except SparseLocoError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def other_start(rank: int) -> str:
    """One shard of peer 1 starts from other values."""
    mesh = mesh_of(2)
    model = sharded(llama(), mesh)
    if rank == 3:
        with torch.no_grad():
            local_views(model)["model.norm.weight"].tensor[0] += 1
    try:
        transport = ProcessGroup(mesh.get_group("peers"))
        transport.connect(Replica(model, method("sparseloco", 2), peer=transport.rank))
    except SparseLocoError as error:
        return str(error)
    return "no error"


def states(rank: int) -> tuple[list[bool], str]:
    """A replica of four shards trains a round, another takes over its state, and a neighbour's state is refused.

    Returns:
        Whether parameters, digest and residual are those of the first, and the text of the refusal.
    """
    mesh = mesh_of(4)["shards"]
    old_model, model = (fully_shard(nn.Linear(16, 16), mesh=mesh) for _ in range(2))
    algorithm = presets.sparseloco(inner_steps=1, k=3, tile=4, panels=4)
    old, new = Replica(old_model, algorithm), Replica(model, algorithm)
    with torch.no_grad():
        for view in local_views(old_model).values():
            view.tensor.sub_(torch.arange(view.tensor.numel()).view_as(view.tensor))
    old.stepped()
    for envelope in old.outbox():
        old.apply(envelope.key, [envelope])
    new.load_shared_state(old.shared_state())
    new.load_private_state(old.private_state())
    mine, theirs = local_views(model), local_views(old_model)
    same = [torch.equal(mine[name].tensor, theirs[name].tensor) for name in mine]
    same += [new.digest() == old.digest(), new.residual_norm() == old.residual_norm() > 0]
    found: list[Any] = [None] * 4
    torch.distributed.all_gather_object(found, old.shared_state())
    try:
        new.load_shared_state(found[(rank + 1) % 4])
    except SparseLocoError as error:
        return same, str(error)
    return same, "no error"


def nan_on_one_shard(rank: int, nonfinite: str) -> tuple[str, bool, str, list[str]]:
    """A gradient of rank 3 (peer 1, shard 1) is not a number before the first round.

    Where that raises, the replica is reset and posts once more.

    Returns:
        What was said or raised, whether the parameters were the anchor before the round was settled, the digest after
        it, and causes of absences from it.
    """
    mesh = mesh_of(2)
    model = sharded(llama(), mesh)
    transport = ProcessGroup(mesh.get_group("peers"))
    replica = Replica(model, method("sparseloco", 2), peer=transport.rank, nonfinite=nonfinite)
    transport.connect(replica)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for step in range(1, INNER_STEPS + 1):
        loss_of(model, step, transport.rank).backward()
        if rank == 3 and step == INNER_STEPS:
            grad: Any = model.get_parameter("model.norm.weight").grad
            grad.to_local()[0] = float("nan")
        optimizer.step()
        optimizer.zero_grad()
        replica.stepped()
    text = "nothing"
    with warnings.catch_warnings(action="always", record=True) as said:
        try:
            post_due(replica, transport)
        except SparseLocoError as error:
            text = str(error)
            replica.reset()
            post_due(replica, transport)
    if text == "nothing" and said:
        text = str(said[0].message)
    anchor = replica.anchor()
    at_anchor = all(torch.equal(view.tensor, anchor[name]) for name, view in local_views(model).items())
    settle(replica, transport)
    return text, at_anchor, replica.digest(), [absence.cause for absence in replica.absent]
