"""Which window of tokens a replica sees at which step: a pure function of seed, slot and step.

No state and no memory: any position of the order can be computed, so a restart or a late peer needs no
replay. Shape letters: B windows in a batch, T tokens in a window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from sparseloco.data.tokens import TokenSplit
from sparseloco.errors import ConfigError
from sparseloco.keys import derive_key

_NUM_ROUNDS = 6


def permute(position: np.ndarray, size: int, *, seed: int, epoch: int) -> np.ndarray:
    """Image of each position under a keyed permutation of ``range(size)``.

    A Feistel network permutes the next power of four above ``size``; an image outside the range is permuted
    again until it falls inside (cycle walking), which keeps it a permutation. Under four passes are expected.

    Args:
        position: Integers, each in ``range(size)``.
        size: Number of things that are permuted.
        seed: Key of the run.
        epoch: Each epoch has its own permutation.

    Example:
        >>> sorted(permute(np.arange(5), 5, seed=1, epoch=0).tolist())
        [0, 1, 2, 3, 4]
    """
    half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    round_keys = np.array([derive_key(seed, epoch, number) for number in range(_NUM_ROUNDS)]).view(np.uint64)
    image = _feistel(position.astype(np.uint64), half_bits, round_keys)
    while (outside := image >= size).any():
        image[outside] = _feistel(image[outside], half_bits, round_keys)
    return image.astype(np.int64)


def _feistel(x: np.ndarray, half_bits: np.uint64, round_keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = x >> half_bits, x & mask
    for key in round_keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << half_bits) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64 finaliser; numpy, since on a few numbers it is several times faster than torch."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Sampler:
    """Windows of a split without replacement: no window repeats within an epoch, across all slots.

    Position ``step * num_slots + slot`` runs through the epochs one after the other; in each, a permutation
    keyed by seed and epoch maps it to a window. Window ``i`` holds the tokens from ``i * sequence_length``
    on, one more than ``sequence_length``, so each token is predicted once in an epoch.

    Args:
        split: Where windows come from.
        sequence_length: Predicted tokens in a window.
        seed: Key of the order.
        name: What ``passes`` calls it; the split's name if it is left out.

    Raises:
        ConfigError: if the split does not fill one window.
    """

    def __init__(self, split: TokenSplit, sequence_length: int, seed: int, name: str = "") -> None:
        self.split = split
        self.name = name or split.name
        self.sequence_length = sequence_length
        self.seed = seed
        self.num_samples = _num_windows(split, sequence_length)

    def index(self, slot: int, step: int, num_slots: int) -> int:
        """Window that ``slot`` of ``num_slots`` sees at ``step``."""
        return int(self._indices([slot], step, num_slots)[0])

    def batch(self, slots: Sequence[int], step: int, num_slots: int) -> Tensor:
        """Windows of several slots at one step: int64 ``[B, sequence_length + 1]``.

        Args:
            slots: Slots of the caller, each in ``range(num_slots)``.
            step: Shared step, from 0.
            num_slots: Windows that all peers together take in one step.
        """
        return gather(self.split, self._indices(slots, step, num_slots), self.sequence_length)

    def passes(self, steps: int, num_slots: int) -> dict[str, float]:
        """How often the split has been seen after so many steps; 1.0 is its whole text."""
        return {self.name: steps * num_slots / self.num_samples}

    def _indices(self, slots: Sequence[int], step: int, num_slots: int) -> np.ndarray:
        if step < 0:
            raise ConfigError(f"step={step}: must not be negative; count steps from 0")
        for slot in slots:
            if not 0 <= slot < num_slots:
                raise ConfigError(f"slot={slot}: must be in 0..{num_slots - 1} (num_slots={num_slots}); count from 0")
        position = np.array(slots, dtype=np.int64) + step * num_slots
        epoch, offset = position // self.num_samples, position % self.num_samples
        index = np.empty_like(offset)
        for number in np.unique(epoch).tolist():
            chosen = epoch == number
            index[chosen] = permute(offset[chosen], self.num_samples, seed=self.seed, epoch=number)
        return index


def evaluation_batches(split: TokenSplit, sequence_length: int, batch_size: int, max_tokens: int) -> Iterator[Tensor]:
    """The first windows of a split, in order: int64 ``[<= batch_size, sequence_length + 1]`` each.

    ``max_tokens`` bounds the predicted tokens, but at least one window is given. The bytes of exactly these
    tokens are ``dataset.token_bytes[batch[:, 1:]].sum()``, summed over the batches.

    Raises:
        ConfigError: if the split does not fill one window.
    """
    num_windows = min(_num_windows(split, sequence_length), max(1, max_tokens // sequence_length))
    starts = range(0, num_windows, batch_size)
    return (gather(split, np.arange(i, min(i + batch_size, num_windows)), sequence_length) for i in starts)


def gather(split: TokenSplit, window_B: np.ndarray, sequence_length: int) -> Tensor:
    """Windows of a split by number: int64 ``[B, sequence_length + 1]``."""
    place_BT = window_B[:, None] * sequence_length + np.arange(sequence_length + 1)
    return torch.from_numpy(split.tokens[place_BT].astype(np.int64))


def _num_windows(split: TokenSplit, sequence_length: int) -> int:
    if sequence_length < 1:
        raise ConfigError(f"train.sequence_length={sequence_length}: must be at least 1; use 128")
    if split.num_tokens < sequence_length + 1:
        raise ConfigError(
            f"train.sequence_length={sequence_length}: one window needs {sequence_length + 1} tokens, but "
            f"split {split.name!r} has only {split.num_tokens}; give more text or a smaller sequence_length"
        )
    return (split.num_tokens - 1) // sequence_length
