"""Packing small unsigned integers into bytes, and fingerprints of tensors.

``pack`` and ``unpack`` are exact inverses for any width from 1 to 32 bits. Values are laid out
least-significant bit first, one after another without gaps; the last byte is filled with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparseloco.errors import WireError
from sparseloco.keys import derive_key, mix64

_GROUP = 8  # eight values of `bits` bits fill `bits` whole bytes


def pack(values: Tensor, bits: int) -> NDArray[np.uint8]:
    """Pack non-negative integers of ``bits`` bits each.

    Args:
        values: Any shape, any integer dtype; every value must be below ``2**bits``.
        bits: Width of one value, 1 to 32.

    Returns:
        ``ceil(numel * bits / 8)`` bytes.

    Example:
        >>> pack(torch.tensor([1, 2, 3, 0]), 2).tolist()
        [57]
    """
    flat = values.detach().cpu().reshape(-1).numpy().astype(np.uint32)
    if bits in (8, 16, 32):
        return np.ascontiguousarray(flat.astype(f"<u{bits // 8}")).view(np.uint8)
    count = flat.size
    padded = np.zeros((-(-count // _GROUP), _GROUP), dtype=np.uint64)
    padded.reshape(-1)[:count] = flat
    out = np.zeros((padded.shape[0], bits), dtype=np.uint64)
    for lane in range(_GROUP):
        _scatter_lane(out, padded[:, lane], lane * bits)
    return out.astype(np.uint8).reshape(-1)[: (count * bits + 7) // 8]


def _scatter_lane(out_bytes: NDArray[np.uint64], value: NDArray[np.uint64], first_bit: int) -> None:
    byte, shift = divmod(first_bit, 8)
    wide = value << np.uint64(shift)
    while byte < out_bytes.shape[1]:
        out_bytes[:, byte] |= wide & np.uint64(0xFF)
        wide = wide >> np.uint64(8)
        byte += 1
        if not wide.any():
            break


def unpack(data: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint32]:
    """Unpack what :func:`pack` packed.

    Raises:
        WireError: if ``data`` does not hold exactly ``count`` values.

    Example:
        >>> unpack(pack(torch.tensor([5, 6, 7]), 3), 3, 3).tolist()
        [5, 6, 7]
    """
    expected = (count * bits + 7) // 8
    if data.size != expected:
        raise WireError(
            f"packed part={data.size} bytes: must be {expected} for {count} values of {bits} bits; refuse it"
        )
    if bits in (8, 16, 32):
        return data.view(f"<u{bits // 8}").astype(np.uint32)
    groups = -(-count // _GROUP)
    padded = np.zeros(groups * bits, dtype=np.uint64)
    padded[: data.size] = data
    padded = padded.reshape(groups, bits)
    mask = np.uint64((1 << bits) - 1)
    out = np.empty((groups, _GROUP), dtype=np.uint32)
    for lane in range(_GROUP):
        byte, shift = divmod(lane * bits, 8)
        wide = np.zeros(groups, dtype=np.uint64)
        for i in range(byte, min(bits, byte + (shift + bits + 7) // 8)):
            wide |= padded[:, i] << np.uint64(8 * (i - byte))
        out[:, lane] = ((wide >> np.uint64(shift)) & mask).astype(np.uint32)
    return out.reshape(-1)[:count]


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
