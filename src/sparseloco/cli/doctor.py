"""``doctor``: what this machine has, what is slow on it and why."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparseloco import __version__, presets
from sparseloco.data.cache import default_cache_dir
from sparseloco.kernels import fast
from sparseloco.report import units
from sparseloco.settings import has_fast_bf16
from sparseloco.types import Source, TensorSpec

EXTRAS = {
    "peers": "obstore",
    "plot": "matplotlib",
    "data": "pyarrow",
    "hf": "datasets",
    "sentencepiece": "sentencepiece",
    "eval": "lm_eval",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    "triton": "triton",
    "torchft": "torchft",
}
"""Extra -> the package that shows whether it is installed."""

_PACKAGES = ("torch", "numpy", "xxhash", "transformers", "tokenizers", "msgspec", "safetensors")
_PROBE_SIDE = 1024
_LOW_DISK_BYTES = 5e9


class Finding(NamedTuple):
    """Something to know: what it is, why it is so, what to do."""

    what: str
    why: str
    remedy: str


def examine() -> dict[str, Any]:
    """Everything that ``doctor`` shows, as plain values; sections of figures, and ``findings``."""
    found: dict[str, Any] = {
        "versions": _versions(),
        "devices": _devices(),
        "threads": _threads(),
        "compiler": _compiler(),
        "kernels": _kernels(),
        "disk": _disk(),
        "cache": _cache(),
        "speed": _speed(),
        "extras": {extra: importlib.util.find_spec(package) is not None for extra, package in EXTRAS.items()},
    }
    found["findings"] = [finding._asdict() for finding in findings(found)]
    return found


def findings(found: dict[str, Any]) -> Iterator[Finding]:
    """What follows from the figures, the most costly first."""
    if not found["cache"]["writable"]:
        yield Finding(
            f"cache {found['cache']['folder']}",
            "it cannot be written, so text is read and tokenized again at each start, or not at all",
            "set SPARSELOCO_CACHE to a folder that can be",
        )
    if found["disk"]["free_here_bytes"] < _LOW_DISK_BYTES:
        free = units.num_bytes(found["disk"]["free_here_bytes"])
        yield Finding("disk", f"only {free} are free here", "free some space before a long run")
    devices = found["devices"]
    if devices["cuda"] or devices["mps"]:
        yield Finding(
            "GPU",
            "this version keeps the model in main memory, and payloads are CPU bytes, so the GPU stays idle",
            "expect the speed of the processor",
        )
    else:
        yield Finding(
            "no GPU",
            "PyTorch finds none, so a step of a large model takes long",
            "keep models small here; the method is the same on any device",
        )
    if not devices["fast_bf16"]:
        yield Finding(
            "bfloat16",
            'this processor has no instructions for it, so train.autocast = "auto" becomes "off"',
            "leave it so; asking for bf16 would be slower here",
        )
    threads = found["threads"]
    if threads["torch"] < threads["usable_cores"]:
        yield Finding(
            "threads",
            f"PyTorch uses {threads['torch']} of {threads['usable_cores']} cores"
            + (f", since OMP_NUM_THREADS={threads['OMP_NUM_THREADS']}" if threads["OMP_NUM_THREADS"] else ""),
            "raise OMP_NUM_THREADS, or run one replica per core with --processes",
        )
    if not found["compiler"]["found"]:
        yield Finding(
            "compiler",
            "none is installed, so torch.compile cannot be used and installing builds no native kernels",
            "install gcc or clang, then install sparseloco again",
        )
    if found["kernels"]["path"] == "torch":
        yield Finding(
            "kernels",
            "the native ones are not installed or switched off, so encoding and settling run in plain PyTorch",
            "install a C++ compiler, then sparseloco again; `sparseloco bench` shows what that gains",
        )
    if found["speed"]["encode_values_per_s"] < 1e8:
        speed = units.count(found["speed"]["encode_values_per_s"])
        yield Finding(
            "encoding",
            f"SparseLoCo encodes {speed} values/s here; per round that is once the model's size",
            "raise inner_steps if the share of time in sync is too high",
        )


def _versions() -> dict[str, Any]:
    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {
        "sparseloco": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        **{package: version(package) for package in _PACKAGES},
    }


def _devices() -> dict[str, Any]:
    cuda = (
        [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {
        "cpu": _cpu_name(),
        "cuda": cuda,
        "mps": torch.backends.mps.is_available(),
        "fast_bf16": has_fast_bf16(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _threads() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "usable_cores": usable,
        "torch": torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }


def _compiler() -> dict[str, Any]:
    path = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if path is None:
        return {"found": False, "version": None}
    ended = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    return {"found": True, "version": (ended.stdout.splitlines() or [None])[0]}


def _kernels() -> dict[str, Any]:
    return {"path": fast.path()}


def _disk() -> dict[str, Any]:
    return {"free_here_bytes": shutil.disk_usage(".").free}


def _cache() -> dict[str, Any]:
    """Whether token caches and indices can be written; what is tried is removed again."""
    folder = default_cache_dir()
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            writable = True
    except OSError:
        writable = False
    return {"folder": str(folder), "writable": writable, "free_bytes": shutil.disk_usage(there).free}


def _speed() -> dict[str, Any]:
    """Short measurements: matrix products, and what SparseLoCo adds to a round."""
    side = _PROBE_SIDE
    left, right = torch.randn(side, side), torch.randn(side, side)
    half = [left.bfloat16(), right.bfloat16()]
    channel = presets.sparseloco().channel
    state = channel.init([TensorSpec("weight", (side, side), torch.float32)], [left])
    source = Source(start=[block.clone() for block in state.anchor], end=right)
    return {
        "float32_flops": 2 * side**3 / _seconds(lambda: left @ right),
        "bfloat16_flops": 2 * side**3 / _seconds(lambda: half[0] @ half[1]),
        "encode_values_per_s": side * side / _seconds(lambda: channel.outgoing([source], state, key=0)),
    }


def _seconds(call: Callable[[], Any]) -> float:
    """The shorter of two runs after a first that warms up."""
    call()
    best = float("inf")
    for _ in range(2):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def title(name: str) -> str:
    """What a figure is called, without its unit."""
    for unit in ("_bytes_per_s", "_bytes", "_flops", "_per_s", "_s"):
        name = name.removesuffix(unit)
    return name if name.isupper() else name.replace("_", " ")


def in_words(name: str, value: Any) -> str:
    """A figure as people read it; the unit at the end of its name goes to the value."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == []:
        return "none"
    if name.endswith("_bytes"):
        return units.num_bytes(value)
    if name.endswith("_bytes_per_s"):
        return f"{units.num_bytes(value)}/s"
    if name.endswith("_flops"):
        return f"{value / 1e9:,.0f} GFLOP/s"
    if name.endswith("_per_s"):
        return f"{units.count(value)}/s"
    if name.endswith("_s"):
        return f"{1000 * value:.1f} ms" if abs(value) < 1 else units.duration(value)
    return ", ".join(value) if isinstance(value, list) else str(value)
