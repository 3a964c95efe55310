"""Sharded parameters, seen from one of the processes that hold them: the one module that knows DTensor.

A replica may be sharded with FSDP2 (``torch.distributed.fsdp.fully_shard``): each process then holds some entries of
dim 0 of every parameter. With a mesh of two dims several processes hold the same entries (HSDP): copies. Here these
become plain tensors that share memory, with their place in the whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from sparseloco.errors import ConfigError, DivergenceError, PeerLostError, SparseLocoError

_INSERTED = {"_orig_mod", "_checkpoint_wrapped_module"}
"""What ``torch.compile`` and ``checkpoint_wrapper`` put into the names of what they wrap."""


class Place(NamedTuple):
    """What a shard holds of a tensor: entries ``first`` to ``last`` (exclusive) of dim 0, maybe none.

    Attributes:
        shape: Of the whole tensor.
        first: First entry.
        last: One behind the last.
        shard: Number of the shard, from 0.
        num_shards: Shards of the tensor; 1 for one that is not sharded.
        wrapped: Whether the parameter is a DTensor, of one shard or more.
    """

    shape: tuple[int, ...]
    first: int
    last: int
    shard: int = 0
    num_shards: int = 1
    wrapped: bool = False

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
        rank: Number of the shard that this process holds, from 0.
        count: Shards.
        copies: Processes that hold the same shard; more than 1 with HSDP, or in data-parallel replicas.
        guard: Around each of their collectives: what a transport makes of one that fails.
    """

    def __init__(
        self, rank: int = 0, count: int = 1, *, shards: Any = None, device: str = "cpu", copies: Any = None
    ) -> None:
        """``shards``, on ``device``, and ``copies`` are the groups of this process; None where it would be alone."""
        self.guard: Callable[[], AbstractContextManager[None]] = nullcontext
        self.rank = rank
        self.count = count
        self._shards, self._device, self._copies = shards, device, copies
        self._spoken = copies is None
        self.copies: int = copies.size() if copies else 1

    def __str__(self) -> str:
        return f"shard {self.rank} of {self.count}"

    @property
    def processes(self) -> int:
        """How many hold the replica together."""
        return self.count * self.copies

    def without_copies(self) -> Shards:
        """Those who hold the shards of the same copy."""
        return Shards(self.rank, self.count, shards=self._shards, device=self._device)

    def spoken_for(self, copies: Any) -> Shards:
        """The same where one of the group ``copies`` speaks for all in it.

        Raises:
            ConfigError: if the mesh says that other processes hold the same shard.
        """
        ranks = torch.distributed.get_process_group_ranks
        if self._copies is not None and ranks(self._copies) != ranks(copies):
            raise ConfigError(
                f"copies={ranks(copies)}: must be the ranks {ranks(self._copies)}, which hold the same shard; pass the "
                "group of the mesh's dim along which FSDP2 replicates"
            )
        found = self.without_copies()
        found.copies = copies.size()
        found._copies = copies if found.copies > 1 else None
        return found

    def check_spoken(self) -> None:
        """Refuse to talk to other replicas where every copy would.

        Raises:
            ConfigError: if there are copies, and nobody has said which of them speaks.
        """
        if not self._spoken:
            raise ConfigError(
                f"transport=one for each of {self.copies} copies: must be one for all that hold the same shard, or all "
                "bytes would be sent again for each; pass Speaker(ProcessGroup(mesh.get_group('peers')), "
                "mesh.get_group('replicate'))"
            )

    def least(self, number: int) -> int:
        """The smallest ``number`` at all processes of the replica; all must ask."""
        for group, device in ((self._shards, self._device), (self._copies, "cpu")):
            if group is not None:
                vote = torch.tensor(number, dtype=torch.int32, device=device)
                with self.guard():
                    torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MIN, group=group)
                number = int(vote.item())
        return number

    def agree(self, good: bool) -> bool:
        """Whether ``good`` at all of them; all must ask."""
        return bool(self.least(int(good)))

    def gather(self, *values: float) -> list[tuple[float, ...]]:
        """These numbers of each shard, in order; all must ask. Float64, so whole numbers below 2**53 are exact."""
        if self._shards is None:
            return [values]
        mine = torch.tensor(values, dtype=torch.float64, device=self._device)
        rows = [torch.empty_like(mine) for _ in range(self.count)]
        with self.guard():
            torch.distributed.all_gather(rows, mine, group=self._shards)
        return [tuple(row.tolist()) for row in rows]

    @contextmanager
    def jointly(self, what: str) -> Generator[None]:
        """What fails in this block at one shard fails at all of them, so that none waits for another.

        Raises:
            DivergenceError: where it did not fail itself, but at another shard of this replica.
        """
        try:
            yield
        except PeerLostError:  # the vote would wait for whoever is gone
            raise
        except SparseLocoError:
            self.agree(False)
            raise
        if not self.agree(True):
            raise DivergenceError(
                f"{what}=failed at another shard of this replica: must succeed at all {self.processes}; "
                "look for the message of that shard"
            )


