"""The geometry of a chart, in pixels: made once, drawn by ``svg`` for the page and by ``png`` for slides.

Knows runs and units; knows nothing of HTML or matplotlib. y grows downwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sparseloco.report import labels, story, units
from sparseloco.report.labels import FONT, Box, Label
from sparseloco.report.runs import Evaluation, Run

WIDTH, HEIGHT = 480, 350
LIGHT = ("#0067a8", "#b84a00", "#1a7f5a", "#a8457c", "#7a6200", "#5b6270", "#5a4fcf", "#00798c")
DARK = ("#58b4f0", "#f28e4b", "#4cc79b", "#e58fbf", "#d9b93b", "#a9b1bd", "#a99cff", "#4fc3d4")
"""Line colours for light and dark ground: Okabe and Ito's hues, darkened or lightened until text in them
reads well, the first four well apart for colour-blind readers too; markers tell all of them apart."""
MARKERS = ("circle", "square", "triangle", "diamond")
MOST_MARKED = 40
"""Lines with more points than this have a marker at their end only."""
_LEFT, _TOP, _BOTTOM = 44, 34, 46


class Tick(NamedTuple):
    """A tick's place along its axis, and its text."""

    at: float
    text: str


@dataclass(frozen=True)
class Line:
    """One run's curve; ``tips`` says the numbers of each point."""

    label: str
    style: int
    points: tuple[tuple[float, float], ...]
    tips: tuple[str, ...]
    bold: bool

    @property
    def marks(self) -> range:
        """The points that have a marker."""
        return range(0 if len(self.points) <= MOST_MARKED else len(self.points) - 1, len(self.points))


@dataclass(frozen=True)
class Bracket:
    """A horizontal distance worth a number: from ``start`` to ``end``, hung from the two line ends above."""

    start: tuple[float, float]
    end: tuple[float, float]
    y: float
    text: str

    @property
    def box(self) -> Box:
        """The ground that arrow and text cover."""
        return Box(self.start[0] - 4, self.y - FONT - 8, self.end[0] + 4, self.y + 5)


@dataclass(frozen=True)
class Chart:
    """Everything that a renderer draws, at its place."""

    name: str
    title: str
    x_title: str
    y_title: str
    plot: Box
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...]
    labels: tuple[Label, ...]
    bracket: Bracket | None = None


@dataclass(frozen=True)
class Scale:
    """A map from values to pixels, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def over_tokens(runs: Sequence[Run]) -> Chart:
    """Validation loss over the tokens of all replicas."""
    most = max((e.tokens for run in runs for e in run.curve), default=0) or 1
    return _chart(
        runs,
        name="loss_over_tokens",
        title="Loss over tokens",
        x_title="Tokens, all replicas",
        x_of=lambda e: e.tokens,
        x=Scale(0, most, _LEFT, _right_edge(runs)),
        x_ticks=[(v, units.tick(v, is_bytes=False)) for v in linear_ticks(0, most, 5)],
    )


def over_bytes(runs: Sequence[Run]) -> Chart:
    """Validation loss over the bytes that one replica has sent, on a logarithmic axis."""
    sent = [e.bytes_sent for run in runs for e in run.curve if e.bytes_sent > 0] or [1, 10]
    low, high = min(sent) / 1.3, max(sent) * 1.15
    return _chart(
        runs,
        name="loss_over_bytes",
        title="Loss over bytes sent",
        x_title="Bytes sent per replica (log scale)",
        x_of=lambda e: e.bytes_sent,
        x=Scale(low, high, _LEFT, _right_edge(runs), log=True),
        x_ticks=[(v, units.tick(v, is_bytes=True)) for v in log_ticks(low, high, 6)],
        contest=story.contestants(runs),
    )


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) in [low, high], at most ``most`` of them."""
    rough = 10 ** math.floor(math.log10((high - low) / most))
    step = next(rough * m for m in (1, 2, 2.5, 5, 10, 20) if (high - low) / (rough * m) <= most - 1 or m == 20)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten in [low, high]: fewer where there are too many, with 2 and 5 where there are too few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)

    def inside(digits: tuple[int, ...], every: int = 1) -> list[float]:
        values = (digit * 10.0**power for power in decades if power % every == 0 for digit in digits)
        return [value for value in values if low <= value <= high]

    if len(inside((1,))) < 3:
        return inside((1, 2, 5)) if len(inside((1, 2, 5))) <= most else inside((1, 3))
    return next(found for every in range(1, 100) if len(found := inside((1,), every)) <= most)


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


def _chart(
    runs: Sequence[Run],
    *,
    name: str,
    title: str,
    x_title: str,
    x_of: Callable[[Evaluation], float],
    x: Scale,
    x_ticks: list[tuple[float, str]],
    contest: tuple[Run, Run] | None = None,
) -> Chart:
    low, high = loss_limits(runs)
    y = Scale(low, high, HEIGHT - _BOTTOM, _TOP)
    lines = tuple(
        Line(
            run.label,
            style,
            tuple((x(x_of(e)), y(e.loss)) for e in curve),
            tuple(map(_tip, curve)),
            _bold(run),
        )
        for style, run in enumerate(runs)
        if (curve := [e for e in run.curve if not x.log or x_of(e) > 0])
    )
    bracket = _bracket(contest, lines) if contest else None
    plot = Box(_LEFT, _TOP, x.end, HEIGHT - _BOTTOM)
    names, styles = [line.label for line in lines], [line.style for line in lines]
    taken = [bracket.box] if bracket else []
    return Chart(
        name=name,
        title=title,
        x_title=x_title,
        y_title="Validation loss (nats per token)",
        plot=plot,
        x_ticks=tuple(Tick(x(value), text) for value, text in x_ticks),
        y_ticks=tuple(Tick(y(value), f"{value:g}") for value in linear_ticks(low, high, 6)),
        lines=lines,
        labels=labels.place(names, styles, [line.points for line in lines], plot, taken),
        bracket=bracket,
    )


def _right_edge(runs: Sequence[Run]) -> float:
    return WIDTH - labels.margin([run.label for run in runs])


def _bold(run: Run) -> bool:
    return run.summary.preset == "sparseloco"


def _tip(e: Evaluation) -> str:
    return (
        f"{units.loss(e.loss)} nats per token after {units.count(e.tokens)} tokens, "
        f"{units.num_bytes(e.bytes_sent)} sent per replica (round {e.round})"
    )


def _bracket(contest: tuple[Run, Run], lines: Sequence[Line]) -> Bracket | None:
    sparse, dense = contest
    ends = {line.label: line.points[-1] for line in lines}
    if sparse.label not in ends or dense.label not in ends:
        return None
    start, end = ends[sparse.label], ends[dense.label]
    text = f"{units.ratio(dense.curve[-1].bytes_sent / sparse.curve[-1].bytes_sent)} fewer bytes"
    # A shorter arrow has no room for its text.
    return Bracket(start, end, HEIGHT - _BOTTOM - 10, text) if end[0] - start[0] > 8 * len(text) else None


def marker(style: int) -> str:
    """The marker of a run; another one when the colours start again."""
    return MARKERS[(style + style // len(LIGHT)) % len(MARKERS)]
