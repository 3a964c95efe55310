"""Encode and settle one block with Triton: the same bits as the torch definition, on NVIDIA cards.

Nothing here imports Triton before it is used. With ``TRITON_INTERPRET=1`` in the environment before that, the same
kernels run on CPU tensors in Triton's interpreter, slowly; the tests do so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseloco.compress.base import index_dtype
from sparseloco.errors import ConfigError
from sparseloco.kernels.geometry import TileGeometry, matrix_row_stride
from sparseloco.types import Parts

MAX_CHUNK = 4096
"""A program holds its chunk in registers; 4096 values are 16 for each of 256 threads."""

_FLOATS = (torch.float32, torch.bfloat16)
# The definition rounds each product before it is added; loads must not be moved ahead of the scratch's barriers.
_FIXED = {"enable_fp_fusion": False, "num_stages": 1}
# Two programs of 256 threads fill the registers of a multiprocessor; more would only push scratch out of the cache.
_PROGRAMS_PER_MULTIPROCESSOR = 2
_INTERPRETED_PROGRAMS = 3


class Settled(NamedTuple):
    """What a settled block says about itself.

    Attributes:
        square: Squared 2-norm of the update; its last bits depend on the order of a sum, unlike all that is stored.
        sane: Whether the whole moved anchor is below the limit. Chunks that are not keep anchor and live values.
    """

    square: float
    sane: bool


def supports(*, chunk_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels take a block: Triton is there, for that device, and the chunk and type are within limits."""
    if not 0 < chunk_size <= MAX_CHUNK or dtype not in _FLOATS or importlib.util.find_spec("triton") is None:
        return False
    from sparseloco.kernels.triton_common import INTERPRETED

    return device.type == ("cpu" if INTERPRETED else "cuda")


