"""Four replicas of a Llama of 30 M parameters on one card: SparseLoCo and dense DiLoCo, their speed and their loss.

    python -m benchmarks.gpu_simulation [--device cpu] [--tiny] [--out FILE]

scripts/gpu_check.sh runs it after the kernels. Both methods see the same windows of the standard library's source for
600 steps in rounds of 30; a method that has trained for 150 s stops at the end of its round, and the other one is given
no more steps than it. So the whole takes less than 6 minutes, most of it on slow cards only. The replicas take turns
on the card, so tokens per second are those of the card. The first round is left out of all times: it compiles kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseloco import Algorithm, WarmupCosine, adamw, presets
from sparseloco.data import Dataset, evaluation_batches, open_dataset, train_sampler
from sparseloco.data.settings import DataConfig
from sparseloco.evaluation import anchored
from sparseloco.model import build_model, next_token_loss
from sparseloco.simulate import Cohort
from sparseloco.transport import post_due


@dataclass(frozen=True)
class Size:
    """What is trained; ``batch_size`` is windows per replica and step, ``limit_s`` seconds per method."""

    hidden_size: int = 512
    num_layers: int = 9
    num_heads: int = 8
    intermediate_size: int = 1408
    sequence_length: int = 512
    batch_size: int = 16
    evaluation_tokens: int = 131072
    replicas: int = 4
    inner_steps: int = 30
    steps: int = 600
    lr: float = 1e-3
    limit_s: float = 150.0


CARD = Size()
TINY = Size(
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    intermediate_size=64,
    sequence_length=32,
    batch_size=2,
    evaluation_tokens=1024,
    inner_steps=4,
    steps=12,
    lr=1e-2,
)


def methods(size: Size) -> dict[str, Algorithm]:
    """The two that are compared, with the same inner optimizer."""
    rate = WarmupCosine(peak=size.lr, total_steps=size.steps, warmup_steps=size.inner_steps)
    return {
        "sparseloco": presets.sparseloco(inner_steps=size.inner_steps, inner=adamw(rate), clip_norm=1.0),
        "diloco": presets.diloco(inner_steps=size.inner_steps, inner=adamw(rate), clip_norm=1.0),
    }


class Stopwatch:
    """Seconds since the first round, and those in synchronization; the device has done its work when one is read."""

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._now = now
        self.begun = self.measured_from = self.read()
        self.in_sync = 0.0

    def read(self) -> float:
        """The present moment, after all that was given to the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._now()

    def restart(self) -> None:
        """Measure from here."""
        self.measured_from, self.in_sync = self.read(), 0.0

    @contextlib.contextmanager
    def sync(self) -> Iterator[None]:
        """Count this block as synchronization."""
        before = self.read()
        yield
        self.in_sync += self.read() - before


def build(dataset: Dataset, algorithm: Algorithm, size: Size, device: torch.device) -> Cohort:
    """All replicas, on the device."""
    model = build_model(
        vocab_size=dataset.vocab_size,
        hidden_size=size.hidden_size,
        num_layers=size.num_layers,
        num_heads=size.num_heads,
        intermediate_size=size.intermediate_size,
        sequence_length=size.sequence_length,
    )
    return Cohort(model.to(device), algorithm, size.replicas)


def train(cohort: Cohort, dataset: Dataset, size: Size, device: torch.device, watch: Stopwatch) -> int:
    """Train for the steps of ``size``, or to the end of the round in which its time is over; returns the steps made."""
    sampler = train_sampler(dataset, size.sequence_length, seed=0)
    for step in range(1, size.steps + 1):
        is_border = step % size.inner_steps == 0
        for peer in range(size.replicas):
            mine = range(peer * size.batch_size, (peer + 1) * size.batch_size)
            batch = sampler.batch(mine, step - 1, size.replicas * size.batch_size).to(device)
            with cohort.turn(peer) as replica:
                loss_of(cohort, batch).backward()
                replica.local_step()
                if is_border:
                    with watch.sync():
                        post_due(replica, cohort.transport)
        if is_border:
            with watch.sync():
                cohort.settle()
            if step == size.inner_steps:
                watch.restart()
            if watch.read() - watch.begun >= size.limit_s:
                return step
    return size.steps


