"""The native CPU kernels on torch tensors; what they do not support is left to the definition.

``available()`` says whether this installation has them. The environment variable ``SPARSELOCO_ISA`` (``scalar``,
``avx2`` or ``avx512``) chooses an instruction set and ``SPARSELOCO_KERNELS=torch`` switches the kernels off, both for
tests and debugging: every set gives the same bits as the definition.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseloco.compress.base import kept_per_chunk
from sparseloco.errors import ConfigError
from sparseloco.kernels.geometry import TileGeometry, tensor_geometry
from sparseloco.layout import Layout

_native: Any = None
try:
    from sparseloco.kernels import _native  # type: ignore[no-redef]
except ImportError:  # no compiler where the package was installed
    _native = None

_definition_only: ContextVar[bool] = ContextVar("definition_only", default=False)

INSTRUCTION_SETS = ("scalar", "avx2", "avx512")
LARGEST_CHUNK = 32768
"""Values of the largest chunk that the encoder takes."""


class EncoderBlock(NamedTuple):
    """What the encoder needs of one block.

    Attributes:
        start: Anchor, contiguous float32 ``[N, C]``.
        live: The whole live parameter, float32 or bfloat16.
        residual: Contiguous float32 ``[N, C]``, updated in place; None forgets what is not sent.
        geometry: Where the block's chunks lie in ``live``.
        kept: Values kept per chunk, K.
    """

    start: Tensor
    live: Tensor
    residual: Tensor | None
    geometry: TileGeometry
    kept: int

    @property
    def section_bytes(self) -> int:
        """Bytes of its section in the fixed coding."""
        return _native.section_bytes(self.geometry.num_chunks, self.kept, self.geometry.chunk_size)


def module() -> Any:
    """The compiled kernels; ask :func:`built` first."""
    assert _native is not None, "the native kernels are not built"
    return _native


def built() -> bool:
    """Whether this installation has the native kernels."""
    return _native is not None


def available() -> bool:
    """Whether the native kernels are built, and others are not asked for."""
    return built() and not is_off() and forced() != "triton"


def is_off() -> bool:
    """Whether the definition alone is to be used."""
    return _definition_only.get() or forced() == "torch"


def forced() -> str:
    """What ``SPARSELOCO_KERNELS`` asks for; nothing where the native kernels, which read it, are missing."""
    return _native.setting("SPARSELOCO_KERNELS") if built() else ""


@contextmanager
def definition_only() -> Generator[None]:
    """Inside this block the definition does all the work, for comparisons."""
    token = _definition_only.set(True)
    try:
        yield
    finally:
        _definition_only.reset(token)


def instruction_set() -> str:
    """Name of the set in use."""
    return _native.instruction_set()


def use(name: str) -> bool:
    """Use the instruction set of that name from now on; False if this machine lacks it.

    Raises:
        ConfigError: if there is no such set.
    """
    if name not in INSTRUCTION_SETS:
        raise ConfigError(f"SPARSELOCO_ISA={name!r}: must be one of {', '.join(INSTRUCTION_SETS)}; unset it to choose")
    return _native.select(name)


def encoder_blocks(
    layout: Layout, live: Tensor, start: Sequence[Tensor], residual: Sequence[Tensor], *, k: int, chunk_size: int
) -> list[EncoderBlock] | None:
    """The blocks of one parameter, or None if it must be left to the definition.

    Args:
        layout: How the parameter becomes blocks.
        live: The parameter, any shape; dims behind the first must be contiguous.
        start: Anchor blocks ``[N, C]``.
        residual: Residual blocks ``[N, C]``; empty if there are none.
        k: Values kept of a whole chunk.
        chunk_size: Values of a whole chunk.
    """
    live = live.detach()
    geometry = tensor_geometry(layout, live)
    if geometry is None or not _is_supported(live, (torch.float32, torch.bfloat16)):
        return None
    if any(g.chunk_size > LARGEST_CHUNK for g in geometry):
        return None
    if not all(_is_supported(block, (torch.float32,)) and block.is_contiguous() for block in (*start, *residual)):
        return None
    return [
        EncoderBlock(start[j], live, residual[j] if residual else None, g, kept_per_chunk(g.chunk_size, k, chunk_size))
        for j, g in enumerate(geometry)
    ]


def threads_for(values: int) -> int:
    """Threads that pay for so many values: one takes about as long to start as to read half a million."""
    return min(torch.get_num_threads(), max(1, values >> 19))


def takes_magnitude(tensor: Tensor) -> bool:
    """Whether :func:`max_magnitudes` can read this tensor where it lies."""
    return _is_supported(tensor, (torch.float32, torch.bfloat16)) and tensor.is_contiguous()


def max_magnitudes(tensors: Sequence[Tensor], *, threads: int) -> list[float]:
    """Largest magnitude of each tensor, float32 or bfloat16; NaN counts as infinity, an empty one has 0."""
    return _native.max_magnitudes([tensor.detach() for tensor in tensors], threads)


def are_below(tensors: Sequence[Tensor], limit: float, *, threads: int) -> list[bool]:
    """Whether all magnitudes of each tensor are below ``limit``, as ``tensor.abs().amax() < limit`` has it.

    One read of memory for all tensors together. The limit is rounded to the type of each tensor, as torch does.
    """
    largest = max_magnitudes(tensors, threads=threads)
    return [bool(torch.tensor(most, dtype=t.dtype) < limit) for most, t in zip(largest, tensors, strict=True)]


def encode(blocks: Sequence[EncoderBlock], *, decay: float, low: float, high: float, threads: int) -> list[Tensor]:
    """Error feedback, exact top-k, SignTwoLevel codes and residual correction in one pass over memory.

    Args:
        blocks: All blocks of a fragment, so that threads start once; residuals are updated in place.
        decay: Of the residual.
        low: Level of small values.
        high: Level of large values.
        threads: Threads to use; the result does not depend on it.

    Returns:
        Sections in the fixed coding (docs/wire-format.md), uint8, one per block. The same bits as
        ``Channel.outgoing`` with TopK and SignTwoLevel.
    """
    sections = [torch.empty(block.section_bytes, dtype=torch.uint8) for block in blocks]
    # A shard may hold no chunk of a block.
    jobs = [(*_job(b), section) for b, section in zip(blocks, sections, strict=True) if b.geometry.num_chunks]
    _native.encode_top_k(jobs, decay, low, high, threads)
    return sections


def ef_pass(blocks: Sequence[EncoderBlock], *, decay: float, threads: int) -> None:
    """Error feedback alone, without anything sent: the memory pass that bounds every encoder; for benchmarks."""
    _native.ef_pass([(*_job(block), None) for block in blocks], decay, threads)


def _job(block: EncoderBlock) -> tuple[Any, ...]:
    return (block.start, block.live.detach(), block.residual, list(block.geometry), block.kept)


def _is_supported(tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> bool:
    plain = tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()
    return plain and tensor.device.type == "cpu" and tensor.dtype in dtypes


def _choose() -> None:
    if _native is None:
        return
    if forced() not in ("", "torch", "triton"):
        raise ConfigError(
            f"SPARSELOCO_KERNELS={forced()!r}: must be torch or triton; unset it to use the native kernels"
        )
    if (name := _native.setting("SPARSELOCO_ISA")) and not use(name):
        raise ConfigError(f"SPARSELOCO_ISA={name!r}: must be a set that this machine has; unset it to choose")


_choose()
