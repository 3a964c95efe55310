"""The two charts of a report: matplotlib draws each once, as SVG for the page and as PNG for slides.

Colours in the SVG are variables of the page's style sheet, so one drawing serves light, dark and paper.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from itertools import combinations
from typing import Any

from sparseloco.errors import ConfigError
from sparseloco.report import story, units
from sparseloco.report.runs import Run

# The runs' are Okabe and Ito's hues, made darker or lighter until text in them reads well; markers tell runs apart too.
_LIGHT_RUNS = ("#0067a8", "#b84a00", "#1a7f5a", "#a8457c", "#7a6200", "#5b6270", "#5a4fcf", "#00798c")
_DARK_RUNS = ("#58b4f0", "#f28e4b", "#4cc79b", "#e58fbf", "#d9b93b", "#a9b1bd", "#a99cff", "#4fc3d4")
NUM_COLOURS = len(_LIGHT_RUNS)
_GROUND, _INK, _MUTED, _GRID = "#ffffff", "#16202c", "#54606e", "#dfe4ea"
LIGHT = {"ground": _GROUND, "ink": _INK, "muted": _MUTED, "grid": _GRID}
LIGHT |= {f"c{n}": colour for n, colour in enumerate(_LIGHT_RUNS)}
DARK = {"ground": "#11161d", "ink": "#e8edf2", "muted": "#9daab8", "grid": "#2a333e"}
DARK |= {f"c{n}": colour for n, colour in enumerate(_DARK_RUNS)}
"""Variable of the style sheet -> colour, on light and on dark ground."""

_MARKERS = "os^DvPX"
_MOST_LABELS = 4
"""More lines than this have a legend instead of a name at each end."""
_STYLE: dict[Any, Any] = {
    "axes.edgecolor": _MUTED,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": _MUTED,
    "axes.axisbelow": True,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": _INK,
    "axes.titlelocation": "left",
    "axes.titlepad": 14,
    "axes.titlesize": 15,
    "axes.titleweight": "bold",
    "figure.dpi": 72,  # so that sizes are points in both pictures
    "font.size": 13,
    "grid.color": _GRID,
    "legend.frameon": False,
    "legend.handlelength": 1.2,
    "legend.labelcolor": "linecolor",
    "lines.markeredgecolor": _GROUND,
    "lines.markersize": 7,
    "svg.fonttype": "none",
    "svg.hashsalt": "sparseloco",
    "text.parse_math": False,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "ytick.left": False,
}


@dataclass(frozen=True)
class Chart:
    """A drawn chart: ``svg`` is one element without references to anything outside it."""

    name: str
    svg: str
    png: bytes


def draw(runs: Sequence[Run]) -> list[Chart]:
    """Validation loss over the tokens of all replicas, and over the bytes that one replica has sent.

    Raises:
        ConfigError: if matplotlib is missing.
    """
    with styled():
        return [_over_tokens(runs), _over_bytes(runs)]


@contextmanager
def styled() -> Iterator[None]:
    """The look of every chart of this project, whatever the reader's own settings are.

    Raises:
        ConfigError: if matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "charts=True: needs matplotlib, which is not installed; "
            'run pip install "sparseloco[plot]" or leave the charts out'
        ) from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def loss_limits(runs: Sequence[Run]) -> tuple[float, float]:
    """The common loss axis of both charts.

    The first tenth of the tokens may run out of the top: an untrained model's loss says nothing about a
    method and would press all that matters into the lower half.
    """
    curves = [run.curve for run in runs if run.curve]
    late = [e.loss for curve in curves for e in curve if e.tokens >= 0.1 * curve[-1].tokens]
    if not late:
        return 0.0, 1.0
    room = (max(late) - min(late)) or 0.1 * abs(max(late)) or 1.0
    return min(late) - 0.22 * room, max(late) + 0.06 * room


def _over_tokens(runs: Sequence[Run]) -> Chart:
    from matplotlib.ticker import EngFormatter

    curves = [[(e.tokens, e.loss) for e in run.curve] for run in runs]
    most = max((x for curve in curves for x, _ in curve), default=0) or 1
    axes = _axes("Loss over tokens", "Tokens, all replicas", loss_limits(runs), xlim=(-0.01 * most, 1.02 * most))
    axes.locator_params(axis="x", nbins=5, steps=[1, 2, 2.5, 5, 10])
    axes.xaxis.set_major_formatter(lambda value, _: EngFormatter()(value).replace("G", "B"))
    return _finish(axes, runs, curves, "loss_over_tokens")


def _over_bytes(runs: Sequence[Run]) -> Chart:
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    curves = [[(e.bytes_sent, e.loss) for e in run.curve if e.bytes_sent > 0] for run in runs]
    sent = [x for curve in curves for x, _ in curve] or [1, 10]
    low, high = min(sent) / 1.3, max(sent) * 1.2
    title = "Bytes sent per replica (log scale)"
    axes = _axes("Loss over bytes sent", title, loss_limits(runs), xscale="log", xlim=(low, high))
    digits = (1, 2, 5) if high < 60 * low else (1, 3) if high < 1000 * low else (1,)
    axes.xaxis.set_major_locator(LogLocator(subs=digits, numticks=7))
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    ends = {run.label: curve[-1] for run, curve in zip(runs, curves, strict=True) if curve}
    left, right = (ends.get(run.label, (0, 0)) for run in story.contestants(runs) or (runs[0], runs[0]))
    if right[0] > 3 * left[0] > 0:
        _bracket(axes, left, right)
    return _finish(axes, runs, curves, "loss_over_bytes")


