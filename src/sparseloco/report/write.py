"""Writing a report: one page that needs nothing but itself, no script, no font, no request, and its charts as PNG.

All contents are made first, then each file appears whole or not at all.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from sparseloco.errors import ConfigError
from sparseloco.metrics import write_atomically
from sparseloco.report import story, units
from sparseloco.report.charts import DARK, LIGHT, NUM_COLOURS, Chart, draw
from sparseloco.report.runs import Run, distinct
from sparseloco.report.seeds import Group, groups, seeds_table
from sparseloco.report.table import settings_table, summary_table


def write_report(
    runs: Sequence[Run],
    out_dir: str | Path,
    *,
    title: str = "SparseLoCo report",
    command: str | None = None,
    charts: bool = True,
) -> Path:
    """Write ``report.html``, and its two charts as PNG too, of one or more runs.

    Args:
        runs: The runs in the order in which tables and colours take them.
        out_dir: Folder of the report; made where it does not exist.
        title: The line above the headline, and the title of the page.
        command: The command line that makes these runs again. Without it, the page names one
            ``sparseloco train`` per run.
        charts: Draw loss over tokens and over bytes, in the page and as ``loss_over_tokens.png`` and
            ``loss_over_bytes.png``; this needs matplotlib.

    Returns:
        The path of ``report.html``.

    Raises:
        ConfigError: if there are no runs, matplotlib is missing or the folder cannot be written.
    """
    if not runs:
        raise ConfigError("runs=[]: must hold at least one run; give the folder of a finished run")
    repeated, runs = groups(runs), distinct(runs)
    drawn = draw(runs) if charts else []
    contents: dict[str, str | bytes] = {f"{chart.name}.png": chart.png for chart in drawn}
    contents["report.html"] = _page(runs, repeated, drawn, title=title, command=command)
    out_dir = Path(out_dir)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            write_atomically(out_dir / name, content)
    except OSError as error:
        rule = f"must be a folder that can be written ({error.strerror})"
        raise ConfigError(f"--out {str(out_dir)!r}: {rule}; choose another") from error
    return out_dir / "report.html"


def _page(
    runs: Sequence[Run], repeated: Sequence[Group], drawn: Sequence[Chart], *, title: str, command: str | None
) -> str:
    """The whole report as HTML text, with the charts that were drawn."""
    import jinja2

    if command is None:
        configs = (shlex.quote((run.folder / "config.toml").as_posix()) for run in runs)
        command = "\n".join(f"sparseloco train {config}" for config in configs)
    by_run, shared = settings_table(runs)
    options = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    return (
        jinja2.Environment(**options)
        .from_string(read_asset("page.html"))
        .render(
            title=title,
            style=style_sheet(),
            story=story,
            runs=runs,
            charts=drawn,
            rows=summary_table(runs),
            repeated=seeds_table(repeated),
            by_run=by_run,
            shared=shared,
            tuned={name for run in runs for name in run.summary.tuned},
            setting=units.setting,
            num_colours=NUM_COLOURS,
            corpora=dict.fromkeys((run.summary.corpus, run.summary.corpus_sha256) for run in runs),
            command=command,
        )
    )


def style_sheet() -> str:
    """The rules of ``style.css`` after the colours that they share with the charts."""

    def variables(colours: Mapping[str, str]) -> str:
        return ":root{" + "".join(f"--{name}:{colour};" for name, colour in colours.items()) + "}"

    dark = f"@media screen and (prefers-color-scheme:dark){{{variables(DARK)}}}"
    classes = "".join(f".c{n}{{background:var(--c{n})}}" for n in range(NUM_COLOURS))
    return "\n".join([variables(LIGHT), dark, read_asset("style.css") + classes])


def read_asset(name: str) -> str:
    """A file that lies beside this one."""
    return files("sparseloco.report").joinpath(name).read_text(encoding="utf-8")
