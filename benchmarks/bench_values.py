"""Error of every code for kept values, on the pseudo-gradients of a real run.

    python benchmarks/bench_values.py [--steps 150] [--out benchmarks/results/values.json]

Trains as `make demo` does, keeps all values that top-k chose, and codes them again with each code. Error is
norm(kept - sent) / norm(kept) over all chunks of a third of the rounds. The last rows answer how much is lost by
levels that are fixed numbers of the format: `best_levels` fits both levels to the very values they are judged on.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from sparseloco.compress import SignOneLevel, SignTwoLevel, Statistical, TopK, ValueCode
from sparseloco.config import build_algorithm, load_config
from sparseloco.data import load_corpus, prepare
from sparseloco.trainer import train
from sparseloco.types import Parts, PartSpec


@dataclass(frozen=True)
class Recorder:
    """A value code that remembers what it was given."""

    code: ValueCode
    kept: list[Tensor] = field(default_factory=list, compare=False)
    name: ClassVar[str] = "recorder"

    def specs(self, rows: int, kept: int) -> tuple[PartSpec, ...]:
        """Those of the code inside."""
        return self.code.specs(rows, kept)

    def encode(self, value_NK: Tensor, *, key: int) -> Parts:
        """Remember, then encode."""
        self.kept.append(value_NK.clone())
        return self.code.encode(value_NK, key=key)

    def decode(self, parts: Parts) -> Tensor:
        """That of the code inside."""
        return self.code.decode(parts)


def error_of(code: ValueCode, kept: list[Tensor]) -> float:
    """norm(kept - sent) / norm(kept), all blocks together."""
    lost = total = 0.0
    for value_NK in kept:
        sent = code.decode(code.encode(value_NK, key=0))
        lost += float((value_NK - sent).double().square().sum())
        total += float(value_NK.double().square().sum())
    return (lost / total) ** 0.5


def best_levels(kept: list[Tensor]) -> tuple[float, float, float]:
    """Lloyd's two levels of |value| / chunk scale, weighted by energy, and their error."""
    magnitude = [value_NK.abs().double() for value_NK in kept]
    scale = [m.mean(dim=1, keepdim=True).expand_as(m).flatten() for m in magnitude]
    value, weight = torch.cat([m.flatten() for m in magnitude]), torch.cat(scale)
    ratio, energy = value / weight.clamp(min=1e-300), weight.square()
    low, high = 0.9, 1.2
    for _ in range(100):
        large = ratio > (low + high) / 2
        low = float((ratio * energy)[~large].sum() / energy[~large].sum())
        high = float((ratio * energy)[large].sum() / energy[large].sum())
    sent = torch.where(ratio > (low + high) / 2, high, low)
    error = float(((ratio - sent).square() * energy).sum() / (ratio.square() * energy).sum()) ** 0.5
    return low, high, error


def main() -> None:
    """Run, print one JSON object, and store it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="examples/demo.toml", help="run to take pseudo-gradients from")
    parser.add_argument("--steps", type=int, default=150, help="inner steps of that run")
    parser.add_argument("--out", type=Path, default=None, help="file for the result")
    arguments = parser.parse_args()
    config = load_config(arguments.config, [f"train.steps={arguments.steps}", "train.evaluate_every=1000000"])
    dataset = prepare(load_corpus(config.data.path), config.data.vocab_size)
    algorithm = build_algorithm(config)
    compressor = algorithm.channel.compressor
    assert isinstance(compressor, TopK)
    recorder = Recorder(compressor.values)
    channel = replace(algorithm.channel, compressor=replace(compressor, values=recorder))
    train(config, replace(algorithm, channel=channel), dataset, None, label="values")
    codes: list[ValueCode] = [SignTwoLevel(), SignOneLevel(), Statistical()]
    third = len(recorder.kept) // 3
    result: dict[str, object] = {"steps": arguments.steps, "k": compressor.k}
    for name, start in (("first_third", 0), ("last_third", len(recorder.kept) - third)):
        kept = recorder.kept[start : start + third]
        low, high, error = best_levels(kept)
        errors = {code.name: round(error_of(code, kept), 4) for code in codes}
        result[name] = {
            **errors,
            "best_levels": {"low": round(low, 3), "high": round(high, 3), "error": round(error, 4)},
        }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
