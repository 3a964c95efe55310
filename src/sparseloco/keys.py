"""Randomness that is a pure function of where it is used.

All random numbers of the library come from a key = hash(seed, peer, round, fragment, block). A counter-based
generator turns key and position into uniform numbers, so results do not depend on call order, device or thread count.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_A = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_B = -7723592293110705685  # 0x94D049BB133111EB


def derive_key(*words: int) -> int:
    """Hash integers into one signed 64-bit key.

    Example:
        >>> derive_key(1, 2) == derive_key(1, 2), derive_key(1, 2) == derive_key(2, 1)
        (True, False)
    """
    digest = hashlib.blake2b(",".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def mix64(x: Tensor) -> Tensor:
    """SplitMix64 finaliser on int64 (arithmetic wraps modulo 2**64)."""
    x = (x ^ _shift_right(x, 30)) * _MIX_A
    x = (x ^ _shift_right(x, 27)) * _MIX_B
    return x ^ _shift_right(x, 31)


def uniform(key: int, shape: torch.Size | tuple[int, ...], device: torch.device | None = None) -> Tensor:
    """Float32 uniform numbers in [0, 1) with 24 random bits each, a function of key and position only."""
    count = int(torch.Size(shape).numel())
    counter = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    bits = mix64(counter * _GOLDEN + key)
    return (_shift_right(bits, 40).to(torch.float32) * 2.0**-24).reshape(shape)


def _shift_right(x: Tensor, amount: int) -> Tensor:
    """Logical right shift; torch's own is arithmetic."""
    return (x >> amount) & ((1 << (64 - amount)) - 1)
