"""Time of encode and of decode + apply over k, one line per variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparseloco.bench import grid
from sparseloco.report.charts import LIGHT, styled

_PANELS = {"encode": "Encode", "decode_r8": "Decode + apply, 8 peers"}
_LINES = {
    grid.DEFINITION: ("definition in torch", "c2", "^", ":"),
    grid.PLAIN: ("plain PyTorch", "c1", "s", "-"),
    grid.FAST: ("sparseloco", "c0", "o", "-"),
    grid.LIMIT: ("memory limit", "muted", "", "--"),
}
"""Variant -> name, colour of the reports, marker, line style."""


def time_over_k(timings: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the picture; its type follows from the file's ending.

    Args:
        timings: Rows of the bench; drawn are those of float32 and one thread on the smallest matrix, the grid's.
        path: Where to, ``.png`` or ``.svg``.

    Raises:
        ConfigError: if matplotlib is missing.
    """
    with styled():
        from matplotlib.figure import Figure

        side = min(row["side"] for row in timings)
        rows = [row for row in timings if (row["side"], row["dtype"], row["threads"]) == (side, "float32", 1)]
        figure = Figure(figsize=(13, 5.4), layout="constrained")
        panels: Any = figure.subplots(1, 2, sharey=True)
        for axes, (operation, title) in zip(panels, _PANELS.items(), strict=True):
            _draw(axes, [row for row in rows if row["operation"] == operation], title)
        panels[0].set_ylabel("ms per million parameters (log scale)")
        panels[0].legend(loc="center right")
        figure.savefig(path, dpi=150, facecolor=LIGHT["ground"], metadata={})


def _draw(axes: Any, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set(title=title, xlabel="values kept of 4096", xscale="log", yscale="log")
    for variant, (name, colour, marker, style) in _LINES.items():
        points = sorted((row["k"], row["ms_per_m"]) for row in rows if row["variant"] == variant)
        if points:
            look = {"color": LIGHT[colour], "marker": marker, "linestyle": style, "linewidth": 2.2}
            axes.plot(*zip(*points, strict=True), label=name, **look)
    ks = sorted({row["k"] for row in rows})
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
