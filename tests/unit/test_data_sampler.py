"""The sampler: a permutation an epoch, no window twice, any position without what came before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseloco.data import Sampler, TokenSplit, evaluation_batches, permute
from sparseloco.errors import ConfigError

GOLDEN = [2, 7, 0, 6, 9, 8, 5, 1, 3, 4]
SIZES = [1, 2, 3, 4, 5, 16, 17, 64, 97, 255, 256, 257, 1009, 4096, 65_537]


def split(num_tokens: int) -> TokenSplit:
    return TokenSplit("train", np.arange(num_tokens, dtype=np.uint16), num_tokens)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", [0, 1, -5, 2**63])
def test_image_is_a_permutation(size: int, seed: int) -> None:
    image = permute(np.arange(size), size, seed=seed, epoch=3)
    assert np.array_equal(np.sort(image), np.arange(size))


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 1000))
def test_one_position_needs_no_other(size: int, seed: int, epoch: int) -> None:
    whole = permute(np.arange(size), size, seed=seed, epoch=epoch)
    for position in {0, size // 2, size - 1}:
        assert permute(np.array([position]), size, seed=seed, epoch=epoch) == whole[position]


def test_large_ranges_need_no_memory() -> None:
    size = 2**50 + 1
    image = permute(np.array([0, 1, size - 1]), size, seed=0, epoch=0)
    assert len(set(image.tolist())) == 3
    assert ((image >= 0) & (image < size)).all()


def test_seeds_and_epochs_differ_and_order_looks_random() -> None:
    size = 5000
    orders = [permute(np.arange(size), size, seed=seed, epoch=epoch) for seed, epoch in ((0, 0), (1, 0), (0, 1))]
    for i, order in enumerate(orders):
        # Random permutations have one fixed point on average, and correlations near 1 / sqrt(size) = 0.014.
        assert (order == np.arange(size)).sum() < 10
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.06
        for other in orders[:i]:
            assert (order == other).sum() < 10


def test_golden_order() -> None:
    # Peers of different versions must agree on the order, so it never changes.
    assert permute(np.arange(10), 10, seed=0, epoch=0).tolist() == GOLDEN
    assert Sampler(split(31), 3, seed=0).index(slot=1, step=2, num_slots=4) == GOLDEN[9]


@given(st.integers(5, 200), st.integers(1, 9), st.integers(1, 7), st.integers(0, 10))
def test_no_window_twice_in_an_epoch_over_all_slots(tokens: int, length: int, num_slots: int, seed: int) -> None:
    length = min(length, tokens - 1)
    sampler = Sampler(split(tokens), length, seed)
    positions = 3 * sampler.num_samples
    steps = -(-positions // num_slots)
    seen = [sampler.index(slot, step, num_slots) for step in range(steps) for slot in range(num_slots)]
    for epoch in range(3):
        window = seen[epoch * sampler.num_samples : (epoch + 1) * sampler.num_samples]
        assert sorted(window) == list(range(sampler.num_samples))


def test_batches_are_the_windows_of_their_slots() -> None:
    sampler = Sampler(split(101), 10, seed=7)
    assert sampler.num_samples == 10
    for step in range(5):  # Steps 2 and 3 cross an epoch's border in the middle of a batch.
        batch = sampler.batch(range(1, 4), step, num_slots=4)
        assert (batch.dtype, batch.shape) == (torch.int64, (3, 11))
        starts = [10 * sampler.index(slot, step, 4) for slot in (1, 2, 3)]
        assert torch.equal(batch, torch.tensor([list(range(start, start + 11)) for start in starts]))


def test_every_token_but_the_first_is_predicted_once_in_an_epoch() -> None:
    sampler = Sampler(split(65), 8, seed=0)
    batch = sampler.batch(range(8), 0, num_slots=8)
    assert sorted(batch[:, 1:].flatten().tolist()) == list(range(1, 65))


def test_slots_of_replicas_are_the_batch_of_one() -> None:
    sampler = Sampler(split(500), 4, seed=0)
    together = sampler.batch(range(6), 5, num_slots=6)
    parts = [sampler.batch(range(first, first + 2), 5, num_slots=6) for first in (0, 2, 4)]
    assert torch.equal(together, torch.cat(parts))


@pytest.mark.parametrize(
    ("slot", "step", "text"),
    [
        (4, 0, "slot=4: must be in 0..3 (num_slots=4); count from 0"),
        (-1, 0, "slot=-1: must be in 0..3 (num_slots=4); count from 0"),
        (0, -1, "step=-1: must not be negative; count steps from 0"),
    ],
)
def test_positions_out_of_range(slot: int, step: int, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Sampler(split(100), 4, seed=0).index(slot, step, 4)
    assert str(error.value) == text


def test_split_that_does_not_fill_a_window() -> None:
    assert Sampler(split(9), 8, seed=0).num_samples == 1
    with pytest.raises(ConfigError) as error:
        Sampler(split(8), 8, seed=0)
    assert str(error.value) == (
        "train.sequence_length=8: one window needs 9 tokens, but split 'train' has only 8; give more text "
        "or a smaller sequence_length"
    )
    with pytest.raises(ConfigError, match=r"train\.sequence_length=0: must be at least 1; use 128"):
        Sampler(split(8), 0, seed=0)
    with pytest.raises(ConfigError, match="one window needs 9 tokens"):
        evaluation_batches(split(8), 8, 4, 100)


@pytest.mark.parametrize(("max_tokens", "windows"), [(1, 1), (40, 4), (59, 5), (10**9, 9)])
def test_evaluation_takes_the_first_windows_in_order(max_tokens: int, windows: int) -> None:
    batches = list(evaluation_batches(split(100), 10, 2, max_tokens))
    assert all(len(batch) == 2 for batch in batches[:-1])
    expected = [list(range(10 * i, 10 * i + 11)) for i in range(windows)]
    assert torch.equal(torch.cat(batches), torch.tensor(expected))
