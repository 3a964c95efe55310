"""Patience: every limit does what it says, on a clock that the test moves."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from sparseloco.errors import AlreadyExists, ConfigError, Denied, NotFound, StoreError, TooLarge, Unavailable
from sparseloco.peers.patience import Meter, Patience, Patient, Usage
from sparseloco.peers.store import Store, open_store, probe
from sparseloco.transport.faults import Crash, Fault, FaultyStore, Rate, Script
from tests.peers.memory import flat_while


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Highest(random.Random):
    """Every draw is the largest possible."""

    def uniform(self, a: float, b: float) -> float:
        return b


def patient(store: Store, clock: Clock | None = None, **limits: Any) -> Patient:
    clock = clock or Clock()
    return Patient(store, Patience(**limits), rng=Highest(), clock=clock, sleep=clock.sleep)


def failing(times: int, kind: str = "drop", store: Store | None = None) -> FaultyStore:
    """A store in memory whose first operations fail."""
    script = Script(at=tuple((number, Fault(kind)) for number in range(times)))
    return FaultyStore(store or open_store("memory://"), script)


VERBS: dict[str, Callable[[Store], object]] = {
    "create": lambda store: store.create("new", b"1"),
    "put": lambda store: store.put("new", b"1"),
    "get": lambda store: store.get("old", limit=1),
    "get_range": lambda store: store.get_range("old", 0, 1),
    "size": lambda store: store.size("old"),
    "list": lambda store: store.list(""),
    "page": lambda store: store.page(""),
    "delete": lambda store: store.delete("old"),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("max_tries", [1, 3])
def test_tries_end_with_max_tries(verb: str, max_tries: int) -> None:
    """C-31: every verb, and the limit is the one given."""
    truth = open_store("memory://")
    truth.put("old", b"0")
    store = patient(failing(max_tries - 1, store=truth), max_tries=max_tries)
    VERBS[verb](store)
    named = {"page": "list"}.get(verb, verb)
    assert store.meter.by_verb()[named][:2] == (max_tries, max_tries - 1)
    with pytest.raises(
        Unavailable, match=f"^{named}.*: no progress in {max_tries} tries; raise max_tries or mend the link"
    ):
        VERBS[verb](patient(failing(max_tries, store=truth), max_tries=max_tries))


def test_the_last_error_says_why() -> None:
    with pytest.raises(Unavailable) as ended:
        patient(failing(2, "busy"), max_tries=2).get("a", limit=1)
    assert str(ended.value) == (
        "get a: no progress in 2 tries; raise max_tries or mend the link "
        "(last: get a: the store answered 503 SlowDown; try again)"
    )


@pytest.mark.parametrize(
    ("base_s", "cap_s", "bounds"),
    [(1.0, 5.0, [1, 2, 4, 5, 5]), (1.0, 3.0, [1, 2, 3, 3, 3]), (0.5, 100.0, [0.5, 1, 2, 4, 8])],
)
def test_waits_double_up_to_the_cap(base_s: float, cap_s: float, bounds: list[float]) -> None:
    """C-31: both parameters count. With the highest draw the waits are their bounds."""
    clock = Clock()
    patient(failing(5), clock, base_s=base_s, cap_s=cap_s).put("a", b"1")
    assert clock.slept == bounds


def test_jitter_is_full_and_seeded() -> None:
    def waits(seed: int) -> list[float]:
        clock = Clock()
        store = Patient(
            failing(7), Patience(base_s=8.0, cap_s=8.0), rng=random.Random(seed), clock=clock, sleep=clock.sleep
        )
        store.put("a", b"1")
        return clock.slept

    assert waits(1) == waits(1) != waits(2)
    drawn = [wait for seed in range(30) for wait in waits(seed)]
    assert min(drawn) < 1
    assert max(drawn) > 7
    assert max(drawn) <= 8


@pytest.mark.parametrize(("stall_s", "passes"), [(6.9, False), (7.0, True)])
def test_a_transfer_ends_for_lack_of_progress(stall_s: float, passes: bool) -> None:
    """C-31, C-34: three failures cost waits of 1 + 2 + 4 seconds."""
    store = patient(failing(3), base_s=1.0, stall_s=stall_s)
    if passes:
        store.put("a", b"1")
        return
    with pytest.raises(Unavailable, match=r"put a: no progress within 6\.9 s; raise stall_s or mend the link"):
        store.put("a", b"1")


def stored(size: int) -> tuple[Store, bytes]:
    store = open_store("memory://")
    data = random.Random(0).randbytes(size)
    store.put("a", data)
    return store, data


def test_parts_that_arrive_start_the_time_anew() -> None:
    """C-34: an hour on a thin link, and not one lost object: the limit is on silence, not on the whole."""
    truth, data = stored(60)
    clock = Clock()
    # Each part of 10 bytes takes 600 s on the link; before each second one, two tries fail.
    faults = tuple((number, Fault("drop")) for number in (2, 3, 5, 6, 8, 9))
    slow = FaultyStore(truth, Script(at=faults, bytes_per_s=1 / 60), sleep=clock.sleep)
    store = patient(slow, clock, base_s=20.0, stall_s=61.0, part_bytes=10, threads=1)
    assert store.get("a", limit=60) == data
    assert clock.now == 60 * 60 + 3 * (20 + 20), "cap_s bounds the waits"
    again = FaultyStore(truth, Script(at=faults, bytes_per_s=1 / 60), sleep=clock.sleep)
    hasty = patient(again, clock, base_s=20.0, stall_s=39.0, part_bytes=10, threads=1)
    with pytest.raises(Unavailable, match=r"no progress within 39\.0 s"):
        hasty.get("a", limit=60)


@pytest.mark.parametrize(("part_bytes", "parts"), [(10, 10), (33, 4), (99, 2), (100, 0), (500, 0)])
def test_long_objects_come_in_parts(part_bytes: int, parts: int) -> None:
    truth, data = stored(100)
    store = patient(truth, part_bytes=part_bytes)
    assert store.get("a", limit=1000) == data
    usage = store.meter.by_verb()
    assert usage.get("get_range", Usage()).operations == parts
    assert store.meter.total().received_bytes == 100


class Crowd:
    """A store that counts how many threads are inside at once, and lets none out before ``wanted`` are there."""

    def __init__(self, store: Any, wanted: int) -> None:
        self._store = store
        self._barrier = threading.Barrier(wanted)
        self._lock = threading.Lock()
        self._inside = 0
        self.most = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get_range(self, path: str, start: int, length: int) -> bytes:
        with self._lock:
            self._inside += 1
            self.most = max(self.most, self._inside)
        self._barrier.wait(60)
        with self._lock:
            self._inside -= 1
        return self._store.get_range(path, start, length)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_as_many_parts_at_once_as_threads(threads: int) -> None:
    """C-31: exactly so many; with fewer the barrier would not open, and more are counted."""
    truth, data = stored(60)
    crowd = Crowd(truth, threads)
    assert patient(crowd, part_bytes=10, threads=threads).get("a", limit=60) == data
    assert crowd.most == threads


def test_one_lost_part_ends_the_others() -> None:
    """The error is that of the part which cannot be had, and nobody goes on trying for the rest."""

    class HalfDenied:
        tries = 0
        both = threading.Barrier(2)

        def size(self, path: str) -> int:
            return 20

        def get_range(self, path: str, start: int, length: int) -> bytes:
            if start == 10:
                self.both.wait(60)
                raise Denied("not this part")
            self.tries += 1
            if self.tries == 1:
                self.both.wait(60)
            raise Unavailable("later")

    store: Any = HalfDenied()
    with pytest.raises(Denied, match=r"^not this part$"):
        patient(store, part_bytes=10, threads=2, max_tries=1 << 40, base_s=0.0).get("a", limit=20)


def test_a_crash_passes_through() -> None:
    truth, _ = stored(100)
    script = Script(at=((3, Fault("crash_before")),))
    with pytest.raises(Crash, match="get_range a"):
        patient(FaultyStore(truth, script), part_bytes=10).get("a", limit=100)


def test_short_parts_are_fetched_again() -> None:
    truth, data = stored(100)
    faulty = FaultyStore(truth, Script(seed=3, rates=(Rate(Fault("truncate"), 0.5, ("get_range",)),)))
    store = patient(faulty, part_bytes=20, threads=1)
    assert store.get("a", limit=100) == data
    assert len(faulty.events) == store.meter.by_verb()["get_range"].failures > 0


def test_size_limits_hold_before_the_first_part() -> None:
    """A 10 GB object costs one question."""

    class Huge:
        asked: tuple[str, ...] = ()

        def size(self, path: str) -> int:
            return 10 << 30

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was called")

    huge: Any = Huge()
    with pytest.raises(TooLarge, match="get a: 10737418240 bytes are more than the 1000000000 accepted; leave it or"):
        patient(huge).get("a", limit=1_000_000_000)


@pytest.mark.parametrize("kind", [AlreadyExists, NotFound, Denied, TooLarge, StoreError])
def test_only_what_may_pass_is_tried_again(kind: type[StoreError]) -> None:
    class Refusing:
        calls = 0

        def get(self, path: str, *, limit: int) -> bytes:
            self.calls += 1
            raise kind("no")

    refusing: Any = Refusing()
    with pytest.raises(kind, match=r"^no$"):
        patient(refusing).get("a", limit=1)
    assert refusing.calls == 1


def test_a_create_whose_answer_was_lost_is_ours() -> None:
    """After any error the object is read: what is there counts."""
    truth = open_store("memory://")
    patient(failing(1, "lost", truth)).create("a", b"mine")
    assert patient(failing(1, "lost", truth)).create_or_same("b", b"mine")
    assert truth.get("a", limit=4) == truth.get("b", limit=4) == b"mine"


def test_a_create_that_another_won_while_the_answer_was_lost_is_not_ours() -> None:
    truth = open_store("memory://")
    truth.put("a", b"another's")
    with pytest.raises(AlreadyExists, match="create a: another object is there; read it and follow what it says"):
        patient(failing(1, store=truth)).create("a", b"mine")
    for data in (b"mine", b"another'z", b"", b"another's and longer"):
        assert not patient(failing(1, store=truth)).create_or_same("a", data)
        assert not patient(truth).create_or_same("a", data)
    with pytest.raises(AlreadyExists, match="the object is there already"):
        patient(truth).create("a", b"another's")
    assert patient(truth).create_or_same("a", b"another's"), "content-addressed objects may be written twice"


def test_an_object_that_is_refused_and_gone_is_no_answer() -> None:
    class Fickle:
        def create(self, path: str, data: bytes) -> None:
            raise AlreadyExists("there")

        def get(self, path: str, *, limit: int) -> bytes:
            raise NotFound("gone")

    fickle: Any = Fickle()
    with pytest.raises(Unavailable, match="create a: the object was there and is gone; try again"):
        patient(fickle).create_or_same("a", b"1")


def test_failed_downloads_leave_nothing_in_memory() -> None:
    """C-47: 200 failures in a row, their errors kept and the collector off; each has 3 MiB in hand when it fails."""
    part = 1 << 20

    rest = threading.Event()

    class FirstPartMissing:
        def size(self, path: str) -> int:
            return 4 * part

        def get_range(self, path: str, start: int, length: int) -> bytes:
            if start == 0:
                rest.wait(60)
                raise Unavailable("lost")
            if start == 3 * part:
                rest.set()
            return bytes(length)

    missing: Any = FirstPartMissing()
    store = patient(missing, max_tries=2, part_bytes=part, threads=2)
    for keep in (True, False):
        assert flat_while(lambda: store.get("a", limit=4 * part), keep=keep)


def test_failed_uploads_leave_nothing_in_memory() -> None:
    """C-47: what was to be sent goes with the error. (An error that is kept holds the frames of its caller.)"""
    keys = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1", "allow_http": "true"}
    nobody = open_store("s3://bucket/run", options={"endpoint": "http://127.0.0.1:1", **keys})
    store = patient(nobody, max_tries=2)
    assert flat_while(lambda: store.put("a", bytes(1 << 20)), keep=False)
    assert flat_while(lambda: store.create("a", bytes(1 << 20)), keep=False)


def test_the_meter_counts_what_went_through() -> None:
    """C-66: bytes are those of what was really handed over, by verb and together."""
    meter = Meter()
    truth = open_store("memory://")
    first, second = Patient(truth, meter=meter), Patient(truth, meter=meter)
    first.put("a", b"12345")
    first.create("b", b"123")
    assert second.get("a", limit=9) == b"12345"
    second.get_range("a", 1, 2)
    second.list("")
    with pytest.raises(NotFound):
        second.get("c", limit=1)
    assert meter.by_verb() == {
        "put": Usage(1, 0, 5, 0),
        "create": Usage(1, 0, 3, 0),
        "get": Usage(2, 1, 0, 5),
        "get_range": Usage(1, 0, 0, 2),
        "list": Usage(1, 0, 0, 0),
    }
    assert meter.total() == Usage(6, 1, 8, 7)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("max_tries", 0, "must be at least 1; leave it out for the default"),
        ("max_tries", 1.5, "must be a whole number; leave out the fraction"),
        ("threads", 0, "must be at least 1; leave it out for the default"),
        ("part_bytes", -1, "must be at least 1; leave it out for the default"),
        ("base_s", -1.0, "must be 0 or more seconds; leave it out for the default"),
        ("cap_s", float("inf"), "must be 0 or more seconds; leave it out for the default"),
        ("stall_s", float("nan"), "must be 0 or more seconds; leave it out for the default"),
    ],
)
def test_limits_are_checked(name: str, value: float, rule: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Patience(**{name: value})
    assert str(refused.value) == f"{name}={value!r}: {rule}"


def test_a_patient_store_passes_the_probe_on_a_bad_day(store: Store) -> None:
    """Every kind of store, with a third of all requests failing in one way or another."""
    kinds = ("drop", "lost", "busy", "delay")
    script = Script(seed=6, rates=tuple(Rate(Fault(kind, 2.0), 0.15) for kind in kinds))
    clock = Clock()
    faulty = FaultyStore(store, script, sleep=clock.sleep)
    probe(patient(faulty, clock, max_tries=20, stall_s=1e6))
    assert {event.fault.kind for event in faulty.events} == set(kinds)
    assert store.list("") == []
