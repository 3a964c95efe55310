"""How much memory a run may use: that of the machine, or less where a container or a batch system sets a limit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_MEMBERSHIP = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def usable_memory() -> tuple[int, str]:
    """Bytes that processes started here may use in all, and whose they are, in words."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    membership = ""
    with contextlib.suppress(OSError):
        membership = _MEMBERSHIP.read_text(encoding="utf-8")
    limit = control_group_limit(membership, _ROOT)
    if limit is not None and limit < physical:
        return limit, "that the control group of this process may use (a container or batch system sets it)"
    return physical, "of this machine"


def control_group_limit(membership: str, root: Path) -> int | None:
    """Smallest memory limit of a process's control group and of all groups above it, in bytes; None if there is none.

    Args:
        membership: What ``/proc/self/cgroup`` says: lines ``0::/path`` (version 2), ``4:memory:/path`` (version 1).
        root: Where control groups are mounted: files ``<path>/memory.max`` of version 2, which hold "max" for no
            limit, and ``memory/<path>/memory.limit_in_bytes`` of version 1, where no limit is a huge number.
    """
    return min(_limits(membership, root), default=None)


def _limits(membership: str, root: Path) -> Iterator[int]:
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        inside = PurePosixPath(path.lstrip("/"))
        # In a container the path may be that of the host; what is mounted is then the container's own group, on top.
        for group in (inside, *inside.parents):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                yield int((mount / group / name).read_text(encoding="ascii"))
