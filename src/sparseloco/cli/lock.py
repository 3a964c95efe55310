"""One writer per run folder: a lock that its process holds, and that is gone with the process, however that ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from sparseloco.cli.folders import LOCK, not_writable
from sparseloco.errors import ConfigError

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""What file systems say that have no flock."""
_TRIES, _PAUSE_S = 5, 0.05
"""Whoever only asks whether a folder is held holds it for a moment too, so a refusal is not final at once."""


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Inside this block no other process that asks for the same folder writes to it; makes the folder if need be.

    The lock is a file in the folder, which is removed at the end, as is a folder made here in which nothing was put.
    Child processes do not inherit it. Where the file system has no locks this is a warning, and the block runs.

    Raises:
        ConfigError: if another process holds it, whose number is named, or the folder cannot be written.
    """
    try:
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        handle = _take(folder)
    except OSError as error:
        raise not_writable(folder, error) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the lock itself goes with the handle
            (folder / LOCK).unlink()
            if made:
                folder.rmdir()
        os.close(handle)


def check_not_held(folder: Path) -> None:
    """Refuse a folder that another process writes to; touches nothing.

    Raises:
        ConfigError: naming that process.
    """
    if _is_held_for_long(folder):
        raise _held(folder)


def is_held(folder: Path) -> bool | None:
    """Whether a process writes to the folder; None where the file system cannot say."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(handle)


def _take(folder: Path) -> int:
    """The handle that holds the lock."""
    path = folder / LOCK
    for _ in range(_TRIES):
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            time.sleep(_PAUSE_S)
            continue
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(handle)
                raise
            warnings.warn(
                f"RUN={str(folder)!r}: is on a file system without locks ({error.strerror}), so two processes that "
                "write to it would not be kept apart; start only one",
                stacklevel=4,
            )
            return handle
        if _is_at(path, handle):
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())
            return handle
        os.close(handle)  # the file of a process that has just ended and removed it
    raise _held(folder)


def _is_at(path: Path, handle: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(handle))
    return False


def _is_held_for_long(folder: Path) -> bool:
    for number in range(_TRIES):
        if not is_held(folder):
            return False
        time.sleep(_PAUSE_S if number < _TRIES - 1 else 0)
    return True


def _held(folder: Path) -> ConfigError:
    pid = ""
    with contextlib.suppress(OSError):
        pid = (folder / LOCK).read_text(encoding="utf-8").strip()
    return ConfigError(
        f"RUN={str(folder)!r}: is being written by another process (pid {pid or 'unknown'}); wait for it or choose "
        "another --out"
    )
