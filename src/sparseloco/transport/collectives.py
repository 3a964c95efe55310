"""Collectives of bytes and numbers over one group of ``torch.distributed``, each with a deadline and a guard.

Nothing here is a floating-point reduction. Buffers lie where the backend of the group wants them: on the card of this
rank for NCCL, else in main memory, page-locked where there is a card, so that copies run on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sparseloco.transport.beats import Guard
from sparseloco.transport.deadline import Deadline


def _card() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


CARD_OF: dict[str, Callable[[], torch.device]] = {"nccl": _card}
"""Backends whose collectives take tensors on a card alone, with the card of this rank."""


def buffer_device(backend: str) -> torch.device:
    """Where the buffers of a group with this backend lie.

    Example:
        >>> buffer_device("gloo")
        device(type='cpu')
    """
    return CARD_OF.get(backend, lambda: torch.device("cpu"))()


class Collectives:
    """What the ranks of one group tell each other.

    Args:
        group: None for the default one.
        deadline: How long any of them is waited for.
        guard: Names who is gone if a collective fails.

    Attributes:
        size: Ranks of the group.
        device: Where buffers lie.
    """

    def __init__(self, group: dist.ProcessGroup | None, deadline: Deadline, guard: Guard) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.device = buffer_device(dist.get_backend(group))
        self._patience = timedelta(seconds=deadline.collective_s)
        self._guard = guard

    def start_gather(self, data: bytes) -> tuple[list[Tensor], dist.Work]:
        """Begin to gather bytes, as many at every rank; the tensors, by rank, are filled once the work is done."""
        mine = self._up(torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8)))
        frames = list(torch.empty(self.size, len(data), dtype=torch.uint8, device=self.device).unbind())
        with self._guard():
            work = dist.all_gather(frames, mine, group=self.group, async_op=True)
        assert work is not None
        return frames, work

    def wait(self, works: Sequence[dist.Work]) -> None:
        """Until all of them are done.

        Raises:
            PeerLostError: if one fails or the deadline is over.
        """
        with self._guard():
            for work in works:
                work.wait(self._patience)

    def gather(self, data: bytes) -> list[bytes]:
        """Bytes of all ranks, as many at each."""
        frames, work = self.start_gather(data)
        self.wait([work])
        return [down(frame) for frame in frames]

    def gather_any(self, data: bytes) -> list[bytes]:
        """Bytes of all ranks, of any length: lengths first, then everybody's padded to the longest."""
        lengths = [int.from_bytes(row, "little") for row in self.gather(len(data).to_bytes(8, "little"))]
        longest = max(lengths)
        rows = self.gather(data.ljust(longest, b"\0")) if longest else [b""] * self.size
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def start_slices(self, parts: Sequence[Tensor]) -> tuple[Tensor, dist.Work]:
        """Begin to send slice r of tensors of one type, laid end to end, to rank r.

        Returns:
            ``[ranks, slice]``, whose row p will be what rank p sent here, and the work.
        """
        flat = torch.cat([self._up(part).reshape(-1) for part in parts])
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % self.size))
        out = torch.empty_like(padded)
        with self._guard():
            work = dist.all_to_all_single(out, padded, group=self.group, async_op=True)
        assert work is not None
        return out.view(self.size, -1), work

    def gather_slices(self, mine: Tensor) -> Tensor:
        """Slices of all ranks, laid end to end."""
        whole = [torch.empty_like(mine) for _ in range(self.size)]
        with self._guard():
            work = dist.all_gather(whole, mine, group=self.group, async_op=True)
        assert work is not None
        self.wait([work])
        return torch.cat(whole)

    def _up(self, tensor: Tensor) -> Tensor:
        """The same values where the buffers lie; one copy, and none if they are there."""
        if tensor.device == self.device:
            return tensor
        if self.device.type == "cpu":
            return to_host(tensor)
        return tensor.to(self.device)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in main memory, page-locked where there is a card of CUDA."""
    if not torch.cuda.is_available():
        return tensor.to("cpu")
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor)


def down(tensor: Tensor) -> bytes:
    """Bytes of a buffer."""
    return tensor.cpu().numpy().tobytes()
