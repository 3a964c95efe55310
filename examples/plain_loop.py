"""A training loop of your own, synchronized with its peers by one context manager.

    torchrun --nproc-per-node 2 examples/plain_loop.py

Every process holds one replica. Module, optimizer, schedule, clipping and accumulation are those of the loop.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import sparseloco


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same start at every peer
    model = TwoLayers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)

    data = torch.Generator().manual_seed(100 + dist.get_rank())  # other data at every peer
    algorithm = sparseloco.presets.sparseloco(inner_steps=10, tile=16, k=32)
    transport = sparseloco.ProcessGroup()
    losses: list[float] = []
    with sparseloco.synchronize(model, optimizer, algorithm, transport) as replica:
        for _ in range(60):
            optimizer.zero_grad()
            for _ in range(2):  # two micro-batches are one inner step
                x = torch.randn(32, 16, generator=data)
                loss = (model(x) - x.flip(1)).square().mean() / 2
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()  # every tenth step is followed by a round
            schedule.step()
            losses.append(2 * loss.item())
    line = f"rank {dist.get_rank()}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {replica.rounds} rounds, "
    print(f"{line}sent {transport.traffic(replica.peer).sent} bytes, anchor {replica.digest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
