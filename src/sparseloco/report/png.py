"""Charts as PNG, for slides: matplotlib draws the geometry of ``chart`` and decides nothing itself."""

from __future__ import annotations

import io
from typing import Any

from sparseloco.errors import ConfigError
from sparseloco.report.chart import HEIGHT, LIGHT, WIDTH, Bracket, Chart, Line, marker
from sparseloco.report.labels import FONT, Label

_INK, _MUTED, _GRID = "#16202c", "#54606e", "#dfe4ea"
_TITLE = 28
_MARKS = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D"}


def require_matplotlib() -> None:
    """Fail early, in one sentence, where PNGs cannot be made."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "pngs=True: needs matplotlib, which is not installed; "
            'run pip install "sparseloco[plot]" or leave the PNGs out'
        ) from error


def draw(chart: Chart, *, dpi: int = 300) -> bytes:
    """The chart with its title on white, as the bytes of a PNG file."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # One unit is one point, so that font sizes and places share a scale.
    figure = Figure(figsize=(WIDTH / 72, (HEIGHT + _TITLE) / 72), dpi=dpi, facecolor="white")
    axes: Any = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(-6, WIDTH), ylim=(HEIGHT, -_TITLE))
    axes.axis("off")
    _text(axes, 0, FONT - _TITLE + 6, chart.title, size=FONT + 2, weight="bold", color=_INK)
    _frame(axes, chart)
    if chart.bracket:
        _bracket(axes, chart.bracket)
    for line in sorted(chart.lines, key=lambda line: line.bold):
        _line(axes, chart, line)
    for label in chart.labels:
        _label(axes, label)
    out = io.BytesIO()
    FigureCanvasAgg(figure).print_png(out, metadata={"Software": "sparseloco"})
    return out.getvalue()


def _text(axes: Any, x: float, y: float, text: str, **style: Any) -> None:
    defaults = {"size": FONT - 2, "color": _MUTED, "va": "baseline", "family": "DejaVu Sans"}
    axes.text(x, y, text, parse_math=False, **defaults | style)


def _frame(axes: Any, chart: Chart) -> None:
    left, _, right, bottom = chart.plot
    _text(axes, 0, FONT, chart.y_title)
    for at, text in chart.y_ticks:
        axes.plot((left, right), (at, at), color=_GRID, lw=0.8, zorder=1)
        _text(axes, left - 8, at, text, ha="right", va="center_baseline")
    axes.plot((left, right), (bottom, bottom), color=_MUTED, lw=1.0, zorder=1)
    for at, text in chart.x_ticks:
        axes.plot((at, at), (bottom, bottom + 4), color=_MUTED, lw=1.0, zorder=1)
        _text(axes, at, bottom + 17, text, ha="center")
    _text(axes, (left + right) / 2, HEIGHT - 7, chart.x_title, ha="center")


def _line(axes: Any, chart: Chart, line: Line) -> None:
    from matplotlib.patches import Rectangle

    left, top, right, bottom = chart.plot
    xs, ys = zip(*line.points, strict=True)
    (drawn,) = axes.plot(
        xs,
        ys,
        color=_colour(line.style),
        lw=2.8 if line.bold else 1.8,
        marker=_MARKS[marker(line.style)],
        markevery=list(line.marks),
        ms=6.5,
        mec="white",
        mew=0.9,
        solid_joinstyle="round",
        zorder=4 if line.bold else 3,
    )
    drawn.set_clip_path(Rectangle((left, top), right - left + 6, bottom - top, transform=axes.transData))


def _label(axes: Any, label: Label) -> None:
    from matplotlib.patheffects import withStroke

    colour = _colour(label.style)
    if label.leader:
        xs, ys = zip(*label.leader, strict=True)
        axes.plot(xs, ys, color=colour, lw=0.9, zorder=5)
    elif label.key:
        mark = _MARKS[marker(label.style)]
        axes.plot(label.x - 9, label.y, color=colour, marker=mark, ms=6.5, mec="white", clip_on=False)
    style: dict[str, Any] = {
        "va": "center",
        "ha": "right" if label.to_left else "left",
        "color": colour,
        "weight": "bold",
        "linespacing": 1.15,
        "path_effects": [withStroke(linewidth=3, foreground="white")],
        "zorder": 6,
    }
    _text(axes, label.x, label.y, "\n".join(label.lines), **style)


def _colour(style: int) -> str:
    return LIGHT[style % len(LIGHT)]


def _bracket(axes: Any, bracket: Bracket) -> None:
    (x0, y0), (x1, y1), y = bracket.start, bracket.end, bracket.y
    for x, top in ((x0, y0), (x1, y1)):
        axes.plot((x, x), (top + 6, y), color=_MUTED, lw=0.9, ls=(0, (1, 2.5)), zorder=2)
    arrow = {"arrowstyle": "<->", "color": _INK, "lw": 1.1, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (x0, y), (x1, y), arrowprops=arrow)
    _text(axes, (x0 + x1) / 2, y - 6, bracket.text, ha="center", color=_INK, weight="bold")
