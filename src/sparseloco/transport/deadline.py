"""The one time limit of a run over a group of processes, and every other that follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from sparseloco.errors import ConfigError

DEADLINE_S = 600.0
LONGEST_S = 7 * 24 * 3600.0
_BEATS = 150
"""Heartbeats in a deadline, as long as that keeps them apart by less than ``_SLOWEST_BEAT_S``."""
_SLOWEST_BEAT_S = 4.0
"""So that survivors name who is gone before torchrun, which gives them 30 s, has ended them too."""
_MISSED_BEATS = 3


def check_deadline(name: str, seconds: float) -> None:
    """Refuse a deadline that is no time to wait.

    Raises:
        ConfigError: naming the setting.
    """
    if not 1 <= seconds <= LONGEST_S:
        raise ConfigError(f"{name}={seconds!r}: must be seconds from 1 to {LONGEST_S:.0f}, a week; use {DEADLINE_S:g}")


@dataclass(frozen=True)
class Deadline:
    """How long a run waits for a process that does not answer.

    Args:
        deadline_s: Seconds from the moment at which a process stops answering until all others have ended with its
            name.

    Raises:
        ConfigError: if that is no time to wait.

    Example:
        >>> Deadline(300).words
        'deadline 300 s: collectives 294 s, checkpoint parts 150 s, heartbeat 2 s, lost after 6 s, stall report 300 s'
    """

    deadline_s: float = DEADLINE_S

    def __post_init__(self) -> None:
        check_deadline("deadline_s", self.deadline_s)

    @property
    def beat_s(self) -> float:
        """Time between two signs of life."""
        return min(_SLOWEST_BEAT_S, self.deadline_s / _BEATS)

    @property
    def lost_s(self) -> float:
        """How long a process may give no sign of life, once a collective has failed."""
        return _MISSED_BEATS * self.beat_s

    @property
    def collective_s(self) -> float:
        """Timeout of every collective; the rest of the deadline is for finding out whom it waited for."""
        return self.deadline_s - self.lost_s

    @property
    def checkpoint_s(self) -> float:
        """How long a checkpoint waits for parts of others: less than a collective, so that slow saving is said so."""
        return self.deadline_s / 2

    @property
    def stall_s(self) -> float:
        """How long a phase may last before the stacks of its process are printed."""
        return self.deadline_s

    @property
    def words(self) -> str:
        """All of them in one line."""
        return (
            f"deadline {self.deadline_s:g} s: collectives {self.collective_s:g} s, checkpoint parts "
            f"{self.checkpoint_s:g} s, heartbeat {self.beat_s:g} s, lost after {self.lost_s:g} s, stall report "
            f"{self.stall_s:g} s"
        )
