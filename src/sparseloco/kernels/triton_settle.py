"""Triton kernel of the way back: mean over peers, outer step, sanity, merge and the write of live parameters.

Programs stay on the card and take one chunk after another. Each has its own scratch, which is small enough to stay in
the caches: sums and weights of one chunk, and its reduced update. Peers are added one after another with a barrier in
between. Positions within one payload are distinct, so this needs no atomics and has one possible result.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import triton
import triton.language as tl

from sparseloco.kernels.triton_common import (
    from_bfloat16,
    load_float,
    magnitude_key,
    store_float,
    tile_corner,
    tile_offsets,
)

# The table of whole numbers: bits of float64 settings, since float arguments of a kernel have only 32 bits; the weight
# of all peers; then addresses of index, code and scale and the weight of each peer.
ALPHA = tl.constexpr(0)
REST = tl.constexpr(1)
LR = tl.constexpr(2)
KEEP = tl.constexpr(3)
MOMENTUM = tl.constexpr(4)
WEIGHTS = tl.constexpr(5)
HEAD = tl.constexpr(6)
PER_PEER = tl.constexpr(4)


@triton.jit
def setting(table, row):
    """A float64 setting of the table."""
    return tl.load(table + row).to(tl.float64, bitcast=True)


@triton.jit
def peer_positions(table, r, n, kept, CHUNK: tl.constexpr, KEPT_BLOCK: tl.constexpr):
    """Slots, positions and mask of what peer ``r`` sent of chunk ``n``; a position outside the chunk is left out."""
    j = tl.arange(0, KEPT_BLOCK)
    slot = n * kept + j
    index = tl.load(table + HEAD + r * PER_PEER).to(tl.pointer_type(tl.int16))
    i = tl.load(index + slot, mask=j < kept, other=-1).to(tl.int32)
    return slot, i, (i >= 0) & (i < CHUNK)


@triton.jit
def add_peer(
    table, r, n, kept, low, high, sums, weights,
    CHUNK: tl.constexpr, KEPT_BLOCK: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """``sums += weight * decoded`` and, if COUNTED, ``weights += weight`` at the positions of peer ``r``."""
    slot, i, valid = peer_positions(table, r, n, kept, CHUNK, KEPT_BLOCK)
    code_at = tl.load(table + HEAD + r * PER_PEER + 1).to(tl.pointer_type(tl.uint8))
    scale_at = tl.load(table + HEAD + r * PER_PEER + 2).to(tl.pointer_type(tl.int16))
    weight = tl.load(table + HEAD + r * PER_PEER + 3)
    code = tl.load(code_at + slot, mask=valid, other=0).to(tl.int32)
    level = tl.where(code >= 2, high, low)
    value = tl.where((code & 1) != 0, -level, level) * from_bfloat16(tl.load(scale_at + n))
    # Exact: a float32 value times a weight below 2**29.
    share = value.to(tl.float64) * weight.to(tl.float64)
    tl.store(sums + i, tl.load(sums + i, mask=valid, other=0.0) + share, mask=valid)
    if COUNTED:
        tl.store(weights + i, tl.load(weights + i, mask=valid, other=0) + weight, mask=valid)


@triton.jit
def reduce_chunk(
    table, peers, n, kept, low, high, sums, weights, update,
    CHUNK: tl.constexpr, KEPT_BLOCK: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """``update`` at every position that some peer sent: one division and one rounding. It is zero elsewhere."""
    for r in range(peers):
        add_peer(table, r, n, kept, low, high, sums, weights, CHUNK, KEPT_BLOCK, COUNTED)
        tl.debug_barrier()
    divisor = tl.load(table + WEIGHTS).to(tl.float64)
    for r in range(peers):  # a position of several peers is written once by each, always the same number
        _, i, valid = peer_positions(table, r, n, kept, CHUNK, KEPT_BLOCK)
        total = tl.load(sums + i, mask=valid, other=0.0)
        mean = total / (tl.load(weights + i, mask=valid, other=1).to(tl.float64) if COUNTED else divisor)
        tl.store(update + i, mean.to(tl.float32), mask=valid)
    tl.debug_barrier()


@triton.jit
def clear_chunk(
    table, peers, n, kept, sums, weights, update,
    CHUNK: tl.constexpr, KEPT_BLOCK: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Scratch back to zero for the next chunk, only where it is not."""
    tl.debug_barrier()
    for r in range(peers):
        _, i, valid = peer_positions(table, r, n, kept, CHUNK, KEPT_BLOCK)
        tl.store(sums + i, 0.0, mask=valid)
        tl.store(update + i, 0.0, mask=valid)
        if COUNTED:
            tl.store(weights + i, 0, mask=valid)
    tl.debug_barrier()


