"""What both Triton kernels share: where a tile lies in memory, and bfloat16 in whole-number arithmetic.

bfloat16 tensors are passed as int16, so that rounding is the same in Triton's interpreter and on every card. Kernels
must be launched with ``enable_fp_fusion=False``: the definition rounds every product before it is added.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitude_key(x):
    """Bits of ``|x|`` as int32: ordered as the magnitudes are, NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def from_bfloat16(bits):
    """Bfloat16 given as int16 to float32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def to_bfloat16(x):
    """Float32 to bfloat16 as int16: to nearest, ties to even, as torch rounds; NaN becomes 0x7FC0."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(magnitude_key(x) > 0x7F800000, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def load_float(pointer, mask, BF16: tl.constexpr):
    """Float32 values of float32 memory, or of bfloat16 memory seen as int16."""
    raw = tl.load(pointer, mask=mask, other=0)
    if BF16:
        return from_bfloat16(raw)
    else:
        return raw


@triton.jit
def store_float(pointer, x, mask, BF16: tl.constexpr):
    """The way back of :func:`load_float`."""
    if BF16:
        tl.store(pointer, to_bfloat16(x), mask=mask)
    else:
        tl.store(pointer, x, mask=mask)


@triton.jit
def tile_corner(n, first_row, panel_height, row_offset, col_offset, grid_rows, grid_cols, row_stride, ROWS, COLS):
    """Element at which tile ``n`` of a :class:`TileGeometry` begins; int64, since tensors exceed 2**31 elements."""
    tile = n % (grid_rows * grid_cols)
    row = first_row + n // (grid_rows * grid_cols) * panel_height + row_offset + tile // grid_cols * ROWS
    return row * row_stride + col_offset + tile % grid_cols * COLS


@triton.jit
def tile_offsets(i, row_stride, COLS: tl.constexpr):
    """Elements from a tile's corner to its values ``i``, row by row."""
    return (i // COLS).to(tl.int64) * row_stride + i % COLS


@triton.jit
def sanity_kernel(tensor, flags, cols, row_stride, blocks_per_row, refused, BLOCK: tl.constexpr, BF16: tl.constexpr):
    """``flags[program] = 1`` where a magnitude's key is ``refused`` or more; NaN is."""
    program = tl.program_id(0).to(tl.int64)
    col = program % blocks_per_row * BLOCK + tl.arange(0, BLOCK)
    x = load_float(tensor + program // blocks_per_row * row_stride + col, col < cols, BF16)
    tl.store(flags + program, (tl.max(magnitude_key(x), 0) >= refused).to(tl.int8))


INTERPRETED = not isinstance(sanity_kernel, triton.JITFunction)
"""Whether kernels run in Triton's interpreter; decided by ``TRITON_INTERPRET`` when Triton was imported."""
