"""What people see in a terminal: progress on stderr, tables on stdout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Column, Table
from rich.text import Text

from sparseloco.metrics import Status
from sparseloco.report import Run, summary_table, units

_WIDE = 160
"""Width of tables that go into a file or a pipe."""
_MOST_COLUMNS = 4


class Screen:
    """A terminal for one command; with ``quiet``, nothing but errors is written to stderr."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self.notes = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=self.notes,
            transient=True,
            disable=quiet or not self.notes.is_terminal,
        )

    def __enter__(self) -> Screen:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

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
        """Progress of one run, as the trainer reports it, and a line about it when it is done."""
        task = self.progress.add_task(label, total=steps, note="")
        last: list[Status] = []

        def show(status: Status) -> None:
            last[:] = [status]
            self.progress.update(task, completed=status.step, note=status_line(status))

        try:
            yield show
        finally:
            self.progress.remove_task(task)
        if last:
            self.say(f"{label}: {last[0].step} steps, {status_line(last[0])}")

    def show_runs(self, runs: Sequence[Run], report: Path) -> None:
        """The table of finished runs and the path of their report."""
        rows = [{name: cell.text for name, cell in row.items()} for row in summary_table(runs)]
        best = [{name for name, cell in row.items() if cell.best} for row in summary_table(runs)]
        self._print(_table(rows, best, name="Run"))
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


def status_line(status: Status) -> str:
    """The figures of a run under way in one line; what is not known yet is left out."""
    figures = [f"{units.count(status.tokens_per_s)} tokens/s", f"sent {units.num_bytes(status.bytes_sent)}"]
    if status.validation_loss is not None:
        figures.insert(0, f"validation {units.loss(status.validation_loss)}")
    if math.isfinite(status.train_loss):
        figures.insert(0, f"loss {units.loss(status.train_loss)}")
    if status.step < status.steps:
        figures.append(f"{units.duration(status.seconds_left)} left")
    return ", ".join(figures)


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