def _axes(title: str, x_title: str, y_limits: tuple[float, float], **x: Any) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(480 / 72, 360 / 72), layout="constrained")
    names = {"title": title, "xlabel": x_title, "ylabel": "Validation loss (nats per token)"}
    axes: Any = figure.add_subplot(ylim=y_limits, **names, **x)
    axes.locator_params(axis="y", nbins=6)
    axes.patch.set_visible(False)
    return axes


def _bracket(axes: Any, left: tuple[float, float], right: tuple[float, float]) -> None:
    """How far apart two line ends are: dotted lines down from both, and an arrow with the factor between them."""
    bottom, top = axes.get_ylim()
    y = bottom + 0.045 * (top - bottom)
    for x, end in (left, right):
        axes.plot((x, x), (y, end), color=_MUTED, linewidth=1, linestyle=(0, (1, 2)), zorder=1.5)
    arrow = {"arrowstyle": "<->", "color": _INK, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (left[0], y), (right[0], y), arrowprops=arrow)
    text, middle = f"{units.ratio(right[0] / left[0])} fewer bytes", math.sqrt(left[0] * right[0])
    axes.annotate(text, (middle, y), (0, 6), textcoords="offset points", ha="center", color=_INK, weight="bold")


def _finish(axes: Any, runs: Sequence[Run], curves: Sequence[Sequence[tuple[float, float]]], name: str) -> Chart:
    """Draw the lines, name them at their ends or in a legend, and save."""
    drawn = [(n, run, curve) for n, (run, curve) in enumerate(zip(runs, curves, strict=True)) if curve]
    for n, run, curve in drawn:
        bold = run.summary.preset == "sparseloco"
        axes.plot(
            *zip(*curve, strict=True),
            color=_LIGHT_RUNS[n % NUM_COLOURS],
            label=run.label,
            linewidth=3 if bold else 1.9,
            marker=_MARKERS[n % len(_MARKERS)],
            markevery=0.07 if len(curve) > 15 else 1,
            zorder=4 if bold else 3,
        )
    if len(drawn) > _MOST_LABELS:
        short = [run.label if len(run.label) <= 18 else run.label[:17] + "\u2026" for _, run, _ in drawn]
        axes.figure.legend(
            axes.lines[-len(drawn) :], short, loc="outside right upper", fontsize=min(11, 250 / len(drawn))
        )
    else:
        _label_ends(axes, axes.lines[-len(drawn) :])
    names = ", ".join(run.label for _, run, _ in drawn)
    title = f"{axes.get_title('left')}: {axes.get_ylabel()} over {axes.get_xlabel()}. Runs: {names}."
    return Chart(name, _svg(axes.figure, name, title), _png(axes.figure))


def _label_ends(axes: Any, lines: Sequence[Any]) -> None:
    """Write each name beside the end of its line; names that cover each other move apart, equally up and down."""
    place = {"textcoords": "offset points", "va": "center", "annotation_clip": False, "zorder": 5}
    texts = []
    for line in lines:
        name = "\n".join(textwrap.wrap(line.get_label(), 16, max_lines=2, placeholder=" \u2026"))
        colour = line.get_color()
        texts.append(axes.annotate(name, line.get_xydata()[-1], (10, 0), color=colour, weight="bold", **place))
    axes.figure.draw_without_rendering()  # places everything, so that boxes are known
    boxes = sorted(((text.get_window_extent(), text) for text in texts), key=lambda pair: pair[0].y0 + pair[0].y1)
    pairs = [(low, high) for low, high in combinations(boxes, 2) if low[0].x0 < high[0].x1 and high[0].x0 < low[0].x1]
    for _ in range(100):
        for (low, low_text), (high, high_text) in pairs:
            lack = low.y1 + low_text.xyann[1] + 2 - high.y0 - high_text.xyann[1]
            for text, sign in ((low_text, -1), (high_text, 1)):
                text.xyann = (10, text.xyann[1] + sign * max(0, lack) / 2)
        for box, text in boxes:  # above the axis, and above the bracket
            text.xyann = (10, max(text.xyann[1], axes.bbox.y0 + 30 - box.y0))


def _svg(figure: Any, name: str, title: str) -> str:
    """One ``<svg>`` element for a page: ids of its own, colours by name, nothing from elsewhere."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    colours = {colour: variable for variable, colour in LIGHT.items()}

    def adapt(tag: re.Match[str]) -> str:
        text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", tag[0])
        return re.sub("#[0-9a-f]{6}", lambda colour: f"var(--{colours[colour[0]]})", text)

    body = re.sub("<[^>]+>", adapt, out.getvalue().partition("<svg ")[2].partition(">")[2])
    width, height = figure.get_size_inches() * 72
    return f'<svg class="chart" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}">{body}'


def _png(figure: Any) -> bytes:
    from matplotlib.patheffects import withStroke
    from matplotlib.text import Text

    for text in figure.findobj(Text):  # the page's style sheet does the same for the SVG
        text.set_path_effects([withStroke(linewidth=3, foreground=_GROUND)])
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=300, facecolor=_GROUND, metadata={"Software": "sparseloco"})
    return out.getvalue()
