"""The command line in this process or in one of its own, with a run small enough to be repeated hundreds of times."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

from sparseloco.cli import app


class Ended(NamedTuple):
    code: int | str | None
    out: str
    err: str


Call = Callable[..., Ended]

_TEXT = """
[data]
path = "text.txt"
vocab_size = 300
"""


def run_file(data: str = _TEXT, more: str = "") -> str:
    """A file for two replicas that train for four steps.

    Args:
        data: Section ``[data]``; the default reads ``text.txt``.
        more: What stands behind the last section.
    """
    return f"""
[algorithm]
preset = "sparseloco"
inner_steps = 2
tile = 8
k = 8

[model]
hidden_size = 16
num_layers = 1
num_heads = 2
intermediate_size = 24
{data}
[train]
workers = 2
steps = 4
batch_size = 2
sequence_length = 16
evaluate_every = 2
evaluation_tokens = 64

[optimizer]
warmup_steps = 1
{more}"""


def text(lines: range = range(2000)) -> str:
    return "".join(f"Line {number} says that {number * 7919 % 1000} is not {number % 13}.\n" for number in lines)


def enter(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Work in a folder, with the cache of tokens in it."""
    patch.chdir(folder)
    patch.setenv("SPARSELOCO_CACHE", str(folder / "cache"))


def run(*arguments: str) -> int | str | None:
    """Run the command line in this process; returns its exit code."""
    with pytest.raises(SystemExit) as ended:
        app(list(arguments), prog_name="sparseloco")
    return ended.value.code


def process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    command = [sys.executable, "-m", "sparseloco", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)


def parse(words: Sequence[str]) -> Any:
    """What the options of a verb are read as, without running it; a mistake in them is an exception."""
    verb: Any = typer.main.get_command(app)
    rest = list(words)
    while hasattr(verb, "get_command"):
        context = verb.make_context("sparseloco", list(rest), resilient_parsing=True)
        name = rest.pop(0)
        verb = verb.get_command(context, name)
        assert verb is not None, f"there is no verb {name}"
    return verb.make_context(words[0], rest)


def names(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())
