"""How long a round stays open: fixed, or from how late peers were before (C-32). Pure; decisions are values to log."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sparseloco.peers.policy import Policy

MADS = 6.0
FLOOR_FRACTION = 0.1
MIN_ARRIVALS = 8
KEPT_ROUNDS = 32


class Decision(NamedTuple):
    """How many seconds after its first frame a round closes, and why."""

    seconds: float
    why: str


def decide(policy: Policy, arrivals: Sequence[float]) -> Decision:
    """The deadline of a round.

    Args:
        policy: Its ``deadline_s`` is the deadline, or the cap of an adaptive one.
        arrivals: Seconds from a round's first frame to each peer's, of past rounds; ``deadline_s`` or more for a peer
            that was missing when a round closed, or those would never count.

    Returns:
        Fixed: ``deadline_s``. Adaptive: median + 6 MAD of the arrivals, at least a tenth of ``deadline_s``, at most
        all of it; ``deadline_s`` until there are 8 arrivals. MAD: median absolute deviation from the median.
    """
    cap = policy.deadline_s
    if policy.deadline == "fixed":
        return Decision(cap, f"fixed: {cap:g} s")
    if len(arrivals) < MIN_ARRIVALS:
        return Decision(cap, f"adaptive: {cap:g} s, since only {len(arrivals)} of {MIN_ARRIVALS} arrivals are known")
    median = statistics.median(arrivals)
    mad = statistics.median(abs(arrival - median) for arrival in arrivals)
    wish, floor = median + MADS * mad, FLOOR_FRACTION * cap
    seconds = min(max(wish, floor), cap)
    bound = "" if seconds == wish else f", held to the {'floor' if seconds == floor else 'cap'}"
    return Decision(
        seconds,
        f"adaptive: {seconds:g} s = median {median:g} + {MADS:g} x MAD {mad:g} of {len(arrivals)} arrivals{bound}",
    )


@dataclass(slots=True)
class Arrivals:
    """Arrivals of the last rounds, as one reader saw them."""

    _rounds: list[tuple[float, ...]] = field(default_factory=list)

    def record(self, late_s: Mapping[str, float], missing: int, deadline_s: float) -> None:
        """Add a round that has closed.

        Args:
            late_s: Seconds from the round's first frame to each peer's.
            missing: Live peers that had not posted when it closed; each counts as ``deadline_s``.
            deadline_s: The cap of the policy.
        """
        self._rounds.append((*late_s.values(), *[deadline_s] * missing))
        del self._rounds[:-KEPT_ROUNDS]

    def known(self) -> list[float]:
        """All arrivals that are kept, oldest round first."""
        return [arrival for one in self._rounds for arrival in one]
