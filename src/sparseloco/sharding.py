"""Sharded parameters, seen from one of the processes that hold them: the one module that knows DTensor.

A replica may be sharded with FSDP2 (``torch.distributed.fsdp.fully_shard``): each process then holds some entries of
dim 0 of every parameter. Here these become plain tensors that share memory, with their place in the whole.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from sparseloco.errors import ConfigError, DivergenceError, SparseLocoError


class Place(NamedTuple):
    """What a shard holds of a tensor: entries ``first`` to ``last`` (exclusive) of dim 0, maybe none.

    Attributes:
        shape: Of the whole tensor.
        first: First entry.
        last: One behind the last.
        shard: Number of the shard, from 0.
        num_shards: Shards of the tensor; 1 for one that is not sharded.
    """

    shape: tuple[int, ...]
    first: int
    last: int
    shard: int = 0
    num_shards: int = 1

    def panels(self, panels: int) -> range:
        """Numbers of the panels that lie here, of ``panels`` panels of ``ceil(n / panels)`` entries of dim 0."""
        height = max(1, -(-(self.shape[0] if self.shape else 1) // panels))
        return range(self.first // height, -(-self.last // height)) if self.last > self.first else range(0)


class LocalView(NamedTuple):
    """One parameter as this process holds it.

    Attributes:
        param: The parameter as optimizers know it; maybe a DTensor.
        tensor: A plain tensor that shares its memory, ``[last - first, ...]``.
        place: Where it lies in the whole.
    """

    param: nn.Parameter
    tensor: Tensor
    place: Place


class Shards:
    """The processes that hold one replica together; one alone for a replica that is not sharded.

    Attributes:
        rank: Number of this process among them, from 0.
        count: How many they are.
    """

    def __init__(self, mesh: Any = None) -> None:
        self._mesh = mesh
        self.rank: int = mesh.get_local_rank() if mesh is not None else 0
        self.count: int = mesh.size() if mesh is not None else 1

    def __str__(self) -> str:
        return f"shard {self.rank} of {self.count}"

    def least(self, number: int) -> int:
        """The smallest ``number`` among them; all must ask."""
        if self.count == 1:
            return number
        vote = torch.tensor(number, dtype=torch.int32, device=self._mesh.device_type)
        torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MIN, group=self._mesh.get_group())
        return int(vote.item())

    def agree(self, good: bool) -> bool:
        """Whether ``good`` at all of them; all must ask."""
        return bool(self.least(int(good)))

    @contextmanager
    def jointly(self, what: str) -> Generator[None]:
        """What fails in this block at one shard fails at all of them, so that none waits for another.

        Raises:
            DivergenceError: where it did not fail itself, but at another shard of this replica.
        """
        try:
            yield
        except SparseLocoError:
            self.agree(False)
            raise
        if not self.agree(True):
            raise DivergenceError(
                f"{what}=failed at another shard of this replica: must succeed at all {self.count}; "
                "look for the message of that shard"
            )


def local_views(module: nn.Module) -> dict[str, LocalView]:
    """Every parameter by name as this process holds it; a tied one once, under its first name.

    FSDP2 modules are resharded first, since they keep their parameters gathered after a forward without backward.

    Raises:
        ConfigError: naming a parameter whose placement is not supported, and why.
    """
    reshard(module)
    return {name: LocalView(p, plain(p), place_of(name, p)) for name, p in module.named_parameters()}


def reshard(module: nn.Module) -> None:
    """Let go of gathered parameters, so that the next forward gathers what the shards hold by then."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # not loaded: nobody can have sharded anything
        return
    parts: list[Any] = list(module.modules())
    for part in parts:
        if isinstance(part, fsdp.FSDPModule):
            part.reshard()


def plain(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, sharing its memory; any other tensor as it is."""
    return tensor.detach().to_local() if _is_dtensor(tensor) else tensor


def place_of(name: str, tensor: Tensor) -> Place:
    """Where the local part of ``tensor`` lies.

    Raises:
        ConfigError: if it is sharded in another way than along dim 0 of a mesh of one dim.
    """
    shape = tuple(tensor.shape)
    if not _is_dtensor(tensor):
        return Place(shape, 0, shape[0] if shape else 1)
    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.ndim != 1:
        raise ConfigError(
            f"{name}.placements={placements}: must be sharded over a mesh of one dim, since replicated shards (HSDP) "
            "and tensor parallelism are not supported; pass fully_shard(model, mesh=mesh['shards'])"
        )
    if type(placements[0]).__name__ != "Shard" or placements[0].dim != 0:
        raise ConfigError(
            f"{name}.placements={placements}: must be Shard(dim=0), since panels are cut along dim 0; "
            "leave shard_placement_fn and tensor parallelism out"
        )
    count, shard = mesh.size(), mesh.get_local_rank()
    size = -(-shape[0] // count)  # as torch.chunk cuts: the last ones may be shorter or empty
    first = min(shape[0], shard * size)
    return Place(shape, first, min(shape[0], first + size), shard, count)


def shards_of(views: dict[str, LocalView]) -> Shards:
    """The processes that hold these parameters together.

    Raises:
        ConfigError: naming a parameter that is sharded over other processes than the rest, or over none.
    """
    meshes = {name: view.param.device_mesh for name, view in views.items() if _is_dtensor(view.param)}
    if not meshes:
        return Shards()
    first, mesh = next(iter(meshes.items()))
    odd = next((name for name in views if meshes.get(name) != mesh), None)
    if odd is not None:
        raise ConfigError(
            f"{odd}=not sharded like {first}: must be sharded over the same processes, since its gradient would "
            "differ between them; call fully_shard on the whole model with one mesh and no ignored_params"
        )
    return Shards(mesh)


def check_panels(views: Iterable[tuple[str, Place]], panels: int) -> None:
    """Refuse shards whose edges are not edges of panels.

    Raises:
        ConfigError: naming the first such tensor, and the number of panels that serves.
    """
    for name, place in views:
        rows = place.shape[0] if place.shape else 1
        height = max(1, -(-rows // panels))
        edges = [min(rows, shard * -(-rows // place.num_shards)) for shard in range(1, place.num_shards)]
        if bad := [edge for edge in edges if edge < rows and edge % height]:
            raise ConfigError(
                f"panels={panels}: must have an edge at every edge of a shard, and {name} of {rows} rows in "
                f"{place.num_shards} shards has one at row {bad[0]}; "
                f"use panels={place.num_shards}"
            )


def _is_dtensor(tensor: Tensor) -> TypeGuard[Any]:
    module = sys.modules.get("torch.distributed.tensor")  # not loaded: nobody can have made one
    return module is not None and isinstance(tensor, module.DTensor)
