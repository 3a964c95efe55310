"""Numbers as people read them: one way to write each kind, everywhere in tables, pages and pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

MISSING = "\u2013"
TIMES = "\u00d7"
_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")
_COUNTS = ("", "k", "M", "B", "T")
_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_SPARK_WIDTH = 32


def loss(value: float) -> str:
    """A loss or a number of bits per byte, three decimals."""
    return f"{value:.3f}" if math.isfinite(value) else MISSING


def num_bytes(value: float) -> str:
    """Bytes with a decimal unit, three significant digits: ``2.13 MB``."""
    return _scaled(value, _BYTES)


def count(value: float) -> str:
    """A count, exact below ten thousand, else three significant digits: ``1.84 M``."""
    return f"{value:.0f}" if abs(value) < 10_000 else _scaled(value, _COUNTS)


def ratio(value: float | None) -> str:
    """A factor, three significant digits: ``151x`` with a proper multiplication sign."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{_three_digits(value)}{TIMES}"


def percent(fraction: float) -> str:
    """A share in [0, 1] as ``3.1 %``."""
    return f"{100 * fraction:.1f} %" if math.isfinite(fraction) else MISSING


def duration(seconds: float) -> str:
    """Seconds as ``42.1 s``, ``3 min 20 s`` or ``2 h 05 min``."""
    if not math.isfinite(seconds):
        return MISSING
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def setting(value: Any) -> str:
    """A setting as it would stand in a configuration file, strings without quotes."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e6:
        return f"{value:.1f}"
    if isinstance(value, float):
        return f"{value:g}"
    return MISSING if value is None else json.dumps(value)


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
    """The course of some values as a row of blocks, each the mean of an equal share of them.

    Example:
        >>> sparkline([4.0, 3.0, 2.0, 1.0])
        '\u2588\u2586\u2583\u2581'
    """
    if not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * n // count for n in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(top * (mean - low) / span) if span else 0] for mean in means)


def _scaled(value: float, units: tuple[str, ...]) -> str:
    if not math.isfinite(value):
        return MISSING
    # 999.6 rounds to four digits in its own unit, so it belongs to the next one.
    power = sum(abs(value) >= 999.5 * 1000**n for n in range(len(units) - 1))
    number = f"{value:.0f}" if power == 0 else _three_digits(value / 1000**power)
    return f"{number} {units[power]}".strip()


def _three_digits(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
