"""A model, its data and its gradients, small enough to think about. Knows nothing of sparseloco."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Params = list[Tensor]
"""Parameters of :func:`net`, in the order of ``net().parameters()``."""


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two layers whose shapes no tile divides: (11, 9), (11,), (5, 11), (5,)."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 11), nn.Tanh(), nn.Linear(11, 5)).to(dtype)


def dropout_net() -> nn.Module:
    """The same with dropout between the layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 11), nn.Tanh(), nn.Dropout(0.2), nn.Linear(11, 5))


def batch_norm_net() -> nn.Module:
    """The same with a normalisation whose buffers change at every forward pass."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 11), nn.BatchNorm1d(11), nn.Tanh(), nn.Linear(11, 5))


def batch(step: int, peer: int, dtype: torch.dtype = torch.float32, size: int = 8) -> Tensor:
    """Inputs of one optimizer step of one peer; any of them can be made again."""
    generator = torch.Generator().manual_seed(1000 * step + peer)
    return torch.randn(size, 9, generator=generator).to(dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Mean squared distance from three times the first five inputs."""
    return (model(x) - 3 * x[:, :5]).square().mean()


def gradients(params: Sequence[Tensor], step: int, peer: int) -> Params:
    """Gradient of one batch at ``params``, by plain autograd."""
    leaves = [p.detach().clone().requires_grad_() for p in params]
    model = net(leaves[0].dtype)
    names = [name for name, _ in model.named_parameters()]
    x = batch(step, peer, leaves[0].dtype)
    output = torch.func.functional_call(model, dict(zip(names, leaves, strict=True)), (x,))
    return list(torch.autograd.grad((output - 3 * x[:, :5]).square().mean(), leaves))


def start(dtype: torch.dtype = torch.float32) -> Params:
    """Where everybody begins."""
    return [p.detach().clone() for p in net(dtype).parameters()]
