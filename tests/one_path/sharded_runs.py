"""What single ranks do in the tests of sharded runs."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparseloco import checkpoint
from sparseloco.errors import SparseLocoError
from sparseloco.evaluation import anchored
from sparseloco.sharding import local_views
from sparseloco.solo import Solo
from sparseloco.whole import digest_of, whole_model
from tests import runs


def world_of(method: str, shards: int = 2) -> Solo:
    warnings.filterwarnings("ignore", "buffers=|FSDP2-wrapped module", UserWarning)
    return Solo(runs.ToyLM, runs.PANELED[method](), seed=0, shards=shards)


def trained(world: Solo, steps: int = 3) -> None:
    """Some inner steps with the data of this rank."""
    replica = world.replicas[0]
    for step in range(steps):
        torch.manual_seed(10 * step + replica.peer)
        world.model(torch.randint(runs.VOCAB, (2, 5))).logits.square().mean().backward()
        replica.local_step()


def looked_at(rank: int, method: str) -> dict[str, Any]:
    """What an evaluation leaves of a shard: bits, mode, and whether the next forward sees the live parameters again."""
    world = world_of(method)
    trained(world)
    replica, ids = world.replicas[0], torch.arange(5).view(1, 5)
    world.model.eval()
    with torch.no_grad():
        live = world.model(ids).logits
    world.model.train()
    before = {name: view.tensor.clone() for name, view in local_views(world.model).items()}
    with anchored(world.model, replica), torch.no_grad():
        inside = world.model(ids).logits
        mode = world.model.training
    after = {name: view.tensor for name, view in local_views(world.model).items()}
    same = runs.same(before, after)
    was_training = world.model.training
    world.model.eval()
    with torch.no_grad():
        again = world.model(ids).logits
    start = runs.ToyLM().eval()
    start.scale.copy_(world.model.scale)  # it is divided by a buffer, which is no part of an anchor
    with torch.no_grad():
        expected = start(ids).logits
    return {
        "same": same,
        "mode": (mode, was_training),
        "live again": torch.equal(live, again),
        "anchor inside": torch.equal(inside, expected),
        "moved": not torch.equal(live, inside),
    }


def gathered(rank: int, method: str) -> tuple[bool, int, str]:
    """Whether the gathered model is the first one at the rank that writes, how many tensors others keep, a digest."""
    world = world_of(method)
    trained(world)
    if not world.evaluates:
        return True, 0, digest_of(world.replicas[0])
    with whole_model(world, runs.ToyLM) as model:
        kept = list(model.parameters())
        start = runs.ToyLM()
        equal = not world.is_main or runs.same(
            {name: p.data for name, p in model.named_parameters()},
            {name: p.data for name, p in start.named_parameters()},
        )
    return equal, len(kept), digest_of(world.replicas[0])


def norm_of_gradients(rank: int) -> tuple[float, float]:
    """What a step of SGD with clipping to 1 moves a sharded model by, and the length that ends up in it."""
    from sparseloco import presets, sgd

    warnings.filterwarnings("ignore", "buffers=|FSDP2-wrapped module", UserWarning)
    algorithm = presets.diloco(inner_steps=2, panels=2, inner=sgd(1.0), clip_norm=1.0)
    world = Solo(runs.ToyLM, algorithm, seed=0, shards=2)
    (1e3 * world.model(torch.arange(10).view(2, 5)).logits.square().mean()).backward()
    world.replicas[0].local_step()
    rows = world.replicas[0].shards.gather(world.replicas[0].delta_norm())
    return sum(row[0] ** 2 for row in rows) ** 0.5, rows[0][0]


def refused(rank: int, method: str, shards: int) -> str:
    """Text of the error with which a sharded world is refused."""
    try:
        warnings.filterwarnings("ignore", "buffers=|FSDP2-wrapped module", UserWarning)
        Solo(runs.ToyLM, {**runs.METHODS, **runs.PANELED}[method](), seed=0, shards=shards)
    except SparseLocoError as error:
        return str(error)
    return "no error"


def with_a_slow_writer(rank: int, out: str, settings: Any, method: str, until: int) -> Any:
    """A run in which rank 1 cannot write its part of a checkpoint before the log has reached a later step."""
    durably = checkpoint.write_durably

    def slow(path: Path, data: bytes) -> None:
        log = Path(out, "metrics.jsonl")
        deadline = time.monotonic() + 50
        while rank == 1 and f'"step": {until}' not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert time.monotonic() < deadline, "training does not go on while a checkpoint is written"
        durably(path, data)

    checkpoint.write_durably = slow
    try:
        return runs.on_a_rank(rank, out, settings, method, None)
    finally:
        checkpoint.write_durably = durably


def lists_sharded(rank: int) -> list[str]:
    """Modules that are sharded by themselves, of a model with a list in a list."""
    from torch.distributed.fsdp import FSDPModule

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Experts(), Experts(), nn.Tanh()])
            self.pairs = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4)])])
            self.out = nn.Linear(4, 4)

    world = Solo(Nested, runs.PANELED["diloco_2_panels"](), seed=0, shards=2)
    return [path for path, module in world.model.named_modules() if isinstance(module, FSDPModule)]


class WithFrozen(runs.ToyLM):
    """A frozen layer of uneven rows, and a table that the model derives anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 7).requires_grad_(False)
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def fixed(rank: int) -> dict[str, str]:
    """Digests of what training does not change, of a sharded model."""
    warnings.filterwarnings("ignore", "buffers=|FSDP2-wrapped module", UserWarning)
    return Solo(WithFrozen, runs.PANELED["diloco_2_panels"](), seed=0, shards=2).replicas[0].fixed_digests()