def is_sane(tensor: Tensor, largest: float) -> bool:
    """Whether all magnitudes are below ``largest``, in one pass; False for NaN. Torch decides for other layouts."""
    row_stride = matrix_row_stride(tensor)
    if not tensor.numel():
        return True
    if row_stride is None or not supports(chunk_size=1, dtype=tensor.dtype, device=tensor.device):
        return bool(tensor.detach().abs().amax() < largest)
    from sparseloco.kernels.triton_common import sanity_kernel

    rows = 1 if tensor.is_contiguous() else tensor.shape[0]
    cols = tensor.numel() // rows
    block = min(MAX_CHUNK, _power_of_two(cols))
    blocks_per_row = -(-cols // block)
    flags = torch.empty(rows * blocks_per_row, dtype=torch.int8, device=tensor.device)
    arguments = (_raw(tensor), flags, cols, row_stride, blocks_per_row, _key(largest, tensor.dtype))
    _launch(sanity_kernel, flags.numel(), *arguments, BLOCK=block, BF16=tensor.dtype == torch.bfloat16)
    return not bool(flags.any())


def encode_block(
    start: Tensor,
    live: Tensor,
    residual: Tensor | None,
    *,
    geometry: TileGeometry,
    decay: float,
    kept: int,
    low: float,
    high: float,
) -> Parts:
    """Encode one block: ``TopK`` with ``SignTwoLevel(low, high)`` of ``decay * residual + (start - live)``.

    Check ``live`` with :func:`is_sane` first: what is not finite has no defined result.

    Args:
        start: Anchor ``[N, C]``, float32; it is rounded to the type of ``live`` on the way.
        live: Parameter, float32 or bfloat16, any shape; ``geometry`` says where the block lies in it.
        residual: ``[N, C]`` float32, written in place; None without error feedback.
        geometry: From :func:`sparseloco.kernels.geometry.tensor_geometry`.
        decay: Share of the residual carried on.
        kept: Values kept of each chunk, 1..C.
        low: Lower level of the code.
        high: Upper level.

    Returns:
        ``index [N, K]`` int16 ascending, ``code [N, K]`` uint8, ``scale [N, 1]`` bfloat16.

    Raises:
        ConfigError: for a block that :func:`supports` refuses or tensors that do not fit.
    """
    _check(start, live, geometry)
    _check_state("residual", residual, start)
    chunks, chunk_size = start.shape
    if not 1 <= kept <= chunk_size:
        raise ConfigError(
            f"kept={kept!r}: must be between 1 and the chunk's {chunk_size} values; take k from the method"
        )
    index = torch.empty(chunks, kept, dtype=index_dtype(chunk_size), device=start.device)
    code = torch.empty(chunks, kept, dtype=torch.uint8, device=start.device)
    scale = torch.empty(chunks, 1, dtype=torch.bfloat16, device=start.device)
    from sparseloco.kernels.triton_encode import encode_kernel

    _launch(
        encode_kernel,
        chunks,
        start,
        _raw(live),
        start if residual is None else residual,
        index,
        code,
        _raw(scale),
        *_corner_arguments(geometry),
        geometry.row_stride,
        kept,
        (kept - 1).bit_length(),
        float(decay),
        float(low),
        float(high),
        **_constants(geometry, live),
        FEEDBACK=residual is not None,
        DECAYS=decay != 1,
    )
    return {"index": index, "code": code, "scale": scale}


def settle_block(
    anchor: Tensor,
    live: Tensor,
    inbox: Sequence[tuple[int, Parts]],
    *,
    geometry: TileGeometry,
    over: str,
    low: float,
    high: float,
    lr: float,
    largest: float,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    nesterov: bool = False,
    velocity: Tensor | None = None,
    alpha: float | None = None,
    snapshot: Tensor | None = None,
    snapshot_stride: int | None = None,
) -> Settled:
    """Settle one block: ``Mean(over)``, ``Sgd`` and a merge, with anchor and live values written in place.

    Args:
        anchor: ``[N, C]`` float32, moved in place.
        live: Parameter, float32 or bfloat16; the block's values are written.
        inbox: Weight and parts (:func:`encode_block`) of each peer, in peer order; empty means no step, only the merge.
        geometry: Where the block lies in ``live``.
        over: ``contributors`` or ``peers``.
        low: Lower level of the code.
        high: Upper level.
        lr: Outer learning rate of this step.
        largest: Magnitudes from here on are refused.
        weight_decay: As in ``Sgd``.
        momentum: As in ``Sgd``; needs ``velocity``.
        nesterov: As in ``Sgd``.
        velocity: ``[N, C]`` float32, written in place.
        alpha: Merge by ``Blend(alpha)``.
        snapshot: Merge by ``Carry`` with these values of the time of the post, shaped and typed as ``live``.
        snapshot_stride: Row stride of the snapshot; None means that of ``live``.

    Returns:
        Norm and sanity. With neither ``alpha`` nor ``snapshot`` the merge is ``Replace``.

    Raises:
        ConfigError: for a block that :func:`supports` refuses or tensors that do not fit.
    """
    _check(anchor, live, geometry)
    _check_state("velocity", velocity, anchor)
    _check_settings(over, momentum, velocity, alpha, snapshot, live)
    rate, share = _float32(lr), alpha or 0.0
    settings = [share, 1 - share, rate, _float32(1.0 - rate * weight_decay), _float32(momentum)]
    table, parts = _table(settings, inbox, anchor)
    programs = min(anchor.shape[0], _programs(anchor.device))
    block = _power_of_two(anchor.shape[1])
    kept = parts[0]["index"].shape[1] if parts else 1
    squares = torch.zeros(anchor.shape[0], dtype=torch.float64, device=anchor.device)
    refused_at = torch.zeros(anchor.shape[0], dtype=torch.int8, device=anchor.device)
    from sparseloco.kernels.triton_settle import settle_kernel

    _launch(
        settle_kernel,
        programs,
        anchor,
        _raw(live),
        _raw(live if snapshot is None else snapshot),
        anchor if velocity is None else velocity,
        table,
        *_scratch(programs, block, sum(weight for weight, _ in inbox), anchor.device),
        squares,
        refused_at,
        *_corner_arguments(geometry),
        geometry.row_stride,
        geometry.row_stride if snapshot_stride is None else snapshot_stride,
        anchor.shape[0],
        len(parts),
        kept,
        float(low),
        float(high),
        _key(largest, anchor.dtype),
        **_constants(geometry, live),
        KEPT_BLOCK=_power_of_two(kept),
        COUNTED=over == "contributors",
        STEP=bool(parts),
        SHRINKS=weight_decay != 0,
        VELOCITY=momentum != 0,
        NESTEROV=nesterov,
        MERGE="blend" if alpha is not None else "carry" if snapshot is not None else "replace",
    )
    return Settled(float(squares.sum()), not bool(refused_at.any()))


def _scratch(programs: int, block: int, weight: int, device: torch.device) -> list[Tensor]:
    """Sums, weights and update of one chunk per program; all zero between chunks."""
    whole = torch.int32 if weight < 1 << 31 else torch.int64
    return [torch.zeros(programs, block, dtype=dtype, device=device) for dtype in (torch.float64, whole, torch.float32)]


def _table(settings: list[float], inbox: Sequence[tuple[int, Parts]], anchor: Tensor) -> tuple[Tensor, list[Parts]]:
    """The kernel's table (see there), and the parts that it points to; they must live as long as the kernel runs."""
    bits = torch.tensor(settings, dtype=torch.float64).view(torch.int64).tolist()
    numbers = [*bits, sum(weight for weight, _ in inbox)]
    held: list[Parts] = []
    for weight, parts in inbox:
        _check_parts(parts, anchor, held[0]["index"].shape[1] if held else parts["index"].shape[1])
        held.append({name: parts[name].contiguous() for name in ("index", "code", "scale")})
        numbers += [*(part.data_ptr() for part in held[-1].values()), weight]
    return torch.tensor(numbers, dtype=torch.int64).to(anchor.device), held


def _check_parts(parts: Parts, anchor: Tensor, kept: int) -> None:
    chunks = anchor.shape[0]
    wanted = {
        "index": ((chunks, kept), torch.int16),
        "code": ((chunks, kept), torch.uint8),
        "scale": ((chunks, 1), torch.bfloat16),
    }
    for name, (shape, dtype) in wanted.items():
        part = parts[name]
        if tuple(part.shape) != shape or part.dtype != dtype or part.device != anchor.device:
            raise ConfigError(
                f"{name}={part.dtype} {tuple(part.shape)} on {part.device}: must be {dtype} {shape} on "
                f"{anchor.device}; decode the frame with this block's table"
            )


def _check(state: Tensor, live: Tensor, geometry: TileGeometry) -> None:
    """Refuse what the kernels would read or write wrongly."""
    chunk_size = geometry.rows * geometry.cols
    if not supports(chunk_size=chunk_size, dtype=live.dtype, device=live.device):
        raise ConfigError(
            f"block={live.dtype} in chunks of {chunk_size} on {live.device}: must be float32 or bfloat16 in chunks of "
            f"at most {MAX_CHUNK}, on a card with Triton; use the torch definition"
        )
    shape = (geometry.panels * geometry.grid_rows * geometry.grid_cols, chunk_size)
    if tuple(state.shape) != shape:
        raise ConfigError(f"anchor={tuple(state.shape)}: must be {shape} as its geometry says; take both of one block")
    _check_state("anchor", state, state)
    last_row = geometry.first_row + (geometry.panels - 1) * geometry.panel_height + geometry.row_offset
    last_row += geometry.grid_rows * geometry.rows - 1
    last = last_row * geometry.row_stride + geometry.col_offset + geometry.grid_cols * geometry.cols
    if live.storage_offset() + last > live.untyped_storage().nbytes() // live.element_size():
        raise ConfigError(
            f"live={tuple(live.shape)}: must hold element {last - 1} as its geometry says; take both of one tensor"
        )


def _check_settings(
    over: str, momentum: float, velocity: Tensor | None, alpha: float | None, snapshot: Tensor | None, live: Tensor
) -> None:
    """Refuse settings of a settle that contradict each other."""
    if over not in ("contributors", "peers"):
        raise ConfigError(f"over={over!r}: must be 'contributors' or 'peers'; choose one of them")
    if momentum and velocity is None:
        raise ConfigError(f"velocity=None: must be a tensor with momentum={momentum!r}; start it at zero")
    if alpha is not None and snapshot is not None:
        raise ConfigError(f"alpha={alpha!r}: must be None with a snapshot; choose Blend or Carry")
    if snapshot is not None and (snapshot.shape != live.shape or snapshot.dtype != live.dtype):
        raise ConfigError(
            f"snapshot={snapshot.dtype} {tuple(snapshot.shape)}: must be {live.dtype} {tuple(live.shape)}; clone live"
        )


def _check_state(name: str, state: Tensor | None, like: Tensor) -> None:
    if state is None:
        return
    fits = state.shape == like.shape and state.dtype == torch.float32 and state.device == like.device
    if not fits or not state.is_contiguous():
        raise ConfigError(
            f"{name}={state.dtype} {tuple(state.shape)}: must be contiguous float32 {tuple(like.shape)} on "
            f"{like.device}; keep it in the block's stored form"
        )


def _corner_arguments(geometry: TileGeometry) -> tuple[int, ...]:
    g = geometry
    return (g.first_row, g.panel_height, g.row_offset, g.col_offset, g.grid_rows, g.grid_cols)


def _launch(kernel: Any, programs: int, *arguments: Tensor | float, **constants: Any) -> None:
    """Run ``programs`` programs of a kernel where its first tensor is."""
    with torch.cuda.device_of(arguments[0]):
        kernel[(programs,)](*arguments, **constants, **_FIXED)


def _constants(geometry: TileGeometry, live: Tensor) -> dict[str, Any]:
    """What a kernel is compiled for."""
    block = _power_of_two(geometry.rows * geometry.cols)
    return {
        "ROWS": geometry.rows,
        "COLS": geometry.cols,
        "BLOCK": block,
        "BF16": live.dtype == torch.bfloat16,
        "num_warps": max(1, min(8, block // 512)),
    }


def _raw(tensor: Tensor) -> Tensor:
    """Float32 as it is; bfloat16 as int16, which the kernels convert themselves."""
    plain = tensor.detach()
    return plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _programs(device: torch.device) -> int:
    """Programs of the settle kernel that are in flight; the result does not depend on it."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count * _PROGRAMS_PER_MULTIPROCESSOR


def _key(number: float, dtype: torch.dtype) -> int:
    """Bits of a positive limit as the comparison of a tensor of ``dtype`` with it sees it."""
    return int(torch.tensor(number, dtype=dtype).to(torch.float32).view(torch.int32))


def _float32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32))