@triton.jit
def multiply_add(x, factor, y):
    """``x * factor + y`` in float64 and rounded to float32, for float32 numbers: the product is exact."""
    return (x.to(tl.float64) * factor + y.to(tl.float64)).to(tl.float32)


@triton.jit
def outer_step(
    anchor, update, velocity, inside, table,
    SHRINKS: tl.constexpr, VELOCITY: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    """``Sgd``: the anchor after one step; the velocity is written back."""
    direction = update
    if VELOCITY:
        momentum = setting(table, MOMENTUM)
        direction = multiply_add(tl.load(velocity, mask=inside, other=0.0), momentum, update)
        tl.store(velocity, direction, mask=inside)
        if NESTEROV:
            direction = multiply_add(direction, momentum, update)
    if SHRINKS:
        anchor = (anchor.to(tl.float64) * setting(table, KEEP)).to(tl.float32)
    return (anchor.to(tl.float64) - direction.to(tl.float64) * setting(table, LR)).to(tl.float32)


@triton.jit
def merged(anchor, live, snapshot, table, inside, MERGE: tl.constexpr, BF16: tl.constexpr):
    """New live values in float32: ``Replace``, ``Blend`` or ``Carry``."""
    if MERGE == "blend":
        mine = load_float(live, inside, BF16).to(tl.float64) * setting(table, ALPHA)
        return (anchor.to(tl.float64) * setting(table, REST) + mine).to(tl.float32)
    elif MERGE == "carry":
        progress = load_float(live, inside, BF16).to(tl.float64) - load_float(snapshot, inside, BF16).to(tl.float64)
        return (progress + anchor.to(tl.float64)).to(tl.float32)
    else:
        return anchor


# As in the other kernel.
@triton.jit(
    do_not_specialize=[
        "first_row", "panel_height", "row_offset", "grid_rows", "grid_cols", "chunks", "peers", "kept", "refused"
    ]
)  # fmt: skip
def settle_kernel(
    anchor, live, snapshot, velocity, table, sums, weights, update, squares, refused_at,
    first_row, panel_height, row_offset, col_offset, grid_rows, grid_cols, row_stride, snapshot_stride,
    chunks, peers, kept, low, high, refused,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, KEPT_BLOCK: tl.constexpr,
    BF16: tl.constexpr, COUNTED: tl.constexpr, STEP: tl.constexpr, SHRINKS: tl.constexpr,
    VELOCITY: tl.constexpr, NESTEROV: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """Settle chunks ``program_id(0)``, ``+ num_programs(0)``, ...

    A chunk whose moved anchor has a key of ``refused`` or more is left as it was and named in ``refused_at``.
    Without STEP (nobody sent anything) the anchor stays and is merged.
    """
    mine = tl.program_id(0) * BLOCK
    sums += mine
    weights += mine
    update += mine
    i = tl.arange(0, BLOCK)
    inside = i < ROWS * COLS
    n = tl.program_id(0).to(tl.int64)
    while n < chunks:
        state = n * (ROWS * COLS) + i
        moved = tl.load(anchor + state, mask=inside, other=0.0)
        good = inside
        if STEP:
            reduce_chunk(table, peers, n, kept, low, high, sums, weights, update, ROWS * COLS, KEPT_BLOCK, COUNTED)
            mean = tl.load(update + i, mask=inside, other=0.0)
            clear_chunk(table, peers, n, kept, sums, weights, update, ROWS * COLS, KEPT_BLOCK, COUNTED)
            tl.store(squares + n, tl.sum(mean.to(tl.float64) * mean.to(tl.float64), 0))
            moved = outer_step(moved, mean, velocity + state, inside, table, SHRINKS, VELOCITY, NESTEROV)
            top = tl.max(magnitude_key(moved), 0)
            tl.store(refused_at + n, (top >= refused).to(tl.int8))
            good = i < tl.where(top < refused, ROWS * COLS, 0)
            tl.store(anchor + state, moved, mask=good)
        corner = tile_corner(
            n, first_row, panel_height, row_offset, col_offset, grid_rows, grid_cols, row_stride, ROWS, COLS
        )
        before = tile_corner(
            n, first_row, panel_height, row_offset, col_offset, grid_rows, grid_cols, snapshot_stride, ROWS, COLS
        )
        live_at = live + corner + tile_offsets(i, row_stride, COLS)
        snapshot_at = snapshot + before + tile_offsets(i, snapshot_stride, COLS)
        store_float(live_at, merged(moved, live_at, snapshot_at, table, inside, MERGE, BF16), good, BF16)
        n += tl.num_programs(0)
