"""Where a replica keeps its state, and how live values get there and back; knows nothing of what is done with them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

STORAGES = ("device", "host")


def is_elsewhere(tensor: Tensor) -> bool:
    """Whether a tensor is not in host memory."""
    return tensor.device.type != "cpu"


@dataclass(frozen=True)
class Staging:
    """Live values in the memory of the state.

    Copies keep strides and types, live as long as they are used, and are pinned where that makes a transfer faster.

    Args:
        storage: ``device``: state lies where the live values are, and nothing is copied. ``host``: it lies in host
            memory, and live values are copied there whenever a fragment is posted or settled.
    """

    storage: str = "device"

    def home(self, tensor: Tensor) -> Tensor:
        """The same values where the state lies; the tensor itself if it is there."""
        if self.storage == "device" or not is_elsewhere(tensor):
            return tensor
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)

    def kept(self, tensor: Tensor) -> Tensor:
        """A copy where the state lies, whatever happens to the tensor."""
        home = self.home(tensor)
        return tensor.clone() if home is tensor else home

    @contextmanager
    def lent(self, tensors: Sequence[Tensor]) -> Generator[list[Tensor]]:
        """The values of ``tensors`` where the state lies, to be changed in place; they go back when the block ends.

        If it fails, nothing goes back.
        """
        lent = [self.home(tensor) for tensor in tensors]
        yield lent
        for tensor, home in zip(tensors, lent, strict=True):
            if home is not tensor:
                tensor.copy_(home)
