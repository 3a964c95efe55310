"""Where the names of lines go: beside their ends if there are few, in a column of keys if there are many.

Pure geometry in pixels; y grows downwards. Knows nothing of runs, HTML or matplotlib.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

FONT = 13
Points = Sequence[tuple[float, float]]
_CHARACTER = 0.64 * FONT
_LINE = 1.2 * FONT
_GAP = 12
_MOST_BESIDE_ENDS, _MOST_WRAPPED = 5, 8
_WRAP = 17
_DEAREST = 60.0


class Box(NamedTuple):
    """A rectangle: the plot, or ground that a label may not take."""

    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True)
class Label:
    """The name of a line; ``(x, y)`` is the middle of the edge where its text starts, or ends if ``to_left``.

    A leader joins ``(end_x, end_y)``, the end of the line, to a label that had to move; a ``key`` has the
    line's marker before it instead.
    """

    x: float
    y: float
    lines: tuple[str, ...]
    style: int
    end_x: float
    end_y: float
    to_left: bool = False
    key: bool = False

    @property
    def height(self) -> float:
        """Pixels from the top of the first line to the bottom of the last."""
        return _LINE * len(self.lines)

    @property
    def box(self) -> Box:
        """The ground that the text covers, by estimate."""
        width = _CHARACTER * max(map(len, self.lines))
        left = self.x - width if self.to_left else self.x
        return Box(left, self.y - self.height / 2, left + width, self.y + self.height / 2)

    @property
    def leader(self) -> tuple[tuple[float, float], tuple[float, float]] | None:
        """From the line's end to the text, if they are apart."""
        if self.key or abs(self.y - self.end_y) <= 5:
            return None
        inward = 3 if self.to_left else -3
        return (self.end_x - inward, self.end_y), (self.x + inward, self.y)


def margin(names: Sequence[str]) -> float:
    """Pixels that the names need at the right of the plot."""
    widest = max((len(line) for name in names for line in _wrapped(name, len(names))), default=0)
    return _GAP + 6 + _CHARACTER * widest


def place(
    names: Sequence[str],
    styles: Sequence[int],
    lines: Sequence[Points],
    plot: Box,
    taken: Sequence[Box] = (),
) -> tuple[Label, ...]:
    """One label per line.

    Lines that all end at the same x get one column, in which each label is as near its end as the others let
    it. Else each takes the free place that is nearest its end. Where there are too many names, or one finds
    no free place, all go into a column of keys.

    Args:
        names: One name per line.
        styles: The number of each line's colour and marker.
        lines: The points of each line; none is empty.
        plot: The plot without its margins.
        taken: Ground that holds something else already.
    """
    labels = [
        Label(line[-1][0] + _GAP, line[-1][1], _wrapped(name, len(names)), style, *line[-1])
        for name, style, line in zip(names, styles, lines, strict=True)
    ]
    if not labels:
        return ()
    if len(labels) > _MOST_BESIDE_ENDS:
        return _keys(labels, plot)
    if len({round(label.end_x) for label in labels}) == 1:
        return _spread(labels, plot)
    page = plot._replace(right=plot.right + margin(names))
    return _search(labels, lines, page, taken) or _keys(labels, plot)


def _wrapped(name: str, number_of_names: int) -> tuple[str, ...]:
    if number_of_names > _MOST_WRAPPED:
        return (name if len(name) <= _WRAP + 3 else name[: _WRAP + 2] + "\u2026",)
    return tuple(textwrap.wrap(name, _WRAP, max_lines=2, placeholder=" \u2026")) or (name[:_WRAP],)


def _keys(labels: Sequence[Label], plot: Box) -> tuple[Label, ...]:
    """One column at the right, in the order in which the lines end."""
    order = sorted(range(len(labels)), key=lambda i: labels[i].end_y)
    need = sum(label.height for label in labels)
    gap = max(0.0, min(6.0, (plot.bottom - plot.top - need) / len(labels)))
    y, at = plot.top + max(0.0, (plot.bottom - plot.top - need - gap * len(labels)) / 2), {}
    for i in order:
        at[i] = y + labels[i].height / 2
        y += labels[i].height + gap
    return tuple(replace(label, x=plot.right + _GAP + 6, y=at[i], key=True) for i, label in enumerate(labels))


def _spread(labels: Sequence[Label], plot: Box) -> tuple[Label, ...]:
    """Move neighbours that overlap apart, equally up and down, and keep all of them beside the plot."""
    at = [label.y for label in labels]
    order = sorted(range(len(labels)), key=lambda i: at[i])
    for _ in range(200):
        for i, j in pairwise(order):
            lack = (labels[i].height + labels[j].height) / 2 + 3 - (at[j] - at[i])
            if lack > 0:
                at[i], at[j] = at[i] - lack / 2, at[j] + lack / 2
        for i, label in enumerate(labels):
            at[i] = min(max(at[i], plot.top + label.height / 2), plot.bottom - label.height / 2)
    return tuple(replace(label, y=y) for label, y in zip(labels, at, strict=True))


def _search(
    labels: Sequence[Label], lines: Sequence[Points], page: Box, taken: Sequence[Box]
) -> tuple[Label, ...] | None:
    """Give each label, from right to left, the cheapest of its possible places; none if that is a bad one."""
    dots = [dot for line in lines for dot in _dots(line)]
    placed: dict[int, Label] = {}
    for i in sorted(range(len(labels)), key=lambda i: (-labels[i].end_x, labels[i].end_y)):
        ground = [*taken, *(label.box for label in placed.values())]
        costs = [(_cost(label, dots, ground, page), n, label) for n, label in enumerate(_places(labels[i]))]
        cost, _, placed[i] = min(costs)
        if cost > _DEAREST:
            return None
    return tuple(placed[i] for i in range(len(labels)))


def _places(label: Label) -> Iterator[Label]:
    for dy in range(-32, 33, 4):
        yield replace(label, y=label.end_y + dy)
        yield replace(label, y=label.end_y + dy, x=label.end_x - _GAP, to_left=True)


def _cost(label: Label, dots: Points, taken: Sequence[Box], page: Box) -> float:
    box = label.box
    outside = box.left < page.left or box.top < page.top or box.bottom > page.bottom - 4 or box.right > page.right
    covered = sum(box.left - 3 < x < box.right + 3 and box.top < y < box.bottom for x, y in dots)
    overlaps = sum(_overlap(box, other) for other in taken)
    return 1000 * outside + 200 * overlaps + 10 * covered + abs(label.y - label.end_y) + (3 if label.to_left else 0)


def _overlap(a: Box, b: Box) -> bool:
    return a.left < b.right and b.left < a.right and a.top < b.bottom and b.top < a.bottom


def _dots(line: Points) -> Iterator[tuple[float, float]]:
    """Points along a line, at most three pixels apart."""
    for (x0, y0), (x1, y1) in pairwise(line):
        number = max(1, math.ceil(math.hypot(x1 - x0, y1 - y0) / 3))
        yield from ((x0 + (x1 - x0) * n / number, y0 + (y1 - y0) * n / number) for n in range(1, number + 1))
