"""Peak memory above the inputs, as the system sees it, so that torch and native code count alike.

Measured in a process of its own whose allocator gives freed memory back at once. The call is first made on a small
matrix, so that code and caches of fixed size are there; then Linux is told to forget the peak so far, and the call is
made on the large one. What the call returns counts too. The kernel counts pages in batches, so results are good to
about 0.05 bytes per parameter at 4096 x 4096.
"""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from sparseloco.bench import grid
from sparseloco.bench.problem import TILE, Case

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}
"""Freed blocks from 64 KiB go back to the system at once; smaller ones are trimmed by hand."""
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_THP_DISABLE = 41


def temp_bytes(side: int, k: int, variant: str, peers: int) -> dict[str, float | None]:
    """Bytes per parameter of ``encode`` and of decode + apply with ``peers`` payloads; None if they cannot be seen."""
    _no_huge_pages()
    small = {name: calls[variant] for name, calls in _calls(Case(4 * TILE, k), variant, peers)}
    for call in small.values():
        call()
    found: dict[str, float | None] = {}
    for name, calls in _calls(Case(side, k), variant, peers):
        extra = peak_above(calls[variant])
        found[name] = None if extra is None else round(extra / side**2, 4)
    return found


def peak_above(call: Callable[[], object]) -> int | None:
    """Bytes by which resident memory rose at most during ``call``; None where Linux does not say."""
    gc.collect()
    _trim()
    try:
        _CLEAR.write_text("5")
        before = _status("VmRSS")
        result = call()
        after = _status("VmHWM")
    except (OSError, LookupError):
        return None
    del result
    return max(0, after - before)


def _calls(case: Case, variant: str, peers: int) -> Iterator[tuple[str, grid.Calls]]:
    """Encode, then decode; of packing nothing is asked."""
    return ((name, calls) for name, calls in grid.operations(case, [peers], [variant]) if "pack" not in name)


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(encoding="ascii"), re.M)
    if found is None:
        raise LookupError(name)
    return 1024 * int(found[1])


def _trim() -> None:
    """Give free memory back to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _no_huge_pages() -> None:
    """Count in pages of 4 KiB: a huge page would hide up to 2 MiB."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_THP_DISABLE, 1, 0, 0, 0)
