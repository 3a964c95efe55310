"""Law: an old shared state and the messages since give what a replica has that was there all the time, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparseloco import CheckpointError, DivergenceError, SyncSchedule, rejoin
from sparseloco.types import Envelope, Key
from tests import toy
from tests.driver import ROWS, Peer, lockstep, with_synced_buffers

STEPS = 21
Mail = dict[Key, list[Envelope]]
States = dict[tuple[int, int], dict[str, Any]]


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return {path: value.clone() if isinstance(value, Tensor) else value for path, value in state.items()}


def make(row: str, peer: int) -> Peer:
    model: nn.Module = toy.batch_norm_net() if row == "buffers" else toy.net()
    return Peer(with_synced_buffers(ROWS["diloco"]()) if row == "buffers" else ROWS[row](), peer, model)


def run(row: str) -> tuple[list[Peer], Mail, States, list[str]]:
    """Two peers, all messages, each fragment's shared state before each round, and the digest after each step."""
    peers, mail = [make(row, i) for i in range(2)], {}
    states: States = {}
    digests = [peers[0].replica.digest()]
    for step in range(STEPS + 1):
        first = peers[0].replica
        for fragment in range(len(first.lanes)):
            states.setdefault(
                (rejoin.num_applied(first, fragment), fragment), copied(rejoin.fragment_state(first, fragment))
            )
        if step < STEPS:
            lockstep(peers, 1, mail)
            digests.append(first.digest())
    return peers, mail, states, digests


def replay_until(peer: Peer, step: int, mail: Mail) -> None:
    schedule = peer.replica.algorithm.schedule
    for fragment in range(len(peer.replica.lanes)):
        for number in range(rejoin.num_applied(peer.replica, fragment), schedule.num_collected(step, fragment)):
            rejoin.replay(peer.replica, Key(number, fragment), mail[Key(number, fragment)])
    rejoin.catch_up_to(peer.replica, step)


@pytest.mark.parametrize("back", [0, 1, 2])
@pytest.mark.parametrize(
    "row", ["sparseloco", "sparseloco_delayed", "diloco", "streaming_diloco", "powersgd", "demo", "ddp", "buffers"]
)
def test_anchor_and_replay_equal_having_been_there(row: str, back: int) -> None:
    """C-08: the joiner has round, anchor and momentum before its first step; at any step, also with mail in flight."""
    _, mail, states, digests = run(row)
    for step in range(1, STEPS + 1):
        joiner = make(row, 7)
        with torch.no_grad():
            for tensor in (*joiner.model.parameters(), *joiner.model.buffers()):
                tensor.zero_()
        joiner = Peer(joiner.replica.algorithm, 7, joiner.model)
        for fragment in range(len(joiner.replica.lanes)):
            closed = joiner.replica.algorithm.schedule.num_collected(step, fragment)
            start = max(0, closed - back)
            rejoin.adopt(joiner.replica, fragment, states[start, fragment], start)
        replay_until(joiner, step, mail)
        assert joiner.replica.digest() == digests[step]
        assert joiner.replica.step == step


@pytest.mark.parametrize("row", ["sparseloco", "sparseloco_delayed", "diloco", "streaming_diloco", "powersgd"])
def test_who_replayed_goes_on_like_the_others(row: str) -> None:
    """It posts its next message with the others and no round out of turn, and all agree ever after."""
    peers, mail, states, _ = run(row)
    joiner = make(row, 2)
    for fragment in range(len(joiner.replica.lanes)):
        rejoin.adopt(joiner.replica, fragment, states[0, fragment], 0)
    replay_until(joiner, STEPS, mail)
    assert joiner.replica.in_flight() == peers[0].replica.in_flight()
    three = [*peers, joiner]
    lockstep(three, 9, mail)
    assert len({peer.replica.digest() for peer in three}) == 1
    assert [len(mail[key]) for key in sorted(mail)][-1] == 3


