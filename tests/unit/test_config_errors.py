"""Every check of a setting in the core, with the whole sentence a user reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sparseloco.algorithm import Algorithm
from sparseloco.channel import Channel, ErrorFeedback
from sparseloco.compress import Dense, LowRank, Quantize, SignTwoLevel, Statistical, Stochastic, TopK
from sparseloco.errors import ConfigError, SparseLocoError
from sparseloco.fragments import Even, Layers
from sparseloco.layout import Chunks, DctTiles, Flat, Tiles
from sparseloco.local import Gradients, InnerSteps
from sparseloco.merge import Blend
from sparseloco.outer import Sgd
from sparseloco.reduce import Mean, check_weight
from sparseloco.schedule import SyncSchedule, WarmupCosine
from sparseloco.update import ClipNorm

NAN = float("nan")


def gradients_every(every: int) -> Algorithm:
    return Algorithm(
        local=Gradients(),
        channel=Channel(layout=Flat(), compressor=Dense(), reducer=Mean()),
        schedule=SyncSchedule(every=every),
    )


CASES: list[tuple[Callable[[], object], str]] = [
    (lambda: Chunks(0), "chunk_size=0: must be at least 1; use a positive whole number"),
    (lambda: Tiles(rows=0), "rows=0: must be at least 1; use a positive whole number"),
    (lambda: Tiles(cols=-1), "cols=-1: must be at least 1; use a positive whole number"),
    (lambda: Tiles(panels=0), "panels=0: must be at least 1; use a positive whole number"),
    (lambda: Tiles(vector_chunk=0), "vector_chunk=0: must be at least 1; use a positive whole number"),
    (lambda: DctTiles(side=0), "side=0: must be at least 1; use a positive whole number"),
    (lambda: DctTiles(panels=0), "panels=0: must be at least 1; use a positive whole number"),
    (
        lambda: TopK(k=5000),
        "k=5000: must be between 1 and chunk_size=4096; use a larger chunk_size or a smaller k",
    ),
    (
        lambda: TopK(k=0, chunk_size=64),
        "k=0: must be between 1 and chunk_size=64; use a larger chunk_size or a smaller k",
    ),
    *(
        (
            lambda low=low, high=high: SignTwoLevel(low=low, high=high),
            f"low={low}, high={high}: must be multiples of 1/32 with 0 < low < high < 8; round them to 1/32",
        )
        for low, high in [(0.8, 1.375), (0.84375, 1.4), (0.0, 1.0), (1.5, 1.0), (1.0, 8.0), (NAN, 1.0)]
    ),
    (lambda: Statistical(bins=3), "bins=3: must be 2, 4, 16 or 256; use 4 for the released setting"),
    (lambda: Stochastic(levels=0), "levels=0: must be between 1 and 127; use Float32 values for more"),
    (lambda: Stochastic(levels=128), "levels=128: must be between 1 and 127; use Float32 values for more"),
    (lambda: Quantize(bits=1), "bits=1: must be between 2 and 16; use Dense() to send full precision"),
    (lambda: Quantize(bits=17), "bits=17: must be between 2 and 16; use Dense() to send full precision"),
    (lambda: Quantize(grid="log"), "grid='log': must be 'exponent' or 'linear'; choose one of them"),
    (lambda: Quantize(bits=9), "bits=9: must be at most 8 with grid='exponent'; use grid='linear'"),
    (lambda: LowRank(rank=0), "rank=0: must be at least 1; use a small whole number such as 4"),
    (lambda: Mean(over="all"), "over='all': must be 'contributors' or 'peers'; choose one of them"),
    (
        lambda: check_weight(0),
        "weight=0: must be a whole number from 1 to 536870911; count tokens in larger units",
    ),
    (
        lambda: check_weight(2**29),
        "weight=536870912: must be a whole number from 1 to 536870911; count tokens in larger units",
    ),
    (lambda: ErrorFeedback(decay=1.5), "decay=1.5: must be between 0 and 1; the paper uses 0.95"),
    (lambda: ErrorFeedback(decay=-0.1), "decay=-0.1: must be between 0 and 1; the paper uses 0.95"),
    (lambda: ErrorFeedback(decay=NAN), "decay=nan: must be between 0 and 1; the paper uses 0.95"),
    (lambda: SyncSchedule(every=0), "every=0: must be at least 1; use 1 to synchronize after every step"),
    (
        lambda: SyncSchedule(every=4, stagger=-1),
        "stagger=-1: must be at least 0; use 0 to post all fragments together",
    ),
    (
        lambda: SyncSchedule(every=30, delay=30),
        "delay=30: must be at least 0 and smaller than every=30, or a fragment would be posted again before it "
        "returns; set delay to 29 or less",
    ),
    (
        lambda: SyncSchedule(every=30, delay=-1),
        "delay=-1: must be at least 0 and smaller than every=30, or a fragment would be posted again before it "
        "returns; set delay to 29 or less",
    ),
    (
        lambda: WarmupCosine(peak=1.0, total_steps=10, warmup_steps=10),
        "warmup_steps=10: must be at least 0 and below total_steps=10; shorten the warm-up or train longer",
    ),
    (
        lambda: WarmupCosine(peak=1.0, total_steps=10, warmup_steps=-1),
        "warmup_steps=-1: must be at least 0 and below total_steps=10; shorten the warm-up or train longer",
    ),
    (
        lambda: WarmupCosine(peak=1.0, total_steps=10, final_fraction=2.0),
        "final_fraction=2.0: must be between 0 and 1; use 0.1 for a tenth",
    ),
    (lambda: Even(0), "num_fragments=0: must be at least 1; use 1 for the whole model"),
    (lambda: Layers(0), "num_fragments=0: must be at least 1; use 1 for the whole model"),
    (lambda: Sgd(lr=0.0), "lr=0.0: must be positive; the outer step moves along minus the update"),
    (lambda: Sgd(lr=NAN), "lr=nan: must be positive; the outer step moves along minus the update"),
    (lambda: Sgd(momentum=1.0), "momentum=1.0: must be in [0, 1); use 0 for plain SGD"),
    (lambda: Sgd(momentum=-0.1), "momentum=-0.1: must be in [0, 1); use 0 for plain SGD"),
    (
        lambda: Sgd(nesterov=True),
        "nesterov=True: must have momentum above 0; set momentum, or nesterov=False",
    ),
    (lambda: Sgd(weight_decay=-0.1), "weight_decay=-0.1: must be at least 0; use 0 for none"),
    (lambda: Blend(alpha=1.1), "alpha=1.1: must be between 0 and 1; use 0 to take the anchor alone"),
    (lambda: Blend(alpha=-1), "alpha=-1: must be between 0 and 1; use 0 to take the anchor alone"),
    (lambda: ClipNorm(0.0), "max_norm=0.0: must be positive; leave the transform out for no clipping"),
    (lambda: ClipNorm(NAN), "max_norm=nan: must be positive; leave the transform out for no clipping"),
    (lambda: InnerSteps(clip_norm=-1.0), "clip_norm=-1.0: must be positive; use None for no clipping"),
    (lambda: InnerSteps(clip_norm=NAN), "clip_norm=nan: must be positive; use None for no clipping"),
    (
        lambda: InnerSteps().step_({}, None, 1),
        "local.optimizer=None: must name an optimizer for local_step(); "
        "call stepped() after a step of your own, or pass inner=adamw(...)",
    ),
    (
        lambda: gradients_every(5),
        "schedule=SyncSchedule(every=5, stagger=0, delay=0): must be SyncSchedule(every=1) for methods that send "
        "gradients; use InnerSteps to train between rounds",
    ),
]


@pytest.mark.parametrize(("make", "text"), CASES, ids=[text.split(":")[0] for _, text in CASES])
def test_a_bad_setting_is_one_clear_sentence(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == text
    assert isinstance(caught.value, SparseLocoError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TopK(k=4096),
        lambda: SignTwoLevel(low=1 / 32, high=8 - 1 / 32),
        lambda: Stochastic(127),
        lambda: Quantize(16, "linear"),
        lambda: ErrorFeedback(0),
        lambda: ErrorFeedback(1),
        lambda: SyncSchedule(every=1),
        lambda: SyncSchedule(every=30, stagger=100, delay=29),
        lambda: WarmupCosine(peak=1.0, total_steps=1),
        lambda: Blend(0),
        lambda: Blend(1),
        lambda: Sgd(lambda step: 0.0),
        lambda: check_weight(2**29 - 1),
        lambda: gradients_every(1),
    ],
)
def test_the_ends_of_ranges_are_allowed(make: Callable[[], object]) -> None:
    make()
