"""Faults by script: each does what it says, is recorded, and comes again in a replay."""

from __future__ import annotations

import pytest
import torch

import sparseloco
from sparseloco.errors import AlreadyExists, ConfigError, NotFound, QuorumError, Unavailable
from sparseloco.peers.store import Page, Store, open_store
from sparseloco.transport import Loopback, Traffic, Transport, advance, settle
from sparseloco.transport.faults import KINDS, Crash, Event, Fault, FaultyStore, FaultyTransport, Rate, Script
from sparseloco.types import Key
from tests import toy


def truth_with(**objects: bytes) -> Store:
    store = open_store("memory://")
    for path, data in objects.items():
        store.put(path, data)
    return store


def faulty(store: Store, *faults: Fault, slept: list[float] | None = None) -> FaultyStore:
    """The first operations fail in these ways."""
    script = Script(at=tuple(enumerate(faults)))
    return FaultyStore(store, script, sleep=[].append if slept is None else slept.append)


def test_delay_waits_and_then_does() -> None:
    slept: list[float] = []
    truth = truth_with()
    faulty(truth, Fault("delay", 2.5), slept=slept).put("a", b"1")
    assert slept == [2.5]
    assert truth.get("a", limit=1) == b"1"


@pytest.mark.parametrize(("kind", "done"), [("drop", False), ("lost", True)])
def test_drop_does_nothing_and_lost_does_it(kind: str, done: bool) -> None:
    """Nobody can tell one from the other by the error."""
    truth = truth_with(old=b"0")
    store = faulty(truth, *[Fault(kind)] * 3)
    text = "create a: the store did not answer, or broke off; try again"
    with pytest.raises(Unavailable, match=f"^{text}$"):
        store.create("a", b"1")
    with pytest.raises(Unavailable, match=r"^put b: "):
        store.put("b", b"1")
    with pytest.raises(Unavailable, match=r"^delete old: "):
        store.delete("old")
    assert [entry.path for entry in truth.list("")] == (["a", "b"] if done else ["old"])


def test_busy_comes_in_bursts() -> None:
    store = faulty(truth_with(a=b"1"), Fault("busy", 3))
    for _ in range(3):
        with pytest.raises(Unavailable, match=r"^get a: the store answered 503 SlowDown; try again$"):
            store.get("a", limit=1)
    assert store.get("a", limit=1) == b"1"
    assert [(event.number, event.fault.kind) for event in store.events] == [(0, "busy"), (1, "busy"), (2, "busy")]


def test_a_duplicated_create_is_refused_by_itself() -> None:
    """The second answer is the one that comes back, though the object is the caller's."""
    truth = truth_with()
    store = faulty(truth, Fault("duplicate"), Fault("duplicate"), Fault("duplicate"))
    with pytest.raises(AlreadyExists):
        store.create("a", b"1")
    assert truth.get("a", limit=1) == b"1"
    store.put("a", b"2")
    store.delete("a")
    with pytest.raises(NotFound):
        truth.get("a", limit=1)


def test_truncate_and_corrupt_damage_what_is_read_only() -> None:
    data = bytes(range(100))
    truth = truth_with(a=data, empty=b"")
    rates = (Rate(Fault("truncate"), 0.5, ("get",)), Rate(Fault("corrupt"), 1.0))
    store = FaultyStore(truth, Script(seed=1, rates=rates))
    read = [store.get("a", limit=100) for _ in range(40)]
    kinds = [event.fault.kind for event in store.events]
    assert {"truncate", "corrupt"} == set(kinds)
    for kind, damaged in zip(kinds, read, strict=True):
        if kind == "truncate":
            assert len(damaged) < 100
            assert data.startswith(damaged)
        else:
            wrong = [a ^ b for a, b in zip(damaged, data, strict=True) if a != b]
            assert [bits.bit_count() for bits in wrong] == [1]
    assert store.get("empty", limit=1) == b""
    assert store.get_range("a", 10, 5) != data[10:15], "ranges too"
    assert truth.get("a", limit=100) == data


def test_a_stale_listing_is_an_old_one() -> None:
    truth = truth_with()
    store = FaultyStore(truth, Script(at=((4, Fault("stale", 2)), (5, Fault("stale", 9)), (6, Fault("stale", 3)))))
    store.put("a", b"")  # 0
    assert [entry.path for entry in store.list("")] == ["a"]  # 1
    store.put("b", b"")  # 2
    assert [entry.path for entry in store.list("")] == ["a", "b"]  # 3
    assert [entry.path for entry in store.list("")] == ["a"]  # 4: as it was at 2, so as seen at 1
    assert store.list("") == []  # 5: before all
    assert [entry.path for entry in store.list("", after="a")] == ["b"]  # 6: as it was at 3
    assert [entry.path for entry in store.list("", after="a")] == ["b"]  # 7: as it is


