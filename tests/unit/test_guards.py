"""What may never happen, tried: infinities in an anchor, peers that cannot be compared, half a setting."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

from sparseloco import ConfigError, DivergenceError, Loopback, Replica, presets, sgd, synchronize, wire
from sparseloco.schedule import WarmupCosine
from sparseloco.simulate import Cohort
from sparseloco.types import Coding, Envelope, TensorSpec
from tests import toy

SPECS = [TensorSpec("w", (4, 4), torch.float32)]


def halving(step: int) -> float:
    return 0.5**step


@dataclass(frozen=True)
class Steps:
    high: float

    def __call__(self, step: int) -> float:
        return self.high / step


@pytest.mark.parametrize("outer_lr", [3e38, 1e300])
def test_an_outer_step_never_leaves_infinities_in_an_anchor(outer_lr: float) -> None:
    cohort = Cohort(toy.net(), presets.diloco(inner_steps=1, outer_lr=outer_lr, inner=sgd(0.1)), 2)
    for peer in range(2):
        with cohort.turn(peer):
            toy.loss_of(cohort.model, toy.batch(1, peer)).backward()
            cohort.advance(peer)
    with pytest.raises(DivergenceError, match=r"anchor of .*must stay finite.*lower the outer learning rate"):
        cohort.settle()
    assert all(bool(torch.isfinite(t).all()) for t in cohort.replicas[0].anchor().values())


@pytest.mark.parametrize("rate", [lambda step: 0.5, partial(WarmupCosine, peak=1.0)], ids=["lambda", "partial"])
def test_settings_that_peers_cannot_compare_are_refused(rate: object) -> None:
    algorithm = presets.diloco(outer_lr=rate, outer_momentum=0.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be a frozen dataclass or a function at the top of a module"):
        algorithm.fingerprint(SPECS)


def test_schedules_are_part_of_the_fingerprint() -> None:
    rates = [halving, Steps(1.0), Steps(2.0), WarmupCosine(peak=1.0, total_steps=9), 0.5]
    assert len({presets.demo(lr=rate).fingerprint(SPECS) for rate in rates}) == len(rates)
    assert presets.demo(lr=Steps(1.0)).fingerprint(SPECS) == presets.demo(lr=Steps(1.0)).fingerprint(SPECS)


def test_frozen_weights_that_differ_are_named_at_the_start() -> None:
    transport = Loopback(2)
    for peer in range(2):
        model = toy.net()
        model[0].weight.requires_grad_(False)
        if peer == 1:
            with torch.no_grad():
                model[0].weight[0, 0] += 1
        replica = Replica(model, presets.diloco(), peer=peer)
        if peer == 1:
            with pytest.raises(
                DivergenceError, match=r"peer 1, tensor 0\.weight: starts from other values than at peer 0"
            ):
                transport.connect(replica)
        else:
            transport.connect(replica)


def test_a_disabled_gradient_scaler_is_no_scaler() -> None:
    model = toy.net()
    with pytest.warns(UserWarning, match="one replica alone"):
        transport = Loopback(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with synchronize(model, optimizer, presets.diloco(inner_steps=1), transport) as replica:
        scaler.scale(toy.loss_of(model, toy.batch(1, 0))).backward()
        scaler.step(optimizer)
    assert replica.step == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: presets.sparseloco(inner_steps=1.5), "inner_steps=1.5: must be a whole number"),
        (lambda: presets.sparseloco(k=64.5), "k=64.5: must be a whole number"),
        (lambda: presets.sparseloco(tile=64.0), "rows=64.0: must be a whole number"),
        (lambda: presets.diloco(inner_steps="a"), "inner_steps='a': must be a whole number"),
        (lambda: presets.diloco(outer_lr=float("inf")), "lr=inf: must be positive"),
        (lambda: presets.powersgd(rank=True), "rank=True: must be a whole number"),
        (lambda: presets.streaming_diloco(num_fragments=2.0), "num_fragments=2.0: must be a whole number"),
        (
            lambda: presets.streaming_diloco(inner_steps=2, num_fragments=4),
            "num_fragments=4: must be at most inner_steps=2, one post a step; use fewer",
        ),
    ],
)
def test_half_a_setting_is_refused(make, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value).startswith(message)


def test_layers_of_a_plain_sequential_are_found() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    algorithm = presets.streaming_diloco(inner_steps=4, num_fragments=2)
    specs = [TensorSpec(n, tuple(p.shape), p.dtype) for n, p in model.named_parameters()]
    assert [len(rows) for rows in algorithm.fragments.assign(specs)] == [4, 4]


def test_a_mean_is_counted_as_in_a_ring() -> None:
    """Received bytes of dense methods are the same figure in both worlds."""
    cohort = Cohort(toy.net(), presets.diloco(inner_steps=1, inner=sgd(0.1)), 3)
    for peer in range(3):
        with cohort.turn(peer):
            toy.loss_of(cohort.model, toy.batch(1, peer)).backward()
            cohort.advance(peer)
    cohort.settle()
    body = 4 * sum(p.numel() for p in cohort.model.parameters())
    assert cohort.transport.traffic(0) == (72 + body, 2 * 72 + 2 * body * 2 // 3)


def test_compact_frames_are_counted_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of different peers differ in size; each peer receives what the others really send."""
    sizes: dict[int, int] = {}
    encode = wire.encode

    def counted(envelope: Envelope, *, coding: Coding) -> bytes:
        frame = encode(envelope, coding=coding)
        sizes[envelope.peer] = len(frame)
        assert coding == Coding.COMPACT
        return frame

    monkeypatch.setattr(wire, "encode", counted)
    cohort = Cohort(toy.net(), presets.sparseloco(inner_steps=1, k=40, tile=64, inner=sgd(0.1)), 3)
    for peer in range(3):
        with cohort.turn(peer):
            toy.loss_of(cohort.model, toy.batch(1, peer)).backward()
            cohort.advance(peer)
    cohort.settle()
    total = sum(sizes.values())
    assert [cohort.transport.traffic(p) for p in range(3)] == [(sizes[p], total - sizes[p]) for p in range(3)]


def test_only_the_replica_on_the_stage_advances() -> None:
    """Anything else would step the model that the caller handed in."""
    cohort = Cohort(toy.net(), presets.diloco(inner_steps=1, inner=sgd(0.1)), 2)
    with pytest.raises(ConfigError, match=r"peer=1: must be on the stage; call advance inside `with cohort.turn\(1\)`"):
        cohort.advance(1)
    with cohort.turn(0), pytest.raises(ConfigError, match="peer=1: must be on the stage"):
        cohort.advance(1)
