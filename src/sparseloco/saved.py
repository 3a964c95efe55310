"""What a replica checks of saved state before it takes it over, and how an inner optimizer takes over its own."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from sparseloco.bits import hex_digest
from sparseloco.errors import CheckpointError
from sparseloco.kernels.fast import digest_tensors
from sparseloco.lane import StateDict
from sparseloco.types import state_dtype


def expect(name: str, found: object, wanted: object, remedy: str) -> None:
    """Refuse state of something else.

    Raises:
        CheckpointError: naming what differs.
    """
    if found != wanted:
        raise CheckpointError(f"{name}={found!r}: must be {wanted!r}; {remedy}")


def expect_all_blocks(state: StateDict) -> None:
    """Refuse shared state that has lost blocks.

    Raises:
        CheckpointError: with both numbers.
    """
    found, saved = count_blocks(state), state.get("blocks")
    if saved is None:
        raise CheckpointError(
            f"blocks=missing: must be in shared state and say how many blocks it holds, here {found}; "
            "load what shared_state() returned"
        )
    if found != saved:
        raise CheckpointError(
            f"blocks={saved}: must be the number of blocks in shared state, which holds {found}; load a complete one"
        )


def count_blocks(state: StateDict) -> int:
    """Tensors of shared state."""
    return sum(path.startswith(("anchor/", "outer/", "codec/")) for path in state)


def load_optimizer(optimizer: torch.optim.Optimizer, state: StateDict) -> None:
    """Load a state dict with the types it has: torch alone would cast it to those of the parameters."""
    optimizer.load_state_dict(copy.deepcopy(state))  # torch would share its tensors
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, saved in state["state"].items():
        optimizer.state[params[number]] = copy.deepcopy(saved)


def digest_of_any(tensor: Tensor) -> str:
    """32 hex digits over a tensor of any type, made of its numbers in items of four or eight bytes."""
    if tensor.is_complex():
        whole = torch.view_as_real(tensor.to(torch.complex128))
    else:
        whole = tensor.to(state_dtype(tensor.dtype) if tensor.is_floating_point() else torch.int64)
    return hex_digest(*digest_tensors([("", whole)]))
