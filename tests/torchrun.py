"""Runs that torchrun starts, and their ranks.

``torchrun`` starts the real command: each rank is a new interpreter, which costs five seconds of a core until it has
imported what it needs. ``forked`` costs none of them: launcher and ranks are forks of the server of
:func:`tests.mp.forks`, while rendezvous, agent, restarts and signals are torchrun's own.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from tests.cli import Ended
from tests.mp import forks

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "torch.distributed.run"]
RANKS, LIMIT_S = ".ranks", 200.0
"""Folder with a file for each rank that was forked, and how long a run may take."""


class Launch:
    """A launcher at work in a folder, where its output lies.

    Args:
        process: The real command, or a process forked for it.
        folder: Where it works.
    """

    def __init__(self, process: Any, folder: Path) -> None:
        self.folder = folder
        self.pid: int = process.pid
        self._process = process

    def ended(self) -> Ended:
        """Wait for its end; its exit code and what it and its ranks printed."""
        until = time.monotonic() + LIMIT_S
        while self.code() is None:
            assert time.monotonic() < until, f"torchrun does not end: {self._printed('err')}"
            time.sleep(0.02)
        return Ended(self.code(), self._printed("out"), self._printed("err"))

    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll() if isinstance(self._process, subprocess.Popen) else self._process.exitcode

    def under_way(self, metrics: Path) -> None:
        """Wait for the third line of the log of its run, which is that of a step."""
        while self.code() is None and not (metrics.exists() and metrics.read_text().count("\n") > 2):
            time.sleep(0.02)
        assert self.code() is None, self.ended()

    def kill(self) -> None:
        """End the launcher and all of its ranks."""
        if self.code() is None:
            os.kill(self.pid, signal.SIGKILL)
        for rank in ranks_of(self.folder):
            os.kill(rank, signal.SIGKILL)
        self.ended()

    def _printed(self, name: str) -> str:
        return (self.folder / f".{name}").read_text()


@contextmanager
def torchrun(folder: Path, *arguments: str, **more: str) -> Iterator[Launch]:
    """The real command in a folder, with more variables; what is left of it and of its ranks at the end is killed."""
    variables = {**_variables(), "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), **more}
    with (folder / ".out").open("w") as out, (folder / ".err").open("w") as err:
        command = [*COMMAND, *_port(), *arguments]
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=err, env={**os.environ, **variables})
    launch = Launch(process, folder)
    try:
        yield launch
    finally:
        launch.kill()


@contextmanager
def forked(folder: Path, *arguments: str, **more: str) -> Iterator[Launch]:
    """The same without a new interpreter."""
    for name in (".out", ".err"):
        (folder / name).write_text("")
    (folder / RANKS).mkdir(exist_ok=True)
    process = forks().Process(target=_launch, args=(str(folder), [*_port(), *arguments], {**_variables(), **more}))
    process.start()
    launch = Launch(process, folder)
    try:
        yield launch
    finally:
        launch.kill()
        process.join()


def ranks_of(folder: Path) -> list[int]:
    """Processes of ranks that work in the folder, from the kernel's list."""
    forked = {int(path.name) for path in (folder / RANKS).glob("*")}
    found: list[int] = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            here, words = (place / "cwd").readlink() == folder, (place / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        is_rank = b"torch.distributed.run" not in words and b"train" in words
        if here and (int(place.name) in forked or is_rank):
            found.append(int(place.name))
    return found


def pid_of_rank(folder: Path, rank: int) -> int:
    """Process of a rank that was forked."""
    return next(pid for pid in ranks_of(folder) if (folder / RANKS / str(pid)).read_text() == str(rank))


def _variables() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "SPARSELOCO_CACHE": "cache"}


def _port() -> list[str]:
    """A port that is free, so that two tests at the same time do not meet each other's ranks."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return ["--master-port", str(found.getsockname()[1])]


def _launch(folder: str, arguments: list[str], variables: dict[str, str]) -> None:
    """Body of a launcher."""
    import torch.distributed.run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    os.chdir(folder)
    for number, name in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), number)
    os.environ.update(variables)
    SubprocessHandler._popen = lambda self, args, env: _Rank(args, env)  # type: ignore  # pyright: ignore
    torch.distributed.run.main(arguments)


class _Rank(ForkProcess):
    """As much of ``subprocess.Popen`` as torchrun asks for."""

    def __init__(self, words: tuple[str, ...], variables: dict[str, str]) -> None:
        super().__init__(target=_rank, args=(words, variables))
        self.start()
        with contextlib.suppress(OSError):  # it has done that itself, or has ended
            os.setpgid(self.pid, self.pid)  # type: ignore[arg-type]  # torchrun signals whole groups

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return self.exitcode


def _rank(words: tuple[str, ...], variables: dict[str, str]) -> None:
    """Body of a rank: ``python -u -m module ...`` or ``python -u script ...``."""
    import torch

    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(variables)
    Path(RANKS, str(os.getpid())).write_text(variables["RANK"])
    torch.set_num_threads(1)
    start = words.index("-u") + 1
    if words[start] == "-m":
        sys.argv = list(words[start + 1 :])
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words[start:])
        runpy.run_path(sys.argv[0], run_name="__main__")
