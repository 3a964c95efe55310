"""Packing small unsigned integers into bytes, and fingerprints of tensors.

``pack`` and ``unpack`` are exact inverses for any width up to 32 bits. Values are laid out
least-significant bit first, one after another without gaps; the last byte is filled with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparseloco.errors import WireError
from sparseloco.keys import derive_key, mix64


def pack(values: Tensor, bits: int) -> NDArray[np.uint8]:
    """Pack non-negative integers of ``bits`` bits each.

    Args:
        values: Any shape, any integer dtype; every value must be below ``2**bits``.
        bits: Width of one value, 0 to 32.

    Returns:
        ``ceil(numel * bits / 8)`` bytes.

    Example:
        >>> pack(torch.tensor([1, 2, 3, 0]), 2).tolist()
        [57]
    """
    return pack_array(values.detach().cpu().reshape(-1).numpy(), bits)


def pack_array(flat: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """The same for a numpy array of one dim."""
    item = _item_bytes(bits)
    whole = np.ascontiguousarray(flat.astype(f"<u{item}")).view(np.uint8)
    if bits == 8 * item:
        return whole
    digits = np.unpackbits(whole.reshape(-1, item), axis=1, bitorder="little")[:, :bits]
    return np.packbits(digits.reshape(-1), bitorder="little")


def unpack(data: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint32]:
    """Unpack what :func:`pack` packed.

    Raises:
        WireError: if ``data`` does not hold exactly ``count`` values, or if a bit behind the last one is set.

    Example:
        >>> unpack(pack(torch.tensor([5, 6, 7]), 3), 3, 3).tolist()
        [5, 6, 7]
    """
    check_packed(data, bits, count)
    item = _item_bytes(bits)
    if bits == 8 * item:
        return np.frombuffer(data.tobytes(), dtype=f"<u{item}").astype(np.uint32)
    digits = np.zeros((count, 8 * item), dtype=np.uint8)
    digits[:, :bits] = np.unpackbits(data, count=count * bits, bitorder="little").reshape(count, bits)
    return np.packbits(digits.reshape(-1), bitorder="little").view(f"<u{item}").astype(np.uint32)


def check_packed(data: NDArray[np.uint8], bits: int, count: int) -> None:
    """Refuse what :func:`pack` cannot have made of ``count`` values.

    Raises:
        WireError: if the size is wrong, or if a bit behind the last value is set.
    """
    expected = (count * bits + 7) // 8
    if data.size != expected:
        raise WireError(
            f"packed part={data.size} bytes: must be {expected} for {count} values of {bits} bits; refuse it"
        )
    spare = count * bits % 8
    if spare and data[-1] >> spare:
        raise WireError(f"padding={data[-1] >> spare:#x}: must be zero behind the last of {count} values; refuse it")


def _item_bytes(bits: int) -> int:
    """Bytes of the smallest integer that holds a value."""
    return 1 if bits <= 8 else 2 if bits <= 16 else 4


def digest_lanes(block: Tensor, salt: int) -> tuple[int, int]:
    """Two 64-bit sums over the bits of ``block [N, C]``, mixed by position; additive over rows.

    A digest of a sharded tensor is the sum of its shards' digests (each with the salt of its first row), so no
    shard needs the whole. Integer arithmetic modulo 2**64 makes it independent of order and threads.

    Args:
        block: Two-dimensional tensor of 4-byte or 8-byte items.
        salt: Global number of the first row plus anything that tells blocks apart, at least 0 and below 2**62.
    """
    if block.numel() == 0:
        return (0, 0)
    integer = torch.int64 if block.element_size() == 8 else torch.int32
    x_NC = block.detach().contiguous().view(integer).to(torch.int64)
    rows, cols = x_NC.shape
    lanes: list[int] = []
    for lane in (0, 1):
        # Columns count downwards from -1, so that no row has the factor of a column and a transpose shows.
        column_C = mix64(~(torch.arange(cols, dtype=torch.int64, device=x_NC.device) * 2 + lane)) | 1
        row_N = mix64((torch.arange(rows, dtype=torch.int64, device=x_NC.device) + salt) * 2 + lane) | 1
        total = ((x_NC * column_C).sum(dim=1) * row_N).sum() + (row_N.sum() * lane)
        lanes.append(int(total) & ((1 << 64) - 1))
    return (lanes[0], lanes[1])


def digest_tensors(named: Sequence[tuple[str, Tensor]]) -> tuple[int, int]:
    """Sum of the lanes of many tensors, each salted with its name."""
    total = [0, 0]
    for name, tensor in named:
        salt = derive_key(*name.encode()) & ((1 << 40) - 1)
        matrix = tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(1, -1)
        for lane, value in enumerate(digest_lanes(matrix, salt << 20)):
            total[lane] += value
    return total[0], total[1]


def hex_digest(*lanes: int) -> str:
    """Lanes modulo 2**64 as 16 hex digits each."""
    return "".join(f"{lane & ((1 << 64) - 1):016x}" for lane in lanes)
