"""A replica whose numbers are not finite contributes nothing to the round; the others do not notice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparseloco import ConfigError, DivergenceError, Loopback, Replica, presets, synchronize
from sparseloco.errors import AllAbstainedError
from sparseloco.local import forget_moments
from sparseloco.transport import advance, post_due, settle
from sparseloco.types import Envelope, Key
from tests import toy
from tests.driver import ROWS, Peer, residual

NAN = float("nan")
METHODS = ["sparseloco", "diloco", "streaming_diloco", "demo", "powersgd", "ddp", "ef_signsgd", "sparseloco_delayed"]
STEPS, BAD = 10, 4

pytestmark = pytest.mark.filterwarnings("ignore:.*contributes nothing:UserWarning")
any_method = pytest.mark.parametrize("row", METHODS)


def step_of(peer: Peer, *, bad: bool = False) -> list[Envelope]:
    """One step; a bad one has a gradient that is not a number."""
    replica = peer.replica
    toy.loss_of(peer.model, toy.batch(replica.step + 1, replica.peer)).backward()
    if bad:
        for param in peer.model.parameters():
            assert param.grad is not None
            param.grad.view(-1)[0] = NAN
    replica.local_step()
    return replica.outbox()


def private(peer: Peer) -> dict[str, Tensor]:
    return {path: value for path, value in peer.replica.private_state().items() if isinstance(value, Tensor)}


def run(row: str, weights: list[int], odd: int) -> list[Peer]:
    """Peers over a transport; at step ``BAD`` the numbers of one are not finite."""
    peers, transport = [Peer(ROWS[row](), r) for r in range(len(weights))], Loopback(len(weights))
    for peer, weight in zip(peers, weights, strict=True):
        peer.replica.weight = weight
        transport.connect(peer.replica)
    for step in range(1, STEPS + 1):
        for peer in peers:
            for envelope in step_of(peer, bad=step == BAD and peer.replica.peer == odd):
                transport.post(envelope)
        for peer in peers:
            settle(peer.replica, transport)
    return peers


def run_without(row: str, weights: list[int], odd: int) -> list[Peer]:
    """The same, but what the odd one posts at step ``BAD`` does not exist for the others."""
    peers = [Peer(ROWS[row](), r) for r in range(len(weights))]
    mail: dict[Key, list[Envelope]] = {}
    for peer, weight in zip(peers, weights, strict=True):
        peer.replica.weight = weight
    for step in range(1, STEPS + 1):
        for peer in peers:
            bad = step == BAD and peer.replica.peer == odd
            posted = step_of(peer, bad=bad)
            assert all(envelope.weight == (0 if bad else peer.replica.weight) for envelope in posted)
            for envelope in posted:
                mail.setdefault(envelope.key, []).extend([] if bad else [envelope])
        for peer in peers:
            peer.settle(mail)
    return peers


@any_method
@given(weights=st.lists(st.integers(1, 50), min_size=2, max_size=4), odd=st.integers(0, 3))
@settings(max_examples=6)
def test_the_round_is_that_of_the_others_c06(row: str, weights: list[int], odd: int) -> None:
    """C-06: bit for bit, weights too, and the one that abstained is back in the rounds that follow."""
    odd %= len(weights)
    with_it, without = run(row, weights, odd), run_without(row, weights, odd)
    assert len({peer.replica.digest() for peer in [*with_it, *without]}) == 1
    for one, other in zip(with_it, without, strict=True):
        mine, theirs = private(one), private(other)
        assert mine.keys() == theirs.keys()
        assert [path for path in mine if not torch.equal(mine[path], theirs[path])] == []
        assert all(bool(torch.isfinite(value).all()) for value in mine.values() if value.is_floating_point())


@any_method
def test_abstaining_leaves_all_state_as_it_was(row: str) -> None:
    """Residual, shared state and messages in flight stay; parameters are the anchor, moments are gone."""
    peer = Peer(ROWS[row]())
    replica = peer.replica
    for _ in range(BAD - 1):
        for envelope in step_of(peer):
            replica.apply(envelope.key, [envelope])
    before, kept, flying = replica.digest(), residual(replica), replica.in_flight()
    with pytest.warns(UserWarning, match=r"^peer 0, round \d: delta of 0\.weight is not finite, so this peer contr.*"):
        (envelope,) = step_of(peer, bad=True)
    assert (envelope.weight, dict(envelope.payload.sections)) == (0, {})
    assert replica.digest() == before
    assert all(torch.equal(block, residual(replica)[path]) for path, block in kept.items())
    assert replica.in_flight() == [*flying, envelope.key]
    assert all(torch.equal(replica.anchor()[name], p.data) for name, p in replica.params.items())
    assert all(param.grad is None for param in replica.params.values())
    assert replica.optimizer is None or not replica.optimizer.state
    assert not replica.is_abstaining


def test_its_own_absent_payload_is_not_credited() -> None:
    """Neither when the others go on without it, nor in an inbox that lacks its envelope."""
    for with_envelope in (True, False):
        peers = [Peer(ROWS["sparseloco"](), r) for r in range(2)]
        posted = [[step_of(peer, bad=step == BAD and peer is peers[1]) for peer in peers] for step in range(1, BAD + 1)]
        inbox = [envelope for envelopes in posted[-1] for envelope in envelopes]
        assert [envelope.weight for envelope in inbox] == [1, 0]
        kept = residual(peers[1].replica)
        peers[1].replica.apply(inbox[0].key, inbox if with_envelope else inbox[:1])
        assert all(torch.equal(block, residual(peers[1].replica)[path]) for path, block in kept.items())


def test_who_was_absent_is_noted_with_the_cause_that_only_it_knows() -> None:
    peers = run("sparseloco", [1, 1, 1], 1)
    assert [peer.replica.absent for peer in peers] == [[], [], []], "of the last step alone"
    peers, transport = [Peer(ROWS["sparseloco"](), r) for r in range(2)], Loopback(2)
    for step in range(1, BAD + 1):
        for peer in peers:
            transport.connect(peer.replica)
            for envelope in step_of(peer, bad=step == BAD and peer is peers[1]):
                transport.post(envelope)
        for peer in peers:
            settle(peer.replica, transport)
    assert [tuple(absence) for absence in peers[0].replica.absent] == [(1, Key(0, 0), "")]
    assert [tuple(absence) for absence in peers[1].replica.absent] == [(1, Key(0, 0), "delta of 0.weight")]


@any_method
def test_if_all_abstain_the_error_names_the_round_and_nothing_changes(row: str) -> None:
    peers, transport = [Peer(ROWS[row](), r) for r in range(2)], Loopback(2)
    for peer in peers:
        transport.connect(peer.replica)
    before = peers[0].replica.digest()
    while not peers[0].replica.due():
        for peer in peers:
            for envelope in step_of(peer, bad=True):
                transport.post(envelope)
    with pytest.raises(AllAbstainedError) as caught:
        settle(peers[0].replica, transport)
    fragment = peers[0].replica.due()[0].fragment
    assert str(caught.value) == (
        f"round 0, fragment {fragment}=no contribution: must have one, and at all 2 peers numbers were not finite; "
        "lower the learning rate, lengthen its warm-up or clip gradients"
    )
    assert peers[0].replica.digest() == before


def test_shared_state_of_one_that_abstains_is_compared_all_the_same() -> None:
    peers = [Peer(ROWS["diloco"](), r) for r in range(2)]
    inbox = [
        e for peer in peers for e in [step_of(peer, bad=step == 4 and peer is peers[1]) for step in range(1, 5)][3]
    ]
    drifted = Envelope(**{**vars(inbox[1]), "digest": "0" * 32})
    with pytest.raises(DivergenceError, match=rf"peer 1, round 0: says shared state {'0' * 32}"):
        peers[0].replica.apply(inbox[0].key, [inbox[0], drifted])


def test_the_policy_is_one_of_two() -> None:
    with pytest.raises(ConfigError, match=r"nonfinite='skip': must be one of abstain, stop"):
        Replica(toy.net(), ROWS["diloco"](), nonfinite="skip")


# -- a loss that is not finite, between rounds -----------------------------------------------------------------------


@pytest.mark.parametrize("row", ["sparseloco", "sparseloco_delayed", "streaming_diloco"])
def test_abstaining_between_rounds_holds_for_the_next_message_of_every_fragment(row: str) -> None:
    peer = Peer(ROWS[row]())
    replica = peer.replica
    step_of(peer)
    with pytest.warns(
        UserWarning, match=r"peer 0, round 0: train_loss is not finite.*inner optimizer state starts anew"
    ):
        replica.abstain("train_loss")
    weights: dict[int, list[int]] = {}
    while replica.is_abstaining:
        replica.stepped()
        for envelope in replica.outbox():
            weights.setdefault(envelope.key.fragment, []).append(envelope.weight)
    assert set(weights) == set(range(len(ROWS[row]().fragments.assign(replica.specs))))
    assert all(found[0] == 0 for found in weights.values())
    assert replica.step <= 5


def test_what_was_posted_before_still_counts_and_progress_since_is_gone() -> None:
    """With overlap: the message in flight is a good one, and Carry adds nothing to the new anchor."""
    peers, transport = [Peer(ROWS["sparseloco_delayed"](), r) for r in range(2)], Loopback(2)
    for step in range(1, 7):
        for peer in peers:
            transport.connect(peer.replica)
            for envelope in step_of(peer):
                assert envelope.weight == 1
                transport.post(envelope)
            if step == 5 and peer is peers[1]:
                peer.replica.abstain("train_loss")
                peer.model.zero_grad()
            if step == 6 and peer is peers[1]:
                peer.replica.abstain("train_loss")
        for peer in peers:
            settle(peer.replica, transport)
    anchor = peers[1].replica.anchor()
    assert all(torch.equal(anchor[name], p.data) for name, p in peers[1].replica.params.items())
    assert peers[0].replica.digest() == peers[1].replica.digest()


def test_progress_after_an_absent_message_is_carried() -> None:
    """It abstains at step 4 and trains on; at step 6 the anchor moves below what it has learned since."""
    peers, transport = [Peer(ROWS["sparseloco_delayed"](), r) for r in range(2)], Loopback(2)
    learned: dict[str, Tensor] = {}
    for step in range(1, 7):
        for peer in peers:
            transport.connect(peer.replica)
            for envelope in step_of(peer, bad=step == BAD and peer is peers[1]):
                transport.post(envelope)
        if step == 6:
            anchor = peers[1].replica.anchor()
            learned = {n: p.data.double() - anchor[n].double() for n, p in peers[1].replica.params.items()}
        for peer in peers:
            settle(peer.replica, transport)
    anchor = peers[1].replica.anchor()
    assert any(bool(delta.any()) for delta in learned.values())
    for name, param in peers[1].replica.params.items():
        assert torch.equal(param.data, (learned[name] + anchor[name]).float())


@pytest.mark.parametrize("step", [2, 5])
def test_a_replica_that_sits_out_can_be_saved(step: int) -> None:
    """Before its empty message is posted, and while that is in flight."""
    peers = [Peer(ROWS["sparseloco_delayed"](), r) for r in range(2)]
    mail: dict[Key, list[Envelope]] = {}

    def go(peers: list[Peer], first: int, last: int) -> None:
        for number in range(first, last + 1):
            for peer in peers:
                if number == 2 and peer.replica.peer == 1:
                    peer.replica.abstain("train_loss")
                if not peer.replica.is_abstaining:
                    posted = step_of(peer)
                else:
                    peer.replica.stepped()
                    posted = peer.replica.outbox()
                for envelope in posted:
                    mail.setdefault(envelope.key, []).append(envelope)
            for peer in peers:
                peer.settle(mail)

    go(peers, 1, step)
    states: list[Any] = [copy.deepcopy((p.replica.shared_state(), p.replica.private_state())) for p in peers]
    again = [Peer(ROWS["sparseloco_delayed"](), r) for r in range(2)]
    for peer, (shared, own) in zip(again, states, strict=True):
        peer.replica.load_shared_state(shared)
        peer.replica.load_private_state(own)
    assert [peer.replica.is_abstaining for peer in again] == [False, step < 4]
    saved = {key: list(inbox) for key, inbox in mail.items()}
    go(peers, step + 1, 9)
    mail = saved
    go(again, step + 1, 9)
    assert len({peer.replica.digest() for peer in [*peers, *again]}) == 1
    mine, theirs = private(peers[1]), private(again[1])
    assert [path for path in mine if not torch.equal(mine[path], theirs[path])] == []
    awaited = [sent.abstained for lane in again[1].replica.lanes for sent in lane.in_flight.values()]
    assert awaited == [""], "that of step 8, a good one"


# -- loops of one's own ----------------------------------------------------------------------------------------------


def test_synchronize_makes_the_optimizer_anew_and_goes_on() -> None:
    transport = Loopback(2)
    models = [toy.net() for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    method = presets.diloco(inner_steps=1)
    other = Replica(models[1], method, peer=1, stepped_by=optimizers[1])
    transport.connect(other)

    def other_step(step: int, *, bad: bool) -> None:
        toy.loss_of(models[1], toy.batch(step, 1)).backward()
        if bad:
            next(models[1].parameters()).grad.fill_(NAN)  # type: ignore[union-attr]
        optimizers[1].step()
        optimizers[1].zero_grad()
        with torch.no_grad():
            other.stepped()
            post_due(other, transport)

    with synchronize(models[0], optimizers[0], method, transport, peer=0) as replica:
        for step in range(1, 4):
            other_step(step, bad=step == 2)
            assert bool(optimizers[1].state) == (step != 2)
            toy.loss_of(models[0], toy.batch(step, 0)).backward()
            if step == 3:
                next(models[0].parameters()).grad.fill_(NAN)  # type: ignore[union-attr]
            optimizers[0].step()
            optimizers[0].zero_grad()
            assert bool(optimizers[0].state) == (step != 3)
            assert [absence.peer for absence in replica.absent] == {1: [], 2: [1], 3: [0]}[step]
            settle(other, transport)
            assert replica.digest() == other.digest()
            assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_stop_raises_and_changes_nothing() -> None:
    model, method = toy.net(), presets.diloco(inner_steps=1)
    with pytest.warns(UserWarning, match="one replica alone"):
        transport = Loopback(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with synchronize(model, optimizer, method, transport, nonfinite="stop"):
        toy.loss_of(model, toy.batch(1, 0)).backward()
        model[0].weight.grad.fill_(NAN)
        with pytest.raises(DivergenceError, match=r"^delta of 0\.weight=not finite: must be finite"):
            optimizer.step()
    assert optimizer.state


def test_a_loop_whose_optimizer_is_unknown_is_told() -> None:
    model = toy.net()
    replica = Replica(model, presets.diloco(inner_steps=1))
    model[0].weight.data[0, 0] = NAN
    replica.stepped()
    with pytest.warns(
        UserWarning, match=r"contributes nothing; parameters were reset .* the caller's optimizer should"
    ):
        replica.outbox()


def test_advance_and_settle_go_on_without_a_word_from_the_caller() -> None:
    peers, transport = [Peer(ROWS["demo"](), r) for r in range(2)], Loopback(2)
    for step in range(1, 4):
        for peer in peers:
            toy.loss_of(peer.model, toy.batch(step, peer.replica.peer)).backward()
            if step == 2 and peer is peers[0]:
                next(peer.model.parameters()).grad.fill_(NAN)  # type: ignore[union-attr]
            advance(peer.replica, transport)
        for peer in peers:
            settle(peer.replica, transport)
    assert peers[0].replica.digest() == peers[1].replica.digest()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD])
def test_an_optimizer_without_moments_steps_as_one_that_is_new(kind: type[torch.optim.Optimizer]) -> None:
    more: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    old, new = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    used = kind([old], lr=0.1, **more)
    old.grad = torch.tensor([1.0, NAN, 3.0])
    used.step()
    forget_moments(used)
    with torch.no_grad():
        old.fill_(1.0)
    fresh = kind([new], lr=0.1, **more)
    for gradient in ([1.0, -2.0, 3.0], [0.5, 0.5, -4.0]):
        for param, optimizer in ((old, used), (new, fresh)):
            param.grad = torch.tensor(gradient)
            optimizer.step()
    assert torch.equal(old, new)
