"""Make the sample of real pseudo-gradients that `sparseloco bench` measures codes on.

    python benchmarks/make_sample.py [--config examples/demo.toml] [--steps 450]

Trains the first entry of the demo and takes what top-k saw in the last two rounds: residual plus delta. Stored are
all kept values of two workers, which quantizers with statistics per tensor need, and whole chunks that are spread
evenly over the matrices, in which any k can be kept. Each block is scaled by a power of two, so float16 loses nothing
that matters here: values are rounded to 11 bits.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from sparseloco.bench.sample import PATH
from sparseloco.compress import TopK
from sparseloco.config import build_algorithm, load_config
from sparseloco.data import load_corpus, prepare
from sparseloco.trainer import train
from sparseloco.types import Parts, PartSpec

ROUNDS, WORKERS, CHUNKS = 2, 2, 24


@dataclass(frozen=True)
class Recorder:
    """A compressor that remembers the blocks it was given, as float16."""

    inner: TopK
    blocks: list[tuple[Tensor, float]] = field(default_factory=list, compare=False)
    name: ClassVar[str] = "recorder"
    linear: ClassVar[bool] = False
    portable: ClassVar[bool] = True
    chunkwise: ClassVar[bool] = False

    def init(self, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Parts:
        """That of the compressor inside."""
        return self.inner.init(rows, cols, dtype, device)

    def specs(self, rows: int, cols: int, dtype: torch.dtype, shared: Parts) -> tuple[PartSpec, ...]:
        """Those of the compressor inside."""
        return self.inner.specs(rows, cols, dtype, shared)

    def encode(self, block: Tensor, shared: Parts, *, key: int) -> Parts:
        """Remember, then encode."""
        self.blocks.append(in_float16(block))
        return self.inner.encode(block, shared, key=key)

    def accumulate_(
        self, out: Tensor, parts: Parts, weight: int, shared: Parts, *, weights: Tensor | None = None
    ) -> None:
        """That of the compressor inside."""
        self.inner.accumulate_(out, parts, weight, shared, weights=weights)

    def advance_(self, shared: Parts, update: Tensor) -> None:
        """That of the compressor inside."""
        self.inner.advance_(shared, update)


def in_float16(block: Tensor) -> tuple[Tensor, float]:
    """The block over a power of two that brings its largest magnitude to 2**12, and that power."""
    _, exponent = torch.frexp(block.abs().amax().to(torch.float64))
    power = 2.0 ** (int(exponent) - 12)
    return (block / power).to(torch.float16), power


def main() -> None:
    """Run the demo's first entry and write the sample."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="examples/demo.toml", help="run to take pseudo-gradients from")
    parser.add_argument("--steps", type=int, default=450, help="inner steps of that run")
    arguments = parser.parse_args()
    config = load_config(arguments.config, [f"train.steps={arguments.steps}", "train.evaluate_every=1000000"])
    dataset = prepare(load_corpus(config.data.path), config.data.vocab_size)
    algorithm = build_algorithm(config)
    compressor = algorithm.channel.compressor
    assert isinstance(compressor, TopK)
    recorder = Recorder(compressor)
    channel = replace(algorithm.channel, compressor=recorder)
    train(config, replace(algorithm, channel=channel), dataset, None, label="sample")
    rounds = arguments.steps // algorithm.schedule.every
    per_payload = len(recorder.blocks) // (rounds * config.train.workers)
    payloads = [
        recorder.blocks[(round_ * config.train.workers + worker) * per_payload :][:per_payload]
        for round_ in range(rounds - ROUNDS, rounds)
        for worker in range(WORKERS)
    ]
    write(payloads, compressor, PATH)
    print(f"{PATH}: {PATH.stat().st_size} bytes, {len(payloads)} payloads of {per_payload} blocks")


def write(payloads: list[list[tuple[Tensor, float]]], compressor: TopK, path: Path) -> None:
    """Kept values of every block, and whole chunks of the last payload."""
    shapes, powers, kept = [], [], []
    for block, power in (pair for payload in payloads for pair in payload):
        index = compressor.encode(block.float(), {}, key=0)["index"].to(torch.int64)
        value = block.gather(1, index)
        shapes.append(tuple(value.shape))
        powers.append(power)
        kept.append(value.flatten())
    whole = [(block * 1.0, power) for block, power in payloads[-1] if block.shape[1] == compressor.chunk_size]
    chunks = torch.cat([block for block, _ in whole])
    scale = torch.cat([torch.full((block.shape[0],), power) for block, power in whole])
    picked = torch.linspace(0, chunks.shape[0] - 1, CHUNKS).round().to(torch.int64)
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(
        path,
        kept=torch.cat(kept).numpy(),
        kept_shapes=np.array(shapes, dtype=np.int32),
        kept_powers=np.array(powers, dtype=np.float64),
        chunks=chunks[picked].numpy(),
        chunk_powers=scale[picked].to(torch.float64).numpy(),
    )


if __name__ == "__main__":
    main()
