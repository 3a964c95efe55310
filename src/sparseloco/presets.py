"""Every published method as a row: one short function with typed keywords and its paper.

``inner`` is the inner optimizer; None leaves it to the caller's loop. Outer settings keep the papers' defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sparseloco.algorithm import Algorithm, Recipe
from sparseloco.channel import Channel, ErrorFeedback
from sparseloco.compress import (
    Dense,
    Float32,
    LowRank,
    Quantize,
    ScaledSign,
    SignOneLevel,
    SignTwoLevel,
    Statistical,
    Stochastic,
    TopK,
    ValueCode,
)
from sparseloco.errors import ConfigError, check_choice, check_whole
from sparseloco.fragments import Even, Layers
from sparseloco.layout import Chunks, DctTiles, Flat, Matrices, Tiles
from sparseloco.local import Gradients, InnerSteps, OptimizerSpec, adamw
from sparseloco.merge import Blend, Carry, Replace
from sparseloco.outer import Sgd, TorchOptimizer
from sparseloco.panels import whole
from sparseloco.reduce import Mean
from sparseloco.schedule import SyncSchedule
from sparseloco.types import Merge, Schedule
from sparseloco.update import ClipNorm, Sign

VALUE_CODES: dict[str, Callable[[], ValueCode]] = {
    "float32": Float32,
    "sign_two_level": SignTwoLevel,
    "sign_one_level": SignOneLevel,
    "statistical": Statistical,
}


def ddp(*, inner: OptimizerSpec | None = None, clip_norm: float | None = None) -> Algorithm:
    """Data parallel training: one optimizer step on the mean gradient, every step.

    Reference: Li et al., 2020, arXiv:2006.15704.

    Args:
        inner: The optimizer, applied to the mean gradient; None means AdamW.
        clip_norm: Largest norm of the mean gradient; None for no clipping.
    """
    return Algorithm(
        local=Gradients(),
        channel=Channel(
            layout=Flat(),
            compressor=Dense(),
            reducer=Mean(over="peers"),
            transforms=(ClipNorm(clip_norm),) if clip_norm is not None else (),
        ),
        outer=TorchOptimizer(inner or adamw()),
        schedule=SyncSchedule(every=1),
    )


def local_sgd(
    *, inner_steps: int = 30, inner: OptimizerSpec | None = None, clip_norm: float | None = None
) -> Algorithm:
    """Average the parameters every ``inner_steps`` steps; with weights this is FedAvg.

    Reference: Stich, 2018, arXiv:1805.09767; McMahan et al., 2016, arXiv:1602.05629.

    Args:
        inner_steps: H, inner steps per round.
        inner: Inner optimizer.
        clip_norm: Largest gradient norm at an inner step.
    """
    return Algorithm(
        local=InnerSteps(inner, clip_norm),
        channel=Channel(layout=Flat(), compressor=Dense(), reducer=Mean(over="peers")),
        outer=Sgd(),
        schedule=_every(inner_steps),
    )


def diloco(
    *,
    inner_steps: int = 30,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    panels: int = 1,
    inner: OptimizerSpec | None = None,
    clip_norm: float | None = None,
) -> Algorithm:
    """DiLoCo: Nesterov momentum on the mean of the replicas' deltas; plain SGD for momentum 0.

    Reference: Douillard et al., 2023, arXiv:2311.08105.

    Args:
        inner_steps: H, inner steps per round (the paper uses 500).
        outer_lr: Outer learning rate.
        outer_momentum: Nesterov momentum, 0 for none.
        panels: Panels along dim 0, so that sharded replicas give the same bytes.
        inner: Inner optimizer.
        clip_norm: Largest gradient norm at an inner step.
    """
    return Algorithm(
        local=InnerSteps(inner, clip_norm),
        channel=Channel(layout=whole(panels), compressor=Dense(), reducer=Mean(over="peers")),
        outer=Sgd(outer_lr, outer_momentum, nesterov=outer_momentum > 0),
        schedule=_every(inner_steps),
    )


def streaming_diloco(
    *,
    inner_steps: int = 30,
    num_fragments: int = 2,
    fragment_by: str = "layers",
    delay: int = 1,
    alpha: float = 0.5,
    bits: int = 4,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    panels: int = 1,
    inner: OptimizerSpec | None = None,
    clip_norm: float | None = None,
) -> Algorithm:
    """Streaming DiLoCo: fragments synced in turn, their messages in flight while training goes on.

    Reference: Douillard et al., 2025, arXiv:2501.18512.

    Args:
        inner_steps: H, steps between two syncs of the same fragment.
        num_fragments: Parts of the model, synced evenly spread over the H steps.
        fragment_by: ``layers`` (strided, as in the paper) or ``size`` (runs of tensors of equal size).
        delay: Steps a message is in flight (tau).
        alpha: Share of the live values kept when the anchor returns.
        bits: Width of a sent value; 32 sends float32.
        outer_lr: Outer learning rate.
        outer_momentum: Nesterov momentum.
        panels: Panels along dim 0, each with a scale of its own, so that sharded replicas give the same bytes.
        inner: Inner optimizer.
        clip_norm: Largest gradient norm at an inner step.
    """
    _check_inner_steps(inner_steps)
    check_whole("num_fragments", num_fragments)
    if num_fragments > inner_steps:
        raise ConfigError(
            f"num_fragments={num_fragments!r}: must be at most inner_steps={inner_steps}, one post a step; use fewer"
        )
    if fragment_by not in ("layers", "size"):
        raise ConfigError(f"fragment_by={fragment_by!r}: must be 'layers' or 'size'; choose one of them")
    return Algorithm(
        local=InnerSteps(inner, clip_norm),
        channel=Channel(
            layout=whole(panels),
            compressor=Dense() if bits == 32 else Quantize(bits),
            reducer=Mean(over="peers"),
        ),
        outer=Sgd(outer_lr, outer_momentum, nesterov=outer_momentum > 0),
        schedule=SyncSchedule(every=inner_steps, stagger=inner_steps // max(1, num_fragments), delay=delay),
        merge=Blend(alpha),
        fragments=Layers(num_fragments) if fragment_by == "layers" else Even(num_fragments),
    )


def sparseloco(
    *,
    inner_steps: int = 30,
    k: int = 64,
    tile: int = 64,
    decay: float = 0.95,
    values: str = "sign_two_level",
    mean_over: str = "contributors",
    outer_lr: float = 1.0,
    delay: int = 0,
    panels: int = 1,
    inner: OptimizerSpec | None = None,
    clip_norm: float | None = None,
) -> Algorithm:
    """SparseLoCo: error feedback, chunked top-k and 2-bit values on the delta; plain SGD outside.

    Per round: H inner steps; ``delta = start - local``; ``residual = decay * residual + delta``; keep the k largest
    of each tile in 2 bits; take what is sent out of the residual; average; ``anchor -= outer_lr * update``.

    Departs from the paper: the values' code is sign and two levels with a scale per tile, and the mean goes over
    the peers that sent a coordinate. ``values="statistical"`` gives the released code, ``mean_over="peers"`` the
    paper's equation.

    Reference: Sarfi et al., 2025, arXiv:2508.15706.

    Args:
        inner_steps: H, inner steps per round (the paper uses 15 to 250).
        k: Values kept per tile.
        tile: Tile side; a tile of 64 x 64 has 4096 values.
        decay: Share of the residual carried to the next round.
        values: Code of the kept values: sign_two_level, sign_one_level, statistical or float32.
        mean_over: What the mean is over: contributors, who sent that coordinate, or all peers.
        outer_lr: Outer learning rate.
        delay: Steps a message is in flight; the progress made meanwhile is kept.
        panels: Panels along dim 0, so that sharded replicas give the same bytes.
        inner: Inner optimizer.
        clip_norm: Largest gradient norm at an inner step.
    """
    if values not in VALUE_CODES:
        raise ConfigError(f"values={values!r}: must be one of {', '.join(VALUE_CODES)}; choose one of them")
    merge: Merge = Carry() if delay else Replace()
    return Algorithm(
        local=InnerSteps(inner, clip_norm),
        channel=Channel(
            layout=Tiles(tile, tile, panels),
            feedback=ErrorFeedback(decay),
            compressor=TopK(k, tile * tile, VALUE_CODES[values]()),
            reducer=Mean(over=mean_over),
        ),
        outer=Sgd(outer_lr),
        schedule=_every(inner_steps, delay=delay),
        merge=merge,
    )


def demo(
    *,
    lr: float | Schedule = 1e-3,
    k: int = 32,
    tile: int = 64,
    decay: float = 0.999,
    weight_decay: float = 0.0,
) -> Algorithm:
    """DeMo: top-k of the cosine transform of momentum, sign of the mean, every step.

    Departs from the paper: edge tiles have their own transform size; k scales with the size of a ragged chunk.

    Reference: Peng et al., 2024, arXiv:2411.19870, and its authors' released code.

    Args:
        lr: Learning rate; scales the gradient into the residual and the step.
        k: Coefficients kept per tile.
        tile: Tile side.
        decay: Decay of the residual, which is the momentum.
        weight_decay: Decoupled weight decay.
    """
    return Algorithm(
        local=Gradients(lr),
        channel=Channel(
            layout=DctTiles(tile),
            feedback=ErrorFeedback(decay),
            compressor=TopK(k, tile * tile, Float32()),
            reducer=Mean(over="contributors"),
            transforms=(Sign(),),
        ),
        outer=Sgd(lr, weight_decay=weight_decay),
        schedule=SyncSchedule(every=1),
    )


def ef_signsgd(*, lr: float | Schedule = 1e-3) -> Algorithm:
    """Scaled sign of the learning-rate-weighted gradient with error feedback, every step.

    Reference: Karimireddy et al., 2019, arXiv:1901.09847, algorithm 2.

    Args:
        lr: Learning rate; it scales the gradient, the outer step is 1.
    """
    return Algorithm(
        local=Gradients(lr),
        channel=Channel(
            layout=Flat(), feedback=ErrorFeedback(1.0), compressor=ScaledSign(), reducer=Mean(over="peers")
        ),
        outer=Sgd(),
        schedule=SyncSchedule(every=1),
    )


def powersgd(*, lr: float | Schedule = 0.05, rank: int = 4, momentum: float = 0.9) -> Algorithm:
    """Low-rank factors of the gradient with error feedback, sides alternating, every step.

    Departs from the paper: momentum is that of ordinary SGD, as in the authors' released code; algorithm 2 of the
    paper steps by the update plus the momentum.

    Reference: Vogels et al., 2019, arXiv:1905.13727.

    Args:
        lr: Learning rate of the SGD that follows.
        rank: Rank of the factors.
        momentum: Momentum of that SGD.
    """
    return Algorithm(
        local=Gradients(),
        channel=Channel(
            layout=Matrices(),
            feedback=ErrorFeedback(1.0),
            compressor=LowRank(rank),
            reducer=Mean(over="peers"),
        ),
        outer=Sgd(lr, momentum),
        schedule=SyncSchedule(every=1),
    )


def qsparse_local_sgd(
    *,
    inner_steps: int = 30,
    k: int = 64,
    chunk_size: int = 4096,
    levels: int = 4,
    inner: OptimizerSpec | None = None,
    clip_norm: float | None = None,
) -> Algorithm:
    """Local steps, then top-k with stochastically rounded values and full error feedback.

    Departs from the paper: top-k per chunk of ``chunk_size`` consecutive values instead of per tensor.

    Reference: Basu et al., 2019, arXiv:1906.02367, algorithm 1.

    Args:
        inner_steps: H, inner steps per round.
        k: Values kept per chunk.
        chunk_size: Values per chunk.
        levels: Rounding levels between zero and the chunk's norm.
        inner: Inner optimizer.
        clip_norm: Largest gradient norm at an inner step.
    """
    return Algorithm(
        local=InnerSteps(inner, clip_norm),
        channel=Channel(
            layout=Chunks(chunk_size),
            feedback=ErrorFeedback(1.0),
            compressor=TopK(k, chunk_size, Stochastic(levels)),
            reducer=Mean(over="peers"),
        ),
        outer=Sgd(),
        schedule=_every(inner_steps),
    )


PRESETS: dict[str, Callable[..., Algorithm]] = {
    function.__name__: function
    for function in (
        ddp,
        local_sgd,
        diloco,
        streaming_diloco,
        sparseloco,
        demo,
        ef_signsgd,
        powersgd,
        qsparse_local_sgd,
    )
}


def build(preset: str, settings: dict[str, Any] | None = None, **private: Any) -> Algorithm:
    """Call a preset by name and remember how, so that the result can be written as TOML.

    Args:
        preset: A name in ``PRESETS``.
        settings: Keywords that belong into a configuration file.
        **private: Keywords that do not, such as ``inner``.

    Raises:
        ConfigError: if there is no such preset.
    """
    check_choice("preset", preset, PRESETS)
    settings = dict(settings or {})
    return replace(PRESETS[preset](**settings, **private), recipe=Recipe(preset, settings))


def _every(inner_steps: int, *, delay: int = 0) -> SyncSchedule:
    _check_inner_steps(inner_steps)
    return SyncSchedule(every=inner_steps, delay=delay)


def _check_inner_steps(inner_steps: int) -> None:
    check_whole("inner_steps", inner_steps)
    if inner_steps < 1:
        raise ConfigError(f"inner_steps={inner_steps!r}: must be at least 1; use 1 to synchronize after every step")


__all__ = [
    "PRESETS",
    "VALUE_CODES",
    "build",
    "ddp",
    "demo",
    "diloco",
    "ef_signsgd",
    "local_sgd",
    "powersgd",
    "qsparse_local_sgd",
    "sparseloco",
    "streaming_diloco",
]
