"""A small convolutional network with batch normalization, four replicas in one process.

    python examples/vision_batchnorm.py

Running means and variances are buffers, not parameters. With ``sync_buffers`` they are averaged at every round, so
that all replicas end with the same network; without it, each keeps its own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from sparseloco import presets, sgd
from sparseloco.simulate import Cohort

PEERS = 4


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip


def images(seed: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """Noisy stripes in one of four directions."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(4, (size,), generator=generator)
    row, column = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    waves = torch.stack([row, column, row + column, row - column]).mul(1.5).sin()
    return waves[label][:, None] + 0.7 * torch.randn(size, 1, 12, 12, generator=generator), label


def main() -> None:
    model = network()
    algorithm = presets.sparseloco(inner_steps=5, tile=16, k=32, inner=sgd(lr=0.05, momentum=0.9))
    algorithm = replace(algorithm, sync_buffers=True)
    cohort = Cohort(model, algorithm, num_replicas=PEERS)
    for step in range(40):
        for peer in range(PEERS):
            with cohort.turn(peer):
                x, label = images(PEERS * step + peer)
                nn.functional.cross_entropy(model(x), label).backward()
                cohort.advance(peer)
        cohort.settle()

    # The anchor holds the averaged buffers under their own names.
    anchor = cohort.replicas[0].anchor()
    trained = network()
    trained.load_state_dict(anchor, strict=False)
    trained.eval()
    x, label = images(seed=10_000, size=512)
    accuracy = (trained(x).argmax(1) == label).float().mean().item()
    means = [replica.anchor()["1.running_mean"] for replica in cohort.replicas]
    word = "alike" if all(torch.equal(mean, means[0]) for mean in means) else "different"
    print(f"accuracy {accuracy:.3f}, running means {word}, digest {cohort.replicas[0].digest()}")


if __name__ == "__main__":
    main()