def test_a_stale_page_is_the_same_page_as_it_was() -> None:
    """Pages of one listing may be of different ages, as with a store that lags behind."""
    truth = truth_with()
    store = FaultyStore(truth, Script(at=((5, Fault("stale", 3)), (6, Fault("stale", 3)), (7, Fault("lost")))))
    for name in ("a", "b"):
        store.put(name, b"")  # 0, 1
    first, later = {"limit": 2}, {"limit": 2, "after": "b"}
    assert [entry.path for entry in store.page("", **first).entries] == ["a", "b"]  # 2
    truth.delete("a")
    store.put("c", b"")  # 3
    assert [entry.path for entry in store.page("", **later).entries] == ["c"]  # 4
    assert [entry.path for entry in store.page("", **first).entries] == ["a", "b"]  # 5: as it was at 2
    assert store.page("", **later) == Page([])  # 6: as it was at 3, when nobody had asked
    with pytest.raises(Unavailable, match=r"^list: the store did not answer"):
        store.page("")  # 7
    assert [entry.path for entry in store.page("", **first).entries] == ["b", "c"]  # 8: as it is
    assert [event.verb for event in store.events] == ["list"] * 3


@pytest.mark.parametrize(
    ("kind", "done"), [("crash_before", {False}), ("crash_after", {True}), ("crash_during", {False, True})]
)
def test_crashes_leave_all_or_nothing(kind: str, done: set[bool]) -> None:
    found: set[bool] = set()
    for seed in range(20):
        truth = truth_with()
        with pytest.raises(Crash, match=r"^put a$"):
            FaultyStore(truth, Script(seed=seed, at=((0, Fault(kind)),))).put("a", b"whole")
        found.add(bool(truth.list("")))
        assert not truth.list("") or truth.get("a", limit=5) == b"whole"
    assert found == done


def test_no_handler_of_errors_catches_a_crash() -> None:
    assert not issubclass(Crash, Exception)


def test_a_slow_link_takes_time_both_ways() -> None:
    slept: list[float] = []
    store = FaultyStore(truth_with(), Script(bytes_per_s=10.0), sleep=slept.append)
    store.put("a", bytes(50))
    store.get("a", limit=50)
    store.get_range("a", 0, 20)
    store.size("a")
    store.list("")
    assert slept == [5.0, 5.0, 2.0]
    assert store.events == []


CHAOS = Script(
    seed=7,
    rates=tuple(
        Rate(Fault(kind, amount), 0.05)
        for kind, amount in [("drop", 1), ("lost", 1), ("busy", 3), ("corrupt", 1), ("stale", 4), ("duplicate", 1)]
    ),
)


def day(script: Script) -> tuple[list[Event], list[object]]:
    """Two hundred operations, and what the caller saw of them."""
    store, seen = FaultyStore(truth_with(), script), list[object]()
    for number in range(50):
        calls = (
            lambda n=number: store.create(f"p/{n % 20}", b"%d" % n),
            lambda n=number: store.put("p/last", b"%d" % n),
            lambda: store.get("p/last", limit=9),
            lambda: store.list("p"),
        )
        for call in calls:
            try:
                result = call()
                seen.append([entry[:2] for entry in result] if isinstance(result, list) else result)
            except (Unavailable, AlreadyExists, NotFound) as error:
                seen.append(str(error))
    return store.events, seen


def test_the_same_seed_is_the_same_day_and_a_replay_too() -> None:
    events, seen = day(CHAOS)
    assert {event.fault.kind for event in events} == {"drop", "lost", "busy", "corrupt", "stale", "duplicate"}
    assert day(CHAOS) == (events, seen)
    assert day(CHAOS.replay(events))[1] == seen
    assert day(Script(seed=8, rates=CHAOS.rates)) != (events, seen)
    assert day(Script())[0] == []


def test_rates_are_shares_of_the_verbs_they_name() -> None:
    script = Script(seed=2, rates=(Rate(Fault("drop"), 0.3, ("get", "list")),))
    for verb, expected in (("get", 0.3), ("list", 0.3), ("put", 0.0)):
        share = sum(script.fault(number, verb) is not None for number in range(2000)) / 2000
        # Four standard deviations of 2000 draws.
        assert abs(share - expected) <= 4 * (0.3 * 0.7 / 2000) ** 0.5 * (expected > 0)
    assert Rate(Fault("truncate"), 0.1).verbs == KINDS["truncate"] == ("get", "get_range")


def test_a_script_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"kind='lots': must be one of delay, drop, lost, .*; did you mean 'lost'"):
        Fault("lots")
    with pytest.raises(ConfigError, match="amount=-1: must not be negative; use 0 or more"):
        Fault("delay", -1)
    with pytest.raises(ConfigError, match="probability=2: must be between 0 and 1; use a share of operations"):
        Rate(Fault("drop"), 2)
    with pytest.raises(ConfigError, match="verbs of 'truncate'='put': must be one of get, get_range; choose"):
        Rate(Fault("truncate"), 0.5, ("put",))
    with pytest.raises(ConfigError, match="bytes_per_s=0: must be above 0; leave it out for no limit"):
        Script(bytes_per_s=0)
    assert Script(at=((0, Fault("truncate")),)).fault(0, "put") is None, "it cannot befall a put"


