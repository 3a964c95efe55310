"""When fragments are posted and collected, and settings that change with the step. Pure integer functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparseloco.errors import ConfigError, check_whole
from sparseloco.types import Schedule


@dataclass(frozen=True, kw_only=True)
class SyncSchedule:
    """A fragment is posted every ``every`` inner steps and collected ``delay`` steps later.

    Fragment f is posted after step t when ``t mod every == (f * stagger) mod every``; so fragment 0 first goes after
    ``every`` steps and staggered ones earlier. Steps are counted from 1.

    Args:
        every: H, inner steps per round, at least 1.
        stagger: Steps between the posts of neighbouring fragments, at least 0.
        delay: Steps between post and collect of one message (the paper's tau), below ``every``.

    Reference: Douillard et al., 2025, arXiv:2501.18512, algorithm 2.

    Example:
        >>> schedule = SyncSchedule(every=4, stagger=2, delay=1)
        >>> [t for t in range(1, 10) if schedule.posts(t, 0)], [t for t in range(1, 10) if schedule.collects(t, 1)]
        ([4, 8], [3, 7])
    """

    every: int
    stagger: int = 0
    delay: int = 0

    def __post_init__(self) -> None:
        for name in ("every", "stagger", "delay"):
            check_whole(name, getattr(self, name))
        if self.every < 1:
            raise ConfigError(f"every={self.every!r}: must be at least 1; use 1 to synchronize after every step")
        if self.stagger < 0:
            raise ConfigError(f"stagger={self.stagger!r}: must be at least 0; use 0 to post all fragments together")
        if not 0 <= self.delay < self.every:
            raise ConfigError(
                f"delay={self.delay!r}: must be at least 0 and smaller than every={self.every}, or a fragment would be "
                f"posted again before it returns; set delay to {self.every - 1} or less"
            )

    def posts(self, step: int, fragment: int) -> bool:
        """Whether ``fragment`` is encoded and posted after inner step ``step``."""
        return step >= 1 and (step - fragment * self.stagger) % self.every == 0

    def collects(self, step: int, fragment: int) -> bool:
        """Whether the message that ``fragment`` posted ``delay`` steps ago is collected after step ``step``."""
        return self.posts(step - self.delay, fragment)

    def post_step(self, round_: int, fragment: int) -> int:
        """Inner step after which ``fragment`` posts its message number ``round_``, counted from 0."""
        return (fragment * self.stagger - 1) % self.every + 1 + round_ * self.every

    def collect_step(self, round_: int, fragment: int) -> int:
        """Inner step after which message number ``round_`` of ``fragment`` is collected and applied."""
        return self.post_step(round_, fragment) + self.delay

    def num_posted(self, step: int, fragment: int) -> int:
        """Messages that ``fragment`` has posted when ``step`` inner steps are made."""
        return max(0, (step - self.post_step(0, fragment)) // self.every + 1)

    def num_collected(self, step: int, fragment: int) -> int:
        """Messages of ``fragment`` that have been collected when ``step`` inner steps are made."""
        return self.num_posted(step - self.delay, fragment)


@dataclass(frozen=True, kw_only=True)
class WarmupCosine:
    """Linear warm-up to ``peak``, then a half cosine down to ``final_fraction * peak``.

    Args:
        peak: Largest value.
        total_steps: Step at which the cosine ends; later steps keep the final value.
        warmup_steps: Steps of warm-up; step 1 has ``peak / warmup_steps``.
        final_fraction: Share of ``peak`` left at the end, in [0, 1].

    Example:
        >>> schedule = WarmupCosine(peak=1.0, total_steps=10, warmup_steps=2, final_fraction=0.1)
        >>> [round(schedule(step), 3) for step in (1, 2, 6, 10)]
        [0.5, 1.0, 0.55, 0.1]
    """

    peak: float
    total_steps: int
    warmup_steps: int = 0
    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_steps < max(1, self.total_steps):
            raise ConfigError(
                f"warmup_steps={self.warmup_steps!r}: must be at least 0 and below total_steps={self.total_steps}; "
                "shorten the warm-up or train longer"
            )
        if not 0 <= self.final_fraction <= 1:
            raise ConfigError(f"final_fraction={self.final_fraction!r}: must be between 0 and 1; use 0.1 for a tenth")

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * max(1, step) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        floor = self.final_fraction
        return self.peak * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


def value_at(setting: float | Schedule, step: int) -> float:
    """A constant, or a schedule's value at ``step``."""
    return setting(step) if callable(setting) else float(setting)