def test_outer_learning_rates_are_those_of_the_step_that_was_missed() -> None:
    from sparseloco import WarmupCosine, presets

    algorithm = presets.diloco(
        inner_steps=4, outer_lr=WarmupCosine(peak=0.7, total_steps=20, warmup_steps=5), inner=None
    )
    mail: Mail = {}
    peer, joiner = Peer(algorithm, 0), Peer(algorithm, 1)
    for _ in range(12):
        for parameter in peer.model.parameters():
            parameter.data.add_(0.01)
        peer.replica.stepped()
        for envelope in peer.replica.outbox():
            mail[envelope.key] = [envelope]
        peer.settle(mail)
    replay_until(joiner, 12, mail)
    assert joiner.replica.digest() == peer.replica.digest()


@pytest.mark.parametrize("row", ["diloco", "buffers", "ddp"])
def test_the_outer_rate_of_a_fragment_is_set_and_taken_back(row: str) -> None:
    """Momentum stays; synced buffers are averaged as before, and torch's optimizers have no such rate."""
    replica = make(row, 0).replica
    before = [lane.outer for lane in replica.lanes]
    for fragment in range(len(replica.lanes)):
        rejoin.set_outer_lr(replica, fragment, 0.25)
    now = [lane.outer for lane in replica.lanes]
    if row == "ddp":
        assert now == before
    else:
        assert now == [replace(before[0], lr=0.25), *before[1:]]
    assert replica.fingerprint == make(row, 0).replica.fingerprint
    for fragment in range(len(replica.lanes)):
        rejoin.set_outer_lr(replica, fragment, None)
    assert [lane.outer for lane in replica.lanes] == before


def test_a_message_in_flight_survives_and_is_credited_or_not() -> None:
    """Of a peer that was away, the message on its way counts as sent if the round has it, else it is owed."""
    peers, mail = [make("sparseloco", i) for i in range(2)], {}
    lockstep(peers, 3, mail)
    posted = [peer.step()[0] for peer in peers]
    away = peers[1]
    before = away.replica.residual_norm()
    state = copied(rejoin.fragment_state(away.replica, 0))
    rejoin.adopt(away.replica, 0, state, 0)
    assert away.replica.in_flight() == [Key(0, 0)]
    rejoin.replay(away.replica, Key(0, 0), posted[:1])
    assert away.replica.residual_norm() > before
    peers[0].replica.apply(Key(0, 0), posted[:1])
    assert away.replica.digest() == peers[0].replica.digest()
    assert away.replica.delta_norm() == 0.0


def test_restored_message_and_residual_are_those_that_were_saved() -> None:
    peers, mail = [make("sparseloco", i) for i in range(2)], {}
    lockstep(peers, 7, mail)
    posted = [peer.step()[0] for peer in peers]
    killed = peers[1].replica
    residual = [block.clone() for block in killed.lanes[0].state.residual]
    again = make("sparseloco", 1)
    rejoin.replay(again.replica, Key(0, 0), mail[Key(0, 0)])
    rejoin.restore(again.replica, Key(1, 0), posted[1].payload, residual)
    assert rejoin.step_to_join(again.replica, [1]) == 8
    rejoin.catch_up_to(again.replica, 8)
    assert again.replica.due() == [Key(1, 0)]
    assert again.replica.outbox() == [], "posted before it was killed"
    for replica in (killed, again.replica):
        replica.apply(Key(1, 0), posted[:1])
    assert again.replica.digest() == killed.digest()
    assert all(
        torch.equal(a, b)
        for a, b in zip(again.replica.lanes[0].state.residual, killed.lanes[0].state.residual, strict=True)
    )


def test_fragments_that_a_crash_kept_from_being_posted_are_posted_then() -> None:
    """Else a crash of all peers between two posts of one step would leave a round that nobody can close."""
    peer = make("buffers", 0)
    mail: Mail = {}
    lockstep([peer], 3, mail)
    first = peer.step()[0]
    again = make("buffers", 0)
    rejoin.restore(again.replica, first.key, first.payload, [])
    assert rejoin.step_to_join(again.replica, [0, 0]) == 4
    rejoin.catch_up_to(again.replica, 4)
    assert [envelope.key for envelope in again.replica.outbox()] == [Key(0, 1)]
    assert again.replica.due() == [Key(0, 0), Key(0, 1)]


