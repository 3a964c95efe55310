"""What people see in a terminal: progress on stderr, tables on stdout."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Column, Table
from rich.text import Text

from sparseloco.cli.live import LiveView, status_line
from sparseloco.metrics import Status
from sparseloco.report import Run, groups, seeds_table, summary_table

_WIDE = 160
"""Width of tables that go into a file or a pipe."""
_MOST_COLUMNS = 4
_PLAIN_SECONDS = 10.0
"""Time between two lines about a run where there is no terminal to draw in."""

_logger = logging.getLogger("sparseloco")


class _Lines(logging.Handler):
    """Log records as lines of a screen."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self.screen = screen
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        self.screen.say(self.format(record))


class Screen:
    """A terminal for one command.

    Args:
        quiet: Write nothing but errors to stderr.
        verbose: Show the library's log too, which names peer and round.
    """

    def __init__(self, *, quiet: bool, verbose: bool = False) -> None:
        self.quiet = quiet
        self.notes = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=self.notes,
        )
        self.draws = self.notes.is_terminal and not quiet
        self._view: LiveView | None = None
        self._lines = _Lines(self) if verbose and not quiet else None
        self._live = Live(
            get_renderable=self._now, console=self.notes, transient=True, refresh_per_second=4, redirect_stdout=False
        )

    def __enter__(self) -> Screen:
        if self.draws:
            self._live.start()
        if self._lines is not None:
            _logger.addHandler(self._lines)
            _logger.setLevel(logging.INFO)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        if self._lines is not None:
            _logger.removeHandler(self._lines)
            _logger.setLevel(logging.NOTSET)

    def say(self, text: str) -> None:
        """A line above the progress, also where there is no terminal."""
        if not self.quiet:
            self.notes.print(text, soft_wrap=True)

    @contextmanager
    def reading(self, path: str) -> Iterator[Callable[[str, int, int], None]]:
        """Progress of reading text and of making tokens of it, as ``data.prepare`` reports it."""
        task = self.progress.add_task(f"reading {path}", total=None, note="")

        def show(stage: str, done: int, total: int) -> None:
            what = {"reading": f"reading {path}", "tokenizer": "training the tokenizer", "tokens": "making tokens"}.get(
                stage, stage
            )
            note = "first use of this text" if total else f"{done / 1e6:,.0f} MB, first use of this text"
            self.progress.update(task, description=what, completed=done, total=total or None, note=note)

        try:
            yield show
        finally:
            self.progress.remove_task(task)

    @contextmanager
    def training(self, label: str, steps: int) -> Iterator[Callable[[Status], None]]:
        """A live view of one run, or lines now and then where there is no terminal; a last line when it is done."""
        view, said_at = LiveView(label, steps), time.monotonic()

        def show(status: Status) -> None:
            nonlocal said_at
            view.update(status)
            if not self.draws and status.step < status.steps and time.monotonic() - said_at >= _PLAIN_SECONDS:
                said_at = time.monotonic()
                self.say(f"{label}: step {status.step} of {steps}, {status_line(status)}")

        self._view = view
        try:
            yield show
        finally:
            self._view = None
        if view.last is not None:
            self.say(f"{label}: {view.last.step} steps, {status_line(view.last)}")

    @contextmanager
    def measuring(self) -> Iterator[Callable[[str, int, int], None]]:
        """A bar while ``bench`` measures; nothing is drawn but between two measurements."""
        task = self.progress.add_task("starting", total=None, note="")

        def show(what: str, done: int, total: int) -> None:
            self.progress.update(task, description=what, completed=done, total=total)

        try:
            yield show
        finally:
            self.progress.remove_task(task)

    def show_bench(self, figures: Mapping[str, Any]) -> None:
        """What ``bench`` found: tables, then the figures beside them, a line each."""
        from sparseloco.bench.show import lines, tables

        for table in tables(figures):
            self._print(table)
        for line in lines(figures):
            self._print(Text(line))

    def show_runs(self, runs: Sequence[Run], report: Path) -> None:
        """The table of finished runs and the path of their report."""
        rows = [{name: cell.text for name, cell in row.items()} for row in summary_table(runs)]
        best = [{name for name, cell in row.items() if cell.best} for row in summary_table(runs)]
        self._print(_table(rows, best, name="Run"))
        if repeated := groups(runs):
            rows = [{name: cell.text for name, cell in row.items()} for row in seeds_table(repeated)]
            self._print(Text("over seeds, mean \u00b1 half the width of its 95 % interval:"))
            self._print(_table(rows, [set() for _ in rows], name="Run"))
        self._print(Text(f"report: {report}"))

    def show_figures(self, described: Sequence[Mapping[str, Any]]) -> None:
        """What methods cost, one column each."""
        from sparseloco.cli.figures import readable

        rows = [readable(figures) for figures in described]
        self._print(_table(rows, [set() for _ in rows], name="method"))

    def show_presets(self, presets: Sequence[Mapping[str, Any]]) -> None:
        """Names, keywords and defaults, and first lines of the presets."""
        table = Table("preset", "what it does", "keywords and their defaults")
        for row in presets:
            keywords = ", ".join(f"{name}={value}" for name, value in row["keywords"].items())
            table.add_row(*map(Text, (row["preset"], row["summary"], keywords)))
        self._print(table)

    def show_examination(self, found: Mapping[str, Any]) -> None:
        """What ``doctor`` found: figures by section, then what to know."""
        from sparseloco.cli.doctor import in_words, title

        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
        for section, figures in found.items():
            if not isinstance(figures, Mapping):
                continue
            for number, (name, value) in enumerate(figures.items()):
                table.add_row(Text(section if number == 0 else ""), Text(title(name)), Text(in_words(name, value)))
        self._print(table)
        for finding in found["findings"]:
            self._print(Text(f"\n{finding['what']}: {finding['why']}; {finding['remedy']}"))

    def _now(self) -> RenderableType:
        return self._view.renderable() if self._view is not None else self.progress.get_renderable()

    def show_dataset(self, figures: Mapping[str, Any]) -> None:
        """Tokens by source and split, then hashes and samples of text, a line each."""
        table = Table(
            "source", "documents", *(Column(Text(name), justify="right") for name in figures["splits"]), "bytes/token"
        )
        for row in figures["sources"]:
            counts = [f"{split['num_tokens']:,}" for split in row["splits"].values()]
            per_token = f"{row['splits']['train']['bytes_per_token']:.2f}"
            table.add_row(*map(Text, (row["name"], f"{row['num_documents']:,}", *counts, per_token)))
        self._print(table)
        name, size, end = (figures["tokenizer"][key] for key in ("name", "vocab_size", "end_token"))
        repeated, skipped = figures["num_duplicates"], figures["num_skipped"]
        lines = [
            f"tokenizer: {name}, {size:,} tokens, documents end with {end}",
            f"left out: {repeated:,} repeated documents, {skipped:,} files or rows without text",
            f"text: sha256 {figures['corpus_sha256']}",
            f"cache: {figures['entry']}",
        ]
        for line in lines:
            self._print(Text(line))
        for sample in figures["samples"]:
            self._print(Text(f"sample: {sample!r}"))

    def _print(self, what: Table | Text) -> None:
        console = Console(highlight=False, markup=False, emoji=False)
        if not console.is_terminal:
            console = Console(highlight=False, markup=False, emoji=False, width=_WIDE)
        console.print(what, soft_wrap=isinstance(what, Text))


def _table(rows: Sequence[Mapping[str, str]], best: Sequence[set[str]], *, name: str) -> Table:
    """Few rows become columns, so that they fit a terminal; many stay rows. ``name`` is what they are called by."""
    titles = list(dict.fromkeys(title for row in rows for title in row))

    def cell(number: int, title: str) -> Text:
        return Text(rows[number].get(title, ""), style="bold green" if title in best[number] else "")

    if len(rows) > _MOST_COLUMNS:
        table = Table(*titles)
        for number in range(len(rows)):
            table.add_row(*(cell(number, title) for title in titles))
        return table
    table = Table("", *(Column(Text(row[name]), overflow="fold") for row in rows))
    for title in titles:
        if title != name:
            table.add_row(Text(title), *(cell(number, title) for number in range(len(rows))))
    return table
