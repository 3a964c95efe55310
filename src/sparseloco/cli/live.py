"""The live view of a run: a few lines that are drawn again in place, from nothing but ``Status`` values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sparseloco.metrics import Status
from sparseloco.report import units
from sparseloco.report.units import sparkline


class LiveView:
    """What a terminal shows of one run; :meth:`update` it, then print its :meth:`renderable`.

    Args:
        label: Name of the run.
        steps: Inner steps that it will make.
    """

    def __init__(self, label: str, steps: int) -> None:
        self.label = label
        self.steps = steps
        self.last: Status | None = None
        self._losses: list[float] = []

    def update(self, status: Status) -> None:
        """Take in the newest state."""
        self.last = status
        if math.isfinite(status.train_loss):
            self._losses.append(status.train_loss)

    def renderable(self) -> Table:
        """The lines as rich prints them."""
        done = self.last.step if self.last else 0
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
        head = Table.grid(padding=(0, 2))
        for _ in range(3):
            head.add_column(no_wrap=True, overflow="ellipsis")
        bar = ProgressBar(total=self.steps, completed=done, width=24)
        head.add_row(bar, Text(f"step {done} of {self.steps}"), Text(_left(self.last)))
        table.add_row(Text(self.label), head)
        for name, text in lines(self.last, self._losses) if self.last else ():
            table.add_row(Text(name), Text(text))
        return table


def lines(status: Status, losses: Sequence[float] = ()) -> list[tuple[str, str]]:
    """Name and figures of each line below the bar; what is not known yet is left out.

    Example:
        >>> status = Status(4, 8, 3.5, None, 1000.0, 2000, 60.0, round=2, round_bytes=1000, compression=150.0)
        >>> for name, text in lines(status): print(name, text, sep=": ")
        loss: 3.500
        speed: 1000 tokens/s, 0.0 % of the time in sync
        round 2: 1.00 kB this round, 2.00 kB in all, 150\u00d7 smaller than dense float32
    """
    loss = [units.loss(status.train_loss), sparkline(losses)]
    if status.validation_loss is not None:
        loss.append(f"validation {units.loss(status.validation_loss)}")
    found = [
        ("loss", "  ".join(text for text in loss if text)),
        ("speed", f"{units.count(status.tokens_per_s)} tokens/s, {units.percent(status.sync_fraction)} of the time "
        "in sync"),
    ]  # fmt: skip
    if status.round:
        sent = f"{units.num_bytes(status.round_bytes)} this round, {units.num_bytes(status.bytes_sent)} in all"
        if status.compression is not None:
            sent += f", {units.ratio(status.compression)} smaller than dense float32"
        found.append((f"round {status.round}", sent))
    norms = {"delta": status.delta_norm, "residual": status.residual_norm, "update": status.update_norm}
    if known := [f"{name} {value:.3g}" for name, value in norms.items() if value is not None]:
        found.append(("norms", ", ".join(known)))
    return found


def status_line(status: Status) -> str:
    """The figures of a run under way in one line; what is not known yet is left out."""
    figures = [f"{units.count(status.tokens_per_s)} tokens/s", f"sent {units.num_bytes(status.bytes_sent)}"]
    if status.validation_loss is not None:
        figures.insert(0, f"validation {units.loss(status.validation_loss)}")
    if math.isfinite(status.train_loss):
        figures.insert(0, f"loss {units.loss(status.train_loss)}")
    return ", ".join([*figures, *filter(None, [_left(status)])])


def _left(status: Status | None) -> str:
    if status is None or status.step >= status.steps or not math.isfinite(status.seconds_left):
        return ""
    return f"{units.duration(status.seconds_left)} left"
