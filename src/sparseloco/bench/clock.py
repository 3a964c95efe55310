"""Timing: variants take turns in one process, so that a slow moment of the machine hits all of them."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

LEAST_CALLS = 3


@dataclass
class Timing:
    """Measured calls of one variant.

    Attributes:
        seconds: One entry per call.
        faults: Pages the system had to map, per call; near 0 if the allocator keeps its memory.
    """

    seconds: list[float] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median seconds of a call."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median: how noisy this was."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median


def take_turns(
    calls: Mapping[str, Callable[[], object]],
    *,
    budget_s: float,
    most_calls: int = 25,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, Timing]:
    """Call each variant once to warm up, then all in turn until each has used its share of time.

    Args:
        calls: Variants by name.
        budget_s: Wall seconds for one variant; each is called at least three times.
        most_calls: Calls of one variant at most.
        clock: ``time.process_time`` for one thread, ``time.perf_counter`` for more.
    """
    for call in calls.values():
        call()
    timings = {name: Timing() for name in calls}
    spent = dict.fromkeys(calls, 0.0)
    collected = gc.isenabled()
    gc.disable()
    try:
        while due := [
            name
            for name, timing in timings.items()
            if len(timing.seconds) < LEAST_CALLS or (spent[name] < budget_s and len(timing.seconds) < most_calls)
        ]:
            for name in due:
                began, faults, start = time.perf_counter(), page_faults(), clock()
                calls[name]()
                timings[name].seconds.append(clock() - start)
                timings[name].faults.append(page_faults() - faults)
                spent[name] += time.perf_counter() - began
    finally:
        if collected:
            gc.enable()
    return timings


def page_faults() -> int:
    """Minor page faults of this process so far; 0 where the system does not count them."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
