"""Processes for tests: forked ranks of one gloo group, met in a file (no ports), with a time limit.

``Group`` keeps its ranks alive and lets them call functions that are named by module, so that one group serves a
whole test session. ``run_on`` is a group for one call.
"""

from __future__ import annotations

import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.forked import forks

LIMIT = 60.0
"""Seconds that a call may take, the start of the processes included."""


class RankError(AssertionError):
    """A rank failed; the message holds its traceback."""


class Group:
    """``world`` processes, one thread each, that are the ranks of a gloo group.

    A rank that fails or is late ends the whole group; the next call starts a new one.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._context = forks()
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, fn: Callable[..., Any], *args: Any, limit: float = LIMIT) -> list[Any]:
        """Call ``fn(rank, *args)`` on every rank; results by rank.

        Args:
            fn: A function at the top of an importable module.
            args: Sent to every rank.
            limit: Seconds until the call counts as hung.

        Raises:
            RankError: with the traceback of each rank that failed, or the ranks that are late.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((fn, args))
        answers = self._answers(time.monotonic() + limit)
        failed = [f"rank {rank}:\n{text}" for rank, (good, text) in sorted(answers.items()) if not good]
        late = sorted(set(range(self.world)) - set(answers))
        if failed or late:
            self.close(kill=True)
            failed += [f"rank {rank}: no answer; waiting for a rank that failed, or hung" for rank in late]
            raise RankError("\n".join([f"{fn.__module__}.{fn.__qualname__} failed", *failed]))
        return [answers[rank][1] for rank in range(self.world)]

    def close(self, *, kill: bool = False) -> None:
        """End the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if kill:
                process.kill()
            elif process.is_alive():
                pipe.send(None)
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder:
            self._folder.cleanup()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sparseloco-mp-")
        rendezvous = Path(self._folder.name, "rendezvous").as_uri()
        for rank in range(self.world):
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(rank, self.world, rendezvous, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def _answers(self, deadline: float) -> dict[int, tuple[bool, Any]]:
        """What each rank says by the deadline; once one has failed, the others get two seconds."""
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < self.world and (left := deadline - time.monotonic()) > 0:
            open_pipes = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            for pipe in wait(open_pipes, timeout=left):
                rank = self._pipes.index(pipe)  # pyright: ignore[reportArgumentType]
                try:
                    answers[rank] = self._pipes[rank].recv()
                except EOFError:
                    answers[rank] = (False, "the process died without a word")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + 2)
        return answers


def run_on(world: int, fn: Callable[..., Any], *args: Any, limit: float = LIMIT) -> list[Any]:
    """Call ``fn(rank, *args)`` on ``world`` new processes; results by rank."""
    group = Group(world)
    try:
        return group.run(fn, *args, limit=limit)
    finally:
        group.close()


def _serve(rank: int, world: int, rendezvous: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=world, timeout=timedelta(seconds=LIMIT)
    )
    while (call := pipe.recv()) is not None:
        fn, args = call
        try:
            pipe.send((True, fn(rank, *args)))
        except BaseException:  # noqa: BLE001 - shown by the test that asked
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
