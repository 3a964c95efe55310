"""Triton kernel of the way out: error feedback, exact top-k, two-bit codes and the new residual in one pass.

One program per chunk, its values in registers: start, live parameters and residual are read once and the residual is
written once. The largest values are found by bisection on their bits, not by sorting.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import triton
import triton.language as tl

from sparseloco.kernels.triton_common import (
    from_bfloat16,
    load_float,
    magnitude_key,
    tile_corner,
    tile_offsets,
    to_bfloat16,
)


@triton.jit
def count_from(key, least):
    """How many keys are ``least`` or more."""
    return tl.sum((key >= least).to(tl.int32), 0)


@triton.jit
def largest(key, kept):
    """Mask of the ``kept`` largest keys, of equal ones the first; keys below 0 are outside the chunk.

    At least ``kept`` keys are ``low`` or more, and fewer are ``high`` or more. The search ends early once exactly
    ``kept`` pass, so ties across the border are what remains at ``high == low + 1``.
    """
    high = tl.max(key, 0) + 1
    low = tl.maximum(high - 3 * 8388608, 0)  # three powers of two below the largest: nearly always far enough
    count = count_from(key, low)
    if count < kept:
        high = low
        low = tl.minimum(low, 0)
        count = count_from(key, low)
    while (count != kept) & (high - low > 1):
        middle = low + (high - low) // 2
        passing = count_from(key, middle)
        enough = passing >= kept
        high = tl.where(enough, high, middle)
        low = tl.where(enough, middle, low)
        count = tl.where(enough, passing, count)
    chosen = key >= low
    if count != kept:
        tie = key == low
        room = kept - count_from(key, low + 1)
        chosen = (key > low) | (tie & (tl.cumsum(tie.to(tl.int32), 0) <= room))
    return chosen


@triton.jit
def exact_mean(key, chosen, kept, count_bits):
    """The definition's ``exact_mean`` of the chosen magnitudes, as float64, in whole numbers.

    The largest is below ``2**exponent``; all are cut to multiples of ``2**-shift``, whose sum fits 52 bits.
    ``count_bits`` is ``(kept - 1).bit_length()``.
    """
    top = tl.max(key, 0)
    wide = top.to(tl.float32, bitcast=True).to(tl.float64).to(tl.int64, bitcast=True)
    exponent = tl.where(top == 0, 0, (wide >> 52) - 1022)
    shift = 52 - count_bits - exponent
    field = key >> 23
    fraction = ((key & 0x7FFFFF) | tl.where(field > 0, 0x800000, 0)).to(tl.int64)
    left = tl.maximum(field, 1).to(tl.int64) - 150 + shift
    cut = tl.where(left >= 0, fraction << tl.maximum(left, 0), fraction >> tl.minimum(tl.maximum(-left, 0), 63))
    total = tl.sum(tl.where(chosen, cut, 0), 0).to(tl.float64)
    scale = ((shift + 1023) << 52).to(tl.float64, bitcast=True)
    return total / (scale * kept)


# Numbers that differ from tensor to tensor and help no address: one compiled kernel serves them all.
@triton.jit(
    do_not_specialize=["first_row", "panel_height", "row_offset", "grid_rows", "grid_cols", "kept", "count_bits"]
)
def encode_kernel(
    start, live, residual, index, code, scale,
    first_row, panel_height, row_offset, col_offset, grid_rows, grid_cols, row_stride,
    kept, count_bits, decay, low, high,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
    BF16: tl.constexpr, FEEDBACK: tl.constexpr, DECAYS: tl.constexpr,
):  # fmt: skip
    """Encode chunk ``program_id(0)``; ``start`` and ``residual`` are ``[N, C]``, ``live`` lies in tiles.

    ``e = decay * residual + (start - live)``, each operation rounded; ``residual = e - sent``. Without FEEDBACK the
    residual is not touched.
    """
    n = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < ROWS * COLS
    corner = tile_corner(
        n, first_row, panel_height, row_offset, col_offset, grid_rows, grid_cols, row_stride, ROWS, COLS
    )
    given = tl.load(start + n * (ROWS * COLS) + i, mask=inside, other=0.0)
    if BF16:  # the replica was given the anchor rounded to its own type
        given = from_bfloat16(to_bfloat16(given))
    e = given - load_float(live + corner + tile_offsets(i, row_stride, COLS), inside, BF16)
    if FEEDBACK:
        old = tl.load(residual + n * (ROWS * COLS) + i, mask=inside, other=0.0)
        if DECAYS:
            old = old * decay
        e = old + e
    key = tl.where(inside, magnitude_key(e), -1)
    chosen = largest(key, kept)
    key = tl.maximum(key, 0)
    scale_bits = to_bfloat16(exact_mean(key, chosen, kept, count_bits).to(tl.float32))
    unit = from_bfloat16(scale_bits)
    negative = e < 0
    big = tl.abs(e) > unit * ((low + high) * 0.5)
    if FEEDBACK:
        level = tl.where(big, high, low)
        sent = tl.where(negative, -level, level) * unit
        tl.store(residual + n * (ROWS * COLS) + i, tl.where(chosen, e - sent, e), mask=inside)
    slot = n * kept + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(index + slot, i.to(tl.int16), mask=chosen)
    tl.store(code + slot, (negative.to(tl.int32) + 2 * big.to(tl.int32)).to(tl.uint8), mask=chosen)
    tl.store(scale + n, scale_bits)
