"""Leases and deadlines on one reader's monotonic clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseloco.peers.deadline import Arrivals, Decision, decide
from sparseloco.peers.membership import Leases, Sighting
from sparseloco.peers.policy import Policy

FIXED = Policy(deadline_s=600.0)
ADAPTIVE = Policy(deadline_s=600.0, deadline="adaptive")


def test_a_lease_counts_from_the_readers_sight_of_its_change() -> None:
    """Rule 6: what a lease says of its own time is nothing; two readers whose clocks differ by years agree."""
    for origin in (0.0, 1e9):
        leases = Leases(lease_s=120)
        leases.saw([Sighting("a", "etag 1"), Sighting("b", "etag 1")], origin)
        leases.saw([Sighting("a", "etag 2"), Sighting("b", "etag 1")], origin + 100)
        assert leases.live(origin + 120) == {"a", "b"}
        assert leases.live(origin + 121) == {"a"}
        assert leases.last_seen(origin + 130) == {"b": 130, "a": 30}
        assert list(leases.last_seen(origin + 130)) == ["b", "a"]


def test_who_leaves_is_gone_at_once_and_may_come_back() -> None:
    leases = Leases(lease_s=120)
    leases.saw([Sighting("a", "1")], 0)
    leases.saw([Sighting("a", "2", left=True)], 1)
    assert leases.live(1) == frozenset()
    leases.saw([Sighting("a", "3")], 2)
    assert leases.live(2) == {"a"}


def test_stale_ids_do_not_pile_up() -> None:
    """C-48: leases of peers long gone neither count as live nor stay in memory."""
    leases = Leases(lease_s=10, max_peers=50)
    for hour in range(100):
        leases.saw([Sighting(f"{hour} {peer}", "x") for peer in range(10)], hour * 3600)
    assert len(leases.live(99 * 3600)) == 10
    assert len(leases.last_seen(99 * 3600)) == 10


def test_an_old_lease_that_is_still_listed_does_not_come_to_life_again() -> None:
    """C-48: forgotten and seen anew, it would count as live for another lease."""
    leases = Leases(lease_s=10)
    for minute in range(60):
        leases.saw([Sighting("dead", "x")] if minute % 3 else [], minute * 60)
        assert leases.live(minute * 60) <= ({"dead"} if minute == 1 else set())


def test_a_flood_of_ids_is_bounded() -> None:
    leases = Leases(lease_s=10, max_peers=20)
    leases.saw([Sighting("honest", "1")], 0)
    leases.saw([Sighting(str(n), "1") for n in range(10_000)], 1)
    assert len(leases.last_seen(1)) == 20
    assert "honest" in leases.live(1)


def test_a_fixed_deadline_is_the_setting() -> None:
    assert decide(FIXED, [1.0] * 100) == Decision(600.0, "fixed: 600 s")


@pytest.mark.parametrize(
    ("arrivals", "seconds", "why"),
    [
        ([5.0] * 7, 600.0, "adaptive: 600 s, since only 7 of 8 arrivals are known"),
        ([5.0] * 8, 60.0, "adaptive: 60 s = median 5 + 6 x MAD 0 of 8 arrivals, held to the floor"),
        ([90.0, 100.0, 110.0] * 3, 160.0, "adaptive: 160 s = median 100 + 6 x MAD 10 of 9 arrivals"),
        ([100.0, 500.0] * 5, 600.0, "adaptive: 600 s = median 300 + 6 x MAD 200 of 10 arrivals, held to the cap"),
    ],
)
def test_an_adaptive_deadline_follows_arrivals(arrivals: list[float], seconds: float, why: str) -> None:
    """C-32: median + k MAD between a floor and a cap, and the decision can be read."""
    assert decide(ADAPTIVE, arrivals) == Decision(seconds, why)


@given(st.lists(st.floats(0, 1e6), max_size=60))
def test_deadlines_stay_between_floor_and_cap(arrivals: list[float]) -> None:
    assert 60.0 <= decide(ADAPTIVE, arrivals).seconds <= 600.0


def test_peers_that_missed_the_deadline_count() -> None:
    """C-32: else a deadline that is too short would never learn of those it cut off, and only get shorter."""
    arrivals = Arrivals()
    for _ in range(8):
        arrivals.record({"a": 0.0, "b": 10.0}, missing=2, deadline_s=600.0)
    assert decide(ADAPTIVE, arrivals.known()).seconds == 600.0
    for _ in range(32):
        arrivals.record({"a": 0.0, "b": 10.0}, missing=0, deadline_s=600.0)
    assert len(arrivals.known()) == 64
    assert decide(ADAPTIVE, arrivals.known()).seconds == 60.0
