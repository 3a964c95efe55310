"""A mixture of experts whose experts are modules, as models have it that do not keep them in one tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.up(x)))


class Experts(nn.ModuleList):
    """In place of Mixtral's. The last one is never asked, so that its parameters have no gradient, as happens."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out, index = torch.zeros_like(x), index % (len(self) - 1)
        for number, expert in enumerate(self):
            tokens, slot = torch.where(index == number)
            if tokens.numel():
                out = out.index_add(0, tokens, expert(x[tokens]) * weights[tokens, slot, None])
        return out


def mixtral(shape: dict[str, Any], *, separate: bool) -> Any:
    """One with four experts in each layer, in a tensor or as modules."""
    model: Any = MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=4, num_experts_per_tok=2))
    if separate:
        for layer in model.model.layers:
            layer.mlp.experts = Experts(Expert(shape["hidden_size"]) for _ in range(4))
    return model