@pytest.mark.parametrize("schedule", [(4, 0, 0), (4, 1, 2), (6, 2, 5), (1, 0, 0), (30, 7, 3)])
def test_steps_of_rounds_are_those_of_the_schedule(schedule: tuple[int, int, int]) -> None:
    every, stagger, delay = schedule
    schedule_ = SyncSchedule(every=every, stagger=stagger, delay=delay)
    for fragment in range(9):
        posts = [t for t in range(100) if schedule_.posts(t, fragment)]
        collects = [t for t in range(100) if t > delay and schedule_.collects(t, fragment)]
        assert [schedule_.post_step(r, fragment) for r in range(len(posts))] == posts
        assert [schedule_.collect_step(r, fragment) for r in range(len(collects))] == collects
        for t in range(100):
            assert schedule_.num_posted(t, fragment) == sum(step <= t for step in posts)
            assert schedule_.num_collected(t, fragment) == sum(step <= t for step in collects)


@pytest.mark.parametrize("row", ["sparseloco", "sparseloco_delayed", "streaming_diloco"])
def test_the_step_to_join_at_is_one_at_which_only_closed_rounds_are_applied(row: str) -> None:
    replica = make(row, 0).replica
    schedule = replica.algorithm.schedule
    for closed in [(0,) * 9, (3,) * 9, (4, 3, 3, 3), (4, 4, 3)]:
        closed = closed[: len(replica.lanes)]
        step = rejoin.step_to_join(replica, closed)
        assert all(schedule.num_collected(step, f) <= number for f, number in enumerate(closed))
        nxt = min(t for t in range(step + 1, 99) for f in range(len(closed)) if schedule.collects(t, f) and t > 4)
        assert any(schedule.num_collected(nxt, f) > number for f, number in enumerate(closed))


def test_bad_state_is_refused_and_nothing_changes() -> None:
    peer = make("powersgd", 0)
    digest = peer.replica.digest()
    good = copied(rejoin.fragment_state(peer.replica, 0))
    missing = {path: value for path, value in good.items() if path != "anchor/0.weight/0"}
    with pytest.raises(CheckpointError, match=r"anchor/0.weight/0=missing: must be in the state; load a complete one"):
        rejoin.adopt(peer.replica, 0, missing, 3)
    for odd in ("outer/9.weight/0/velocity", "anchor/elsewhere/0", "stuff/0.weight/0/x"):
        with pytest.raises(CheckpointError, match=rf"{odd}=present: must be of a block of this fragment; load it into"):
            rejoin.adopt(peer.replica, 0, good | {odd: torch.zeros(3)}, 3)
    with pytest.raises(CheckpointError, match=r"codec/0.weight/0/basis=torch.float64 .*must be torch.float32"):
        rejoin.adopt(peer.replica, 0, good | {"codec/0.weight/0/basis": torch.zeros(3, dtype=torch.float64)}, 3)
    assert (peer.replica.digest(), rejoin.num_applied(peer.replica, 0)) == (digest, 0)


def test_a_round_of_another_state_is_refused() -> None:
    peers, mail = [make("diloco", i) for i in range(2)], {}
    lockstep(peers, 9, mail)
    joiner = make("diloco", 2)
    with torch.no_grad():
        joiner.replica.lanes[0].state.anchor[0].add_(1)
    with pytest.raises(DivergenceError, match="says shared state"):
        rejoin.replay(joiner.replica, Key(0, 0), mail[Key(0, 0)])
    with pytest.raises(CheckpointError, match=r"residual=torch.float32 \(3,\): must be torch.float32"):
        rejoin.set_residual(peers[0].replica, 0, [torch.zeros(3)] * 4)
