"""The context manager around a caller's own loop does what the explicit loop does, and refuses what it cannot keep."""

from __future__ import annotations

import pytest
import torch

from sparseloco import ConfigError, Loopback, ProcessGroup, Replica, adamw, advance, presets, settle, synchronize
from sparseloco.algorithm import Algorithm
from sparseloco.schedule import WarmupCosine
from tests import toy
from tests.mp import Group

STEPS = 7
METHODS = {
    "sparseloco": lambda **own: presets.sparseloco(inner_steps=3, k=8, **own),
    "delayed": lambda **own: presets.sparseloco(inner_steps=3, k=8, delay=2, **own),
    "diloco": lambda **own: presets.diloco(inner_steps=3, **own),
}
RATE = WarmupCosine(peak=1e-2, total_steps=STEPS, warmup_steps=2)


def own_loop(rank: int, method: str) -> tuple[str, list[torch.Tensor], int]:
    """A caller's loop: own optimizer, own schedule, own clipping."""
    model = toy.net()
    optimizer = adamw(RATE).build(list(model.parameters()))
    with synchronize(model, optimizer, METHODS[method](), ProcessGroup()) as replica:
        for step in range(1, STEPS + 1):
            toy.loss_of(model, toy.batch(step, rank)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = RATE(step)
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()  # outside the block: counts for nobody
    return replica.digest(), [p.detach().clone() for p in model.parameters()], replica.step


def explicit_loop(rank: int, method: str) -> tuple[str, list[torch.Tensor], int]:
    model, transport = toy.net(), ProcessGroup()
    replica = Replica(model, METHODS[method](inner=adamw(RATE), clip_norm=1.0), peer=rank)
    for step in range(1, STEPS + 1):
        toy.loss_of(model, toy.batch(step, rank)).backward()
        advance(replica, transport)
        settle(replica, transport)
    for key in replica.in_flight():
        replica.apply(key, transport.collect(key))
    return replica.digest(), [p.detach().clone() for p in model.parameters()], replica.step


@pytest.mark.mp
@pytest.mark.xdist_group("mp")
@pytest.mark.parametrize("method", METHODS)
def test_the_callers_loop_gives_the_bits_of_the_explicit_one(pair: Group, method: str) -> None:
    for mine, theirs in zip(pair.run(own_loop, method), pair.run(explicit_loop, method), strict=True):
        assert mine[0] == theirs[0]
        assert mine[2] == theirs[2] == STEPS
        assert all(torch.equal(a, b) for a, b in zip(mine[1], theirs[1], strict=True))


def alone() -> tuple[torch.nn.Module, torch.optim.Optimizer, Loopback]:
    model = toy.net()
    with pytest.warns(UserWarning, match="one replica alone"):
        transport = Loopback(1)
    return model, torch.optim.AdamW(model.parameters(), fused=True), transport


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (presets.demo(), r"algorithm.local='gradients': must be inner_steps here.*use the loop of advance\(\)"),
        (
            presets.diloco(inner=adamw()),
            r"algorithm.local.optimizer=set: must be None here.*leave inner and clip_norm out",
        ),
        (presets.diloco(clip_norm=1.0), r"algorithm.local.optimizer=set: must be None here"),
    ],
)
def test_algorithms_that_step_themselves_are_refused(algorithm: Algorithm, message: str) -> None:
    model, optimizer, transport = alone()
    with pytest.raises(ConfigError, match=message), synchronize(model, optimizer, algorithm, transport):
        pass


def test_closures_are_refused_before_anything_moves() -> None:
    model, optimizer, transport = alone()
    before = [p.detach().clone() for p in model.parameters()]
    with synchronize(model, optimizer, presets.diloco(inner_steps=2), transport) as replica:
        toy.loss_of(model, toy.batch(1, 0)).backward()
        with pytest.raises(ConfigError, match="must be called without one"):
            optimizer.step(lambda: torch.tensor(0.0))
        assert replica.step == 0
    assert all(torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))


def test_a_gradient_scaler_is_refused() -> None:
    model, optimizer, transport = alone()
    scaler = torch.amp.GradScaler("cpu")
    with synchronize(model, optimizer, presets.diloco(inner_steps=2), transport) as replica:
        scaler.scale(toy.loss_of(model, toy.batch(1, 0))).backward()
        with pytest.raises(ConfigError, match="train in bfloat16"):
            scaler.step(optimizer)
        assert replica.step == 0


def test_hooks_end_with_the_block_also_after_an_error() -> None:
    model, optimizer, transport = alone()
    steps = []

    def fail_after_a_step() -> None:
        with synchronize(model, optimizer, presets.diloco(inner_steps=2), transport) as replica:
            toy.loss_of(model, toy.batch(1, 0)).backward()
            optimizer.step()
            steps.append(replica)
            raise KeyError

    with pytest.raises(KeyError):
        fail_after_a_step()
    optimizer.step()
    assert steps[0].step == 1
