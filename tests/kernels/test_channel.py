"""The channel with its kernels and without: equal bits over whole rounds, and the fast path is really taken."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparseloco import Algorithm, DivergenceError, presets, sgd
from sparseloco.kernels import fast, native
from sparseloco.kernels.plan import Settled
from sparseloco.merge import Blend
from sparseloco.outer import Sgd
from sparseloco.replica import Replica
from sparseloco.sections import PackedSection
from sparseloco.simulate import Cohort
from sparseloco.transport import Loopback, advance, settle
from tests import toy

needs_native = pytest.mark.skipif(not native.built(), reason="the native kernels are not built here")

OURS: dict[str, Any] = {"inner_steps": 2, "k": 4, "tile": 4, "inner": sgd(0.05)}
ALGORITHMS = {
    "default": presets.sparseloco(**OURS),
    "mean over peers": presets.sparseloco(**OURS, mean_over="peers", outer_lr=0.7),
    "delayed": presets.sparseloco(**OURS, delay=1),
    "panels": presets.sparseloco(**OURS, panels=3),
    "momentum": replace(presets.sparseloco(**OURS), outer=Sgd(0.7, momentum=0.9, nesterov=True, weight_decay=0.1)),
    "one": presets.sparseloco(inner_steps=1, inner=sgd(1.0)),
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


def spy_on_settle(monkeypatch: pytest.MonkeyPatch) -> list[Settled]:
    """What kernels settle from now on."""
    settled: list[Settled] = []
    original = fast.settle_

    def spy(*args: Any, **kwargs: Any) -> Settled:
        settled.append(original(*args, **kwargs))
        return settled[-1]

    monkeypatch.setattr(fast, "settle_", spy)
    return settled


def one_round(*params: torch.Tensor, delta: float = 0.25) -> tuple[torch.Tensor, dict[str, Any]]:
    """One replica per parameter; they move by ``delta``, twice that and so on. The first one's values and state."""
    transport = Loopback(len(params))
    replicas = [
        Replica(torch.nn.ParameterList([torch.nn.Parameter(param)]), ALGORITHMS["one"], peer=peer)
        for peer, param in enumerate(params)
    ]
    for replica in replicas:
        transport.connect(replica)
    for peer, (param, replica) in enumerate(zip(params, replicas, strict=True)):
        replica.params["0"].grad = torch.full_like(param, -delta) * (peer + 1)
        advance(replica, transport)
    for replica in replicas:
        settle(replica, transport)
    return params[0].detach().clone(), replicas[0].shared_state() | replicas[0].private_state()


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [*range(65, 128), 17, 33, 81, 100])
def test_every_right_edge(width: int, dtype: torch.dtype) -> None:
    """Rows of ragged tiles start at any place of a window."""
    param = torch.randn(70, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    mine, state = one_round(param.clone(), param.clone())
    with native.definition_only():
        theirs, expected = one_round(param.clone(), param.clone())
    assert torch.equal(mine, theirs)
    assert all(torch.equal(v, expected[n]) for n, v in state.items() if n.startswith(("anchor/", "residual/")))


@needs_native
@pytest.mark.parametrize(
    ("view", "taken"),
    [(lambda t: t[:, :128], True), (lambda t: t[5:, 3:], True), (lambda t: t.T, False), (lambda t: t[:, ::2], False)],
)
def test_parameters_that_are_views(
    view: Callable[[torch.Tensor], torch.Tensor], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with gaps between them are encoded and settled where they lie; what is no such matrix, by the definition."""
    whole = torch.randn(128, 160, generator=torch.Generator().manual_seed(0))
    with native.definition_only():
        theirs, _ = one_round(view(whole.clone()), view(whole.clone()))
    settled = spy_on_settle(monkeypatch)
    mine, _ = one_round(view(whole.clone()), view(whole.clone()))
    assert torch.equal(mine, theirs)
    assert [done.tensors == {0} for done in settled] == [taken] * 2


@pytest.mark.parametrize("off", [False, True])
def test_a_scale_that_is_too_large_does_not_leave_its_replica(off: bool) -> None:
    with native.definition_only() if off else contextlib.nullcontext():
        cohort = Cohort(torch.nn.ParameterList([torch.nn.Parameter(torch.full((64, 64), -9e36))]), ALGORITHMS["one"], 2)
        with cohort.turn(0):
            cohort.model[0].data.fill_(9e36)
            cohort.model[0].grad = torch.zeros(64, 64)
            with pytest.raises(
                DivergenceError,
                match=r"^peer 0, round 0, block 0, part scale=not finite: must be finite \(below 1e\+37\)",
            ):
                cohort.advance(0)


@needs_native
def test_the_kernels_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    settled = spy_on_settle(monkeypatch)
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
