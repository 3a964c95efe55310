"""Charts as inline SVG; colours come from the page's style sheet, so one drawing serves screen and print."""

from __future__ import annotations

from html import escape

from sparseloco.report.chart import HEIGHT, LIGHT, WIDTH, Bracket, Chart, Line, marker
from sparseloco.report.labels import FONT, Label

_CORNERS = {
    "square": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    "triangle": ((0, -1.2), (1.1, 0.8), (-1.1, 0.8)),
    "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
}


def draw(chart: Chart) -> str:
    """The chart as one ``<svg>`` element without references to anything outside it."""
    clip, plot = f"clip-{chart.name}", chart.plot
    names = ", ".join(line.label for line in chart.lines)
    title = f"{chart.title}: {chart.y_title} over {chart.x_title}. Runs: {names}."
    size = f'width="{plot.right - plot.left + 6:.1f}" height="{plot.bottom - plot.top:.1f}"'
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<defs><clipPath id="{clip}"><rect x="{plot.left}" y="{plot.top}" {size}/></clipPath></defs>',
        *_axes(chart),
        *([_bracket(chart.bracket)] if chart.bracket else []),
        f'<g clip-path="url(#{clip})">',
        *(_line(line) for line in sorted(chart.lines, key=lambda line: line.bold)),
        "</g>",
        *(_label(label) for label in chart.labels),
        "</svg>",
    ]
    return "\n".join(parts)


def colour_class(style: int) -> str:
    """The class that gives an element the colour of a run."""
    return f"c{style % len(LIGHT)}"


def _axes(chart: Chart) -> list[str]:
    left, _, right, bottom = chart.plot
    middle = (left + right) / 2
    parts = [_text("axis", 0, FONT, chart.y_title)]
    for at, text in chart.y_ticks:
        parts.append(f'<path class="grid" d="M{left} {at:.1f}H{right:.1f}"/>')
        parts.append(_text("tick", left - 8, at + 4, text, "end"))
    parts.append(f'<path class="base" d="M{left} {bottom}H{right:.1f}"/>')
    for at, text in chart.x_ticks:
        parts.append(f'<path class="base" d="M{at:.1f} {bottom}v4"/>')
        parts.append(_text("tick", at, bottom + 18, text, "middle"))
    parts.append(_text("axis", middle, HEIGHT - 6, chart.x_title, "middle"))
    return parts


def _text(kind: str, x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(line: Line) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in line.points)
    marks = "".join(_mark(line.style, *line.points[i], f"{line.label}: {line.tips[i]}") for i in line.marks)
    return (
        f'<g class="run {colour_class(line.style)}{" bold" if line.bold else ""}">'
        f'<title>{escape(line.label)}</title><polyline points="{path}"/>{marks}</g>'
    )


def _mark(style: int, x: float, y: float, tip: str) -> str:
    title, shape, size = f"<title>{escape(tip)}</title>", marker(style), 3.4
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}">{title}</circle>'
    corners = " ".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in _CORNERS[shape])
    return f'<polygon points="{corners}">{title}</polygon>'


def _label(label: Label) -> str:
    first = label.y - (len(label.lines) - 1) * FONT * 0.6 + 4.5
    text = "".join(
        f'<tspan x="{label.x:.1f}" y="{first + n * FONT * 1.2:.1f}">{escape(line)}</tspan>'
        for n, line in enumerate(label.lines)
    )
    sign = ""
    if label.leader:
        (x0, y0), (x1, y1) = label.leader
        sign = f'<path class="leader" d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}"/>'
    elif label.key:
        sign = f'<g class="run">{_mark(label.style, label.x - 9, label.y, " ".join(label.lines))}</g>'
    anchor = "end" if label.to_left else "start"
    return f'<g class="name {colour_class(label.style)}">{sign}<text text-anchor="{anchor}">{text}</text></g>'


def _bracket(bracket: Bracket) -> str:
    (x0, y0), (x1, y1), y = bracket.start, bracket.end, bracket.y
    heads = f"M{x0 + 6:.1f} {y - 4}l-5 4l5 4M{x1 - 6:.1f} {y - 4}l5 4l-5 4"
    return (
        f'<g class="bracket"><path d="M{x0:.1f} {y0 + 6:.1f}V{y}M{x1:.1f} {y1 + 6:.1f}V{y}"/>'
        f'<path class="arrow" d="M{x0 + 1:.1f} {y}H{x1 - 1:.1f}{heads}"/>'
        f"{_text('span', (x0 + x1) / 2, y - 6, bracket.text, 'middle')}</g>"
    )
