"""One replica, driven by hand: signs, credit, refusals, and what belongs to the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from sparseloco import DivergenceError, presets, sgd
from sparseloco.algorithm import Algorithm
from sparseloco.compress import SignTwoLevel
from sparseloco.replica import Replica
from sparseloco.types import Envelope
from tests import toy
from tests.driver import INNER, ROWS, Peer, lockstep, residual, with_synced_buffers

F64 = torch.float64


class Point(nn.Module):
    """One matrix, nothing else."""

    def __init__(self, values: list[list[float]]) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(values))


LOW = SignTwoLevel().low
START = [[1.0, 2.0], [3.0, 4.0]]
DELTAS = torch.tensor([[[1.0, 0.5], [0.25, 2.0]], [[3.0, 0.5], [-0.75, 0.0]]])  # mean: 2, 0.5, -0.25, 1
ONE_STEP: dict[str, tuple[Callable[[], Algorithm], list[list[float]]]] = {
    "ddp": (lambda: presets.ddp(inner=sgd(0.5)), [[0.0, 1.75], [3.125, 3.5]]),
    "local_sgd": (lambda: presets.local_sgd(inner_steps=1), [[-1.0, 1.5], [3.25, 3.0]]),
    # lr 0.5, momentum 0.5: the first Nesterov step is 0.5 * (1 + 0.5) times the mean.
    "diloco": (
        lambda: presets.diloco(inner_steps=1, outer_lr=0.5, outer_momentum=0.5),
        [[-0.5, 1.625], [3.1875, 3.25]],
    ),
    "diloco_plain": (
        lambda: presets.diloco(inner_steps=1, outer_lr=0.5, outer_momentum=0.0),
        [[0.0, 1.75], [3.125, 3.5]],
    ),
    # E3M0: all of them are representable but 0.5 of 3, which becomes 1/8 of 3.
    "streaming_diloco": (
        lambda: presets.streaming_diloco(
            inner_steps=1, num_fragments=1, fragment_by="size", delay=0, outer_lr=1.0, outer_momentum=0.0
        ),
        [[-1.0, 1.5625], [3.25, 3.0]],
    ),
    # k = 1: 2 of the first and 3 of the second, each times the small level; no coordinate has two senders.
    "sparseloco": (
        lambda: presets.sparseloco(inner_steps=1, k=1, tile=2),
        [[1.0 - 3 * LOW, 2.0], [3.0, 4.0 - 2 * LOW]],
    ),
    "sparseloco_lr_half": (
        lambda: presets.sparseloco(inner_steps=1, k=1, tile=2, outer_lr=0.5),
        [[1.0 - 1.5 * LOW, 2.0], [3.0, 4.0 - LOW]],
    ),
    "sparseloco_mean_over_peers": (
        lambda: presets.sparseloco(inner_steps=1, k=1, tile=2, mean_over="peers"),
        [[1.0 - 1.5 * LOW, 2.0], [3.0, 4.0 - LOW]],
    ),
    "demo": (lambda: presets.demo(lr=0.5, k=4, tile=2), [[0.5, 1.5], [3.5, 3.5]]),
    # Mean magnitudes 0.46875 and 0.53125 after lr; zero counts as positive.
    "ef_signsgd": (lambda: presets.ef_signsgd(lr=0.5), [[0.5, 1.5], [3.03125, 3.5]]),
    "powersgd": (lambda: presets.powersgd(lr=0.5), [[0.0, 1.75], [3.125, 3.5]]),
    # One level: the kept value itself.
    "qsparse_local_sgd": (
        lambda: presets.qsparse_local_sgd(inner_steps=1, k=1, chunk_size=4, levels=1),
        [[-0.5, 2.0], [3.0, 3.0]],
    ),
}


def one_round(algorithm: Algorithm, deltas: Tensor) -> list[Replica]:
    """Replicas of one matrix after a round in which replica r went by ``-deltas[r]``, or had it as gradient."""
    replicas = [Replica(Point(START), algorithm, peer=r) for r in range(len(deltas))]
    inbox: list[Envelope] = []
    for replica, delta in zip(replicas, deltas, strict=True):
        theta = replica.params["theta"]
        if algorithm.local.name == "gradients":
            theta.grad = delta.clone()
        else:
            theta.data.sub_(delta)
        replica.stepped()
        inbox += replica.outbox()
    for replica in replicas:
        for key in replica.due():
            replica.apply(key, inbox)
    return replicas


@pytest.mark.parametrize("row", list(ONE_STEP))
def test_one_step_in_closed_form_c01_c15(row: str) -> None:
    """C-01, C-15: two workers, known deltas, exact weights; a flipped sign or a second lr cannot hide."""
    make, expected = ONE_STEP[row]
    for replica in one_round(make(), DELTAS):
        assert torch.equal(replica.anchor()["theta"], torch.tensor(expected))


def test_every_preset_has_a_closed_form() -> None:
    assert set(presets.PRESETS) <= set(ONE_STEP)


def test_blend_in_closed_form_c01() -> None:
    """C-01: live = (1 - alpha) * new anchor + alpha * own live, and the anchor itself is not blended."""
    algorithm = presets.streaming_diloco(
        inner_steps=1, num_fragments=1, fragment_by="size", delay=0, alpha=0.25, bits=32, outer_lr=1.0,
        outer_momentum=0.0,
    )  # fmt: skip
    replicas = one_round(algorithm, DELTAS)
    new = torch.tensor([[-1.0, 1.5], [3.25, 3.0]])
    for replica, delta in zip(replicas, DELTAS, strict=True):
        assert torch.equal(replica.anchor()["theta"], new)
        assert torch.equal(replica.params["theta"].data, 0.75 * new + 0.25 * (torch.tensor(START) - delta))


CONSERVING: dict[str, Callable[[], Algorithm]] = {
    "sparseloco": lambda: presets.sparseloco(inner_steps=2, k=3, tile=4, decay=1.0, mean_over="peers", inner=INNER),
    "local_sgd": lambda: presets.local_sgd(inner_steps=2, inner=INNER),
    "ef_signsgd": lambda: presets.ef_signsgd(lr=0.01),
    "powersgd": lambda: presets.powersgd(lr=1.0, rank=2, momentum=0.0),
    "qsparse_local_sgd": lambda: presets.qsparse_local_sgd(inner_steps=2, k=3, chunk_size=16, inner=INNER),
}
"""Methods with decay 1, or without error feedback, whose outer step is 1 times the mean."""


class Ledger:
    """Sums over rounds, by tensor."""

    def __init__(self, replica: Replica) -> None:
        self.total = {name: torch.zeros_like(p) for name, p in replica.params.items()}

    def add(self, values: dict[str, Tensor], weight: float = 1.0) -> None:
        for name, value in values.items():
            self.total[name] += weight * value

    def minus(self, *others: dict[str, Tensor]) -> float:
        """Largest difference to the sum of ``others``."""
        return max(float((t - sum(other[name] for other in others)).abs().max()) for name, t in self.total.items())


@pytest.mark.parametrize("row", list(CONSERVING))
def test_moved_is_applied_plus_residual_when_payloads_are_dropped(row: str) -> None:
    """Decay 1: what a peer went, it sent and it was applied, or it is still owed. Float64, so 1e-12 is rounding."""
    peers = [Peer(CONSERVING[row](), r, toy.net(F64)) for r in range(3)]
    moved, applied = ([Ledger(peer.replica) for peer in peers] for _ in range(2))
    of_anchor, start = Ledger(peers[0].replica), peers[0].replica.anchor()
    for step in range(1, 25):
        posted = [envelope for peer, ledger in zip(peers, moved, strict=True) for envelope in _step(peer, ledger)]
        inbox = [envelope for envelope in posted if (step + envelope.peer) % 3]  # every third of a peer's is lost
        for envelope in inbox:
            values = _decode(peers[0].replica, envelope)
            applied[envelope.peer].add(values)
            of_anchor.add(values, 1 / len(inbox))
        for peer in peers:
            for key in peer.replica.due():
                peer.replica.apply(key, inbox)
    assert len({peer.replica.digest() for peer in peers}) == 1
    for peer, went, gave in zip(peers, moved, applied, strict=True):
        assert went.minus(gave.total, _residual_tensors(peer.replica)) <= 1e-12
    of_anchor.add(peers[0].replica.anchor())
    assert of_anchor.minus(start) <= 1e-12
    assert any(owed.any() for peer in peers for owed in _residual_tensors(peer.replica).values())


def _step(peer: Peer, moved: Ledger) -> list[Envelope]:
    """Inner step and outbox; what the replica went is written down without the library's help."""
    replica, local = peer.replica, peer.replica.algorithm.local
    toy.loss_of(peer.model, toy.batch(replica.step + 1, replica.peer, peer.dtype)).backward()
    grads = {name: p.grad.clone() for name, p in replica.params.items() if p.grad is not None}
    replica.local_step()
    if local.name == "gradients":
        moved.add(grads, getattr(local, "scale", 1.0))
    elif replica.algorithm.schedule.posts(replica.step, 0):
        moved.add({name: value - replica.params[name].data for name, value in replica.anchor().items()})
    return replica.outbox()


