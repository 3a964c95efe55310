"""Panels: how the blocks of a tensor are shared out among the shards that hold it.

A shard whose edges are edges of panels holds whole chunks, and chunks are coded each alone. So the blocks of all
shards, one under another, are the blocks of the whole tensor, and so are the payloads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparseloco.layout import Flat, Layout, Region, Tiled, check_positive, matrix_shape
from sparseloco.sharding import Place


@dataclass(frozen=True)
class Panels(Tiled):
    """One chunk per panel: ``[panels, values of a panel]``; a shorter last panel is a block of its own.

    For methods whose chunk is the whole tensor, on sharded replicas; one panel is the whole tensor as one chunk.

    Args:
        panels: Panels along dim 0, of ``ceil(n / panels)`` entries; part of the algorithm's fingerprint.

    Example:
        >>> import torch
        >>> [tuple(b.shape) for b in Panels(4).forward(torch.zeros(7, 5))]
        [(3, 10), (1, 5)]
    """

    panels: int = 1
    name: ClassVar[str] = "panels"

    def __post_init__(self) -> None:
        check_positive("panels", self.panels)

    def tile_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return matrix_shape(shape)


@dataclass(frozen=True)
class Piece(Tiled):
    """A shard's part of the blocks of a :class:`sparseloco.layout.Tiled` layout: the chunks of the panels it holds.

    Every block of the whole tensor is there, maybe without a chunk, so that blocks have the same numbers on all shards.

    Args:
        whole: Layout of the whole tensor.
        place: What the shard holds; its edges must be edges of panels.
    """

    whole: Tiled
    place: Place
    name: ClassVar[str] = "piece"

    def tile_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return self.whole.tile_of(self.place.shape)

    def regions(self, shape: tuple[int, ...]) -> tuple[Region, ...]:
        found = ((self._panels_of(region), region) for region in self.whole.regions(self.place.shape))
        return tuple(
            region._replace(first_row=max(0, region.first_row - self.place.first) if held else 0, panels=len(held))
            for held, region in found
        )

    def first_chunks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(
            self._panels_of(region).start * region.grid[0] * region.grid[1]
            for region in self.whole.regions(self.place.shape)
        )

    def _panels_of(self, region: Region) -> range:
        """Panels of a region of the whole tensor that this shard holds, counted from the region's first."""
        first, last = (
            min(region.panels, max(0, row - region.first_row) // region.height)
            for row in (self.place.first, self.place.last)
        )
        return range(first, last)


def whole(panels: int) -> Layout:
    """Tensors as one chunk each, or as one chunk per panel where there is more than one panel."""
    return Flat() if panels == 1 else Panels(panels)


def piece_of(layout: Layout, place: Place) -> Layout:
    """How the shard at ``place`` becomes blocks; the layout itself where one shard is the whole tensor."""
    if place.num_shards == 1:
        return layout
    assert isinstance(layout, Tiled), "ask support.check_shards first"
    return Piece(layout, place)
