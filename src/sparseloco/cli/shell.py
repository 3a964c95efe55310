"""What every command has in common: errors and warnings as single lines, the exit code, results as JSON."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import typer

from sparseloco.errors import Interrupted, SparseLocoError

P = ParamSpec("P")
T = TypeVar("T")

STOPPING = "stopping at the next round border, after saving; once more to stop at once"
INTERRUPTED = 130
MISTAKE = 2
UNFINISHED = 1
"""Of ``watch``, if the run has ended without a result."""
_OF_THE_DISK = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
"""Errors of files that no check in advance can rule out."""


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
            except Interrupted as error:
                if words := str(error):  # without words another process has said it
                    say(f"interrupted: {words}")
                raise typer.Exit(INTERRUPTED) from error
            except SparseLocoError as error:
                say(f"error: {error}")
                raise typer.Exit(MISTAKE) from error
            except OSError as error:
                if error.errno not in _OF_THE_DISK or error.filename is None:
                    raise
                say(f"error: {str(error.filename)!r}: cannot be used ({error.strerror}); choose another place")
                raise typer.Exit(MISTAKE) from error
            except KeyboardInterrupt as error:
                say("interrupted: a run folder without summary.json is not finished; start it again with --resume")
                raise typer.Exit(INTERRUPTED) from error

    return run


@contextlib.contextmanager
def stop_signals(words: str = STOPPING) -> Iterator[Callable[[], bool]]:
    """Inside this block the first Ctrl-C or SIGTERM only makes the yielded function true; the next one ends at once.

    Args:
        words: Said at the first; nothing if empty.

    Yields:
        Whether a signal has come.
    """
    seen: list[int] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        if words:
            say(words)

    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(text: str) -> None:
    """Write one line to stderr, whatever the text holds."""
    typer.echo(" ".join(text.split()), err=True)


def print_json(value: Any) -> None:
    """Write a value as the whole of stdout; numbers that are not finite become null, since JSON has none."""
    typer.echo(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    say(f"warning: {message}")