def _decode(replica: Replica, envelope: Envelope) -> dict[str, Tensor]:
    """What a payload adds to a mean, tensor by tensor, at the shared state of this moment."""
    lane = replica.lanes[0]
    channel, state = lane.channel, lane.state
    blocks = [torch.zeros_like(block) for block in state.anchor]
    for j, block in enumerate(blocks):
        channel.compressor.accumulate_(block, envelope.payload.blocks[j], 1, state.codec[j])
    return {
        spec.name: channel.layout.inverse(tuple(blocks[j] for j in span), spec.shape)
        for spec, span in zip(state.specs, state.spans, strict=True)
    }


def _residual_tensors(replica: Replica) -> dict[str, Tensor]:
    lane = replica.lanes[0]
    state = lane.state
    blocks = state.residual or [torch.zeros_like(block) for block in state.anchor]
    return {
        spec.name: lane.channel.layout.inverse(tuple(blocks[j] for j in span), spec.shape)
        for spec, span in zip(state.specs, state.spans, strict=True)
    }


@pytest.mark.parametrize("row", ["sparseloco", "diloco", "streaming_diloco"])
def test_delta_that_is_not_finite_never_leaves_c06(row: str) -> None:
    """C-06: the error names the tensor, nothing has changed, and reset() gives a fresh start, said aloud."""
    peer = Peer(ROWS[row](), nonfinite="stop")
    lockstep([peer], 3 if row != "streaming_diloco" else 5, {})
    replica = peer.replica
    toy.loss_of(peer.model, toy.batch(99, 0)).backward()
    replica.local_step()
    assert all(state for state in replica.optimizer.state.values())
    peer.model[0].weight.data[1, 2] = float("nan")
    peer.model[2].bias.data[1] = float("inf")
    while not replica.algorithm.schedule.posts(replica.step, 0):
        replica.stepped()
    digest, rest, flying = replica.digest(), residual(replica), replica.in_flight()
    # The second fragment missed its post above, so it is due as well, and looked at before anything is encoded.
    named = "2.bias" if row == "streaming_diloco" else "0.weight"
    told = f"delta of {named}=not finite: must be finite (below 1e+37) to leave its replica"
    with pytest.raises(DivergenceError, match=re.escape(told)):
        replica.outbox()
    assert replica.digest() == digest
    assert replica.in_flight() == flying
    assert all(torch.equal(block, rest[path]) for path, block in residual(replica).items())
    with pytest.warns(UserWarning, match="peer 0: parameters were reset to the anchor and inner optimizer state"):
        replica.reset()
    assert not replica.optimizer.state
    assert all(torch.equal(replica.anchor()[name], p.data) for name, p in replica.params.items())
    assert [envelope.key for envelope in replica.outbox()]


