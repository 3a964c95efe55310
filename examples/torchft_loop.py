"""Replicas that come and go: kill one with -9, start it again, and it goes on with the others.

    torchft_lighthouse --bind 127.0.0.1:29510 --min_replicas 1
    python examples/torchft_loop.py --peer 0 --lighthouse http://127.0.0.1:29510
    python examples/torchft_loop.py --peer 1 --lighthouse http://127.0.0.1:29510

Each line in a terminal of its own. A loop under torchft asks the replica how far it is, since one that joins starts
where the others are.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import sparseloco
from sparseloco.transport.torchft import managed_group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer", type=int, required=True, help="number of this replica, another one at each")
    parser.add_argument("--lighthouse", required=True, help="address of torchft_lighthouse")
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(100 + options.peer)  # other data at every peer
    algorithm = sparseloco.presets.sparseloco(inner_steps=10, tile=16, k=32)
    with (
        managed_group(options.peer, options.lighthouse) as transport,
        sparseloco.synchronize(model, optimizer, algorithm, transport) as replica,
    ):
        print(f"peer {options.peer}: joined at step {replica.step}, anchor {replica.digest()}", flush=True)
        while replica.step < options.steps:
            x = torch.randn(32, 16, generator=data)
            loss = (model(x) - x.flip(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # every tenth step is followed by a round with whoever is there
        print(
            f"peer {options.peer}: step {replica.step}, loss {loss.item():.3f}, anchor {replica.digest()}", flush=True
        )


if __name__ == "__main__":
    main()
