"""What a method becomes when one of its parts is switched off."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparseloco import adamw, presets, sgd
from sparseloco.local import OptimizerSpec
from sparseloco.merge import Blend, Carry, Replace
from tests import toy
from tests.driver import INNER, anchor, residual, train

F64 = torch.float64


def plain_training(optimizer: OptimizerSpec, steps: int, dtype: torch.dtype, peers: int = 1) -> list[Tensor]:
    """One model, one optimizer, no library; the gradient is the mean over the peers' batches."""
    model = toy.net(dtype)
    torch_optimizer = optimizer.build(list(model.parameters()))
    for step in range(1, steps + 1):
        for peer in range(peers):
            (toy.loss_of(model, toy.batch(step, peer, dtype)) / peers).backward()
        torch_optimizer.step()
        torch_optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) <= tolerance


@pytest.mark.parametrize("mean_over", ["contributors", "peers"])
@pytest.mark.parametrize("lr", [1.0, 0.7])
def test_sparseloco_with_every_value_is_diloco_without_momentum(mean_over: str, lr: float) -> None:
    """k = C, float32 values, no decay: the residual stays zero and the mean is that of the deltas."""
    full = presets.sparseloco(
        inner_steps=4, k=16, tile=4, decay=1.0, values="float32", mean_over=mean_over, outer_lr=lr, inner=INNER
    )  # fmt: skip
    dense = presets.diloco(inner_steps=4, outer_lr=lr, outer_momentum=0, inner=INNER)
    cohort = train(full, peers=3, steps=16)
    assert_same(anchor(cohort), anchor(train(dense, peers=3, steps=16)))
    assert all(not block.any() for replica in cohort.replicas for block in residual(replica).values())


def test_qsparse_with_every_value_keeps_nothing_of_the_selection() -> None:
    """k = C and 127 levels: what differs from dense is the stochastic rounding alone, less than one level."""
    full = presets.qsparse_local_sgd(inner_steps=4, k=16, chunk_size=16, levels=127, inner=sgd(0.01))
    dense = presets.local_sgd(inner_steps=4, inner=sgd(0.01))
    found, expected = (anchor(train(algorithm, peers=3, steps=4)) for algorithm in (full, dense))
    delta = max(float((a - b).norm()) for a, b in zip(expected, toy.start(), strict=True))
    assert_close(found, expected, 3 * delta / 127)  # a chunk's norm of one peer is within 3 mean deltas here


def test_sparse_method_with_every_step_and_value_is_ddp() -> None:
    """H = 1, k = C, no decay, SGD inside: one step of DDP with SGD."""
    full = presets.sparseloco(inner_steps=1, k=16, tile=4, decay=1.0, values="float32", inner=sgd(0.125))
    found = anchor(train(full, peers=3, steps=12, dtype=F64))
    # Values travel as float32, so each delta is off by 6e-8 of itself until error feedback sends the rest.
    assert_close(found, anchor(train(presets.ddp(inner=sgd(0.125)), peers=3, steps=12, dtype=F64)), 1e-7)


@pytest.mark.parametrize("weights", [None, (1, 2, 4)])
def test_diloco_without_outer_optimizer_is_local_sgd(weights: tuple[int, ...] | None) -> None:
    dense = presets.diloco(inner_steps=4, outer_lr=1, outer_momentum=0, inner=INNER)
    averaged = presets.local_sgd(inner_steps=4, inner=INNER)
    found, expected = (train(a, peers=3, steps=16, weights=weights) for a in (dense, averaged))
    assert_same(anchor(found), anchor(expected))


def test_streaming_diloco_with_one_fragment_and_no_delay_is_diloco() -> None:
    streaming = presets.streaming_diloco(
        inner_steps=4, num_fragments=1, fragment_by="size", delay=0, alpha=0, bits=32, inner=INNER
    )  # fmt: skip
    found = train(streaming, peers=3, steps=16)
    assert_same(anchor(found), anchor(train(presets.diloco(inner_steps=4, inner=INNER), peers=3, steps=16)))


@pytest.mark.parametrize("lr", [0.125, 0.1])
def test_local_sgd_with_one_inner_step_is_ddp_c04(lr: float) -> None:
    """C-04: post-local SGD in a set-up that should equal plain DDP must equal it."""
    local = presets.local_sgd(inner_steps=1, inner=sgd(lr))
    found = anchor(train(local, peers=3, steps=30, dtype=F64))
    assert_close(found, anchor(train(presets.ddp(inner=sgd(lr)), peers=3, steps=30, dtype=F64)), 1e-13)  # 30 roundings
    assert_close(found, plain_training(sgd(lr), 30, F64, peers=3), 1e-13)


@pytest.mark.parametrize("preset", ["local_sgd", "diloco", "sparseloco", "streaming_diloco"])
def test_one_replica_alone_is_plain_training(preset: str) -> None:
    """One peer, one fragment, nothing lost on the way; whoever does this is told that it synchronizes with nobody."""
    settings: dict[str, dict[str, object]] = {
        "local_sgd": {},
        "diloco": {"outer_lr": 1.0, "outer_momentum": 0.0},
        "sparseloco": {"k": 16, "tile": 4, "decay": 1.0, "values": "float32"},
        "streaming_diloco": {
            "num_fragments": 1, "fragment_by": "size", "delay": 0, "alpha": 0.0, "bits": 32,
            "outer_lr": 1.0, "outer_momentum": 0.0,
        },
    }  # fmt: skip
    algorithm = presets.build(preset, {"inner_steps": 4, **settings[preset]}, inner=INNER)
    with pytest.warns(UserWarning, match=r"num_peers=1: one replica alone synchronizes with nobody; use 2 or more"):
        cohort = train(algorithm, peers=1, steps=16, dtype=F64)
    # anchor - (anchor - local) is local to a rounding; top-k's values are float32 numbers, and travel as such.
    assert_close(anchor(cohort), plain_training(INNER, 16, F64), 1e-7 if preset == "sparseloco" else 1e-14)