def test_all_deltas_are_checked_before_the_first_is_sent_c06() -> None:
    """C-06: parameters are fine, a synced buffer is not: nothing is posted, nothing has changed."""
    peer = Peer(with_synced_buffers(ROWS["sparseloco"]()), 0, toy.batch_norm_net(), nonfinite="stop")
    for _ in range(3):
        assert peer.step() == []
    peer.model[1].running_mean.fill_(float("nan"))
    with pytest.raises(DivergenceError, match=r"delta of 1\.running_mean=not finite"):
        peer.step()
    assert peer.replica.in_flight() == []
    assert all(not block.any() for block in residual(peer.replica).values())


def test_reset_with_a_message_in_flight_keeps_no_progress() -> None:
    """The progress since the post is gone; what was posted before is not taken back."""
    peers = [Peer(ROWS["sparseloco_delayed"](), r) for r in range(2)]
    mail: dict = {}
    lockstep(peers, 5, mail)
    assert peers[0].replica.in_flight()
    with pytest.warns(UserWarning, match="were reset"):
        peers[0].replica.reset()
    peers[0].replica.stepped()
    lockstep([peers[1]], 1, mail)
    peers[0].settle(mail)
    assert all(torch.equal(peers[0].replica.anchor()[n], p.data) for n, p in peers[0].replica.params.items())
    assert peers[0].replica.digest() == peers[1].replica.digest()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1e38])
