"""What a method costs on a model, computed on the meta device: nothing is allocated and no text is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sparseloco.algorithm import Algorithm
from sparseloco.cli.memory import usable_memory
from sparseloco.config import Entry, build_algorithm, keywords_of
from sparseloco.errors import ConfigError
from sparseloco.local import InnerSteps, OptimizerSpec
from sparseloco.model import tensor_table
from sparseloco.muon_adamw import MuonWithAdamW, is_muons
from sparseloco.outer import Sgd, TorchOptimizer
from sparseloco.presets import PRESETS
from sparseloco.report import units
from sparseloco.settings import RunConfig
from sparseloco.types import PartSpec, TensorSpec
from sparseloco.wire import frame_bytes

_FLOAT32 = 4
_CODING = "as frames of fixed size; compact ones differ by some percent"
_PROCESS_BYTES = 150_000_000
"""What a process of its own needs at least, mostly for PyTorch."""


def describe(entry: Entry) -> dict[str, Any]:
    """Figures of one run as plain values; bytes and memory are of one replica, that is of one rank.

    Frames are counted with their headers in FIXED coding, as processes send them: their size is exact before there are
    positions. Those of one process are compact, and differ by some percent. Memory is that of tensors by kind, at
    their largest: activations and what a process needs anyway come on top.
    """
    config = entry.config
    algorithm, specs = build_algorithm(config), tensor_table(config)
    description = algorithm.describe(specs)
    fragments, codec_bytes = _payloads(algorithm, specs)
    frames = sum(frame_bytes(parts) for parts in fragments)
    rounds = config.train.steps // algorithm.schedule.every
    return {
        "label": entry.label,
        "preset": description.name,
        "settings": dict(config.algorithm.settings),
        "parameters": description.parameters,
        "tensors": len(specs),
        "fragments": description.num_fragments,
        "inner_steps": description.inner_steps,
        "rounds": rounds,
        "workers": config.train.workers,
        "tokens": config.train.tokens,
        "density": _density(fragments, description.parameters),
        "payload_bytes_per_round": description.payload_bytes_per_round,
        "bytes_sent_per_round": frames,
        "dense_bytes_per_round": description.dense_bytes_per_round,
        "compression": description.dense_bytes_per_round / frames,
        "bytes_sent_per_replica": frames * rounds,
        "memory_bytes_per_rank": {
            **_memory(algorithm, specs, description.state_bytes, codec_bytes),
            "payload": _inbox_bytes(algorithm, frames, config.train.workers),
        },
        "portable": description.portable,
        "fingerprint": description.fingerprint,
        "parts": dict(description.parts),
    }


def check_memory(config: RunConfig, algorithm: Algorithm) -> None:
    """Refuse replicas whose tensors alone cannot fit into the memory they may use; activations come on top.

    Raises:
        ConfigError: saying how many would fit.
    """
    specs = tensor_table(config)
    description = algorithm.describe(specs)
    _, codec_bytes = _payloads(algorithm, specs)
    each = _memory(algorithm, specs, description.state_bytes, codec_bytes)
    size = sum(each.values()) + _PROCESS_BYTES if config.train.processes else sum(each.values()) - each["gradients"]
    workers, (there, whose) = config.train.workers, usable_memory()
    if size * workers > there:
        fewer = f"use {there // size} or fewer" if there >= size else "use a smaller model"
        raise ConfigError(
            f"train.workers={workers}: must fit into the {units.num_bytes(there)} of memory {whose}, but need "
            f"at least {units.num_bytes(size * workers)}; {fewer}"
        )


def presets() -> list[dict[str, Any]]:
    """Name, first line and keywords of every preset."""
    return [
        {
            "preset": name,
            "summary": (function.__doc__ or "").partition("\n")[0],
            "keywords": {keyword: default for keyword, (_, default) in keywords_of(name).items()},
        }
        for name, function in PRESETS.items()
    ]


def readable(figures: Mapping[str, Any]) -> dict[str, str]:
    """The same as words, one line per figure."""
    density, memory = figures["density"], figures["memory_bytes_per_rank"]
    lines = {
        "method": figures["label"],
        "preset": figures["preset"],
        "parameters": f"{figures['parameters']:,} in {figures['tensors']} tensors",
        "rounds": f"{figures['rounds']} of {figures['inner_steps']} steps, {figures['workers']} replicas",
        "density": "every value" if density is None else units.percent(density),
        "sent per round": f"{units.num_bytes(figures['bytes_sent_per_round'])} per replica, {_CODING}",
        "as dense float32": units.num_bytes(figures["dense_bytes_per_round"]),
        "compression": units.ratio(figures["compression"]),
        "sent in all": f"{units.num_bytes(figures['bytes_sent_per_replica'])} per replica",
        "portable": "yes" if figures["portable"] else "no",
        "fingerprint": figures["fingerprint"],
        **{f"memory: {kind}": units.num_bytes(size) for kind, size in memory.items()},
        "memory: all": f"{units.num_bytes(sum(memory.values()))} per rank, activations on top",
    }
    parts = {**figures["parts"], **figures["parts"]["channel"]}
    return {**lines, **{name: _in_words(parts[name]) for name in _PARTS}}


_PARTS = (
    "local", "layout", "feedback", "compressor", "reducer", "transforms", "outer", "schedule", "merge",
    "fragments",
)  # fmt: skip


def _payloads(algorithm: Algorithm, specs: Sequence[TensorSpec]) -> tuple[list[tuple[PartSpec, ...]], int]:
    """Parts of what each fragment sends, and bytes of the compressor's own shared state."""
    fragments: list[tuple[PartSpec, ...]] = []
    codec_bytes = 0
    for rows in algorithm.fragments.assign(specs):
        chosen = [specs[row] for row in rows]
        meta = [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in chosen]
        state = algorithm.channel.init(chosen, meta)
        fragments.append(algorithm.channel.part_specs(state))
        codec_bytes += sum(part.nbytes for parts in state.codec for part in parts.values())
    return fragments, codec_bytes


