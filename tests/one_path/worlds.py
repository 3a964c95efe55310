"""The same training in two worlds: replicas of one process, and ranks of a gloo group."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparseloco import ProcessGroup, SparseLocoError, adamw, advance, presets, settle
from sparseloco.replica import Replica
from sparseloco.simulate import Cohort, replica_rng_state
from tests import toy
from tests.driver import ROWS, with_synced_buffers

MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": toy.dropout_net,
    "batch_norm": toy.batch_norm_net,
}


@dataclass(frozen=True)
class Outcome:
    """All that two worlds must have in common after the same steps."""

    digest: str
    private: dict[str, Tensor]
    update_norms: list[float]
    absent: list[int]


def algorithm_of(row: str, model: str) -> Any:
    return with_synced_buffers(ROWS[row]()) if model == "batch_norm" else ROWS[row]()


def weight_of(peer: int, step: int) -> int:
    """Weights that differ by peer and change on the way."""
    return 1 + peer + step // 5


def private_tensors(replica: Replica) -> dict[str, Tensor]:
    """Live parameters and residual."""
    return {path: value for path, value in replica.private_state().items() if isinstance(value, Tensor)}


Bad = tuple[int, int] | None
"""Step and peer at which a gradient is not a number."""


def backward(model: nn.Module, step: int, peer: int, bad: Bad) -> None:
    toy.loss_of(model, toy.batch(step, peer)).backward()
    if bad == (step, peer):
        for param in model.parameters():
            assert param.grad is not None
            param.grad.view(-1)[0] = float("nan")


def in_one_process(row: str, model: str, peers: int, steps: int, bad: Bad = None) -> list[Outcome]:
    cohort = Cohort(MODELS[model](), algorithm_of(row, model), peers)
    norms: list[list[float]] = [[] for _ in range(peers)]
    absent: list[list[int]] = [[] for _ in range(peers)]
    for step in range(1, steps + 1):
        for peer in range(peers):
            with cohort.turn(peer) as replica:
                replica.weight = weight_of(peer, step)
                backward(cohort.model, step, peer, bad)
                cohort.advance(peer)
        for peer in range(peers):
            with cohort.turn(peer) as replica:
                norms[peer] += [replica.apply(key, cohort.transport.collect(key)) for key in replica.due()]
                absent[peer] += [absence.peer for absence in replica.absent]
    outcomes = []
    for peer in range(peers):
        with cohort.turn(peer) as replica:
            outcomes.append(Outcome(replica.digest(), private_tensors(replica), norms[peer], absent[peer]))
    return outcomes


def on_a_rank(rank: int, row: str, model_name: str, steps: int, bad: Bad = None) -> Outcome:
    model = MODELS[model_name]()
    replica = Replica(model, algorithm_of(row, model_name), peer=rank)
    transport = ProcessGroup()
    torch.set_rng_state(replica_rng_state(0, rank))
    norms: list[float] = []
    absent: list[int] = []
    for step in range(1, steps + 1):
        replica.weight = weight_of(rank, step)
        backward(model, step, rank, bad)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*contributes nothing", UserWarning)
            advance(replica, transport)
        norms += [replica.apply(key, transport.collect(key)) for key in replica.due()]
        absent += [absence.peer for absence in replica.absent]
    return Outcome(replica.digest(), private_tensors(replica), norms, absent)


def traffic_on_a_rank(rank: int, row: str, steps: int) -> tuple[int, int]:
    model = toy.net()
    replica, transport = Replica(model, ROWS[row](), peer=rank), ProcessGroup()
    for step in range(1, steps + 1):
        toy.loss_of(model, toy.batch(step, rank)).backward()
        advance(replica, transport)
        settle(replica, transport)
    return transport.traffic(rank)


def refusal(rank: int, odd: str) -> str:
    """Text of the error with which a rank refuses to start beside one that has something ``odd``."""
    model = toy.net()
    outer_lr = 0.5 if odd == "algorithm" and rank == 1 else 0.7
    if odd == "weights" and rank == 1:
        with torch.no_grad():
            model[2].bias[3] += 1e-6  # pyright: ignore
    algorithm = presets.diloco(inner_steps=2, outer_lr=outer_lr, inner=adamw(1e-2))
    replica = Replica(model, algorithm, peer=rank)
    try:
        ProcessGroup().connect(replica)
    except SparseLocoError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def wrong_peer_number(rank: int) -> str:
    replica = Replica(toy.net(), ROWS["diloco"](), peer=1 - rank)
    try:
        ProcessGroup().connect(replica)
    except SparseLocoError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def fails_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("on purpose")
    torch.distributed.barrier()
