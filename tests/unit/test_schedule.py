"""Every posted message is collected exactly once and in order; schedules of settings are their formulas."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseloco.algorithm import Algorithm
from sparseloco.channel import Channel
from sparseloco.compress import Dense
from sparseloco.fragments import Even
from sparseloco.layout import Flat
from sparseloco.local import InnerSteps
from sparseloco.reduce import Mean
from sparseloco.replica import Replica
from sparseloco.schedule import SyncSchedule, WarmupCosine, value_at
from sparseloco.types import Envelope, Key


@st.composite
def schedules(draw: st.DrawFn) -> SyncSchedule:
    every = draw(st.integers(1, 12))
    return SyncSchedule(every=every, stagger=draw(st.integers(0, 15)), delay=draw(st.integers(0, every - 1)))


@given(schedule=schedules(), num_fragments=st.integers(1, 6), steps=st.integers(0, 80))
def test_every_post_is_collected_once_and_in_order(schedule: SyncSchedule, num_fragments: int, steps: int) -> None:
    for fragment in range(num_fragments):
        posts = [t for t in range(1, steps + 1) if schedule.posts(t, fragment)]
        collects = [t for t in range(1, steps + 1) if schedule.collects(t, fragment)]
        assert collects == [t + schedule.delay for t in posts if t + schedule.delay <= steps]
        assert all(later - earlier == schedule.every for earlier, later in pairwise(posts))
        # The one before is back when the next goes out, so at most one message of a fragment is under way.
        assert all(t + schedule.delay < t + schedule.every for t in posts)
        if steps >= schedule.every:
            assert posts, "no fragment waits longer than one round for its first post"
            assert len(posts) in (steps // schedule.every, steps // schedule.every + 1)


@given(schedule=schedules(), fragment=st.integers(0, 50), step=st.integers(-20, 0))
def test_nothing_happens_before_the_first_step(schedule: SyncSchedule, fragment: int, step: int) -> None:
    assert not schedule.posts(step, fragment)
    assert not schedule.collects(step, fragment)


def test_fragment_zero_posts_after_h_steps_and_staggered_ones_in_between() -> None:
    schedule = SyncSchedule(every=30, stagger=10, delay=5)
    posts = {f: [t for t in range(1, 91) if schedule.posts(t, f)] for f in range(3)}
    assert posts == {0: [30, 60, 90], 1: [10, 40, 70], 2: [20, 50, 80]}
    assert [t for t in range(1, 91) if schedule.collects(t, 2)] == [25, 55, 85]


class FourTensors(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tensors = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2)) for _ in range(4)])


@settings(max_examples=40)
@given(schedule=schedules(), num_fragments=st.integers(1, 4), steps=st.integers(1, 40))
def test_a_replica_settles_each_key_once_and_in_order(schedule: SyncSchedule, num_fragments: int, steps: int) -> None:
    algorithm = Algorithm(
        local=InnerSteps(),
        channel=Channel(layout=Flat(), compressor=Dense(), reducer=Mean()),
        schedule=schedule,
        fragments=Even(num_fragments),
    )
    replica = Replica(FourTensors(), algorithm)
    posted: dict[Key, tuple[int, Envelope]] = {}
    settled: list[Key] = []
    for step in range(1, steps + 1):
        replica.stepped()
        for envelope in replica.outbox():
            assert envelope.key not in posted
            posted[envelope.key] = (step, envelope)
        due = replica.due()
        assert due == sorted(due, key=lambda key: key.fragment)
        for key in due:
            sent_at, envelope = posted[key]
            assert step == sent_at + schedule.delay
            replica.apply(key, [envelope])
            settled.append(key)
        assert replica.due() == [], "settled once"
    assert max(Counter(settled).values(), default=1) == 1
    under_way = {key for key, (sent_at, _) in posted.items() if sent_at + schedule.delay > steps}
    assert set(posted) - set(settled) == under_way == set(replica.in_flight())
    for fragment in range(num_fragments):
        rounds = [key.round for key in settled if key.fragment == fragment]
        assert rounds == list(range(len(rounds)))


# -- settings --------------------------------------------------------------------------------------------------------


@given(
    peak=st.floats(1e-6, 10),
    total=st.integers(1, 200),
    warmup=st.integers(0, 199),
    final=st.floats(0, 1),
    step=st.integers(1, 400),
)
def test_warmup_cosine_is_its_formula(peak: float, total: int, warmup: int, final: float, step: int) -> None:
    warmup = min(warmup, total - 1)
    got = WarmupCosine(peak=peak, total_steps=total, warmup_steps=warmup, final_fraction=final)(step)
    if step <= warmup:
        wanted = peak * step / warmup
    else:
        angle = math.pi * (min(step, total) - warmup) / (total - warmup)
        wanted = peak * final + peak * (1 - final) * (1 + math.cos(angle)) / 2
    assert got == pytest.approx(wanted, rel=1e-12, abs=1e-15)
    assert -1e-15 <= got <= peak * (1 + 1e-12)


def test_warmup_rises_cosine_falls_and_the_end_stays() -> None:
    schedule = WarmupCosine(peak=2.0, total_steps=100, warmup_steps=10, final_fraction=0.25)
    values = [schedule(step) for step in range(1, 151)]
    assert values[0] == 0.2
    assert max(values) == values[9] == 2.0
    assert values[:10] == sorted(values[:10])
    assert values[9:] == sorted(values[9:], reverse=True)
    assert values[54] == pytest.approx((2.0 + 0.5) / 2)
    assert set(values[99:]) == {0.5}


def test_warmup_never_starts_at_zero() -> None:
    """A resumed or counted-from-zero step must not freeze a run."""
    assert WarmupCosine(peak=1.0, total_steps=10, warmup_steps=5)(0) == 0.2


def test_a_setting_is_a_number_or_a_function_of_the_step() -> None:
    assert value_at(3, 7) == 3.0
    assert isinstance(value_at(3, 7), float)
    assert value_at(lambda step: step / 2, 7) == 3.5
