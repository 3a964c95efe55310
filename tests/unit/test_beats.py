"""Signs of life without processes: a store in memory, ranks that stop, and what the last one says of them."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from sparseloco.errors import DivergenceError, PeerLostError
from sparseloco.transport import beats
from sparseloco.transport.beats import Beats, Sign, enter, phase, present_phase
from sparseloco.transport.deadline import Deadline

SHORT = Deadline(1.5)  # 0.01 s between beats, lost after 0.03 s
CLOSED = RuntimeError(
    "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:44459. This is typically caused by a "
    "remote worker crashing. Check the logs"
)
LATE = RuntimeError("[/src/gloo/unbound_buffer.cc:78] Timed out waiting 588000ms for recv operation to complete")


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


@pytest.fixture(autouse=True)
def in_a_round() -> Any:
    enter("collect round 3")
    yield
    enter("start")


def say(store: Any, rank: int, **sign: Any) -> None:
    """What another rank has published last."""
    import json
    from dataclasses import asdict

    known = {"name": f"peer {rank}", "beat": 7, "phase": "collect round 3", **sign}
    store.set(f"sparseloco/0/{rank}", json.dumps(asdict(Sign(**known))))


class Living:
    """Ranks that go on beating in threads of their own."""

    def __init__(self, store: Any, **phases: str) -> None:
        self.store, self.stopped = store, threading.Event()
        self.threads = [threading.Thread(target=self._beat, args=(int(r[1:]), p)) for r, p in phases.items()]

    def _beat(self, rank: int, name: str) -> None:
        beat = 0
        while not self.stopped.is_set():
            beat += 1
            say(self.store, rank, beat=beat, phase=name, phase_s=590.4)
            time.sleep(0.001)

    def __enter__(self) -> None:
        for thread in self.threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.join()


def mine(store: Any, num_ranks: int = 3, deadline: Deadline = SHORT) -> Beats:
    own = Beats(store, 0, num_ranks, deadline)
    own.publish()
    return own


def test_a_rank_that_is_silent_is_named_with_its_phase(store: Any) -> None:
    say(store, 2, phase="step 12")
    with Living(store, r1="collect round 3"), pytest.raises(PeerLostError) as caught, mine(store).guard():
        raise CLOSED
    assert str(caught.value) == (
        "peer 2=no sign of life for 0.03 s, last in phase 'step 12': must answer within deadline_s=1.5; "
        "look at what it printed, then continue with --resume"
    )


def test_a_shard_is_named_as_such(store: Any) -> None:
    say(store, 1, name="peer 0, shard 1", phase="step 4")
    assert mine(store, 2).explain(CLOSED).startswith("peer 0, shard 1=no sign of life for 0.03 s, last in phase 'step")


def test_a_rank_that_never_began_is_named(store: Any) -> None:
    assert mine(store, 2).explain(CLOSED).startswith("peer 1=no sign of life for 0.03 s, last in phase 'start': must")


def test_a_rank_that_ended_with_an_error_of_its_own_is_named_at_once(store: Any) -> None:
    """Others that are silent by then are not to blame; nobody is waited for, however long a deadline is."""
    say(store, 1, end="DivergenceError", phase="step 12")
    text = mine(store, 3, Deadline(3000)).explain(CLOSED)
    assert text.startswith(
        "peer 1=ended with DivergenceError, last in phase 'step 12': must answer within deadline_s=3"
    )


def test_who_lost_another_is_not_to_blame_itself(store: Any) -> None:
    say(store, 1, end="PeerLostError", why="peer 2=no sign of life for 12 s")
    with Living(store, r2="collect round 3"):
        assert mine(store).explain(CLOSED) == "peer 2=no sign of life for 12 s"
    assert mine(store).explain(CLOSED).startswith("peer 2=no sign of life for 0.03 s"), "seen by itself by now"


def test_a_rank_that_is_slow_is_told_from_one_that_is_gone(store: Any) -> None:
    with Living(store, r1="collect round 3", r2="evaluate"):
        text = mine(store).explain(LATE)
    assert text == (
        "peer 2=in phase 'evaluate' for 590 s while peer 0 waits in 'collect round 3': must answer within "
        "deadline_s=1.5; raise transport.deadline_s if it is slow, or look at what it printed if it is stuck"
    )


def test_a_network_that_fails_between_the_living_is_said(store: Any) -> None:
    with Living(store, r1="collect round 3", r2="collect round 3"):
        text = mine(store).explain(CLOSED)
    assert text == (
        "peer 0=failed in phase 'collect round 3' (Connection closed by peer [127.0.0.1]:44459) while every other rank "
        "gives signs of life: must reach all of them; check the network between them, then continue with --resume"
    )


def test_a_store_that_is_gone_is_said(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = mine(store)

    def gone(*_: object) -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    monkeypatch.setattr(own, "store", type("Gone", (), {"check": gone, "set": gone, "get": gone})())
    assert own.explain(CLOSED) == (
        "peer 0=failed in phase 'collect round 3' (Connection closed by peer [127.0.0.1]:44459), and the store in "
        "which ranks give signs of life is gone: must keep its host, rank 0 or torchrun; "
        "look at what it printed, then continue with --resume"
    )
    own.stop(CLOSED)  # says nothing to nobody


def test_errors_of_this_library_pass_a_guard_as_they_are(store: Any) -> None:
    with pytest.raises(DivergenceError, match=r"^on purpose$"), mine(store).guard():
        raise DivergenceError("on purpose")


def test_a_phase_ends_with_its_block_and_stays_shown_after_an_error() -> None:
    enter("step 12")
    with phase("post round 3"):
        assert present_phase() == "post round 3"
    assert present_phase() == "step 12"
    with pytest.raises(KeyError), phase("save step 12"):
        raise KeyError
    assert present_phase() == "save step 12"
    with phase("evaluate"):
        pass
    assert present_phase() == "step 12"


def test_the_thread_beats_shows_the_phase_and_says_how_it_ended(store: Any) -> None:
    own = Beats(store, 0, 2, SHORT)
    other = Beats(store, 1, 2, SHORT)
    own.start()
    enter("save step 40")
    try:
        deadline = time.monotonic() + 30
        while (sign := other._read()[0]).beat < 3 or sign.phase != "save step 40":
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        own.stop(DivergenceError("numbers differ"))
    last = other._read()[0]
    assert (last.end, last.why, last.phase) == ("DivergenceError", "numbers differ", "save step 40")
    assert not own._thread.is_alive()


def test_a_restart_does_not_read_what_the_ranks_before_it_said(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    say(store, 1, phase="step 400")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert mine(store, 2)._read()[1] == Sign("peer 1", 0, "start")


def test_a_phase_that_lasts_is_reported_once_with_all_stacks_c36(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C-36: on a clock that the test turns, the second after the deadline prints; further ones do not."""
    now = [100.0]
    monkeypatch.setattr(beats, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stuck, leave = threading.Event(), threading.Event()

    def waits_for_a_lock() -> None:
        stuck.set()
        leave.wait()

    thread = threading.Thread(target=waits_for_a_lock)
    thread.start()
    stuck.wait()
    with (tmp_path / "stderr").open("w+") as stderr:
        own = Beats(store, 0, 1, Deadline(600), stderr=stderr)

        def said() -> str:
            own.report_stall()
            return (tmp_path / "stderr").read_text()

        enter("evaluate")
        now[0] += 599
        assert said() == ""
        now[0] += 2
        text = said()
        now[0] += 600
        assert said() == text, "once"
        enter("step 41")
        assert said() == text
        now[0] += 600
        assert said().count("its threads are at:") == 2
    leave.set()
    thread.join()
    assert text.startswith("peer 0=in phase 'evaluate' for 601 s; its threads are at:\n")
    assert "waits_for_a_lock" in text
    assert sys._getframe().f_code.co_name in text