def pair(*scripts: Script, slept: list[float] | None = None) -> tuple[list[sparseloco.Replica], list[FaultyTransport]]:
    """Two replicas that share a loopback, each behind faults of its own."""
    algorithm = sparseloco.presets.sparseloco(inner_steps=1, inner=sparseloco.sgd(0.1))
    replicas = [sparseloco.Replica(toy.net(), algorithm, peer=peer) for peer in range(2)]
    loopback = Loopback(2)
    wait = [].append if slept is None else slept.append
    return replicas, [FaultyTransport(loopback, script, sleep=wait) for script in scripts]


def step(replica: sparseloco.Replica, transport: Transport, number: int = 1) -> None:
    params = list(replica.params.values())
    for param, gradient in zip(params, toy.gradients(params, number, replica.peer), strict=True):
        param.grad = gradient
    advance(replica, transport)


def test_without_faults_a_transport_is_as_it_was() -> None:
    replicas, transports = pair(Script(), Script())
    plain, (loopback,) = pair(Script())[0], [Loopback(2)]
    for number in (1, 2):
        for replica, transport in zip(replicas, transports, strict=True):
            step(replica, transport, number)
        for replica in plain:
            step(replica, loopback, number)
        norms = [settle(replica, transport) for replica, transport in zip(replicas, transports, strict=True)]
        assert norms == [settle(replica, loopback) for replica in plain]
    for mine, other in zip(replicas[0].anchor().values(), plain[0].anchor().values(), strict=True):
        assert torch.equal(mine, other)
    assert transports[0].rank is None
    assert transports[0].traffic(0) == loopback.traffic(0)
    transports[0].set_traffic(0, Traffic(1, 2))
    assert transports[1].traffic(0) == Traffic(1, 2)
    assert transports[0].events == []


def test_a_dropped_post_never_arrives() -> None:
    replicas, transports = pair(Script(), Script(at=((1, Fault("drop")),)))
    for replica, transport in zip(replicas, transports, strict=True):
        step(replica, transport)
    assert transports[1].events == [Event(1, "post", "round 0, fragment 0", Fault("drop"))]
    with pytest.raises(QuorumError, match="round 0, fragment 0: only 1 of 2 peers have posted"):
        settle(replicas[0], transports[0])


def test_a_lost_post_has_arrived() -> None:
    replicas, transports = pair(Script(), Script(at=((1, Fault("lost")),)))
    step(replicas[0], transports[0])
    with pytest.raises(Unavailable, match="post round 0, fragment 0: the store did not answer"):
        step(replicas[1], transports[1])
    inbox = transports[0].collect(Key(0, 0))
    assert [envelope.peer for envelope in inbox] == [0, 1]
    transports[1].collect(Key(0, 0))
    transports[0].put_back(Key(0, 0), inbox)
    assert transports[0].collect(Key(0, 0)) == inbox


def test_an_envelope_may_come_twice() -> None:
    replicas, transports = pair(Script(at=((2, Fault("duplicate")),)), Script())
    for replica, transport in zip(replicas, transports, strict=True):
        step(replica, transport)
    twice = [envelope.peer for envelope in transports[0].collect(Key(0, 0))]
    assert sorted(twice) == twice
    assert sorted(set(twice)) == [0, 1]
    assert len(twice) == 3


def test_peers_that_lose_the_same_envelope_agree() -> None:
    """The one that is left out keeps its payload as credit."""
    script = Script(seed=1, at=((2, Fault("lose_one")),))
    replicas, transports = pair(script, script)
    for replica, transport in zip(replicas, transports, strict=True):
        step(replica, transport)
    for replica, transport in zip(replicas, transports, strict=True):
        settle(replica, transport)
    assert replicas[0].digest() == replicas[1].digest()
    assert replicas[0].digest() != sparseloco.Replica(toy.net(), replicas[0].algorithm).digest()
    lost = [Event(2, "collect", "round 0, fragment 0", Fault("lose_one"))]
    assert transports[0].events == transports[1].events == lost


def test_a_transport_delays_answers_503_and_crashes() -> None:
    slept: list[float] = []
    faults = ((0, Fault("busy")), (1, Fault("delay", 3.0)), (2, Fault("crash_before")))
    replicas, transports = pair(Script(at=faults), Script(), slept=slept)
    with pytest.raises(Unavailable, match="connect: the store answered 503"):
        transports[0].connect(replicas[0])
    with pytest.raises(Crash, match="post round 0"):
        step(replicas[0], transports[0])
    assert slept == [3.0]
