"""The table of runs and the table of settings, as text cells that HTML and the terminal both print."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sparseloco.report import units
from sparseloco.report.runs import Run, distinct


@dataclass(frozen=True)
class Cell:
    """One cell: its text, the number behind it (``None`` for words), and if it is the best of its column."""

    text: str
    value: float | None = None
    best: bool = False


Row = dict[str, Cell]
"""Column title -> cell, in the order of the columns; the same columns in every row."""


class _Column(NamedTuple):
    title: str
    value: Callable[[Run], float | None]
    text: Callable[[Any], str]
    better: Callable[[list[float]], float] | None = None


_COLUMNS = (
    _Column("Held-out loss (nats/token)", lambda run: run.summary.held_out_loss, units.loss, min),
    _Column("Bits per byte", lambda run: run.summary.bits_per_byte, units.loss, min),
    _Column("Sent per replica", lambda run: run.summary.bytes_sent_per_replica, units.num_bytes, min),
    _Column("Received per replica", lambda run: run.summary.bytes_received_per_replica, units.num_bytes, min),
    _Column("Compression", lambda run: run.summary.compression, units.ratio, max),
    _Column("Tokens", lambda run: run.summary.tokens, units.count),
    _Column("Rounds", lambda run: run.summary.rounds, units.count),
    _Column("Time", lambda run: run.summary.seconds, units.duration, min),
    _Column("In sync", lambda run: run.sync_fraction, units.percent, min),
)


def summary_table(runs: Sequence[Run]) -> list[Row]:
    """One row per run, ready to print; the first column, ``Run``, is the label.

    A cell is best when no other run is better and at least one is worse.

    Example:
        >>> summary_table([])
        []
    """
    rows: list[Row] = [{"Run": Cell(run.label)} for run in distinct(runs)]
    for column in _COLUMNS:
        values = [column.value(run) for run in runs]
        best = _best(values, column.better)
        for row, value in zip(rows, values, strict=True):
            text = units.MISSING if value is None else column.text(value)
            row[column.title] = Cell(text, value, best is not None and value == best)
    return rows


def settings_table(runs: Sequence[Run]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Settings by run, and what the configurations of all runs have in common.

    Returns:
        Name -> one value per run (``None`` where a run has no such setting): the keywords of the algorithms,
        then the other settings that differ. Second, dotted name -> the value that all runs share.
    """
    by_run: dict[str, list[Any]] = {"preset": [run.summary.preset for run in runs]}
    for name in dict.fromkeys(name for run in runs for name in run.summary.settings if name != "preset"):
        by_run[name] = [run.summary.settings.get(name) for run in runs]
    shared: dict[str, Any] = {}
    configs = [_flat({k: v for k, v in run.config.items() if k != "algorithm"}) for run in runs]
    for name in dict.fromkeys(name for config in configs for name in config):
        values = [config.get(name) for config in configs]
        if all(value == values[0] for value in values):
            shared[name] = values[0]
        else:
            by_run[name] = values
    return by_run, shared


def _best(values: list[float | None], better: Callable[[list[float]], float] | None) -> float | None:
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    if better is None or len(set(numbers)) < 2:
        return None
    return better(numbers)


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
