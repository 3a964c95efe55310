"""Packing small unsigned integers into bytes, and fingerprints of tensors.

``pack`` and ``unpack`` are exact inverses for any width up to 32 bits. Values are laid out
least-significant bit first, one after another without gaps; the last byte is filled with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparseloco.errors import WireError
from sparseloco.keys import derive_key, mix64

_RUN = 64  # words of a row that share a factor of the digest
_PIECE = 1 << 20  # words of the digest at a time, a multiple of the run
_LANE = 2**64 - 1  # bits of a lane


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

    Items count as 4-byte words (two to an 8-byte item). A word has three odd factors, so that each change of one word
    shows for certain: a 32-bit one of its place in a run of 64 words, and 64-bit ones of the run and of the row. A
    processor thus needs one 32-bit multiplication a word and lane; ``kernels`` has that.

    Args:
        block: Two-dimensional tensor of 4-byte or 8-byte items.
        salt: Global number of the first row plus anything that tells blocks apart, at least 0 and below 2**62.
    """
    if block.numel() == 0:
        return (0, 0)
    word_NC = block.detach().contiguous().view(torch.int32)
    lanes = [0, 0]
    # In pieces, since a piece's words take 8 bytes each.
    step = max(1, _PIECE // word_NC.shape[1])
    for first_row in range(0, word_NC.shape[0], step):
        for first_col in range(0, word_NC.shape[1], _PIECE):
            piece = word_NC[first_row : first_row + step, first_col : first_col + _PIECE]
            for lane in (0, 1):
                lanes[lane] += _digest_piece(piece, salt + first_row, first_col // _RUN, lane)
    return lanes[0] & _LANE, lanes[1] & _LANE


def _digest_piece(word_NC: Tensor, first_row: int, first_run: int, lane: int) -> int:
    rows, cols = word_NC.shape
    runs = -(-cols // _RUN)
    device = word_NC.device
    wide = torch.zeros(rows, runs * _RUN, dtype=torch.int64, device=device)
    wide[:, :cols] = word_NC
    wide &= 2**32 - 1
    # Places count up from the lowest number and runs down from -1, so that no row, from 0 up, has a factor of theirs.
    place = _odd_factors(torch.arange(_RUN, device=device) * 2 + (lane - 2**63)) >> 32 & (2**32 - 1) | 1
    run = _odd_factors(~((torch.arange(runs, device=device) + first_run) * 2 + lane))
    row_N = _odd_factors((torch.arange(rows, device=device) + first_row) * 2 + lane)
    sum_N = ((wide.view(rows, runs, _RUN) * place).sum(dim=2) * run).sum(dim=1)
    if first_run == 0:
        sum_N += lane  # lane 1 counts rows, so that zeros of different shapes differ
    return int((sum_N * row_N).sum())


def _odd_factors(number: Tensor) -> Tensor:
    return mix64(number) | 1


def digest_tensors(
    named: Sequence[tuple[str, Tensor]],
    lanes: Callable[[Tensor, int], tuple[int, int]] = digest_lanes,
    first_rows: Sequence[int] | None = None,
) -> tuple[int, int]:
    """Sum of the lanes of many tensors, each salted with its name.

    Args:
        named: Names and tensors; of a sharded tensor the rows that are here.
        lanes: May be a faster way to the same sums.
        first_rows: Number of each tensor's first row in the whole tensor; None for whole ones.
    """
    total = [0, 0]
    for (name, tensor), first_row in zip(named, first_rows or [0] * len(named), strict=True):
        if not tensor.numel():
            continue
        salt = derive_key(*name.encode()) & ((1 << 40) - 1)
        matrix = tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(1, -1)
        for lane, value in enumerate(lanes(matrix, (salt << 20) + first_row)):
            total[lane] += value
    return total[0], total[1]


def add_digests(digests: Sequence[str]) -> str:
    """The digest of a whole replica from those of its shards.

    Args:
        digests: 32 hex digits each, as :func:`hex_digest` writes two lanes.

    Example:
        >>> add_digests([hex_digest(1, 2), hex_digest(3, 2**64 - 2)]) == hex_digest(4, 0)
        True
    """
    return hex_digest(*(sum(int(digest[at : at + 16], 16) for digest in digests) for at in (0, 16)))


def hex_digest(*lanes: int) -> str:
    """Lanes modulo 2**64 as 16 hex digits each."""
    return "".join(f"{lane & _LANE:016x}" for lane in lanes)
