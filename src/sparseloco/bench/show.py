"""The figures of the bench as tables and lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from sparseloco.bench import grid
from sparseloco.report import units

_WORDS = {
    grid.LIMIT: "memory limit",
    grid.FAST: "sparseloco",
    grid.PLAIN: "plain PyTorch",
    grid.LEAN: "plain, lean",
    grid.DEFINITION: "definition",
}
_GRID = ("encode", "decode_r8", "decode_r16")
_GRID_TITLE = "ms per million parameters, and how much faster than plain PyTorch; --json has all rows"
_CODES = {
    "sign_two_level": "sign and two levels",
    "sign_one_level": "sign alone",
    "statistical": "released",
    "fitted_two_level": "two levels fitted to each tensor",
}
Rows = Sequence[Mapping[str, Any]]


def tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """The headline, the grid, and the bits of positions."""
    side = max(row["side"] for row in found["timings"])
    headline, *rest = by_case(found["timings"], first=side)
    yield _headline(headline, found["how"]["headline"])
    if rest:
        yield _grid(rest)
    yield _bits(found["index"])


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Figures that are not in a table, and how all of them were measured."""
    frame = f"{found['bits_per_kept']:.2f} bits per kept value, {found['bits_per_kept_fixed']:.2f} in the fixed coding"
    yield f"frame: {frame}, {units.ratio(found['compression'])} below dense float32"
    temporaries = found["temp_bytes_per_param"]
    seen = "not seen on this system" if temporaries is None else f"{temporaries:.2f} bytes per parameter"
    yield f"temporaries: {seen}"
    errors = ", ".join(f"{_CODES.get(name, name)} {error:.3f}" for name, error in found["value_error"].items())
    yield f"error of kept values on real pseudo-gradients: {errors}"
    noise, how = found["noise"], found["how"]
    yield (
        f"noise: quartiles of a measurement lie {units.percent(noise['spread_median'])} apart (worst "
        f"{units.percent(noise['spread_worst'])}), the limit moved by {units.percent(noise['limit_moved'] - 1)}"
    )
    yield f"measured: {how['path']}; limit: {how['limit']}; {how['clock']}"


def by_case(timings: Rows, *, first: int | None = None) -> list[Rows]:
    """Rows of one matrix, k, type and thread count each; the float32 case of side ``first`` leads."""
    cases: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in timings:
        cases.setdefault((row["side"], row["dtype"], row["threads"], row["k"]), []).append(row)
    return [cases[key] for key in sorted(cases, key=lambda key: key[0] != first)]


def _headline(rows: Rows, title: str) -> Table:
    times = _times(rows)
    table = Table("ms per million parameters", *_right(*_WORDS.values(), "against plain", "over limit"), title=title)
    for operation, by_variant in times.items():
        cells = [_number(by_variant.get(variant)) for variant in _WORDS]
        cells += [_factor(by_variant, grid.PLAIN, grid.FAST), _factor(by_variant, grid.FAST, grid.LIMIT)]
        table.add_row(_in_words(operation), *map(Text, cells))
    return table


def _grid(some: Sequence[Rows]) -> Table:
    operations = [name for name in _GRID if any(row["operation"] == name for row in some[0])]
    titles = [_in_words(operation) for operation in operations]
    table = Table("parameters", *_right("threads", "k", *titles), title=_GRID_TITLE)
    for rows in some:
        times, case = _times(rows), rows[0]
        cells = [
            f"{_number(times[name].get(grid.FAST))} ({_factor(times[name], grid.PLAIN, grid.FAST)})"
            for name in operations
        ]
        table.add_row(case["dtype"], str(case["threads"]), str(case["k"]), *map(Text, cells))
    return table


def _bits(index: Rows) -> Table:
    titles = ("k", "log2 C(4096, k) / k", "uniform sets", "over it", "real sets", "over it", "fixed coding", "payload")
    table = Table(*_right(*titles), title="bits of a position")
    real = {row["k"]: row for row in index if row["sets"] == "real"}
    for row in (row for row in index if row["sets"] == "uniform"):
        other = real[row["k"]]
        cells = [row["bound"], row["index"], row["over_bound"], other["index"], other["over_bound"]]
        cells += [row["index_fixed"], row["payload"]]
        table.add_row(str(row["k"]), *(f"{cell:.3f}" for cell in cells))
    return table


def _times(rows: Rows) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row["operation"], {}).setdefault(row["variant"], row["ms_per_m"])
    return found


def _factor(times: Mapping[str, float], above: str, below: str) -> str:
    return units.ratio(times[above] / times[below]) if above in times and below in times else units.MISSING


def _number(value: float | None) -> str:
    return units.MISSING if value is None else f"{value:.3f}"


def _in_words(operation: str) -> str:
    name, _, peers = operation.partition("_r")
    return f"decode + apply, R = {peers}" if name == "decode" else name


def _right(*titles: str) -> list[Column]:
    return [Column(title, justify="right") for title in titles]
