"""Low-rank adapters on a frozen language model: only what is trained travels.

    python examples/lora.py

The adapters are a few lines here; those of another package work alike, since frozen parameters are never sent.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparseloco import adamw, presets
from sparseloco.model import build_model, next_token_loss
from sparseloco.simulate import Cohort

PEERS = 4


class Adapted(nn.Module):
    """A frozen linear layer plus a product of two thin matrices, which starts at zero."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T

    def merged(self) -> nn.Linear:
        """The same layer without an adapter."""
        with torch.no_grad():
            self.base.weight += self.up @ self.down
        return self.base


def adapt(model: nn.Module, rank: int) -> None:
    """Freeze a model and adapt its queries and values."""
    model.requires_grad_(False)
    for block in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(block.self_attn, name, Adapted(getattr(block.self_attn, name), rank))


def text(seed: int) -> Tensor:
    """Windows that count upwards from somewhere."""
    start = torch.randint(64, (8, 1), generator=torch.Generator().manual_seed(seed))
    return (start + torch.arange(17)) % 64


def main() -> None:
    torch.manual_seed(0)
    model = build_model(vocab_size=64, hidden_size=64, num_layers=2, num_heads=4, intermediate_size=96)
    whole = sum(value.numel() for value in model.parameters())
    adapt(model, rank=4)
    algorithm = presets.sparseloco(inner_steps=5, tile=16, k=64, inner=adamw(lr=1e-2))
    cohort = Cohort(model, algorithm, num_replicas=PEERS)
    losses: list[float] = []
    for step in range(40):
        for peer in range(PEERS):
            with cohort.turn(peer):
                loss = next_token_loss(model, text(PEERS * step + peer))
                loss.backward()
                cohort.advance(peer)
                losses.append(loss.item())
        cohort.settle()

    replica = cohort.replicas[0]
    model.load_state_dict(replica.anchor(), strict=False)
    before = model(input_ids=text(1)).logits
    for block in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(block.self_attn, name, getattr(block.self_attn, name).merged())
    assert torch.allclose(model(input_ids=text(1)).logits, before, atol=1e-4)
    trained, sent = sum(spec.numel for spec in replica.specs), cohort.transport.traffic(0).sent
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, trained {trained} of {whole} values, sent {sent} bytes each")


if __name__ == "__main__":
    main()
