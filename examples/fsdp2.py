"""Two replicas of two FSDP2 shards each, synchronized without gathering anything.

    torchrun --nproc-per-node 4 examples/fsdp2.py

The mesh has a dim of peers, over which rounds are exchanged, and a dim of shards, over which FSDP2 works.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sparseloco

SHARDS = 2


def main() -> None:
    mesh = init_device_mesh(
        "cpu", (int(os.environ["WORLD_SIZE"]) // SHARDS, SHARDS), mesh_dim_names=("peers", "shards")
    )
    peer, shard = mesh.get_coordinate() or (0, 0)
    torch.manual_seed(0)  # the same start everywhere
    model = nn.Sequential(nn.Linear(16, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 16))
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh["shards"])
    fully_shard(model, mesh=mesh["shards"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # after fully_shard

    data = torch.Generator().manual_seed(100 + dist.get_rank())  # other data at every process
    algorithm = sparseloco.presets.sparseloco(inner_steps=10, tile=16, k=32, panels=SHARDS)
    transport = sparseloco.ProcessGroup(mesh.get_group("peers"))
    losses: list[float] = []
    with sparseloco.synchronize(model, optimizer, algorithm, transport) as replica:
        for _ in range(60):
            x = torch.randn(64, 16, generator=data)
            loss = (model(x) - x.flip(1)).square().mean()
            loss.backward()  # FSDP2 averages over the shards of this replica
            optimizer.step()  # every tenth step is followed by a round with the other replica
            optimizer.zero_grad()
            losses.append(loss.item())
    print(
        f"peer {peer}, shard {shard}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {replica.rounds} rounds, "
        f"sent {transport.traffic(peer).sent} bytes, anchor {replica.digest()}",
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
