"""Channel work by the Triton kernels, block by block, for tensors on a card; in tests also for those on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparseloco.compress.base import kept_per_chunk
from sparseloco.kernels import native, triton_blocks
from sparseloco.kernels.geometry import TileGeometry, tensor_geometry
from sparseloco.kernels.plan import Codec, Round, Settled
from sparseloco.types import LARGEST, Parts, Section, Source


def is_sane(tensor: Tensor) -> bool:
    """Whether all magnitudes are below ``LARGEST``, by a kernel where there is one; False for NaN."""
    if _wanted(tensor) and tensor.numel():
        return triton_blocks.is_sane(tensor, LARGEST)
    return not tensor.numel() or float(tensor.detach().abs().amax()) < LARGEST


def encode(codec: Codec, sources: Sequence[Source], *, decay: float) -> dict[int, Section]:
    """Parts of the blocks that the kernels take, by number; their residuals are updated."""
    sections: dict[int, Section] = {}
    for i, (source, span) in enumerate(zip(sources, codec.state.spans, strict=True)):
        places = _places(codec, i, source.end, [codec.state.anchor[j] for j in span])
        if source.start is None or places is None:
            continue
        for j, start, where in zip(span, source.start, places, strict=True):
            sections[j] = triton_blocks.encode_block(
                start,
                source.end.detach(),
                codec.state.residual[j],
                geometry=where,
                decay=decay,
                kept=kept_per_chunk(where.chunk_size, codec.top_k.k, codec.top_k.chunk_size),
                low=codec.values.low,
                high=codec.values.high,
            )
    return sections


def settle_(codec: Codec, round_: Round) -> Settled:
    """Reduce, step and merge the tensors that the kernels take."""
    done: set[int] = set()
    square, failed = 0.0, None
    for i, (live, span) in enumerate(zip(round_.live, codec.state.spans, strict=True)):
        places = _places(codec, i, live, [codec.state.anchor[j] for j in span])
        snapshot = round_.snapshot_of(i)
        if places is None or (snapshot is not None and snapshot.stride() != live.stride()):
            continue
        done.add(i)
        for j, where in zip(span, places, strict=True):
            settled = _settle_block(codec, round_, j, live, snapshot, where)
            square += settled.square
            failed = j if failed is None and not settled.sane else failed
    return Settled(frozenset(done), square, failed)


def _settle_block(
    codec: Codec, round_: Round, block: int, live: Tensor, snapshot: Tensor | None, where: TileGeometry
) -> triton_blocks.Settled:
    anchor = codec.state.anchor[block]
    stepping = bool(round_.outer.momentum) and bool(round_.inbox)
    return triton_blocks.settle_block(
        anchor,
        live.detach(),
        [(envelope.weight, _on(envelope.payload.blocks[block], anchor.device)) for envelope in round_.inbox],
        geometry=where,
        over=round_.over,
        low=codec.values.low,
        high=codec.values.high,
        lr=round_.outer.lr,
        largest=LARGEST,
        weight_decay=round_.outer.weight_decay,
        momentum=round_.outer.momentum if stepping else 0.0,
        nesterov=round_.outer.nesterov,
        velocity=codec.velocity(block, anchor) if stepping else None,
        alpha=round_.merge.alpha if round_.merge.kind == "blend" else None,
        snapshot=snapshot if round_.merge.kind == "carry" else None,
    )


def _wanted(tensor: Tensor) -> bool:
    """Whether Triton's kernels are to be asked for a tensor on this device."""
    return (tensor.device.type == "cuda" and not native.is_off()) or native.forced() == "triton"


def _places(codec: Codec, number: int, live: Tensor, state: Sequence[Tensor]) -> tuple[TileGeometry, ...] | None:
    """Where the blocks of a tensor lie in it; None if it must be left to the definition."""
    places = tensor_geometry(codec.state.layouts[number], live.detach()) if _wanted(live) else None
    if places is None or any(block.dtype != torch.float32 for block in state):
        return None
    if not all(place.num_chunks for place in places):  # of a shard that holds no chunk of some block
        return None
    takes = all(triton_blocks.supports(chunk_size=p.chunk_size, dtype=live.dtype, device=live.device) for p in places)
    return places if takes else None


def _on(parts: Parts, device: torch.device) -> Parts:
    return {name: part.to(device) for name, part in parts.items()}
