"""The limits: the fewest passes over memory that any implementation must make, and nothing else.

Encode has to read start, live parameters and residual, and to write the residual. Decode has to read and write the
anchor, and to write the live parameters. Native passes are used where there are any; else torch calls in place on
pieces small enough to stay in the last cache between calls, which come close.
"""

from __future__ import annotations

from torch import Tensor

from sparseloco.bench import paths

_PIECE = 1 << 18
"""Values in a piece: 1 MiB of float32, so that three operands stay in cache and the calls' own cost does not show."""


def used() -> str:
    """Which passes are measured, in words."""
    return "native" if paths.NATIVE_LIMITS is not None else "torch in place"


def ef_pass(residual: Tensor, start: Tensor, live: Tensor, decay: float) -> None:
    """``residual <- decay * residual + (start - live)``, on contiguous tensors of the same number of values."""
    if paths.NATIVE_LIMITS is not None:
        paths.NATIVE_LIMITS[0](residual, start, live, decay)
        return
    for r, s, p in zip(_pieces(residual), _pieces(start), _pieces(live), strict=True):
        r.mul_(decay).add_(s).sub_(p)


def apply_pass(anchor: Tensor, live: Tensor, step: float) -> None:
    """``anchor <- anchor - step; live <- anchor``, on contiguous tensors of the same number of values."""
    if paths.NATIVE_LIMITS is not None:
        paths.NATIVE_LIMITS[1](anchor, live, step)
        return
    for a, p in zip(_pieces(anchor), _pieces(live), strict=True):
        a.sub_(step)
        p.copy_(a)


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.view(-1).split(_PIECE)
