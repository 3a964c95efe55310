"""C-18 with several sources: every position is computable, shares are exact, and nobody's windows meet."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseloco.data import Dataset, MixedSampler, Sampler, SourceTokens, TokenSplit, train_sampler
from sparseloco.data.mixture import BLOCK
from sparseloco.errors import ConfigError

LENGTH = 4
GOLDEN = [("a", 7), ("b", 8), ("b", 5), ("a", 6), ("a", 5), ("b", 6), ("b", 7), ("b", 8)]


def source(name: str, num_windows: int, weight: float = 0.0, first: int = 0) -> SourceTokens:
    """Windows of one source hold numbers that no other source has."""
    tokens = np.arange(first, first + num_windows * LENGTH + 1, dtype=np.uint32)
    return SourceTokens(name, weight, TokenSplit(f"train of {name}", tokens, 1), 1, {}, {})


def sampler(*sources: SourceTokens, seed: int = 0, workers: int = 1, per_worker: str = "iid") -> MixedSampler:
    return MixedSampler(sources, LENGTH, seed, num_workers=workers, per_worker=per_worker)  # type: ignore[arg-type]


def test_c18_every_position_is_a_function_of_seed_slot_and_step() -> None:
    """C-18: a resume with another batch on each side of it must neither repeat nor skip data."""
    sources = (source("a", 7, 1.0), source("b", 50, 2.0, 1000), source("c", 90, 0.5, 2000))
    for workers, per_worker in ((1, "iid"), (2, "source"), (6, "source")):
        whole = sampler(*sources, workers=workers, per_worker=per_worker)
        seen = [whole.locate(slot, step, 12) for step in range(40) for slot in range(12)]
        again = sampler(*sources, workers=workers, per_worker=per_worker)
        for place in (479, 0, 250, 13):
            step, slot = divmod(place, 12)
            assert again.locate(slot, step, 12) == seen[place]
            first = {"a": 0, "b": 1000, "c": 2000}[seen[place][0]] + seen[place][1] * LENGTH
            assert again.batch([slot], step, 12).tolist() == [list(range(first, first + LENGTH + 1))]
        assert torch.equal(again.batch(range(12), 7, 12), torch.cat([whole.batch([slot], 7, 12) for slot in range(12)]))


def test_golden_positions_never_change() -> None:
    mixed = sampler(source("a", 10, 3.0), source("b", 10, 1.0))
    assert [mixed.locate(slot, 5, 8) for slot in range(8)] == GOLDEN


def test_weights_are_shares_of_the_windows_to_one_in_a_block() -> None:
    mixed = sampler(source("a", 30, 0.7), source("b", 3000, 0.2), source("c", 11, 0.1))
    names = [mixed.locate(0, step, 1)[0] for step in range(BLOCK)]
    assert Counter(names) == {"a": 7000, "b": 2000, "c": 1000}
    # Well mixed: binomial over 500 windows has a standard deviation of 10.
    assert 300 < names[:500].count("a") < 400


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 1)), min_size=1, max_size=4), st.integers(0, 9))
def test_each_source_is_gone_through_before_it_repeats(shapes: list[tuple[int, float]], seed: int) -> None:
    sources = [source(str(i), size, weight) for i, (size, weight) in enumerate(shapes)]
    mixed = sampler(*sources, seed=seed)
    names, windows = mixed.streams[0].locate(np.arange(BLOCK))
    for number, (size, _) in enumerate(shapes):
        times = Counter(windows[names == number].tolist())
        assert max(times.values()) - min(times.get(window, 0) for window in range(size)) <= 1


def test_without_weights_every_window_is_seen_once_an_epoch() -> None:
    mixed = sampler(source("a", 13), source("b", 29), workers=2, per_worker="iid")
    seen = [mixed.locate(slot, step, 6) for step in range(7) for slot in range(6)]
    assert len(set(seen)) == 42 == len(seen)


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 7])
def test_sources_are_dealt_out(workers: int) -> None:
    sources = [source(name, 60 + i) for i, name in enumerate("abc")]
    mixed = sampler(*sources, workers=workers, per_worker="source")
    by_worker = {
        worker: {mixed.locate(2 * worker + own, step, 2 * workers)[0] for step in range(40) for own in range(2)}
        for worker in range(workers)
    }
    for worker, names in by_worker.items():
        assert names == {"abc"[i] for i in range(3) if i % min(workers, 3) == worker % min(workers, 3)}
    seen = [mixed.locate(slot, step, 2 * workers) for step in range(10) for slot in range(2 * workers)]
    assert len(set(seen)) == len(seen)


def test_weights_count_among_the_sources_of_a_worker() -> None:
    sources = [source("a", 900, 1.0), source("b", 900, 1.0), source("c", 900, 3.0)]
    mixed = sampler(*sources, workers=2, per_worker="source")
    names = Counter(mixed.locate(0, step, 2)[0] for step in range(BLOCK))
    assert names == {"a": BLOCK // 4, "c": BLOCK * 3 // 4}


def test_one_source_and_sources_without_weights_keep_their_order() -> None:
    parts = (source("a", 8), source("b", 12, first=8 * LENGTH))
    split = TokenSplit("train", np.arange(81, dtype=np.uint32), 1)
    for sources in (parts[:1], parts, ()):
        dataset = Dataset(300, None, "x", "0" * 64, {"train": split}, torch.ones(300), sources=sources)  # type: ignore[arg-type]
        plain = train_sampler(dataset, LENGTH, 3, num_workers=2)
        assert isinstance(plain, Sampler)
        assert torch.equal(plain.batch(range(4), 5, 4), Sampler(split, LENGTH, 3).batch(range(4), 5, 4))


def test_passes_say_how_often_a_text_was_seen() -> None:
    assert Sampler(TokenSplit("train", np.arange(41, dtype=np.uint16), 1), LENGTH, 0).passes(5, 4) == {"train": 2.0}
    weighted = sampler(source("a", 10, 3.0), source("b", 10, 1.0))
    assert weighted.passes(10, 4) == {"a": 3.0, "b": 1.0}
    dealt = sampler(source("a", 10), source("b", 20), workers=3, per_worker="source")
    assert dealt.passes(10, 3) == {"a": 2.0, "b": 0.5}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda s: s.locate(0, -1, 2), "step=-1: must not be negative; count steps from 0"),
        (lambda s: s.batch([2], 0, 2), "slot=2: must be in 0..1 (num_slots=2); count from 0"),
        (lambda s: s.locate(0, 0, 3), "num_slots=3: must be a multiple of num_workers=2; give all as many"),
    ],
)
def test_positions_that_do_not_exist(call, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        call(sampler(source("a", 9), source("b", 9), workers=2, per_worker="source"))
    assert str(error.value) == text


def test_sources_that_cannot_take_part() -> None:
    with pytest.raises(ConfigError) as error:
        sampler(source("a", 9, 1.0), source("b", 9, 1e-5))
    assert str(error.value) == (
        "data.sources.weight=1e-05: of 'b' is less than 1/10000 of all weights; use a larger one or leave the source "
        "out"
    )
    with pytest.raises(ConfigError, match="split 'train of b' has only 1;"):
        sampler(source("a", 9), source("b", 0))
