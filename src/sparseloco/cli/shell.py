"""How a command ends: its errors and warnings as single lines, and its exit code."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import typer

from sparseloco.errors import SparseLocoError

P = ParamSpec("P")
T = TypeVar("T")

INTERRUPTED = 130
MISTAKE = 2


def command(body: Callable[P, T]) -> Callable[P, T]:
    """Turn errors of the library into one line on stderr and an exit code; others are bugs and keep their traceback."""

    @functools.wraps(body)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("default", UserWarning)
            warnings.showwarning = _show_warning
            try:
                return body(*args, **kwargs)
            except SparseLocoError as error:
                say(f"error: {error}")
                raise typer.Exit(MISTAKE) from error
            except KeyboardInterrupt as error:
                say("interrupted: a run folder without summary.json is not finished; start the command again")
                raise typer.Exit(INTERRUPTED) from error

    return run


def say(text: str) -> None:
    """Write one line to stderr, whatever the text holds."""
    typer.echo(" ".join(text.split()), err=True)


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    say(f"warning: {message}")
