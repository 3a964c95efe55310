"""State of an inner optimizer as plain tensors: on a shard, the rows of the moments that it holds."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from sparseloco.sharding import plain, wrapped


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A copy of the optimizer's ``state_dict`` with the local part of every tensor."""
    found = optimizer.state_dict()
    moments = {
        number: {name: _copied(value) for name, value in values.items()} for number, values in found["state"].items()
    }
    return {"state": moments, "param_groups": copy.deepcopy(found["param_groups"])}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what :func:`optimizer_state` returned, with the types it has: torch alone would cast to the parameters'.

    A tensor of the shape of the local part of its parameter is sharded as the parameter is.
    """
    optimizer.load_state_dict(copy.deepcopy(state))  # torch would share its tensors
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, values in state["state"].items():
        param = params[number]
        optimizer.state[param] = {name: _like(value, param) for name, value in values.items()}


def _copied(value: Any) -> Any:
    return plain(value).clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _like(value: Any, param: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    here = value.to(param.device) if value.ndim else value  # counters stay where torch keeps them
    return wrapped(here, param) if here.shape == plain(param).shape else here.clone()
