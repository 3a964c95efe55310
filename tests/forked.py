"""Processes that fork off one server per test process, which has imported what takes long.

A start then costs milliseconds instead of seconds of a core. At least one test of each command starts it as people do.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from tests.cli import Ended

PRELOADED = [
    "sparseloco.cli.joining",
    "sparseloco.cli.runs",
    "tests.one_path.compiled",
    "tests.one_path.dcp_runs",
    "tests.one_path.lost",
    "tests.one_path.sharded_runs",
    "tests.one_path.worlds",
    "tests.peers.crowd",
]
"""What the server imports; among it torch, its compiler and Llama, which take some seconds."""
LIMIT_S = 200.0


def forks() -> ForkServerContext:
    """Context of processes that fork off the server; it starts with the first call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # where it finds them
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


class Fork:
    """A process at work in a folder.

    Args:
        folder: Where it works.
        body: What it does with ``words``.
        words: Of its command line.
        variables: Of its environment, beside those of this process.
    """

    def __init__(
        self, folder: Path, body: Callable[[Sequence[str]], None], words: Sequence[str], variables: Mapping[str, str]
    ) -> None:
        self._printed = Path(tempfile.mkdtemp(prefix=".printed-", dir=folder))
        arguments = (folder, self._printed, body, words, {**os.environ, **variables})
        self._process = forks().Process(target=_work, args=arguments, daemon=body is execute)
        self._process.start()
        self.pid: int = self._process.pid  # type: ignore[assignment]

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.exitcode

    def ended(self) -> Ended:
        """Wait for its end; its exit code and what it and its children printed."""
        self._process.join(LIMIT_S)
        found = Ended(self.poll(), *((self._printed / name).read_text() for name in ("out", "err")))
        assert found.code is not None, f"{self.pid} does not end: {found}"
        return found

    def send_signal(self, number: int) -> None:
        """As a shell does."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()
        self._process.join()


def python(folder: Path, *words: str, **variables: str) -> Fork:
    """``python -m module ...`` or ``python script ...`` in a folder."""
    return Fork(folder, execute, words, variables)


class Workers:
    """What ``train_processes`` knows as ``multiprocessing``: its processes are forks with the variables of this one."""

    def get_context(self, _: str) -> Workers:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(forks(), name)

    def Process(self, *, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> Any:
        return forks().Process(target=_worker, args=(dict(os.environ), target, args), daemon=daemon)


def execute(words: Sequence[str]) -> None:
    """Do in this process what the interpreter does with such words."""
    first = 1 if words[0] == "-m" else 0
    sys.argv = list(words[first:])
    if first:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def begin(variables: Mapping[str, str]) -> None:
    """Make a fork what a new process is: its environment, its signals, one thread."""
    import torch

    os.environ.clear()
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(1)


def _worker(variables: Mapping[str, str], body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    begin(variables)
    body(*arguments)


def _work(
    folder: Path,
    printed: Path,
    body: Callable[[Sequence[str]], None],
    words: Sequence[str],
    variables: Mapping[str, str],
) -> None:
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(printed / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    begin(variables)
    body(words)