def loss_of(cohort: Cohort, batch: Tensor) -> Tensor:
    """Loss of the replica on the stage, in mixed precision on its device."""
    with torch.autocast(batch.device.type, dtype=torch.bfloat16):
        return next_token_loss(cohort.model, batch)


@torch.no_grad()
def held_out_loss(cohort: Cohort, dataset: Dataset, size: Size, device: torch.device) -> float:
    """Nats per token of the anchor on the test split."""
    nats, tokens = 0.0, 0
    split = dataset.split("test")
    with cohort.turn(0) as replica, anchored(cohort.model, replica):
        for batch in evaluation_batches(split, size.sequence_length, size.batch_size, size.evaluation_tokens):
            count = batch[:, 1:].numel()
            nats += float(loss_of(cohort, batch.to(device))) * count
            tokens += count
    return nats / tokens


def measure(algorithm: Algorithm, dataset: Dataset, size: Size, device: torch.device) -> dict[str, Any]:
    """Figures of one method."""
    cohort = build(dataset, algorithm, size, device)
    watch = Stopwatch(device)
    steps = train(cohort, dataset, size, device, watch)
    seconds = watch.read() - watch.measured_from
    digests = {replica.digest() for replica in cohort.replicas}
    first = cohort.replicas[0]
    sent = cohort.transport.traffic(first.peer).sent
    tokens_per_step = size.replicas * size.batch_size * size.sequence_length
    return {
        "steps": steps,
        "rounds": first.rounds,
        "parameters": sum(spec.numel for spec in first.specs),
        "tokens": steps * tokens_per_step,
        "tokens_per_s": (steps - size.inner_steps) * tokens_per_step / seconds,
        "seconds": seconds,
        "sync_fraction": watch.in_sync / seconds,
        "held_out_loss": held_out_loss(cohort, dataset, size, device),
        "bytes_sent_per_replica": sent,
        "compression": first.dense_bytes() / sent,
        "replicas_agree": len(digests) == 1,
    }


def compare(device: torch.device, size: Size) -> dict[str, Any]:
    """Both methods one after the other, the second for at most as many steps as the first; prints a line for each."""
    dataset = open_dataset(DataConfig())
    found: dict[str, Any] = {"size": asdict(size), "text": dataset.corpus_name, "methods": {}}
    steps = size.steps
    for name, algorithm in methods(size).items():
        row = measure(algorithm, dataset, replace(size, steps=steps), device)
        found["methods"][name] = row
        print(line(name, row), flush=True)
        if row["steps"] < steps:
            print(f"{name}: stopped after {size.limit_s:.0f} s, at step {row['steps']} of {steps}", flush=True)
        steps = row["steps"]
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def line(name: str, row: dict[str, Any]) -> str:
    """One method for people."""
    return (
        f"{name:10} {row['parameters'] / 1e6:.1f} M parameters, {row['steps']} steps, {row['rounds']} rounds: "
        f"{row['tokens_per_s']:,.0f} tokens/s, {row['sync_fraction']:.1%} of the time in sync, "
        f"held-out loss {row['held_out_loss']:.3f}, compression {row['compression']:.1f}"
        + ("" if row["replicas_agree"] else "  REPLICAS DIFFER")
    )


def agreed(found: dict[str, Any]) -> bool:
    """Whether all replicas ended with the same anchor, in both methods."""
    return all(row["replicas_agree"] for row in found["methods"].values())


def main(arguments: list[str] | None = None) -> int:
    """Compare, print, write what was found; 1 if replicas differ, 2 if there is no card."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of 40 thousand parameters, some seconds on a CPU")
    parser.add_argument("--out", type=Path, help="write what was found as JSON")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "device=cuda: must be an NVIDIA card that torch sees; run this on a machine with one, or try --device cpu "
            "--tiny",
            file=sys.stderr,
        )
        return 2
    found = compare(torch.device(options.device), TINY if options.tiny else CARD)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if agreed(found) else 1


if __name__ == "__main__":
    sys.exit(main())
