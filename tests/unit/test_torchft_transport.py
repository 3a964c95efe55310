"""The transport over torchft without torchft: refusals, rounds that fail, and shared state as bytes."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sparseloco import CheckpointError, ConfigError, DivergenceError, QuorumError, advance, presets, settle, sgd, wire
from sparseloco.replica import Replica
from sparseloco.transport.torchft import ManagedGroup, StateOverGroup, managed_group, unpack
from sparseloco.types import Key
from tests import toy

HELLO = 36
"""Bytes in which a peer says who it is and where it stands, once a round."""


class Done:
    """A collective that has ended."""

    def wait(self) -> bool:
        return True


class Lonely:
    """A process group of one, or of more if ``others`` says what they send."""

    def __init__(self, others: Callable[[bytes], list[bytes]] = lambda mine: []) -> None:
        self.others = others
        self.rows = 1
        self.sent: list[bytes] = []

    def size(self) -> int:
        return self.rows

    def allgather(self, output: Any, mine: Any, options: Any) -> Done:
        data = mine[0].numpy().tobytes()
        for row, theirs in zip(output[0], [data, *self.others(data)], strict=True):
            row.copy_(torch.frombuffer(bytearray(theirs), dtype=torch.uint8))
        return Done()

    def send(self, tensors: Any, rank: int, tag: int) -> Done:
        self.sent.append(tensors[0].numpy().tobytes())
        return Done()

    def recv(self, tensors: Any, rank: int, tag: int) -> Done:
        tensors[0].view(torch.uint8).copy_(torch.frombuffer(bytearray(self.sent.pop(0)), dtype=torch.uint8))
        return Done()


class Verdicts:
    """A manager that finds a quorum at once and says no if anything was reported, or to the rounds in ``refused``."""

    def __init__(self, *refused: int) -> None:
        self.refused = refused
        self.rounds = 0
        self.error: Exception | None = None
        self.fails: Exception | None = None
        self.callbacks: dict[str, Any] = {}

    def register_state_dict_fn(self, key: str, load_state_dict: Any, state_dict: Any) -> None:
        self.callbacks[key] = state_dict
        self.take_over = load_state_dict

    def start_quorum(self) -> None:
        self.rounds += 1
        self.error = None
        if self.fails:
            raise self.fails

    def errored(self) -> Exception | None:
        return self.error

    def report_error(self, e: Exception) -> None:
        self.error = e

    def should_commit(self) -> bool:
        return self.error is None and self.rounds not in self.refused


def replica_of(peer: int = 0, inner_steps: int = 1, delay: int = 0) -> Replica:
    algorithm = presets.sparseloco(inner_steps=inner_steps, delay=delay, k=3, tile=4, inner=sgd(0.1))
    return Replica(toy.net(), algorithm, peer=peer)


def step(replica: Replica, transport: ManagedGroup) -> float:
    for param in replica.params.values():
        param.grad = torch.ones_like(param)
    advance(replica, transport)
    return settle(replica, transport)


def test_a_round_that_does_not_count_is_sent_again_in_time() -> None:
    """Nothing reaches the anchor; the message is credited, as for any transport that lost it."""
    replica, transport = replica_of(), ManagedGroup(Verdicts(2), Lonely(), peer=0)
    transport.connect(replica)
    before = replica.digest()
    assert step(replica, transport) == 0
    assert replica.digest() == before
    assert replica.residual_norm() > 0
    assert step(replica, transport) > 0
    assert replica.digest() != before
    rounds = 3  # joining is one
    frames = transport.traffic(0).sent - rounds * HELLO
    assert frames == 2 * wire.frame_bytes(replica.part_specs(Key(0, 0)))
    assert transport.traffic(0).received == 0


def test_a_peer_that_is_gone_makes_the_round_fail() -> None:
    manager, group = Verdicts(), Lonely()
    replica, transport = replica_of(), ManagedGroup(manager, group, peer=0)
    transport.connect(replica)

    def gone(mine: bytes) -> list[bytes]:
        raise RuntimeError("connection closed by peer")

    group.others = gone
    before = replica.digest()
    assert step(replica, transport) == 0
    assert str(manager.error) == "connection closed by peer"
    assert replica.digest() == before


def test_a_bystander_sends_nothing_and_applies_what_the_others_sent() -> None:
    """A replica that joins holds the state before the round in flight, and settles that round like all others."""
    trainer = replica_of(peer=1)
    for param in trainer.params.values():
        param.grad = torch.ones_like(param)
    trainer.local_step()
    (envelope,) = trainer.outbox()

    class Join(Verdicts):
        def start_quorum(self) -> None:
            super().start_quorum()
            transport._take_over(trainer.shared_state())

    def theirs(mine: bytes) -> list[bytes]:
        if len(mine) == HELLO:
            return [struct.pack("<I", 1) + mine[4:]]
        assert not any(mine)
        return [wire.encode(envelope)]

    group = Lonely(theirs)
    group.rows = 2
    joiner, transport = replica_of(), ManagedGroup(Join(), group, peer=0)
    transport.connect(joiner)
    trainer.apply(envelope.key, [envelope])
    assert joiner.digest() == trainer.digest()
    assert joiner.step == trainer.step == 1
    assert joiner.residual_norm() == 0
    assert joiner.in_flight() == []


def test_moments_of_the_callers_optimizer_do_not_outlive_its_parameters() -> None:
    """What a replica did alone is dropped, also where the loop has the optimizer."""
    model, manager = toy.net(), Verdicts()
    optimizer = torch.optim.AdamW(model.parameters())
    replica = Replica(model, presets.sparseloco(inner_steps=1, k=3, tile=4), stepped_by=optimizer)
    ManagedGroup(manager, Lonely(), peer=0).connect(replica)
    toy.loss_of(model, toy.batch(1, 0)).backward()
    optimizer.step()
    assert optimizer.state
    manager.take_over(replica.shared_state())
    assert not optimizer.state


def test_state_travels_through_the_group_without_a_pickle() -> None:
    state = {"user": {"sparseloco": replica_of().shared_state()}, "torchft": {"step": 7, "batches_committed": 9}}
    carrier = StateOverGroup(Lonely())
    carrier.send_checkpoint([1], 7, state, timeout=None)  # pyright: ignore[reportArgumentType]
    found = carrier.recv_checkpoint(0, carrier.metadata(), 7, timeout=None)  # pyright: ignore[reportArgumentType]
    assert found["torchft"] == state["torchft"]
    mine, theirs = state["user"]["sparseloco"], found["user"]["sparseloco"]
    assert mine.keys() == theirs.keys()
    for path, value in mine.items():
        assert torch.equal(value, theirs[path]) if isinstance(value, torch.Tensor) else value == theirs[path]


def test_bytes_that_are_no_state_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"^state=5 bytes: must be shared state \(.*\); start this peer anew$"):
        unpack(b"never")


def sharded() -> Replica:
    replica = replica_of()
    replica.shards.count = 2
    return replica


@pytest.mark.parametrize(
    ("replica", "text"),
    [
        (lambda: replica_of(peer=1), r"^peer=1: must be 0; build Replica\(\.\.\., peer=0\)$"),
        (sharded, r"^shards=2: must be 1 under torchft; use ProcessGroup$"),
        (
            lambda: replica_of(inner_steps=4, delay=2),
            r"^delay=2: must be 0 under torchft, where a round is settled in the step that posts it; use ProcessGroup$",
        ),
    ],
    ids=["peer", "shards", "delay"],
)
def test_what_cannot_be_held_is_refused(replica: Callable[[], Replica], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ManagedGroup(Verdicts(), Lonely(), peer=0).connect(replica())


def test_numbers_and_states_must_agree() -> None:
    group = Lonely(lambda mine: [mine])
    group.rows = 2
    with pytest.raises(ConfigError, match=r"^peer=0: must be another number at each replica; the group has \[0, 0\]$"):
        ManagedGroup(Verdicts(), group, peer=0).connect(replica_of())
    group.others = lambda mine: [struct.pack("<IQ", 1, 5) + mine[12:]]
    with pytest.raises(
        DivergenceError, match=r"^peer 1: says step 5, algorithm \w+ and shared state \w{32}, here they"
    ):
        ManagedGroup(Verdicts(), group, peer=0).connect(replica_of())


def test_a_lighthouse_that_is_silent_is_named() -> None:
    manager = Verdicts()
    manager.fails = TimeoutError("deadline has elapsed")
    with pytest.raises(QuorumError, match=r"^lighthouse=no quorum \(deadline has elapsed\): must answer within"):
        ManagedGroup(manager, Lonely(), peer=0).connect(replica_of())


def test_joining_ends_if_no_round_counts() -> None:
    with pytest.raises(QuorumError, match=r"^peer=0: must be in a round that counts, and was in none of 10; give the"):
        ManagedGroup(Verdicts(*range(20)), Lonely(), peer=0).connect(replica_of())


def test_without_torchft_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    text = r"^lighthouse='http://127\.0\.0\.1:1': needs torchft, .*; run: pip install \"sparseloco\[torchft\]\"$"
    with pytest.raises(ConfigError, match=text), managed_group(0, "http://127.0.0.1:1"):
        pass
