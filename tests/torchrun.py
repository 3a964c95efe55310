"""Runs that torchrun starts, and their ranks.

``torchrun`` starts the real command: each rank is a new interpreter, which costs five seconds of a core until it has
imported what it needs. ``forked`` costs none of them: launcher and ranks are forks, while rendezvous, agent, restarts
and signals are torchrun's own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path

from tests.forked import Fork, begin, execute

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "torch.distributed.run"]
RANKS = ".ranks"
"""Folder with a file for each rank that was forked, in which its number stands."""


@contextlib.contextmanager
def torchrun(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """The real command in a folder; what is left of it and of its ranks at the end is killed."""
    process = subprocess.Popen(
        [*COMMAND, *_port(), *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **_variables(), "PYTHONPATH": str(ROOT / "src")},
    )
    try:
        yield process
    finally:
        for pid in [*ranks_of(folder), *([process.pid] if process.poll() is None else [])]:
            os.kill(pid, signal.SIGKILL)
        process.communicate()


@contextlib.contextmanager
def forked(folder: Path, *words: str, **variables: str) -> Iterator[Fork]:
    """The same without new interpreters, with more variables."""
    (folder / RANKS).mkdir(exist_ok=True)
    process = Fork(folder, _launch, [*_port(), *words], {**_variables(), **variables})
    try:
        yield process
    finally:
        process.kill()
        for pid in ranks_of(folder):
            os.kill(pid, signal.SIGKILL)


def ranks_of(folder: Path) -> list[int]:
    """Processes of ranks that work in the folder, from the kernel's list."""
    forked = {int(path.name) for path in (folder / RANKS).glob("*")}
    found: list[int] = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            here, words = (place / "cwd").readlink() == folder, (place / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        if here and (int(place.name) in forked or (b"sparseloco" in words and b"torch.distributed.run" not in words)):
            found.append(int(place.name))
    return found


def pid_of_rank(folder: Path, rank: int) -> int:
    """Process of a rank that was forked."""
    return next(pid for pid in ranks_of(folder) if (folder / RANKS / str(pid)).read_text() == str(rank))


def _variables() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "SPARSELOCO_CACHE": "cache"}


def _port() -> list[str]:
    """One that is free, so that two tests at the same time do not meet each other's ranks."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return ["--master-port", str(found.getsockname()[1])]


def _launch(words: Sequence[str]) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    SubprocessHandler._popen = lambda self, args, env: _Rank(args, env)  # type: ignore  # pyright: ignore
    run.main(words)


class _Rank(ForkProcess):
    """As much of ``subprocess.Popen`` as torchrun asks for."""

    def __init__(self, words: Sequence[str], variables: Mapping[str, str]) -> None:
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


def _rank(words: Sequence[str], variables: Mapping[str, str]) -> None:
    """Body of a rank: ``python -u -m module ...`` or ``python -u script ...``."""
    os.setpgid(0, 0)
    begin(variables)
    Path(RANKS, str(os.getpid())).write_text(variables["RANK"])
    execute(words[words.index("-u") + 1 :])
