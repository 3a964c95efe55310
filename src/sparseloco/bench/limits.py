"""The limits: the fewest passes over memory that any implementation must make, and nothing else.

Encode has to read start, live parameters and residual, and to write the residual. Decode has to read and write the
anchor, and to write the live parameters. Native passes are used where there are any; else torch calls in place on
pieces small enough to stay in the last cache between calls, which come close.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseloco.bench.problem import CHUNK
from sparseloco.kernels import native, native_settle
from sparseloco.kernels.geometry import TileGeometry

_PIECE = 1 << 18
"""Values in a piece: 1 MiB of float32, so that three operands stay in cache and the calls' own cost does not show."""


def used() -> str:
    """Which passes are measured, in words."""
    return "native" if native.available() else "torch in place"


def ef_pass(residual: Tensor, start: Tensor, live: Tensor, decay: float) -> None:
    """``residual <- decay * residual + (start - live)``, on contiguous tensors of the same number of values."""
    if native.available():
        rows = (start.view(-1, CHUNK), live.view(-1), residual.view(-1, CHUNK))
        block = native.EncoderBlock(*rows, geometry=_in_memory_order(live), kept=1)
        native.ef_pass([block], decay=decay, threads=torch.get_num_threads())
        return
    for r, s, p in zip(_pieces(residual), _pieces(start), _pieces(live), strict=True):
        r.mul_(decay).add_(s).sub_(p)


def apply_pass(anchor: Tensor, live: Tensor, step: float) -> None:
    """Read and write ``anchor`` and write it to ``live``, contiguous tensors of the same number of values.

    The torch form takes ``step`` off the anchor; the native one writes back what it read, which costs the same.
    """
    if native.available():
        job = native_settle.SettleJob(anchor.view(-1, CHUNK), live.view(-1), _in_memory_order(live), 1, ())
        native_settle.apply_pass([job], threads=torch.get_num_threads())
        return
    for a, p in zip(_pieces(anchor), _pieces(live), strict=True):
        a.sub_(step)
        p.copy_(a)


def _in_memory_order(tensor: Tensor) -> TileGeometry:
    return TileGeometry(0, 1, tensor.numel(), 0, 0, tensor.numel() // CHUNK, 1, CHUNK, 1, 1)


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.view(-1).split(_PIECE)
