"""The page: one HTML file that needs nothing but itself, no script, no font, no request."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from sparseloco.report import chart, story, svg, units
from sparseloco.report.runs import Run
from sparseloco.report.table import Cell, settings_table, summary_table

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_CHOSEN = "\u2020"


def page(runs: Sequence[Run], *, title: str, command: str | None) -> str:
    """The whole report as HTML text; every string that comes from a run is escaped."""
    facts = "".join(f"<li>{escape(fact)}</li>" for fact in story.facts(runs))
    alerts = "".join(f'<p class="alert" role="note">{escape(text)}</p>\n' for text in story.warnings(runs))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<style>
{_style_sheet()}</style>
</head>
<body>
<main>
<p class="title">{escape(title)}</p>
<h1>{escape(story.headline(runs))}</h1>
<p class="details">{escape(story.details(runs))}</p>
<ul class="facts">{facts}</ul>
{alerts}{_figures(runs)}
<h2>Runs</h2>
{_runs(runs)}
<h2>Settings</h2>
{_settings(runs)}
<h2>Corpus</h2>
{_corpora(runs)}
<h2>Reproduce</h2>
{_reproduce(runs, command)}
</main>
</body>
</html>
"""


def _style_sheet() -> str:
    def colours(palette: tuple[str, ...]) -> str:
        return ":root{" + "".join(f"--c{n}:{colour};" for n, colour in enumerate(palette)) + "}"

    classes = "\n".join(f".{svg.colour_class(n)}{{--c:var(--c{n})}}" for n in range(len(chart.LIGHT)))
    dark = f"@media screen and (prefers-color-scheme:dark){{{colours(chart.DARK)}}}"
    rules = files("sparseloco.report").joinpath("style.css").read_text(encoding="utf-8")
    return f"{rules}{colours(chart.LIGHT)}\n{dark}\n{classes}\n"


def _figures(runs: Sequence[Run]) -> str:
    drawn = "\n".join(
        f"<figure>\n<h3>{escape(c.title)}</h3>\n{svg.draw(c)}\n</figure>"
        for c in (chart.over_tokens(runs), chart.over_bytes(runs))
    )
    return f'<div class="figures">\n{drawn}\n</div>\n' + _note(
        "Both loss axes are the same and do not start at zero; an untrained model's loss may lie above them. "
        "Each line is one run with one seed."
    )


def _runs(runs: Sequence[Run]) -> str:
    rows = summary_table(runs)
    body = [
        f'<th scope="row">{_swatch(n)}{escape(row["Run"].text)}</th>'
        + "".join(_cell(name, cell) for name, cell in row.items() if name != "Run")
        for n, row in enumerate(rows)
    ]
    return _table("runs", [escape(name) for name in rows[0]], body) + (
        _note(story.selection(runs))
        + _note(
            ("Highlighted: the best of its column. " if len(runs) > 1 else "")
            + "Compression is dense float32 bytes over bytes sent, all headers counted, at the same number "
            "of rounds. In sync: share of the time spent in encoding, exchange and outer steps."
        )
    )


def _cell(name: str, cell: Cell) -> str:
    text = escape(cell.text)
    if cell.best:
        return f'<td class="best" data-name="{escape(name)}"><b>{text}</b></td>'
    return f'<td data-name="{escape(name)}">{text}</td>'


def _settings(runs: Sequence[Run]) -> str:
    by_run, shared = settings_table(runs)
    head = ["Setting", *(_swatch(n) + escape(run.label) for n, run in enumerate(runs))]
    body = [
        f'<th scope="row"><code>{escape(name)}</code></th>'
        + "".join(_value(name, value, run) for value, run in zip(values, runs, strict=True))
        for name, values in by_run.items()
    ]
    chosen = {name for run in runs for name in run.summary.tuned}
    text = _table("settings", head, body)
    if chosen:
        text += _note(f"{_CHOSEN} selected on the validation split.")
    if shared:
        items = "".join(
            f"<div><dt><code>{escape(name)}</code></dt>"
            f"<dd>{escape(units.setting(value))}{f' {_CHOSEN}' if name in chosen else ''}</dd></div>"
            for name, value in shared.items()
        )
        text += f"<h2>{'Common to all runs' if len(runs) > 1 else 'Training'}</h2>\n<dl>{items}</dl>\n"
    return text


def _value(name: str, value: Any, run: Run) -> str:
    if value is None:
        return f'<td class="none">{units.MISSING}</td>'
    return f"<td>{escape(units.setting(value))}{f' {_CHOSEN}' if name in run.summary.tuned else ''}</td>"


def _corpora(runs: Sequence[Run]) -> str:
    known = dict.fromkeys((run.summary.corpus, run.summary.corpus_sha256) for run in runs)
    return "\n".join(f"<p>{escape(name)}, SHA-256 <code>{escape(sha)}</code></p>" for name, sha in known)


def _reproduce(runs: Sequence[Run], command: str | None) -> str:
    if command is None:
        configs = (shlex.quote((run.folder / "config.toml").as_posix()) for run in runs)
        command = "\n".join(f"sparseloco train {config}" for config in configs)
    texts = "\n".join(
        f"<details><summary>config.toml of {escape(run.label)}</summary><pre>{escape(run.config_text)}</pre></details>"
        for run in runs
    )
    return f"<pre>{escape(command)}</pre>\n{texts}"


def _table(kind: str, head: Sequence[str], rows: Sequence[str]) -> str:
    """A table from cells that are HTML already."""
    names = "".join(f'<th scope="col">{name}</th>' for name in head)
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}">\n<thead><tr>{names}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>\n"
    )


def _swatch(style: int) -> str:
    return f'<span class="swatch {svg.colour_class(style)}"></span>'


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>\n'