def test_payload_that_is_not_finite_never_reaches_an_anchor_c06(number: float) -> None:
    """C-06: the error names peer and tensor; without that payload the round goes on."""
    peers = [Peer(ROWS["diloco"](), r) for r in range(3)]
    inbox = [[peer.step() for peer in peers] for _ in range(4)][-1]
    good = [envelope for posted in inbox for envelope in posted]
    broken = {3: {"value": torch.full_like(good[1].payload.blocks[3]["value"], number)}}
    payload = replace(good[1].payload, sections={**good[1].payload.sections, **broken})
    bad = [good[0], replace(good[1], payload=payload), good[2]]
    before = peers[0].replica.digest()
    with pytest.raises(DivergenceError, match=r"payload of peer 1, round 0, 2\.bias=not finite.*leave that peer out"):
        peers[0].replica.apply(good[0].key, bad)
    assert peers[0].replica.digest() == before
    for peer in peers:
        peer.replica.apply(good[0].key, [good[0], good[2]])
    assert len({peer.replica.digest() for peer in peers}) == 1


def test_idle_bf16_replica_has_a_delta_of_exactly_zero() -> None:
    """The anchor is float32 and no bf16 number, so a difference to it would not be zero."""
    peers = [Peer(presets.diloco(inner_steps=1, inner=INNER), r, toy.net(torch.bfloat16)) for r in range(2)]
    lockstep(peers, 2, {})
    replica = peers[0].replica
    assert any(not torch.equal(a, a.bfloat16().float()) for a in replica.anchor().values())
    replica.stepped()
    (envelope,) = replica.outbox()
    assert all(part.dtype == torch.float32 and not part.any() for part in envelope.payload.tensors.values())


def test_idle_bf16_replica_leaves_its_residual_alone() -> None:
    algorithm = presets.sparseloco(inner_steps=1, k=3, tile=4, decay=1.0, values="float32", inner=INNER)
    peers = [Peer(algorithm, r, toy.net(torch.bfloat16)) for r in range(2)]
    lockstep(peers, 2, {})
    replica = peers[0].replica
    before = _residual_tensors(replica)
    replica.stepped()
    (envelope,) = replica.outbox()
    sent, after = _decode(replica, envelope), _residual_tensors(replica)
    assert all(torch.equal(before[name], after[name] + sent[name]) for name in before)
