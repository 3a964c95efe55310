"""Models inside wrappers: names, states and rounds are those of the model itself. C-56 for ``torch.compile``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from sparseloco import presets
from sparseloco.replica import Replica
from sparseloco.session import synchronize
from sparseloco.sharding import local_views, own_name
from sparseloco.transport import Loopback
from tests import toy

ROUNDS, INNER_STEPS = 4, 2


def as_it_is(model: Any) -> Any:
    return model


def compiled(model: Any) -> Any:
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(model, backend="aot_eager")


def compiled_in_parts(model: Any) -> Any:
    torch._dynamo.reset()
    counters.clear()
    model[0] = torch.compile(model[0], backend="eager")
    return model


WRAPPERS = {"compiled": compiled, "compiled in parts": compiled_in_parts}


def trained(wrap: Callable[[Any], Any], model: nn.Module, late: bool = False) -> tuple[Replica, list[int]]:
    """A replica after four rounds by itself, and the graphs that were compiled by the end of each step.

    Args:
        wrap: What wraps the model.
        model: As it was made.
        late: Wrap it when the replica exists already.
    """
    module = model if late else wrap(model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=False)
    graphs: list[int] = []
    algorithm = presets.sparseloco(inner_steps=INNER_STEPS)
    with (
        warnings.catch_warnings(action="ignore"),  # one replica alone, with buffers of its own
        synchronize(module, optimizer, algorithm, Loopback(1)) as replica,
    ):
        run = wrap(model) if late else module
        for step in range(1, ROUNDS * INNER_STEPS + 1):
            toy.loss_of(run, toy.batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            graphs.append(counters["stats"]["unique_graphs"])
    return replica, graphs


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_rounds_of_a_compiled_model(kind: str, late: bool) -> None:
    """The same table, digests and residual, whoever compiled and when; nothing is compiled again after the first."""
    plain, _ = trained(as_it_is, toy.net())
    replica, graphs = trained(WRAPPERS[kind], toy.net(), late)
    assert replica.fingerprint == plain.fingerprint
    assert list(replica.params) == list(plain.params) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert replica.digest() == plain.digest()
    assert replica.residual_norm() == plain.residual_norm() > 0
    assert graphs == [1] * (ROUNDS * INNER_STEPS)
    assert not counters["recompiles"]


@pytest.mark.parametrize("kind", WRAPPERS)
def test_states_pass_between_compiled_and_plain_models(kind: str) -> None:
    """Buffers included: what the compiled model saved is loaded by the plain one, and the other way round."""
    old, _ = trained(WRAPPERS[kind], toy.batch_norm_net())
    model = toy.batch_norm_net()
    with pytest.warns(UserWarning, match=r"buffers=\['1.running_mean', '1.running_var'\]"):
        new = Replica(model, old.algorithm)
    new.load_shared_state(old.shared_state())
    new.load_private_state(old.private_state())
    assert new.digest() == old.digest()
    assert new.fixed_digests() == old.fixed_digests()
    mine, theirs = new.private_state(), old.private_state()
    assert mine.keys() == theirs.keys()
    tensors = [path for path, value in theirs.items() if isinstance(value, torch.Tensor)]
    assert {"buffer/1.running_mean", "live/0.weight", "residual/0.weight/0"} <= set(tensors)
    assert [path for path in tensors if not torch.equal(mine[path], theirs[path])] == []
    old.load_shared_state(new.shared_state())
    assert old.digest() == new.digest()


def test_names_without_what_wrappers_insert() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert own_name(model, "0._orig_mod.weight") == "0.weight"
    assert own_name(model, "0._checkpoint_wrapped_module._orig_mod.weight") == "0.weight"
    assert own_name(model, "module.weight") == "module.weight"


def test_parameters_of_a_checkpoint_wrapper_keep_their_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = toy.net()
    model.register_module("0", checkpoint_wrapper(model.get_submodule("0")))
    assert list(local_views(model)) == ["0.weight", "0.bias", "2.weight", "2.bias"]
