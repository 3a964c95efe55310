"""Ranks that die, hang or differ on purpose, and what those that are left write down."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sparseloco import ProcessGroup, Replica, SparseLocoError, adamw, advance, presets, settle
from sparseloco.algorithm import Algorithm
from sparseloco.transport import starts
from sparseloco.transport.beats import enter, phase
from sparseloco.transport.deadline import Deadline
from sparseloco.transport.meeting import joined_group, signs_of_life
from tests import toy
from tests.forked import forks

PATIENT = Deadline(300)  # 2 s between beats, lost after 6 s
LIMIT_S = 100
ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "sparse": lambda: presets.sparseloco(inner_steps=1, k=3, tile=4, panels=2, inner=adamw(1e-2)),
    "linear": lambda: presets.diloco(inner_steps=1, inner=adamw(1e-2)),
}


def texts(world: int, fn: Callable[..., None], folder: Path, *args: Any) -> dict[int, str]:
    """What each rank of a group wrote that ran ``fn(rank, folder, *args)``; nothing for one that was killed."""
    context = forks()
    ranks = [
        context.Process(target=_serve, args=(rank, world, fn, folder, *args), daemon=True) for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    until = time.monotonic() + LIMIT_S
    for rank in ranks:
        rank.join(max(0.0, until - time.monotonic()))
    late = [number for number, rank in enumerate(ranks) if rank.exitcode is None]
    for rank in ranks:
        rank.kill()
        rank.join()
    assert not late, f"ranks {late} did not end"
    return {rank: file.read_text() for rank in range(world) if (file := folder / f"{rank}.txt").exists()}


def _serve(rank: int, world: int, fn: Callable[..., None], folder: Path, *args: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    try:
        with joined_group(f"file://{folder}/rendezvous", rank, world, PATIENT):
            fn(rank, folder, *args)
        text = "no error"
    except SparseLocoError as error:
        text = f"{type(error).__name__}: {error}"
    except ValueError as error:
        text = f"not ours: {error}"
    _write(rank, folder, text)


def _write(rank: int, folder: Path, text: str) -> None:
    temporary = folder / f".{rank}.txt"
    temporary.write_text(text)
    temporary.rename(folder / f"{rank}.txt")


def rounds(rank: int, spoil: Callable[[int, Replica], None], row: str = "sparse", **more: Any) -> None:
    """Three rounds of a whole replica; ``spoil(step, replica)`` comes before each."""
    model = toy.net()
    replica = Replica(model, ALGORITHMS[row](), peer=rank)
    transport = ProcessGroup(**more)
    for step in range(1, 4):
        enter(f"step {step}")
        spoil(step, replica)
        toy.loss_of(model, toy.batch(step, rank)).backward()
        advance(replica, transport)
        settle(replica, transport)


def sharded_rounds(rank: int, spoil: Callable[[int, Replica], None]) -> None:
    """The same for two peers of two shards each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("peers", "shards"))
    model: nn.Module = fully_shard(toy.net(), mesh=mesh["shards"])
    transport = ProcessGroup(mesh.get_group("peers"))
    replica = Replica(model, ALGORITHMS["sparse"](), peer=transport.rank)
    transport.connect(replica)
    for step in range(1, 4):
        enter(f"step {step}")
        spoil(step, replica)
        toy.loss_of(model, toy.batch(step, transport.rank)).backward()
        advance(replica, transport)
        settle(replica, transport)


def _kill_self(_: object = None) -> None:
    """As out of memory does, once the others can read what this rank does."""
    beats = signs_of_life()
    while beats._read()[beats._rank].phase != "step 2":
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def killed(rank: int, folder: Path) -> None:
    def spoil(step: int, _: Replica) -> None:
        if (rank, step) == (2, 2):
            _kill_self()

    rounds(rank, spoil)


def killed_shard(rank: int, folder: Path) -> None:
    def spoil(step: int, _: Replica) -> None:
        if (rank, step) == (3, 2):
            _kill_self()

    sharded_rounds(rank, spoil)


def fails(rank: int, folder: Path) -> None:
    def spoil(step: int, _: Replica) -> None:
        if (rank, step) == (2, 2):
            raise ValueError("on purpose")

    rounds(rank, spoil)


