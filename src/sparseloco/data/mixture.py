"""Which source a window is from, and who sees which source: still a pure function of seed, slot and step.

A *stream* is an endless row of windows out of some sources. Workers that see the same sources share a stream, and each
takes its own positions of it. Shape letters: B windows in a batch, T tokens in a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from sparseloco.data.sampler import Sampler, gather, permute
from sparseloco.data.tokens import Dataset, SourceTokens
from sparseloco.errors import ConfigError
from sparseloco.keys import derive_key

BLOCK = 10_000
"""Windows in which every source has its share exactly, to one window."""
_SOURCE, _ORDER = 1, 2


class TrainSampler(Protocol):
    """What the training loop needs of a sampler."""

    def batch(self, slots: Sequence[int], step: int, num_slots: int) -> Tensor:
        """Windows of several slots at one step."""
        ...

    def passes(self, steps: int, num_slots: int) -> dict[str, float]:
        """How often each source has been seen after so many steps; 1.0 is its whole text."""
        ...


def train_sampler(
    dataset: Dataset,
    sequence_length: int,
    seed: int,
    *,
    num_workers: int = 1,
    per_worker: Literal["iid", "source"] = "iid",
) -> TrainSampler:
    """The sampler of the train split.

    With one source, or several without weights that everybody sees, it is ``Sampler``. Otherwise ``MixedSampler``.

    Args:
        dataset: Its sources carry the weights.
        sequence_length: Predicted tokens in a window.
        seed: Key of the order.
        num_workers: Workers that share the slots of a step.
        per_worker: "iid" or "source"; see ``DataConfig``.

    Raises:
        ConfigError: if a source does not fill one window.
    """
    is_weighted = any(source.weight for source in dataset.sources)
    if per_worker == "iid" and (len(dataset.sources) < 2 or not is_weighted):
        return Sampler(dataset.split("train"), sequence_length, seed, dataset.corpus_name)
    return MixedSampler(dataset.sources, sequence_length, seed, num_workers=num_workers, per_worker=per_worker)


class MixedSampler:
    """Windows out of several sources, by weight or by size, for all workers alike or dealt out to them.

    ``per_worker="source"`` deals out in turn: with W workers and S sources, worker w sees source w modulo S; if there
    are fewer workers, worker w sees sources w, w + W and so on. Workers with the same sources never see the same window
    in one epoch of it.

    Args:
        sources: The sources.
        sequence_length: Predicted tokens in a window; no window reaches from one source into the next.
        seed: Key of the order.
        num_workers: Workers; slot ``i`` of a step belongs to worker ``i * num_workers // num_slots``.
        per_worker: "iid" or "source".

    Raises:
        ConfigError: if a source does not fill one window, or a weight is too small to be kept.
    """

    def __init__(
        self,
        sources: Sequence[SourceTokens],
        sequence_length: int,
        seed: int,
        *,
        num_workers: int,
        per_worker: Literal["iid", "source"],
    ) -> None:
        self.sequence_length = sequence_length
        self.num_workers = num_workers
        self.num_groups = min(num_workers, len(sources)) if per_worker == "source" else 1
        self.streams = [
            _Stream(sources[group :: self.num_groups], sequence_length, derive_key(seed, group) if group else seed)
            for group in range(self.num_groups)
        ]

    def locate(self, slot: int, step: int, num_slots: int) -> tuple[str, int]:
        """Name of the source, and number of the window in it, that a slot sees at a step."""
        group, position = self._position(slot, step, num_slots)
        source, window = self.streams[group].locate(np.array([position]))
        return self.streams[group].sources[int(source[0])].name, int(window[0])

    def batch(self, slots: Sequence[int], step: int, num_slots: int) -> Tensor:
        """Windows of several slots at one step: int64 ``[B, sequence_length + 1]``."""
        placed = [self._position(slot, step, num_slots) for slot in slots]
        group_B, position_B = (np.array(column, dtype=np.int64) for column in zip(*placed, strict=True))
        batch_BT = torch.empty((len(slots), self.sequence_length + 1), dtype=torch.int64)
        for group in np.unique(group_B).tolist():
            of_group = np.flatnonzero(group_B == group)
            stream = self.streams[group]
            source_B, window_B = stream.locate(position_B[of_group])
            for number in np.unique(source_B).tolist():
                of_source = source_B == number
                windows = gather(stream.sources[number].train, window_B[of_source], self.sequence_length)
                batch_BT[torch.from_numpy(of_group[of_source])] = windows
        return batch_BT

    def passes(self, steps: int, num_slots: int) -> dict[str, float]:
        """How often each source has been seen after so many steps; 1.0 is its whole text."""
        seen: dict[str, float] = {}
        for group, stream in enumerate(self.streams):
            seen.update(stream.passes(steps * self._slots_of_group(group, num_slots)))
        return seen

    def _slots_of_group(self, group: int, num_slots: int) -> int:
        return len(range(group, self.num_workers, self.num_groups)) * (num_slots // self.num_workers)

    def _position(self, slot: int, step: int, num_slots: int) -> tuple[int, int]:
        """Group of a slot's worker, and the slot's position in the stream of that group."""
        if step < 0:
            raise ConfigError(f"step={step}: must not be negative; count steps from 0")
        if not 0 <= slot < num_slots:
            raise ConfigError(f"slot={slot}: must be in 0..{num_slots - 1} (num_slots={num_slots}); count from 0")
        if num_slots % self.num_workers:
            raise ConfigError(
                f"num_slots={num_slots}: must be a multiple of num_workers={self.num_workers}; give all as many"
            )
        if self.num_groups == 1:
            return 0, step * num_slots + slot
        per_worker = num_slots // self.num_workers
        worker, own = divmod(slot, per_worker)
        group, rank = worker % self.num_groups, worker // self.num_groups
        return group, step * self._slots_of_group(group, num_slots) + rank * per_worker + own


class _Stream:
    """Endless row of windows out of some sources."""

    def __init__(self, sources: Sequence[SourceTokens], sequence_length: int, seed: int) -> None:
        self.sources = sources
        self.seed = seed
        self.num_windows = np.array([Sampler(s.train, sequence_length, seed).num_samples for s in sources])
        weights = [source.weight for source in sources]
        self.counts = _counts(sources, weights) if any(weights) else None

    def locate(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source, and window in it, at each position."""
        if self.counts is None:
            return self._by_size(position)
        return self._by_weight(position, self.counts)

    def passes(self, num_positions: int) -> dict[str, float]:
        """How often each source has been seen after so many positions."""
        shares = self.num_windows / self.num_windows.sum() if self.counts is None else self.counts / BLOCK
        return {
            s.name: float(num_positions * f / n) for s, f, n in zip(self.sources, shares, self.num_windows, strict=True)
        }

    def _by_size(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All windows of all sources in one permutation an epoch."""
        ends = np.cumsum(self.num_windows)
        number = _shuffled(position, int(ends[-1]), self.seed)
        source = np.searchsorted(ends, number, side="right")
        return source, number - (ends - self.num_windows)[source]

    def _by_weight(self, position: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Blocks in which every source has its count of places, in random order; each source has epochs of its own."""
        ends = np.cumsum(counts)
        place = _shuffled(position, BLOCK, derive_key(self.seed, _SOURCE))
        source = np.searchsorted(ends, place, side="right")
        # The how-manieth window of its source this is, over all blocks.
        nth = position // BLOCK * counts[source] + place - (ends - counts)[source]
        window = np.empty_like(nth)
        for number in np.unique(source).tolist():
            chosen = source == number
            key = derive_key(self.seed, _ORDER, number)
            window[chosen] = _shuffled(nth[chosen], int(self.num_windows[number]), key)
        return source, window


def _shuffled(position: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Image of endless positions under one permutation of ``range(size)`` an epoch."""
    epoch, offset = position // size, position % size
    image = np.empty_like(offset)
    for number in np.unique(epoch).tolist():
        chosen = epoch == number
        image[chosen] = permute(offset[chosen], size, seed=seed, epoch=number)
    return image


def _counts(sources: Sequence[SourceTokens], weights: Sequence[float]) -> np.ndarray:
    """Places of each source in a block: shares of the weights, rounded so that they fill the block."""
    exact = np.array(weights) / sum(weights) * BLOCK
    counts = np.floor(exact).astype(np.int64)
    rest = np.argsort(-(exact - counts), kind="stable")[: BLOCK - int(counts.sum())]
    counts[rest] += 1
    for source, count in zip(sources, counts.tolist(), strict=True):
        if count == 0:
            raise ConfigError(
                f"data.sources.weight={source.weight!r}: of {source.name!r} is less than 1/{BLOCK} of all weights; use "
                "a larger one or leave the source out"
            )
    return counts
