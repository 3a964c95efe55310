"""What the verb ``bench`` does around the measuring: settings, the plot, and how it ends."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from sparseloco.bench import figures, run
from sparseloco.cli.screen import Screen
from sparseloco.cli.shell import INTERRUPTED, say
from sparseloco.errors import ConfigError

STRAWMAN = 1
"""Exit code if the baseline is one."""


def settings(*, quick: bool, side: int | None, plot: Path | None) -> run.Settings:
    """What to measure; anything that would fail after minutes fails here.

    Raises:
        ConfigError: if the side is not a multiple of 64, or the plot cannot be drawn.
    """
    chosen = run.QUICK if quick else run.Settings()
    if plot is not None:
        if quick:
            raise ConfigError("--plot: must stand without --quick, which measures one k only; leave one of them out")
        if plot.suffix not in (".png", ".svg"):
            raise ConfigError(f"--plot {str(plot)!r}: must end in .png or .svg; name such a file")
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(
                "--plot: needs matplotlib, which is not installed; "
                'run pip install "sparseloco[plot]" or leave the plot out'
            )
        plot.parent.mkdir(parents=True, exist_ok=True)
    chosen = replace(chosen, threads=tuple(count for count in chosen.threads if count <= max(1, usable_cores())))
    return chosen if side is None else replace(chosen, side=side, grid_side=side)


def usable_cores() -> int:
    """Cores this process may use; more threads than that would measure the scheduler."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure(chosen: run.Settings, screen: Screen) -> dict[str, Any]:
    """Measure with a progress bar; Ctrl-C ends it."""
    try:
        with screen.measuring() as progress:
            return run.measure(chosen, progress)
    except KeyboardInterrupt as error:
        say("interrupted: nothing was written")
        raise typer.Exit(INTERRUPTED) from error


def finish(found: Mapping[str, Any], plot: Path | None) -> None:
    """Draw the plot, and end with an error if the baseline is a strawman."""
    if plot is not None:
        from sparseloco.bench.chart import time_over_k

        time_over_k(found["timings"], plot)
        say(f"plot: {plot}")
    try:
        figures.check_baseline(found["plain_over_limit"])
    except ConfigError as error:
        say(f"error: {error}")
        raise typer.Exit(STRAWMAN) from error