def local_views(module: nn.Module) -> dict[str, LocalView]:
    """Every parameter by its :func:`own_name` as this process holds it; a tied one once, under its first name.

    FSDP2 modules are resharded first, since they keep their parameters gathered after a forward without backward.

    Raises:
        ConfigError: naming a parameter whose placement is not supported, and why.
    """
    reshard(module)
    named = {own_name(module, name): p for name, p in module.named_parameters()}
    return {name: LocalView(p, plain(p), place_of(name, p)) for name, p in named.items()}


def own_name(module: nn.Module, name: str) -> str:
    """Name of a tensor in the model itself, without what wrappers put into it.

    So a model has the same tensor table whether it is compiled, checkpointed or data-parallel, as a whole or in parts.
    """
    parts = [part for part in name.split(".") if part not in _INSERTED]
    while (inner := getattr(module, "_orig_mod", None)) is not None:
        module = inner
    return ".".join(parts[isinstance(module, nn.parallel.DistributedDataParallel) :])


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


def wrapped(local: Tensor, param: Tensor) -> Tensor:
    """A copy of ``local`` that is sharded as ``param`` is, in the type of ``local``; the inverse of :func:`plain`."""
    if not _is_dtensor(param):
        return local.clone()
    whole = torch.empty_like(param.detach(), dtype=local.dtype)
    plain(whole).copy_(local)
    return whole


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered from its shards, which must all ask; any other tensor as it is."""
    return tensor.detach().full_tensor() if _is_dtensor(tensor) else tensor


def place_of(name: str, tensor: Tensor) -> Place:
    """Where the local part of ``tensor`` lies.

    Raises:
        ConfigError: if it is sharded in another way than along dim 0, over one dim of the mesh at most.
    """
    shape = tuple(tensor.shape)
    if not _is_dtensor(tensor):
        return Place(shape, 0, shape[0] if shape else 1)
    dim, _ = _dims(name, tensor)
    if dim is None:
        return Place(shape, 0, shape[0] if shape else 1, wrapped=True)
    count, shard = tensor.device_mesh.size(dim), tensor.device_mesh.get_local_rank(dim)
    size = -(-shape[0] // count)  # as torch.chunk cuts: the last ones may be shorter or empty
    first = min(shape[0], shard * size)
    return Place(shape, first, min(shape[0], first + size), shard, count, wrapped=True)


def placed_like(local: Tensor, param: Tensor) -> Tensor:
    """``local``, which lies as the local part of ``param`` does, as a DTensor where ``param`` is one."""
    if not _is_dtensor(param):
        return local
    dtensor: Any = sys.modules["torch.distributed.tensor"]
    return dtensor.DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=torch.empty(param.shape, device="meta").stride(),
    )


def shards_of(views: dict[str, LocalView]) -> Shards:
    """The processes that hold these parameters together, as far as their meshes say so.

    Raises:
        ConfigError: naming a parameter that is sharded over other processes than the rest, or over none.
    """
    homes = {name: (p.device_mesh, p.placements) for name, (p, *_) in views.items() if _is_dtensor(p)}
    if not homes:
        return Shards()
    first, home = next(iter(homes.items()))
    odd = next((name for name in views if homes.get(name) != home), None)
    if odd is not None:
        raise ConfigError(
            f"{odd}=not sharded like {first}: must be sharded over the same processes, since its gradient would "
            "differ between them; call fully_shard on the whole model with one mesh and no ignored_params"
        )
    mesh = home[0]
    groups = [mesh.get_group(dim) if dim is not None else None for dim in _dims(first, views[first].param)]
    shards, copies = (group if group is not None and group.size() > 1 else None for group in groups)
    place = views[first].place
    return Shards(place.shard, place.num_shards, shards=shards, device=mesh.device_type, copies=copies)


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


def _dims(name: str, tensor: Any) -> tuple[int | None, int | None]:
    """The dims of a DTensor's mesh along which it is sharded and replicated."""
    placements = tensor.placements
    kinds = ["shard" if type(p).__name__ == "Shard" and p.dim == 0 else type(p).__name__ for p in placements]
    if sorted(kinds) not in (["shard"], ["Replicate"], ["Replicate", "shard"]):
        raise ConfigError(
            f"{name}.placements={placements}: must be Shard(dim=0), Replicate() or one of each, since panels are cut "
            "along dim 0; leave shard_placement_fn and tensor parallelism out"
        )
    shard, copy = (kinds.index(kind) if kind in kinds else None for kind in ("shard", "Replicate"))
    return shard, copy


def _is_dtensor(tensor: Tensor) -> TypeGuard[Any]:
    module = sys.modules.get("torch.distributed.tensor")  # not loaded: nobody can have made one
    return module is not None and isinstance(tensor, module.DTensor)
