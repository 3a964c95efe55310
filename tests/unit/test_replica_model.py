"""What of a model is trained and sent: tied, frozen and low-rank parts, accumulation, buffers, the start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from sparseloco import DivergenceError, Loopback, WarmupCosine, presets, sgd
from sparseloco.simulate import Cohort
from tests import toy
from tests.driver import INNER, ROWS, Peer, anchor, train

F64 = torch.float64


class Tied(nn.Module):
    """Embedding and head are one matrix; the layer between them is frozen."""

    def __init__(self, frozen: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 6)
        self.middle = nn.Sequential(nn.Linear(6, frozen), nn.Linear(frozen, 6)).requires_grad_(requires_grad=False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(x)))


@pytest.mark.parametrize("row", ["diloco", "sparseloco", "ddp"])
def test_tied_counts_once_and_frozen_costs_nothing_c53(row: str) -> None:
    """C-53: frozen parameters are never sent nor stepped, whatever their size; a tied one is one tensor."""
    sent = []
    for frozen in (1, 50):
        model = Tied(frozen)
        before = [p.clone() for p in model.middle.parameters()]
        cohort = Cohort(model, ROWS[row](), 2)
        assert [spec.name for spec in cohort.replicas[0].specs] == ["embedding.weight"]
        for _ in range(4):
            for peer in range(2):
                with cohort.turn(peer):
                    model(torch.arange(7)).square().mean().backward()
                    cohort.advance(peer)
            cohort.settle()
        with cohort.turn(1):
            assert all(torch.equal(p, q) for p, q in zip(model.middle.parameters(), before, strict=True))
            assert model.head.weight is model.embedding.weight
        assert list(cohort.replicas[0].anchor()) == ["embedding.weight"]
        sent.append(cohort.transport.traffic(0).sent)
    assert sent[0] == sent[1]


class LoraLinear(nn.Module):
    """A frozen matrix and a trainable product of two thin ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(9, 5).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(9, 2, bias=False), nn.Linear(2, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@dataclass(frozen=True)
class Median:
    """A reducer that this library does not have: coordinate-wise median of what peers decode to."""

    name: ClassVar[str] = "median"

    def reduce(self, like: Tensor, inbox: list, compressor: object, shared: object) -> Tensor:
        decoded = []
        for _, parts in inbox:
            decoded.append(torch.zeros_like(like))
            compressor.accumulate_(decoded[-1], parts, 1, shared)  # pyright: ignore
        return torch.stack(decoded).median(dim=0).values


@pytest.mark.parametrize("attacked", [False, True])
def test_trainable_subset_with_an_aggregation_of_ones_own_c60(attacked: bool) -> None:
    """C-60: LoRA-like training of K workers in one process; one of them may be hostile."""
    dense = presets.sparseloco(inner_steps=3, k=16, tile=4, values="float32", inner=INNER)
    algorithm = replace(dense, channel=replace(dense.channel, reducer=Median()))
    cohort = Cohort(LoraLinear(), algorithm, 3)
    assert [spec.name for spec in cohort.replicas[0].specs] == ["down.weight", "up.weight"]
    base, losses = cohort.model.base.weight.clone(), []
    for step in range(1, 31):
        for peer in range(3):
            with cohort.turn(peer):
                loss = toy.loss_of(cohort.model, toy.batch(step, peer))
                loss.backward()
                cohort.advance(peer)
                if attacked and peer == 2:
                    cohort.model.up.weight.data.fill_(1e3)
        losses.append(loss.item() if not attacked else _loss_of_anchor(cohort))
        cohort.settle()
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert torch.equal(cohort.model.base.weight, base)
    assert len({replica.digest() for replica in cohort.replicas}) == 1


def _loss_of_anchor(cohort: Cohort) -> float:
    with cohort.turn(0) as replica, torch.no_grad():
        here = {name: p.data.clone() for name, p in replica.params.items()}
        for name, value in replica.anchor().items():
            replica.params[name].data.copy_(value)
        loss = toy.loss_of(cohort.model, toy.batch(0, 0)).item()
        for name, value in here.items():
            replica.params[name].data.copy_(value)
    return loss


@pytest.mark.parametrize("row", ["ddp", "diloco", "sparseloco", "local_sgd"])
def test_accumulation_does_not_change_the_method_c13(row: str) -> None:
    """C-13: H counts optimizer steps; 1 x 8 and 4 x 2 sequences differ by the order of sums alone."""

    def run(micro_batches: int) -> list[Tensor]:
        cohort = Cohort(toy.net(F64), ROWS[row](), 2)
        for step in range(1, 9):
            for peer in range(2):
                with cohort.turn(peer):
                    for x in toy.batch(step, peer, F64).chunk(micro_batches):
                        (toy.loss_of(cohort.model, x) / micro_batches).backward()
                    cohort.advance(peer)
            cohort.settle()
        assert cohort.replicas[0].step == 8
        assert cohort.replicas[0].rounds == 8 // ROWS[row]().schedule.every
        return anchor(cohort)

    for one, four in zip(run(1), run(4), strict=True):
        assert (one - four).abs().max() <= 1e-12


@pytest.mark.filterwarnings("ignore:num_peers=1")
@pytest.mark.parametrize("preset", ["local_sgd", "ddp"])
def test_learning_rate_follows_the_shared_step(preset: str) -> None:
    schedule = WarmupCosine(peak=0.2, total_steps=9, warmup_steps=3)
    spec = sgd(schedule, momentum=0.5)
    algorithm = presets.local_sgd(inner_steps=3, inner=spec) if preset == "local_sgd" else presets.ddp(inner=spec)
    model = toy.net(F64)
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(1, 10):
        toy.loss_of(model, toy.batch(step, 0, F64)).backward()
        for p, v in zip(model.parameters(), velocity, strict=True):
            v.mul_(0.5).add_(p.grad)
            p.data.sub_(schedule(step) * v)
            p.grad = None
    for found, expected in zip(anchor(train(algorithm, peers=1, steps=9, dtype=F64)), model.parameters(), strict=True):
        assert (found - expected).abs().max() <= 1e-13


def test_loopback_refuses_other_starts_c02() -> None:
    """C-02: as on ranks; the tensor is named before a step is made."""
    transport = Loopback(2)
    transport.connect(Peer(ROWS["diloco"](), 0).replica)
    other = toy.net()
    with torch.no_grad():
        other[0].bias[2] += 1e-6
    with pytest.raises(DivergenceError, match=r"peer 1, tensor 0\.bias: starts from other values than at peer 0"):
        transport.connect(Peer(ROWS["diloco"](), 1, other).replica)


def test_private_buffers_are_named_once() -> None:
    with pytest.warns(UserWarning, match=r"buffers=\['1.running_mean', '1.running_var'\]: stay private") as caught:
        Peer(ROWS["diloco"](), 0, toy.batch_norm_net())
    assert len(caught) == 1
