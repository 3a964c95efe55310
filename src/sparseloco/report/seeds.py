"""Several seeds of the same settings as one row: mean and 95 % interval."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparseloco.report import units
from sparseloco.report.runs import Run
from sparseloco.report.table import Cell, Row

# Two-sided 95 % points of Student's t for 1 to 30 degrees of freedom; beyond, the last one is a little too wide.
_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_FIGURES = {
    "held_out_loss": "Held-out loss (nats/token)",
    "validation_loss": "Validation loss",
    "bits_per_byte": "Bits per byte",
}
_PLACES = ("logging",)
"""Sections of a configuration that cannot change a result."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds; a 95 % interval is ``mean`` plus and minus ``half_width``."""

    mean: float
    half_width: float

    @property
    def text(self) -> str:
        """As tables show it: ``3.012 ± 0.011``."""
        return f"{units.loss(self.mean)} \u00b1 {units.loss(self.half_width)}"


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed, one of each."""

    label: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> list[int]:
        """Their seeds, in the order of the runs."""
        return [_seed(run) for run in self.runs]

    def interval(self, figure: str) -> Interval:
        """Of one figure of the summaries; not a number if one run has none."""
        return interval([getattr(run.summary, figure) for run in self.runs])

    def as_json(self) -> dict[str, Any]:
        """Plain values for a program."""
        found = {figure: self.interval(figure) for figure in _FIGURES}
        return {
            "label": self.label,
            "seeds": self.seeds,
            **{
                name: {"mean": _finite(value.mean), "half_width_95": _finite(value.half_width)}
                for name, value in found.items()
            },
        }


def groups(runs: Sequence[Run]) -> list[Group]:
    """Labels with at least two seeds of the same settings, in the order of the runs.

    A seed that occurs twice counts once, since it is no independent run.
    """
    found: dict[str, dict[int, Run]] = {}
    for run in runs:
        found.setdefault(_identity(run), {}).setdefault(_seed(run), run)
    return [
        Group(next(iter(by_seed.values())).label, tuple(by_seed.values()))
        for by_seed in found.values()
        if len(by_seed) > 1
    ]


def seeds_table(found: Sequence[Group]) -> list[Row]:
    """One row per group, ready to print; the first column is ``Run``."""
    return [
        {
            "Run": Cell(group.label),
            "Seeds": Cell(", ".join(map(str, group.seeds))),
            **{title: Cell(group.interval(figure).text) for figure, title in _FIGURES.items()},
        }
        for group in found
    ]


def interval(values: Sequence[float]) -> Interval:
    """Mean and half width of Student's 95 % interval for it.

    Example:
        >>> interval([3.0, 3.1, 3.2]).text
        '3.100 ± 0.248'
    """
    count = len(values)
    mean = sum(values) / count
    if not math.isfinite(mean):
        return Interval(math.nan, math.nan)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    return Interval(mean, _STUDENT[min(count - 1, len(_STUDENT)) - 1] * deviation / math.sqrt(count))


def _identity(run: Run) -> str:
    """Everything that two runs must share to be repetitions of each other."""
    config = {name: section for name, section in run.config.items() if name not in _PLACES}
    train = {name: value for name, value in config.get("train", {}).items() if name != "seed"}
    shared = [run.label, run.summary.corpus_sha256, run.summary.settings, {**config, "train": train}]
    return json.dumps(shared, sort_keys=True, default=str)


def _seed(run: Run) -> int:
    return int(run.config.get("train", {}).get("seed", 0))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
