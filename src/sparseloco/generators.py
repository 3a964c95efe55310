"""Random state of the devices that a model lives on, beside torch's CPU generator: saved and set, never drawn from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_WITHOUT = ("cpu", "meta")


def devices_of(tensors: Iterable[Tensor]) -> list[torch.device]:
    """Devices other than the CPU on which tensors lie and that have a random generator, in order of appearance."""
    found = dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type not in _WITHOUT)
    return [device for device in found if hasattr(torch.get_device_module(device), "get_rng_state")]


def states_of(devices: Sequence[torch.device]) -> list[Tensor]:
    """State of the generator of each device, uint8 on the CPU."""
    return [torch.get_device_module(device).get_rng_state(*_argument(device)).cpu() for device in devices]


def set_states(devices: Sequence[torch.device], states: Sequence[Tensor]) -> None:
    """Set the generators again, by position: a replica may come back on another device of the same kind.

    Where there are more devices than states, the others keep theirs, and the other way round: a run may go on without
    a GPU, or on one that it did not have before.
    """
    for device, state in zip(devices, states, strict=False):
        torch.get_device_module(device).set_rng_state(state, *_argument(device))


def _argument(device: torch.device) -> list[torch.device]:
    """MPS has one device and does not ask for it."""
    return [] if device.type == "mps" else [device]
