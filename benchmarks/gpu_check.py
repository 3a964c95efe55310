"""Check a card: bits of the Triton kernels against the torch definition, their speed against a copy, then training.

    scripts/gpu_check.sh [--out FILE]
    python -m benchmarks.gpu_check --device cpu --interpret --params 100000 --every 40

First all cases of tests/kernels/triton_cases.py, kernels on the card and the definition on the CPU, bit for bit. Then
sanity, encode and settle (8 peers) on one parameter of each size, in bytes that must move over seconds, beside a
device-to-device copy in the same run. Then four replicas are trained on it, see benchmarks/gpu_simulation.py; without
a card these are tiny. Ends with 0 if all bits are equal and the replicas too, 1 if not, 2 if there is no card.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu_simulation

SIDE = 64
CHUNK = SIDE * SIDE
PEERS = 8
KEPT = 64
SIZES = (100_000_000, 1_000_000_000, 4_000_000_000)
LEVELS = {"low": 0.96875, "high": 1.09375}
TIMED_RUNS = 5


@dataclass(frozen=True)
class Device:
    """Where kernels run, and how time is taken there."""

    place: torch.device

    def seconds(self, work: Callable[[], object]) -> float:
        """Median time of ``work``, on a card after one run that compiles it."""
        if self.place.type != "cuda":
            return self._once(work)
        work()
        return statistics.median(self._once(work) for _ in range(TIMED_RUNS))

    def _once(self, work: Callable[[], object]) -> float:
        self._wait()
        begin = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - begin

    def _wait(self) -> None:
        if self.place.type == "cuda":
            torch.cuda.synchronize(self.place)

    def free_bytes(self) -> int:
        """Memory that a measurement may use."""
        gc.collect()
        if self.place.type != "cuda":
            return 1 << 32
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.place)[0]

    def describe(self) -> str:
        """Name of the card."""
        return torch.cuda.get_device_name(self.place) if self.place.type == "cuda" else "cpu, interpreted"


def check_bits(device: Device, every: int) -> dict[str, Any]:
    """Run the cases; a case that differs is named with what differs."""
    from tests.kernels.triton_cases import encode_cases, encode_differences, settle_cases, settle_differences

    differing: dict[str, list[str]] = {}
    count = 0
    for verb, cases, compare in (
        ("encode", encode_cases(), encode_differences),
        ("settle", settle_cases(), settle_differences),
    ):
        for case in cases[::every]:
            count += 1
            found = compare(case, device.place)
            if found:
                differing[f"{verb}: {case}"] = found
                print(f"DIFFERS  {verb}: {case}: {found}", flush=True)
    print(f"bits: {count - len(differing)} of {count} cases equal the definition", flush=True)
    return {"cases": count, "differing": differing}


def measure(device: Device, params: int, dtype: torch.dtype) -> dict[str, Any]:
    """Bandwidth of one size; a row with a reason where memory does not allow it."""
    cols = 4096 if params >= 1 << 24 else 256
    rows = max(SIDE, params // cols // SIDE * SIDE)
    count = rows * cols
    row: dict[str, Any] = {"params": count, "dtype": str(dtype).removeprefix("torch.")}
    width = torch.finfo(dtype).bits // 8
    payload = KEPT * 3 + 2  # int16 and uint8 per kept value, bfloat16 per chunk
    need = count * (8 + width) + (PEERS + 2) * count // CHUNK * payload
    if need * 1.1 > device.free_bytes():
        return row | {"left_out": f"needs {need / 1e9:.0f} GB"}
    torch.manual_seed(0)
    anchor = torch.randn(count // CHUNK, CHUNK, device=device.place)
    live = torch.empty(rows, cols, dtype=dtype, device=device.place).normal_()
    residual = torch.randn_like(anchor)
    seconds = encode_seconds(device, anchor, live, residual)
    inbox = [(1, encoded(anchor, live, residual.normal_())) for _ in range(PEERS)]
    seconds["settle"] = settle_seconds(device, anchor, live, inbox)
    seconds["copy"] = device.seconds(lambda: residual.copy_(anchor))
    per_param = {
        "sanity": width,
        "encode": 12 + width + payload / CHUNK,
        "settle": 8 + width + PEERS * payload / CHUNK,
        "copy": 8,
    }
    rates = {name: per_param[name] * count / seconds[name] / 1e9 for name in per_param}
    return row | {
        "seconds": seconds,
        "gigabytes_per_s": rates,
        "of_copy": {name: rate / rates["copy"] for name, rate in rates.items()},
    }


def geometry_of(live: Tensor) -> Any:
    """The one block of a parameter whose sides are whole tiles."""
    from sparseloco.kernels.geometry import tensor_geometry
    from sparseloco.layout import Tiles

    found = tensor_geometry(Tiles(SIDE, SIDE), live)
    assert found is not None
    (block,) = found
    return block


def encoded(anchor: Tensor, live: Tensor, residual: Tensor) -> Any:
    """Parts of the whole parameter."""
    from sparseloco.kernels.triton_blocks import encode_block

    return encode_block(anchor, live, residual, geometry=geometry_of(live), decay=0.95, kept=KEPT, **LEVELS)


def encode_seconds(device: Device, anchor: Tensor, live: Tensor, residual: Tensor) -> dict[str, float]:
    """The two passes of the way out."""
    from sparseloco.channel import LARGEST
    from sparseloco.kernels.triton_blocks import is_sane

    return {
        "sanity": device.seconds(lambda: is_sane(live, LARGEST)),
        "encode": device.seconds(lambda: encoded(anchor, live, residual)),
    }


def settle_seconds(device: Device, anchor: Tensor, live: Tensor, inbox: Any) -> float:
    """The pass of the way back."""
    from sparseloco.channel import LARGEST
    from sparseloco.kernels.triton_blocks import settle_block

    block = geometry_of(live)
    return device.seconds(
        lambda: settle_block(
            anchor, live, inbox, geometry=block, over="contributors", lr=1e-3, largest=LARGEST, **LEVELS
        )
    )


def show(row: dict[str, Any]) -> None:
    """One line per size."""
    head = f"{row['params'] / 1e9:8.4f} G {row['dtype']:9}"
    if "left_out" in row:
        print(f"{head} left out: {row['left_out']}", flush=True)
        return
    rates, shares = row["gigabytes_per_s"], row["of_copy"]
    cells = [f"{name} {rates[name]:9.3f} GB/s ({shares[name]:5.1%} of copy)" for name in ("encode", "settle", "sanity")]
    print(f"{head} copy {rates['copy']:9.3f} GB/s  " + "  ".join(cells), flush=True)


def missing(options: argparse.Namespace) -> str | None:
    """Why nothing can be checked here, as one sentence."""
    import importlib.util

    if options.device == "cuda" and not torch.cuda.is_available():
        return (
            "device=cuda: must be an NVIDIA card that torch sees; run this on a machine with one, "
            "or try --device cpu --interpret --params 100000"
        )
    if options.device == "cpu" and not options.interpret:
        return "device=cpu: must be used with --interpret; Triton has no other way to run kernels on a CPU"
    if importlib.util.find_spec("triton") is None:
        return "triton=not installed: must be there to run its kernels; install sparseloco[triton]"
    return None


def main(arguments: list[str] | None = None) -> int:
    """Check bits, measure, write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--interpret", action="store_true", help="run kernels in Triton's interpreter, on the CPU")
    parser.add_argument("--params", type=int, nargs="+", default=SIZES, help="sizes to measure")
    parser.add_argument("--every", type=int, default=1, help="run every n-th case only")
    parser.add_argument("--out", type=Path, help="write what was found as JSON")
    options = parser.parse_args(arguments)
    os.environ["TRITON_INTERPRET"] = "1" if options.interpret else "0"
    reason = missing(options)
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    device = Device(torch.device(options.device))
    print(f"{device.describe()}, torch {torch.__version__}", flush=True)
    bits = check_bits(device, options.every)
    rows = []
    for params in options.params:
        for dtype in (torch.float32, torch.bfloat16):
            rows.append(measure(device, params, dtype))
            show(rows[-1])
    device.free_bytes()  # what was measured is not needed any more
    on_card = device.place.type == "cuda"
    trained = gpu_simulation.compare(device.place, gpu_simulation.CARD if on_card else gpu_simulation.TINY)
    if options.out:
        found = {"device": device.describe(), "torch": torch.__version__, "bits": bits, "peers": PEERS, "k": KEPT}
        options.out.write_text(json.dumps({**found, "sizes": rows, "simulation": trained}, indent=1) + "\n")
    return 0 if not bits["differing"] and gpu_simulation.agreed(trained) else 1


if __name__ == "__main__":
    sys.exit(main())
