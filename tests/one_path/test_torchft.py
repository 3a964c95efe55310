"""Replicas under torchft: one is killed and comes back, one misses a round. No result depends on who is fast."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator

import pytest

from tests.one_path.managed import INNER_STEPS, Processes

pytestmark = [
    pytest.mark.mp,
    pytest.mark.timeout(300),  # five processes import torch, one after the other where cores are few
    pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="torchft is not installed"),
]


@pytest.fixture
def processes() -> Iterator[Processes]:
    found = Processes()
    yield found
    found.close()


def test_one_is_killed_and_comes_back(processes: Processes) -> None:
    """The survivor gives up that round, goes on alone, and hands its state to the one that comes back."""
    method = "sparseloco"
    _, survivor = processes.replica(0, method, "stays")
    victim, _ = processes.replica(1, method, "killed")
    victim.join(60)
    assert victim.exitcode == -signal.SIGKILL
    _, returned = processes.replica(1, method, "returns")
    (long, traffic), (short, _) = processes.answer(survivor), processes.answer(returned)

    missed = next(number for number, each in enumerate(long) if not each.counts)
    assert long[missed].participants == 2, "the round in which the victim died"
    assert long[missed].digest == long[missed - 1].digest, "nothing was applied"
    alone = [each for each in long[missed:] if each.participants == 1]
    assert len({each.digest for each in alone}) == len(alone) >= 1, "the survivor went on"
    # From the round in which it came back on, steps and anchors are the same bit for bit.
    assert short == long[-len(short) :]
    assert all(each.counts for each in short)
    assert not any(each.step % INNER_STEPS for each in short)
    assert len({each.digest for each in short}) == len(short) > 1
    assert traffic.sent > 0 < traffic.received


def test_a_round_that_one_has_missed(processes: Processes) -> None:
    """Who missed it takes over the state of who has it, before any further message counts; with a dense method."""
    pipes = [processes.replica(0, "diloco", "sees_all")[1], processes.replica(1, "diloco", "misses_one")[1]]
    (mine, _), (theirs, _) = (processes.answer(pipe) for pipe in pipes)
    mine, theirs = mine[-len(theirs) :], theirs[-len(mine) :]
    (number,) = [n for n, (one, other) in enumerate(zip(mine, theirs, strict=True)) if one != other]
    assert mine[number].counts
    assert not theirs[number].counts
    assert theirs[number].digest == theirs[number - 1].digest != mine[number].digest
    assert number + 1 < len(mine), "and they went on together"
