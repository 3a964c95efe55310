"""What the peers learn: a small regression in float64, with noise that nobody can learn, and a held-out loss."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparseloco import presets, sgd
from sparseloco.algorithm import Algorithm
from sparseloco.simulate import Cohort

INPUTS, HIDDEN, OUTPUTS, BATCH = 12, 24, 3, 32
INNER_STEPS = 4
DECAY = 0.95
NOISE = 0.5
"""Its square is the least loss; the peers come within a tenth of it, so that one percent of the loss says something."""
_HELD_OUT = 4096


def algorithm() -> Algorithm:
    """SparseLoCo with small tiles, and inner steps that become shorter."""
    inner = sgd(lambda step: 0.2 / (1 + step / 100), momentum=0.5)
    return presets.sparseloco(inner_steps=INNER_STEPS, k=16, tile=8, decay=DECAY, inner=inner)


def net(seed: int = 0) -> nn.Module:
    """The model; equal for equal seeds, from whatever thread."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS)).double()
    with torch.no_grad():
        for param in model.parameters():
            fan = param.shape[-1] if param.ndim > 1 else 4
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) / fan**0.5)
    return model


_TEACHER = net(seed=1).requires_grad_(False)


def _data(size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, INPUTS, generator=generator, dtype=torch.float64)
    noise = torch.randn(size, OUTPUTS, generator=generator, dtype=torch.float64)
    return x, _TEACHER(x) + NOISE * noise


def loss_of(model: nn.Module, step: int, peer: int) -> Tensor:
    """Loss on the batch of one step of one peer; any of them can be made again."""
    x, y = _data(BATCH, 1000 * step + peer + 1)
    return (model(x) - y).square().mean()


def held_out(anchor: Mapping[str, Tensor]) -> float:
    """Loss of the agreed parameters on data that no peer trains on."""
    x, y = _data(_HELD_OUT, 0)
    with torch.no_grad():
        return float((torch.func.functional_call(net(), dict(anchor), (x,)) - y).square().mean())


def without_faults(rounds: int, peers: int) -> Cohort:
    """The same training in one process, without a store."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cohort = Cohort(net(), algorithm(), peers)
    for step in range(1, rounds * INNER_STEPS + 1):
        for peer in range(peers):
            with cohort.turn(peer):
                loss_of(cohort.model, step, peer).backward()
                cohort.advance(peer)
        cohort.settle()
    return cohort
