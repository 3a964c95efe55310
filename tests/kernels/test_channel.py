"""The channel with its kernels and without: equal bits over whole rounds, and the fast path is really taken."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparseloco import Algorithm, presets, sgd
from sparseloco.kernels import fast, native
from sparseloco.kernels.plan import Settled
from sparseloco.merge import Blend
from sparseloco.outer import Sgd
from sparseloco.sections import PackedSection
from sparseloco.simulate import Cohort
from tests import toy

needs_native = pytest.mark.skipif(not native.built(), reason="the native kernels are not built here")

OURS: dict[str, Any] = {"inner_steps": 2, "k": 4, "tile": 4, "inner": sgd(0.05)}
ALGORITHMS = {
    "default": presets.sparseloco(**OURS),
    "mean over peers": presets.sparseloco(**OURS, mean_over="peers", outer_lr=0.7),
    "delayed": presets.sparseloco(**OURS, delay=1),
    "panels": presets.sparseloco(**OURS, panels=3),
    "momentum": replace(presets.sparseloco(**OURS), outer=Sgd(0.7, momentum=0.9, nesterov=True, weight_decay=0.1)),
    "blend": replace(presets.sparseloco(**OURS), merge=Blend(0.25)),
}


def train(algorithm: Algorithm, dtype: torch.dtype, steps: int = 7) -> list[dict[str, Any]]:
    """State of all replicas after some rounds."""
    cohort = Cohort(toy.net(dtype), algorithm, num_replicas=3)
    for step in range(steps):
        for peer in range(3):
            with cohort.turn(peer):
                toy.loss_of(cohort.model, toy.batch(step, peer, dtype)).backward()
                cohort.advance(peer)
        cohort.settle()
    states = []
    for peer, replica in enumerate(cohort.replicas):
        with cohort.turn(peer):
            states.append(replica.shared_state() | replica.private_state())
    return states


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@needs_native
@pytest.mark.parametrize("kernels", ["", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_rounds_with_kernels_are_rounds_without(
    name: str, dtype: torch.dtype, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSELOCO_KERNELS", kernels)
    fast_states = train(ALGORITHMS[name], dtype)
    monkeypatch.setenv("SPARSELOCO_KERNELS", "torch")
    assert fast.path() == "torch"
    for mine, theirs in zip(fast_states, train(ALGORITHMS[name], dtype), strict=True):
        assert mine.keys() == theirs.keys()
        for entry, value in mine.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, theirs[entry]), entry
            elif entry != "optimizer":
                assert value == theirs[entry], entry


@needs_native
def test_the_kernels_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[Settled] = []
    original = fast.settle_

    def spy(*args: Any, **kwargs: Any) -> Settled:
        settled.append(original(*args, **kwargs))
        return settled[-1]

    monkeypatch.setattr(fast, "settle_", spy)
    cohort = Cohort(toy.net(), ALGORITHMS["default"], num_replicas=2)
    for step in range(2):
        for peer in range(2):
            with cohort.turn(peer) as replica:
                toy.loss_of(cohort.model, toy.batch(step, peer)).backward()
                replica.local_step()
                for envelope in replica.outbox():
                    assert all(isinstance(s, PackedSection) for s in envelope.payload.sections.values())
                    cohort.transport.post(envelope)
    cohort.settle()
    assert [done.tensors for done in settled] == [frozenset(range(4))] * 2
    assert all(done.square > 0 and done.failed is None for done in settled)


def test_what_is_missing_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_native", None)
    fast._say_once_what_is_missing.cache_clear()
    assert fast.path() == "torch"
    with pytest.warns(
        UserWarning, match="native kernels=not installed: SparseLoCo must encode in plain PyTorch"
    ) as said:
        train(ALGORITHMS["default"], torch.float32, steps=4)
    assert len(said) == 1
