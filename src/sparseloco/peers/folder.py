"""Pages of a listing of a directory, read off its names: a file system has no listing that starts somewhere.

Each page reads the names of every folder on its way once, some two seconds for a million, and keeps no more of them
than it gives. Links are not followed: one could lead out of the store, or in circles.
"""

from __future__ import annotations

import contextlib
import heapq
import os
from collections.abc import Iterator
from pathlib import Path

from sparseloco.errors import ConfigError
from sparseloco.peers.store import Listed, Page, check_path, past


def page(root: Path, folder: str, after: str, limit: int) -> Page:
    """Files in a folder and below, in order of their paths, from ``after`` on; names that are no paths are not seen.

    Args:
        root: The store.
        folder: Path below it, "" for all.
        after: Only paths greater than it.
        limit: Files and folders that are looked at.

    Raises:
        OSError: if the folder cannot be read; one that is not there is empty, and so are those below it that are shut.
    """
    found: list[Listed] = []
    looked, last = 0, after
    levels = [_level(root, folder, after, limit)]
    while levels:
        path = next(levels[-1], None)
        if path is None:
            levels.pop()
        elif looked >= limit:
            return Page(found, last)
        elif path.endswith("/"):
            looked += not last.startswith(path)  # counted already, if the page before ended in it
            last = max(last, path)
            with contextlib.suppress(PermissionError):  # who shuts a folder hides that one, and no other
                levels.append(_level(root, path[:-1], after, limit - looked))
        else:
            looked, last = looked + 1, path
            with contextlib.suppress(FileNotFoundError):  # removed since
                found.append(_listed(root, path))
    return Page(found)


def _level(root: Path, folder: str, after: str, room: int) -> Iterator[str]:
    """What lies directly in a folder, folders with a slash, as paths sort: as much as there is room for, and two more.

    One shows that there are further ones, and one is the folder in which the page before ended, which takes no room.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(root / folder) as entries:
        return iter(heapq.nsmallest(room + 2, _paths(entries, folder, after)))
    return iter(())


def _paths(entries: Iterator[os.DirEntry[str]], folder: str, after: str) -> Iterator[str]:
    for entry in entries:
        path = f"{folder}/{entry.name}" if folder else entry.name
        with contextlib.suppress(ConfigError):
            if entry.is_dir(follow_symlinks=False):
                if past(path) > after:
                    yield f"{check_path(path)}/"
            elif path > after and entry.is_file(follow_symlinks=False):
                yield check_path(path)


def _listed(root: Path, path: str) -> Listed:
    facts = os.stat(root / path, follow_symlinks=False)
    etag = f"{facts.st_ino:x}-{facts.st_mtime_ns:x}-{facts.st_size:x}"
    return Listed(path, facts.st_size, etag, facts.st_mtime)