def slow(rank: int, folder: Path) -> None:
    """Rank 2 evaluates until the others have given up on it, after two seconds instead of the usual time."""
    Deadline.collective_s = property(lambda self: 2.0)  # type: ignore[assignment,method-assign]

    def spoil(step: int, _: Replica) -> None:
        if (rank, step) == (2, 2):
            with phase("evaluate"):
                while not all((folder / f"{other}.txt").exists() for other in (0, 1)):
                    time.sleep(0.02)
            raise ValueError("done")

    if rank == 2:
        rounds(rank, spoil)
    _write(rank, folder, told(rounds, rank, spoil))
    os._exit(0)  # the group itself has the longer timeout, until which it would not be left


def told(fn: Callable[..., None], *args: Any) -> str:
    """Text of the error with which all ranks of a group of ``tests.mp`` end alike."""
    try:
        fn(*args)
    except SparseLocoError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def differs(rank: int, row: str, world: int) -> str:
    """The anchor of the last rank changes by itself before the second round."""

    def spoil(step: int, replica: Replica) -> None:
        if rank == world - 1 and step == 2:
            replica.lanes[0].state.anchor[1].view(-1)[0] += 1e-3

    return told(rounds, rank, spoil, row)


def differs_on_a_shard(rank: int) -> str:
    def spoil(step: int, replica: Replica) -> None:
        if rank == 3 and step == 2:
            next(block for block in replica.lanes[0].state.anchor if block.numel()).view(-1)[0] += 1e-3

    return told(sharded_rounds, rank, spoil)


def starts_otherwise(rank: int, what: str) -> str:
    """Rank 2 has something that the others do not have; no tensor differs."""
    facts = {"train.batch_size": "8", "train.seed": "0"}
    if rank == 2 and what == "setting":
        facts["train.batch_size"] = "4"
    model = nn.Linear(3, 4 if rank == 2 and what == "model" else 5)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    every = 3 if rank == 2 and what == "algorithm" else 2
    replica = Replica(model, presets.diloco(inner_steps=every, inner=adamw(1e-2)), peer=rank)
    with pytest.MonkeyPatch.context() as patched:
        if rank == 2 and what == "version":
            patched.setattr(starts, "_installed", lambda: "9.9.9")
        if rank == 2 and what == "torch":
            patched.setattr(torch, "__version__", "1.0.0")
        if rank == 2 and what == "source":
            patched.setattr(starts, "source_hash", lambda: "0123456789abcdef")
        return told(ProcessGroup(facts=facts if what != "algorithm" else None).connect, replica)


def any_length(rank: int, rows: list[bytes]) -> list[bytes]:
    """For a group of ``tests.mp``: everybody's row, of any length."""
    return ProcessGroup()._collectives.gather_any(rows[rank])


def reduced(rank: int, shapes: list[tuple[tuple[int, ...], str]]) -> dict[str, torch.Tensor]:
    """For a group of ``tests.mp``: the mean of one tensor per shape, by name."""
    from dataclasses import replace

    from sparseloco.types import Envelope, Key, Payload

    specs, tensors = parts(rank, shapes)
    mine = Envelope(
        key=Key(0, 0), peer=rank, weight=rank + 1, fingerprint="0" * 16, digest="0" * 32, payload=Payload((), {})
    )
    transport = ProcessGroup()
    transport.post(replace(mine, payload=Payload.of_tensors(specs, tensors, linear=True)))
    (mean,) = transport.collect(Key(0, 0))
    assert mean.weight == 3
    return mean.payload.tensors


def parts(rank: int, shapes: list[tuple[tuple[int, ...], str]]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Tables and tensors of whole numbers; no two elements of one rank are equal."""
    from sparseloco.types import PartSpec

    specs, tensors, first = [], {}, 1
    for number, (shape, dtype) in enumerate(shapes):
        name, count = f"{number}.value", int(torch.Size(shape).numel())
        kind = getattr(torch, dtype)
        specs.append(PartSpec(name, shape, kind, 8 * kind.itemsize))
        values = torch.arange(first, first + count, dtype=torch.float64) * (1000 if rank else 1)
        tensors[name] = values.reshape(shape).to(kind)
        first += count
    return specs, tensors
