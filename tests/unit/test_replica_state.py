"""Shared and private state: who has both continues as if nothing had been, who has the shared part may join."""

from __future__ import annotations

import pytest
import torch

from sparseloco import CheckpointError, DivergenceError, presets
from sparseloco.types import Envelope, Key
from tests import toy
from tests.driver import INNER, ROWS, Peer, lockstep, residual

STEPS = 11
Mail = dict[Key, list[Envelope]]


def copied(mail: Mail) -> Mail:
    return {key: list(envelopes) for key, envelopes in mail.items()}


def assert_equal_peers(found: list[Peer], expected: list[Peer]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.replica.digest() == b.replica.digest()
        mine, other = a.replica.private_state(), b.replica.private_state()
        tensors = [path for path, value in mine.items() if isinstance(value, torch.Tensor)]
        assert mine.keys() == other.keys()
        assert [path for path in tensors if not torch.equal(mine[path], other[path])] == []


@pytest.mark.parametrize("row", list(ROWS))
def test_resume_is_as_if_never_stopped(row: str) -> None:
    """At every inner step, also with a message in flight, and although the original has moved on since."""
    peers, mail = [Peer(ROWS[row](), i) for i in range(2)], {}
    saved = []
    for _ in range(STEPS):
        saved.append(([(p.replica.shared_state(), p.replica.private_state()) for p in peers], copied(mail)))
        lockstep(peers, 1, mail)
    in_flight = 0
    for step, (states, mail_then) in enumerate(saved):
        resumed = [Peer(ROWS[row](), i) for i in range(2)]
        for peer, (shared, private) in zip(resumed, states, strict=True):
            peer.replica.load_shared_state(shared)
            peer.replica.load_private_state(private)
            in_flight += len(peer.replica.in_flight())
        lockstep(resumed, STEPS - step, copied(mail_then))
        assert_equal_peers(resumed, peers)
    assert bool(in_flight) == (row in ("streaming_diloco", "sparseloco_delayed"))


def test_resume_with_a_credit_that_was_not_sent_again() -> None:
    """Without error feedback a residual exists for one round only; it is saved all the same."""
    peer = Peer(ROWS["diloco"]())
    mail: Mail = {}
    lockstep([peer], 3, mail)
    (envelope,) = peer.step()
    peer.replica.apply(envelope.key, [])
    shared, private = peer.replica.shared_state(), peer.replica.private_state()
    assert any(path.startswith("residual/") for path in private)
    again = Peer(ROWS["diloco"]())
    again.replica.load_shared_state(shared)
    again.replica.load_private_state(private)
    for each in (peer, again):
        lockstep([each], 4, {})
    assert_equal_peers([again], [peer])


@pytest.mark.parametrize("row", list(ROWS))
def test_joiner_needs_the_shared_state_alone(row: str) -> None:
    peers, mail = [Peer(ROWS[row](), i) for i in range(3)], {}
    lockstep(peers, 5, mail)
    while peers[0].replica.in_flight():
        lockstep(peers, 1, mail)
    torch.manual_seed(7)
    other_start = toy.net()
    with torch.no_grad():
        for param in other_start.parameters():
            param.normal_()
    joiner = Peer(ROWS[row](), 2, other_start)
    lockstep([joiner], 6, {})  # whatever it did before does not count
    joiner.replica.load_shared_state(peers[0].replica.shared_state())
    assert joiner.replica.digest() == peers[0].replica.digest()
    assert all(not block.any() for block in residual(joiner.replica).values())
    together = [*peers[:2], joiner]
    lockstep(together, 8, mail)
    assert len({peer.replica.digest() for peer in together}) == 1


@pytest.mark.parametrize("row", ["streaming_diloco", "sparseloco_delayed"])
def test_joiner_is_admitted_with_a_message_in_flight(row: str) -> None:
    """It awaits what the others have posted before, and owes nothing to it."""
    peers, mail = [Peer(ROWS[row](), i) for i in range(2)], {}
    while not peers[0].replica.in_flight():
        lockstep(peers, 1, mail)
    joiner = Peer(ROWS[row](), 2)
    joiner.replica.load_shared_state(peers[0].replica.shared_state())
    assert joiner.replica.in_flight() == peers[0].replica.in_flight()
    together = [*peers, joiner]
    lockstep(together, 9, mail)
    assert len({peer.replica.digest() for peer in together}) == 1


def test_state_of_another_algorithm_is_refused() -> None:
    one, other = Peer(ROWS["diloco"]()).replica, Peer(ROWS["sparseloco"]()).replica
    with pytest.raises(CheckpointError, match=r"fingerprint='\w{16}': must be '\w{16}'; all peers need the same"):
        other.load_shared_state(one.shared_state())
    with pytest.raises(CheckpointError, match=r"fingerprint='\w{16}': must be '\w{16}'; resume with the algorithm"):
        other.load_private_state(one.private_state())


def test_private_state_of_another_moment_is_refused() -> None:
    peer = Peer(ROWS["diloco"]())
    early = peer.replica.private_state()
    peer.step()
    with pytest.raises(CheckpointError, match=r"step=0: must be 1; load private and shared state of the same moment"):
        peer.replica.load_private_state(early)


def test_residual_is_keyed_by_name_and_never_reset_c05() -> None:
    """C-05: residuals belong to parameter names; one that is missing or has another shape is an error."""
    peer = Peer(ROWS["sparseloco"]())
    lockstep([peer], 4, {})
    state = peer.replica.private_state()
    names = {path.split("/")[1] for path in state if path.startswith("residual/")}
    assert names == {name for name, _ in peer.model.named_parameters()}
    path = "residual/2.bias/0"

    def refused(**changes: object) -> str:
        changed = {p: changes.get("value", v) if p == path else v for p, v in state.items()}
        if not changes:
            del changed[path]
        with pytest.raises(CheckpointError) as caught:
            peer.replica.load_private_state(changed)
        return str(caught.value)

    assert refused() == f"{path}=missing: must be in the state; load a complete one"
    assert refused(value=torch.zeros(1, 6)) == (
        f"{path}=torch.float32 (1, 6): must be torch.float32 (1, 5); load it into the model it came from"
    )
    assert "torch.float64 (1, 5): must be torch.float32 (1, 5)" in refused(value=torch.zeros(1, 5).double())
    without = {p: v for p, v in state.items() if not p.startswith("residual/")}
    with pytest.raises(CheckpointError, match=r"residual/0\.weight/0=missing"):
        peer.replica.load_private_state(without)


def test_other_shared_state_is_named_in_the_round_in_which_it_starts() -> None:
    peers = [Peer(ROWS["sparseloco"](), i) for i in range(3)]
    mail: Mail = {}
    lockstep(peers, 4, mail)
    strayed = peers[2].replica.shared_state()
    strayed["anchor/0.bias/0"][0, 3] += 1e-6
    private = peers[2].replica.private_state()
    peers[2].replica.load_shared_state(strayed)
    peers[2].replica.load_private_state(private)
    sent = [[peer.step() for peer in peers] for _ in range(4)][-1]
    inbox = [envelope for envelopes in sent for envelope in envelopes]
    before = peers[0].replica.digest()
    with pytest.raises(DivergenceError, match=r"peer 2, round 1: says shared state \w{32}, here it is \w{32}; restart"):
        peers[0].replica.apply(inbox[0].key, inbox)
    assert peers[0].replica.digest() == before
    named = [p.replica.tensor_digests() for p in (peers[0], peers[2])]
    assert [name for name in named[0] if named[0][name] != named[1][name]] == ["0.bias"]


def test_digest_sees_outer_state() -> None:
    """Momentum is shared state: peers that agree on parameters alone do not agree."""
    with_momentum = Peer(presets.diloco(inner_steps=1, inner=INNER))
    lockstep([with_momentum], 2, {})
    state = with_momentum.replica.shared_state()
    before = with_momentum.replica.digest()
    state["outer/2.weight/0/velocity"][0, 0] += 1e-3
    with_momentum.replica.load_shared_state(state)
    assert with_momentum.replica.digest() != before


FEWER = "blocks=8: must be the number of blocks in shared state, which holds 7; load a complete one"


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("fingerprint", "fingerprint=None: must be"),
        ("anchor/0.weight/0", FEWER),
        ("outer/0.weight/0/velocity", FEWER),
        (
            "blocks",
            "blocks=missing: must be in shared state and say how many blocks it holds, here 8; "
            "load what shared_state() returned",
        ),
    ],
)
def test_incomplete_shared_state_is_refused_before_anything_moves(missing: str, message: str) -> None:
    """Momentum that is left out would be lost in silence."""
    peers = [Peer(ROWS["diloco"](), r) for r in range(2)]
    lockstep(peers, 4, {})
    state = peers[0].replica.shared_state()
    assert missing in state
    del state[missing]
    before = peers[1].replica.digest()
    with pytest.raises(CheckpointError) as refused:
        peers[1].replica.load_shared_state(state)
    assert str(refused.value).startswith(message)
    assert peers[1].replica.digest() == before
    with pytest.raises(CheckpointError, match="fingerprint=None: must be"):
        peers[1].replica.load_private_state({})
