"""From rows to the figures that are promised, and the rule that the baseline must not be a strawman."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sparseloco import __version__
from sparseloco.bench import grid, limits, paths
from sparseloco.errors import ConfigError

STRAWMAN = 30.0
"""Times the limit that the baseline may take."""
STRAWMAN_PEERS = 8
"""Most payloads for which that is asked: the limit of decode does not grow with their number, the work does."""
Rows = Sequence[Mapping[str, Any]]


def assemble(
    rows: Rows, bits: Mapping[str, Any], temporaries: Mapping[str, Mapping[str, Any]], k: int, side: int
) -> dict[str, Any]:
    """The object of ``sparseloco bench --json``: figures first, then all rows they come from."""
    headline = headline_times(rows, k=k, side=side)
    return {
        **ratios(headline),
        "temp_bytes_per_param": _largest(temporaries[grid.FAST]),
        "index_bits_over_bound": max(row["over_bound"] for row in bits["index"] if row["sets"] == "uniform"),
        **{name: bits[name] for name in ("bits_per_kept", "bits_per_kept_fixed", "bits_over_bound", "compression")},
        "value_error": bits["value_error"],
        "temp_bytes": temporaries,
        "index": bits["index"],
        "noise": noise(rows),
        "how": {
            "path": paths.fast().name,
            "limit": limits.used(),
            "clock": "process time with one thread, wall time with more; medians, variants in turn in one process",
            "headline": f"{side} x {side}, k = {k}, float32, 1 thread",
        },
        "machine": machine(),
        "timings": [dict(row) for row in rows],
    }


def headline_times(rows: Rows, *, k: int, side: int) -> dict[str, dict[str, float]]:
    """Milliseconds per million parameters by operation and variant: float32, one thread."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if (row["side"], row["k"], row["dtype"], row["threads"]) == (side, k, "float32", 1):
            found.setdefault(row["operation"], {}).setdefault(row["variant"], row["ms_per_m"])
    return found


def ratios(times: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Speed against the baseline and distance from the limit.

    Args:
        times: By operation and variant, from one process.
    """
    operations = ["encode", *(name for name in times if name.startswith("decode_"))]
    found: dict[str, Any] = {}
    for what, above, below, ending in (
        ("speedup", grid.PLAIN, grid.FAST, ""),
        ("over_limit", grid.FAST, grid.LIMIT, ""),
        ("speedup", grid.LEAN, grid.FAST, "_lean"),
    ):
        for name in operations:
            verb, _, peers = name.partition("_")
            key = "_".join(filter(None, (verb, what, peers)))
            found[key + ending] = _ratio(times[name], above, below)
    found["plain_over_limit"] = {name: _ratio(times[name], grid.PLAIN, grid.LIMIT) for name in operations}
    return found


def check_baseline(plain_over_limit: Mapping[str, float]) -> None:
    """Refuse figures whose baseline is slower than a plain pipeline has to be.

    Raises:
        ConfigError: naming the operation that takes longest against its limit.
    """
    asked = {
        name: times
        for name, times in plain_over_limit.items()
        if not name.startswith("decode_r") or int(name.removeprefix("decode_r")) <= STRAWMAN_PEERS
    }
    name, worst = max(asked.items(), key=lambda item: item[1])
    if worst > STRAWMAN:
        raise ConfigError(
            f"plain_over_limit[{name}]={worst:.1f}: must be at most {STRAWMAN:g}, or the baseline is a strawman and no "
            "speed-up counts; run again on a quiet machine, then look for waste in bench/plain.py"
        )


def noise(rows: Rows) -> dict[str, float]:
    """How far measurements of the same thing lay apart.

    Returns:
        Median and largest spread (distance of the quartiles over the median) of all rows, and the range of the limit
        of encode over all cases of the same type and thread count, largest over smallest.
    """
    spreads = sorted(row["spread"] for row in rows)
    moved = 1.0
    for key in {(row["dtype"], row["threads"], row["side"]) for row in rows}:
        times = [
            row["ms_per_m"]
            for row in rows
            if (row["dtype"], row["threads"], row["side"]) == key
            and (row["operation"], row["variant"]) == ("encode", grid.LIMIT)
        ]
        moved = max(moved, max(times) / min(times)) if times else moved
    return {
        "spread_median": round(statistics.median(spreads), 4),
        "spread_worst": round(spreads[-1], 4),
        "limit_moved": round(moved, 3),
    }


def machine() -> dict[str, Any]:
    """What it was measured on."""
    return {
        "sparseloco": __version__,
        "torch": torch.__version__,
        "system": platform.platform(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
    }


def _ratio(times: Mapping[str, float], above: str, below: str) -> float:
    return round(times[above] / times[below], 3)


def _largest(found: Mapping[str, float | None]) -> float | None:
    seen = [value for value in found.values() if value is not None]
    return max(seen) if seen else None
