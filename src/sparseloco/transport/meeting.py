"""How the processes of a run come together and part: rendezvous, network interface, timeouts, signs of life."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous as meet

from sparseloco.errors import ConfigError, Interrupted, PeerLostError, SparseLocoError
from sparseloco.transport.beats import Beats
from sparseloco.transport.deadline import Deadline
from sparseloco.transport.interface import choose_interface

_PREFIX, _LOCK = "sparseloco-", "lock"
_HERE = "127.0.0.1"
_GLANCE_S = 0.05
"""Time between two looks at whether all ranks have come."""
_running: list[Beats] = []
"""Signs of life of this process; at most one."""

logger = logging.getLogger("sparseloco")


@contextlib.contextmanager
def joined_group(
    rendezvous: str,
    rank: int,
    num_ranks: int,
    deadline: Deadline,
    interface: str = "",
    stop: Callable[[], bool] | None = None,
) -> Iterator[None]:
    """The default gloo group inside this block; its ranks give signs of life.

    Args:
        rendezvous: ``env://`` under torchrun, or ``file://`` and a path that does not exist yet.
        rank: Of this process.
        num_ranks: Processes of the group.
        deadline: How long they wait for each other.
        interface: Network interface; empty takes the one that leads to the rendezvous.
        stop: Asked while ranks wait for each other; once true at one of them, all of them give up.

    Raises:
        PeerLostError: if a rank does not come, or a collective of PyTorch fails inside the block, as those of FSDP2.
        Interrupted: if they gave up.
    """
    join(rendezvous, rank, num_ranks, deadline, interface, stop)
    beats = signs_of_life(deadline)
    try:
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, SparseLocoError) or not _is_of_a_collective(error):
                raise
            raise PeerLostError(beats.explain(error)) from error
    except BaseException as error:
        beats.stop(error)
        raise
    else:
        beats.stop()
    finally:
        dist.destroy_process_group()


def join(
    rendezvous: str,
    rank: int,
    num_ranks: int,
    deadline: Deadline,
    interface: str = "",
    stop: Callable[[], bool] | None = None,
) -> None:
    """Make the default gloo group.

    Raises:
        ConfigError: if ``interface`` is not one of this machine.
        PeerLostError: if not all ranks come within the deadline.
        Interrupted: if ``stop`` was true at one of them before all had come.
    """
    address = os.environ.get("MASTER_ADDR", _HERE) if rendezvous == "env://" else _HERE
    is_here = os.environ.get("LOCAL_WORLD_SIZE", str(num_ranks)) == str(num_ranks) or address == _HERE
    choose_interface(address, interface, is_here=is_here)
    patience = timedelta(seconds=deadline.collective_s)
    try:
        store, _, _ = next(meet(rendezvous, rank, num_ranks, timeout=patience))
        store.set_timeout(patience)
        # After a restart the store of torchrun still holds the addresses of the processes before.
        attempt = f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        own = dist.PrefixStore(attempt, store)  # pyright: ignore[reportPrivateImportUsage]
        wait_for_all(own, num_ranks, deadline.collective_s, stop)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=num_ranks, timeout=patience)
    except Interrupted:
        raise
    except RuntimeError as error:  # the errors of gloo have no type of their own
        raise PeerLostError(
            f"peer {rank}=waited for {num_ranks} ranks to meet ({str(error).partition(chr(10))[0]}): must all come "
            f"within deadline_s={deadline.deadline_s:g}; look at what the others printed, or raise transport.deadline_s"
        ) from error


def wait_for_all(store: Any, num_ranks: int, patience_s: float, stop: Callable[[], bool] | None = None) -> None:
    """Return once as many ranks have called this.

    Gloo would wait for them in one call that no signal interrupts. The first word in the store, that all have come or
    that one was asked to stop, is the only one, so no rank goes on without another.

    Args:
        store: Shared by the ranks, and by nobody else.
        num_ranks: How many must come.
        patience_s: How long to wait for them.
        stop: Whether this rank was asked to stop.

    Raises:
        Interrupted: at all ranks, if one was asked to stop first.
        RuntimeError: if they do not come.
    """
    word, going, stopping = "meeting", "going", "stopping"
    if store.add("arrived", 1) == num_ranks:
        store.compare_set(word, "", going)
    until = time.monotonic() + patience_s
    while not store.check([word]):
        if stop is not None and stop():
            store.compare_set(word, "", stopping)
        elif time.monotonic() > until:
            raise RuntimeError(f"{store.add('arrived', 0)} came")
        else:
            time.sleep(_GLANCE_S)
    if store.get(word).decode() != going:
        raise Interrupted(f"stopped before all {num_ranks} ranks had met, with nothing trained")


def signs_of_life(deadline: Deadline | None = None) -> Beats:
    """Those of this process in its default group; they begin with the first call.

    Args:
        deadline: None for that of the signs that are given already, else for the usual one.

    Raises:
        ConfigError: if ``torch.distributed`` is not initialised.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "group=None: must have torch.distributed initialised; call init_process_group or start with torchrun"
        )
    store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    running = _running[0] if _running else None
    if running is not None and running.store is store and deadline in (None, running.deadline):
        return running
    if running is not None:
        running.stop(silent=True)
    beats = Beats(store, dist.get_rank(), dist.get_world_size(), deadline or Deadline())
    beats.start()
    _running[:] = [beats]
    if dist.get_rank() == 0:
        logger.info("%s", beats.deadline.words)
    return beats


@atexit.register
def _stop() -> None:
    """Say goodbye before the interpreter goes, whose end a thread must not see."""
    for beats in _running:
        beats.stop(vars(sys).get("last_value"), silent=not dist.is_initialized())  # the error that nobody caught


@contextlib.contextmanager
def meeting_folder() -> Iterator[Path]:
    """A temporary folder for the rendezvous of processes on this machine; it is gone after the block.

    A process that is killed leaves its folder behind. Its lock, however, goes with it, so the next call removes every
    folder that is not locked.
    """
    import fcntl  # not on Windows, where the rest of the package can be imported

    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open("rb") as file:  # of another user, in use, or gone by now
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with (folder / "new").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            (folder / "new").rename(folder / _LOCK)  # never there without being locked
            yield folder


def _is_of_a_collective(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()