@pytest.mark.filterwarnings("ignore:num_peers=1")
@pytest.mark.parametrize("preset", ["ddp", "ddp_clipped"])
def test_ddp_of_one_replica_is_the_optimizer_itself(preset: str) -> None:
    clip_norm = 1e9 if preset == "ddp_clipped" else None  # a bound that never binds multiplies by exactly 1
    cohort = train(presets.ddp(inner=INNER, clip_norm=clip_norm), peers=1, steps=16)
    assert_same(anchor(cohort), plain_training(INNER, 16, torch.float32))


@pytest.mark.filterwarnings("ignore:num_peers=1")
@pytest.mark.parametrize("delay", [1, 3])
def test_delay_is_invisible_to_one_replica_that_carries_its_progress(delay: int) -> None:
    """What was trained while the message was in flight is neither lost nor counted twice."""
    algorithm = presets.sparseloco(
        inner_steps=4, k=16, tile=4, decay=1.0, values="float32", delay=delay, inner=INNER
    )  # fmt: skip
    cohort = train(algorithm, peers=1, steps=18, dtype=F64)
    with cohort.turn(0):
        live = [p.detach().clone() for p in cohort.model.parameters()]
    # float32 values: what is not sent in full stays in the residual, and is 6e-8 of a delta at most.
    assert_close(live, plain_training(INNER, 18, F64), 1e-7)


def test_merges_agree_when_nothing_is_in_flight() -> None:
    algorithm = presets.sparseloco(inner_steps=4, k=3, tile=4, inner=INNER)
    expected = anchor(train(algorithm, peers=3, steps=16))
    for merge in (Replace(), Carry(), Blend(0.0)):
        assert_same(anchor(train(replace(algorithm, merge=merge), peers=3, steps=16)), expected)


def test_blend_of_one_never_comes_back() -> None:
    """alpha = 1 keeps the live values: every replica trains alone."""
    algorithm = presets.streaming_diloco(inner_steps=4, fragment_by="size", alpha=1.0, inner=INNER)
    cohort = train(algorithm, peers=2, steps=16)
    with cohort.turn(0):
        live = [p.detach().clone() for p in cohort.model.parameters()]
    assert_same(live, plain_training(INNER, 16, torch.float32))


@pytest.mark.filterwarnings("ignore:num_peers=1")
@pytest.mark.parametrize("preset", ["sparseloco", "diloco", "ef_signsgd", "demo"])
def test_equal_peers_are_one_peer(preset: str) -> None:
    """Two replicas on the same data send the same, and the mean of two equal numbers is that number."""
    settings: dict[str, dict[str, object]] = {
        "sparseloco": {"inner_steps": 4, "k": 3, "tile": 4},
        "diloco": {"inner_steps": 4},
        "ef_signsgd": {},
        "demo": {"k": 3, "tile": 4},
    }
    private = {"inner": INNER} if "inner_steps" in settings[preset] else {}
    algorithm = presets.build(preset, settings[preset], **private)
    two = train(algorithm, peers=2, steps=12, same_data=True)
    assert_same(anchor(two), anchor(train(algorithm, peers=1, steps=12)))


def test_demo_with_every_value_and_no_memory_is_the_sign_of_the_mean_gradient() -> None:
    lr = 2.0**-6
    algorithm = presets.demo(lr=lr, k=16, tile=4, decay=0.0)
    theta = toy.start(F64)
    for step in range(1, 9):
        grads = [toy.gradients(theta, step, peer) for peer in range(3)]
        theta = [p - lr * torch.stack(g).mean(dim=0).sign() for p, *g in zip(theta, *grads, strict=True)]
    assert_same(anchor(train(algorithm, peers=3, steps=8, dtype=F64)), theta)


def test_powersgd_of_a_rank_that_does_not_shrink_is_ddp_with_momentum() -> None:
    full = presets.powersgd(lr=0.125, rank=11, momentum=0.875)
    dense = presets.ddp(inner=sgd(0.125, momentum=0.875))
    found, expected = (anchor(train(algorithm, peers=3, steps=12, dtype=F64)) for algorithm in (full, dense))
    assert_close(found, expected, 1e-13)  # torch's SGD may round products another way


def test_weights_count_as_copies() -> None:
    """A peer of weight 2 is that peer twice; FedAvg's weights are nothing else."""
    algorithm = presets.local_sgd(inner_steps=4, inner=adamw(1e-2))
    weighted = train(algorithm, peers=2, steps=4, weights=(2, 1))
    deltas = [
        [p - q for p, q in zip(toy.start(), _alone(peer), strict=True)] for peer in (0, 0, 1)
    ]  # fmt: skip
    mean = [torch.stack(d).double().mean(dim=0).float() for d in zip(*deltas, strict=True)]
    assert_same(anchor(weighted), [p - d for p, d in zip(toy.start(), mean, strict=True)])


def _alone(peer: int) -> list[Tensor]:
    model = toy.net()
    optimizer = INNER.build(list(model.parameters()))
    for step in range(1, 5):
        toy.loss_of(model, toy.batch(step, peer)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]