def _density(fragments: Sequence[Sequence[PartSpec]], parameters: int) -> float | None:
    """Share of the values that are kept, small and ragged chunks counted; None if the method selects none."""
    chosen = [part for parts in fragments for part in parts if part.name.endswith(".index")]
    if not chosen:
        return None
    return sum(int(torch.Size(part.shape).numel()) for part in chosen) / parameters


def _memory(
    algorithm: Algorithm, specs: Sequence[TensorSpec], state_bytes: Mapping[str, int], codec_bytes: int
) -> dict[str, int]:
    """Bytes by kind: model, optimizers and the state of the method; messages come on top."""
    local, outer = algorithm.local, algorithm.outer
    inner = local.optimizer if isinstance(local, InnerSteps) else None
    model = _FLOAT32 * sum(spec.numel for spec in specs)
    outer_bytes = 0
    if isinstance(outer, TorchOptimizer):
        outer_bytes = _optimizer_bytes(outer.spec, specs)
    elif isinstance(outer, Sgd) and outer.momentum:
        outer_bytes = model
    return {
        "parameters": model,
        "gradients": model,
        "inner optimizer": _optimizer_bytes(inner, specs),
        **state_bytes,
        "snapshot": model if algorithm.merge.needs_snapshot else 0,
        "outer optimizer": outer_bytes,
        "compressor": codec_bytes,
    }


def _inbox_bytes(algorithm: Algorithm, frames: int, workers: int) -> int:
    """Messages of a round at a rank: everybody's where all are gathered, the own and the mean where they are summed."""
    return frames * (2 if algorithm.channel.compressor.linear else workers)


def _optimizer_bytes(spec: OptimizerSpec | None, specs: Sequence[TensorSpec]) -> int:
    """Bytes of moments; a few for counters of steps are left out."""
    return 0 if spec is None else _FLOAT32 * sum(each.numel * _moments(spec, each) for each in specs)


def _moments(spec: OptimizerSpec, tensor: TensorSpec) -> int:
    """Values that an optimizer keeps per value of a parameter."""
    settings = dict(spec.settings)
    if issubclass(spec.cls, torch.optim.SGD):
        return 1 if settings.get("momentum") else 0
    if issubclass(spec.cls, MuonWithAdamW):
        return 1 if is_muons(tensor.name, tensor.shape, settings["adamw_for"]) else 2
    return 2


def _in_words(part: Any) -> str:
    """A part as a call, ``top_k(k=64, chunk_size=4096, values=float32)``, without what is None or False."""
    if part is None or part == []:
        return "none"
    if isinstance(part, list):
        return f"[{', '.join(map(_in_words, part))}]"
    if not isinstance(part, Mapping):
        return f"{part:g}" if isinstance(part, float) else str(part)
    name, *rest = part.items()
    settings = ", ".join(f"{key}={_in_words(value)}" for key, value in rest if value is not None and value is not False)
    return f"{name[1]}({settings})" if settings else str(name[1])
