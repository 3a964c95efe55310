"""The state that ``torch.distributed.checkpoint`` is given, without it: every method, and what is refused."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparseloco import adamw, presets
from sparseloco.algorithm import Algorithm
from sparseloco.dcp import ReplicaState
from sparseloco.errors import CheckpointError, ConfigError
from sparseloco.outer import TorchOptimizer
from sparseloco.replica import Replica
from sparseloco.transport import Loopback, post_due, settle
from tests import toy

ALGORITHMS: dict[str, Algorithm] = {
    "ddp": presets.ddp(),
    "local_sgd": presets.local_sgd(inner_steps=2),
    "diloco": presets.diloco(inner_steps=2),
    "streaming_diloco": presets.streaming_diloco(inner_steps=4, num_fragments=2, fragment_by="size"),
    "sparseloco": presets.sparseloco(inner_steps=2, k=3, tile=4),
    "demo": presets.demo(),
    "ef_signsgd": presets.ef_signsgd(),
    "qsparse_local_sgd": presets.qsparse_local_sgd(inner_steps=2),
    "outer adamw": replace(presets.diloco(inner_steps=2), outer=TorchOptimizer(adamw(0.1))),
    "synced buffers": replace(presets.diloco(inner_steps=2), sync_buffers=True),
}


def cohort(algorithm: Algorithm) -> tuple[list[Replica], list[nn.Module]]:
    models = [toy.batch_norm_net() for _ in range(2)]
    with warnings.catch_warnings(action="ignore"):  # of buffers that stay private
        return [Replica(model, algorithm, peer=peer) for peer, model in enumerate(models)], models


def train(replicas: list[Replica], models: list[nn.Module], first: int, last: int) -> None:
    transport = Loopback(2)
    for replica in replicas:
        transport.connect(replica)
    for step in range(first, last + 1):
        for replica, model in zip(replicas, models, strict=True):
            toy.loss_of(model, toy.batch(step, replica.peer)).backward()
            with torch.no_grad():
                if replica.algorithm.local.name == "inner_steps":
                    descend(replica)
                replica.stepped()
                post_due(replica, transport)
        for replica in replicas:
            with torch.no_grad():
                settle(replica, transport)


def descend(replica: Replica) -> None:
    for param in replica.params.values():
        assert param.grad is not None
        param.sub_(0.1 * param.grad)
        param.grad = None


def hand_over(old: Replica, new: Replica) -> None:
    """As DCP does: what the new one offers is filled in place with what lies at the same paths, of the same kind."""
    source, target = ReplicaState(old).state_dict(), ReplicaState(new).state_dict()
    assert source.keys() == target.keys() == {"shared", f"peer-{old.peer:04d}"}
    for part, tensors in target.items():
        assert tensors.keys() == source[part].keys()
        for path, tensor in tensors.items():
            assert (tensor.shape, tensor.dtype) == (source[part][path].shape, source[part][path].dtype), path
            tensor.copy_(source[part][path])
    ReplicaState(new).load_state_dict(target)


@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_new_replica_takes_over(name: str, steps: int) -> None:
    """All of shared and private state, before the first round and after some, and the rounds that follow."""
    (old, old_models), (new, new_models) = cohort(ALGORITHMS[name]), cohort(ALGORITHMS[name])
    train(old, old_models, 1, steps)
    for giver, taker in zip(old, new, strict=True):
        hand_over(giver, taker)
        assert taker.digest() == giver.digest()
        assert_same(taker.shared_state(), giver.shared_state())
        assert_same(taker.private_state(), giver.private_state())
    train(old, old_models, steps + 1, steps + 4)
    train(new, new_models, steps + 1, steps + 4)
    assert new[0].digest() == new[1].digest() == old[0].digest()


@pytest.mark.parametrize("cause", ["loss", "delta of " + 300 * "\N{GREEK SMALL LETTER ALPHA}"])
@pytest.mark.parametrize("name", ["sparseloco", "streaming_diloco"])
def test_a_replica_that_abstains_goes_on_abstaining(name: str, cause: str) -> None:
    """A cause that is too long is cut; what was loaded is loaded into a replica that abstained, as well."""
    (old, old_models), (new, _) = cohort(ALGORITHMS[name]), cohort(ALGORITHMS[name])
    train(old, old_models, 1, 5)
    with pytest.warns(UserWarning, match="contributes nothing"):
        old[1].abstain(cause)
    hand_over(old[1], new[1])
    assert new[1].is_abstaining
    kept = {path: value for path, value in new[1].private_state().items() if path.startswith("abstains/")}
    assert kept
    assert all(value and cause.startswith(value) for value in kept.values())
    hand_over(old[0], other := cohort(ALGORITHMS[name])[0][0])
    assert not other.is_abstaining
    with pytest.warns(UserWarning, match="contributes nothing"):
        other.abstain(cause)
    hand_over(old[0], other)
    assert not other.is_abstaining


def assert_same(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine.keys() == theirs.keys()
    for path, value in mine.items():
        equal = torch.equal(value, theirs[path]) if isinstance(value, Tensor) else value == theirs[path]
        assert equal, path


def test_state_is_in_the_parameters_own_shapes() -> None:
    replicas, models = cohort(ALGORITHMS["sparseloco"])
    train(replicas, models, 1, 3)
    state = ReplicaState(replicas[1]).state_dict()
    for name, param in replicas[1].params.items():
        assert torch.equal(state["shared"][f"anchor/{name}"], replicas[1].anchor()[name])
        assert torch.equal(state["peer-0001"][f"live/{name}"], param)
        assert state["peer-0001"][f"residual/{name}"].shape == param.shape


def test_a_snapshot_is_a_copy() -> None:
    (replica, _), _ = cohort(ALGORITHMS["diloco"])
    state = ReplicaState(replica).state_dict()
    before = {path: tensor.clone() for path, tensor in state["peer-0000"].items()}
    with torch.no_grad():
        for param in replica.params.values():
            param.add_(1)
    assert [path for path, tensor in before.items() if not torch.equal(state["peer-0000"][path], tensor)] == []


def test_another_algorithm_is_refused() -> None:
    (old, _), _ = cohort(presets.sparseloco(inner_steps=2))
    (new, _), _ = cohort(presets.sparseloco(inner_steps=3))
    digest = new.digest()
    with pytest.raises(CheckpointError, match=rf"fingerprint='{old.fingerprint}': must be '{new.fingerprint}'"):
        ReplicaState(new).load_state_dict(ReplicaState(old).state_dict())
    assert new.digest() == digest


def test_an_optimizer_of_the_replica_is_refused() -> None:
    replica = Replica(toy.net(), presets.sparseloco(inner=adamw()))
    message = (
        "algorithm.local.optimizer=set: must be None here, since an optimizer that has made no step yet has nothing "
        "for DCP to load into; make the optimizer in the loop and save it with the model"
    )
    with pytest.raises(ConfigError) as error:
        ReplicaState(replica)
    assert str(error.value) == message


def test_a_compressor_with_state_is_refused() -> None:
    message = (
        "compressor='low_rank': must keep no state of its own, since its shape changes from round to round and DCP "
        "loads into shapes that are known; save with sparseloco.checkpoint"
    )
    with pytest.raises(CheckpointError) as error:
        ReplicaState(Replica(toy.net(), presets.powersgd())).state_dict()
    assert str(error.value) == message


def test_an_undelivered_message_without_error_feedback_is_refused() -> None:
    """Its credit is a residual that such a method does not have otherwise."""
    (replica, _), (model, _) = cohort(ALGORITHMS["diloco"])
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
        replica.stepped()
        replica.stepped()
        (envelope,) = replica.outbox()
        replica.apply(envelope.key, [])
    message = r"^residual=an undelivered message: must have been sent before DCP saves; save after the next round$"
    with pytest.raises(CheckpointError, match=message):
        ReplicaState(replica).state_dict()
