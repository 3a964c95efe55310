"""Whole runs of the trainer on a language model small enough to be run hundreds of times, and what they leave."""

from __future__ import annotations

import json
import warnings
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from sparseloco import presets
from sparseloco.algorithm import Algorithm, Recipe
from sparseloco.checkpoint import Checkpoint, CheckpointFolder
from sparseloco.data import Dataset, TokenSplit
from sparseloco.settings import CheckpointConfig, OptimizerConfig, RunConfig, TrainConfig
from sparseloco.simulate import Cohort
from sparseloco.solo import Solo
from sparseloco.trainer import CHECKPOINTS, train
from tests.driver import INNER, ROWS

VOCAB, STEPS = 23, 11
CLOCK = ("seconds", "seconds_in_sync", "tokens_per_s")
Output = namedtuple("Output", "logits")


class ToyLM(nn.Module):
    """Embedding, two numbered layers with dropout, a buffer that counts in floats and one that counts in integers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(vocab_size=VOCAB)
        self.embedding = nn.Embedding(VOCAB, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, VOCAB)
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.to(dtype)

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Output:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.1, self.training)
        if self.training:
            self.scale.mul_(0.9).add_(0.1 * x.detach().abs().mean(dim=(0, 1)))
            self.calls += 1
        return Output(self.head(x / (self.scale + 0.5)))


def synced(algorithm: Algorithm) -> Algorithm:
    return replace(algorithm, sync_buffers=True)


METHODS: dict[str, Callable[[], Algorithm]] = {
    **ROWS,
    "buffers_synced": lambda: synced(ROWS["diloco"]()),
}


PANELED: dict[str, Callable[[], Algorithm]] = {
    "sparseloco_2_panels": lambda: presets.sparseloco(
        inner_steps=4, k=3, tile=4, panels=2, delay=2, inner=INNER, clip_norm=0.5
    ),
    "diloco_2_panels": lambda: presets.diloco(inner_steps=4, panels=2, inner=INNER, clip_norm=0.5),
    "streaming_diloco_2_panels": lambda: presets.streaming_diloco(
        inner_steps=4, panels=2, fragment_by="size", inner=INNER, clip_norm=0.5
    ),
}
"""Methods for replicas of one shard or two; clipping is by the norm over both."""


def dataset(seed: int = 0) -> Dataset:
    """Random tokens with some order in them."""
    generator = np.random.default_rng(seed)
    sizes = {"train": 4000, "validation": 200, "test": 200}
    splits = {
        name: TokenSplit(name, (np.cumsum(generator.integers(0, 3, size)) % VOCAB).astype(np.uint16), size)
        for name, size in sizes.items()
    }
    return Dataset(VOCAB, None, "toy", f"{seed:064}", splits, torch.ones(VOCAB, dtype=torch.int64))  # type: ignore[arg-type]


def config(*, every: int = 0, keep: int = 2, lr: float = 1e-2, asynchronous: bool = False, **changes: Any) -> RunConfig:
    base = {
        "workers": 2, "steps": STEPS, "batch_size": 2, "sequence_length": 8, "evaluate_every": 4, "log_every": 5,
        "evaluation_tokens": 64, "autocast": "off",
    }  # fmt: skip
    return RunConfig(
        algorithm=Recipe("sparseloco", {"k": 3}),
        train=TrainConfig(**{**base, **changes}),  # type: ignore[arg-type]
        optimizer=OptimizerConfig(warmup_steps=1, lr=lr),
        checkpoint=CheckpointConfig(every=every, keep=keep, asynchronous=asynchronous),
    )


def simulated(
    out: Path | None,
    settings: RunConfig,
    algorithm: Algorithm,
    *,
    resume: Checkpoint | None = None,
    text: Dataset | None = None,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> dict[str, Any]:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    world = Cohort(ToyLM(dtype), algorithm, settings.train.workers)
    return train(settings, algorithm, text or dataset(), out, label="toy", world=world, resume=resume, **more)


def on_a_rank(rank: int, out: str, settings: RunConfig, method: str, step: int | None, source: str = "") -> Any:
    """The same in a group of processes; ``step`` is where to resume, from the checkpoints of ``source`` or ``out``."""
    # Layers of the toy are linear maps, whose output FSDP2 does not like to be a view.
    warnings.filterwarnings("ignore", "buffers=|train.(shards|workers)=|FSDP2-wrapped module", UserWarning)
    algorithm = {**METHODS, **PANELED}[method]()
    resume = None if step is None else checkpoint_at(Path(source or out), step)
    world = Solo(ToyLM, algorithm, seed=settings.train.seed, shards=settings.train.shards)
    Path(out).mkdir(parents=True, exist_ok=True)
    return train(settings, algorithm, dataset(), Path(out), label="toy", world=world, resume=resume)


def same(a: Any, b: Any) -> bool:
    """Whether two nested states are equal, types of their tensors and order of their keys included."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def checkpoint_at(out: Path, step: int) -> Checkpoint:
    return Checkpoint.open(out / CHECKPOINTS / f"step-{step:08}")


def newest(out: Path) -> Checkpoint:
    found, _ = CheckpointFolder(out / CHECKPOINTS).newest()
    assert found is not None
    return found


def metrics(out: Path) -> list[dict[str, Any]]:
    """Lines of the log without what the clock says."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in CLOCK} for line in lines]


def outcome(out: Path) -> dict[str, Any]:
    """All bits that a run leaves, apart from its clock: digest, private parts, metrics, figures."""
    last = newest(out)
    summary = json.loads((out / "summary.json").read_text())
    return {
        "step": last.step,
        "digest": last.facts["digest"],
        "private": {name: stored.sha256 for name, stored in last.index.files.items() if name.startswith("peer-")},
        "metrics": metrics(out),
        "summary": {name: value for name, value in summary.items() if name not in CLOCK},
    }
