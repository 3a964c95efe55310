"""Fragment rules: which tensors are synced together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from sparseloco.errors import ConfigError, check_whole
from sparseloco.types import TensorSpec


class FragmentRule(Protocol):
    """Cuts the tensor table into fragments; every tensor belongs to exactly one."""

    name: ClassVar[str]

    def assign(self, specs: Sequence[TensorSpec]) -> tuple[tuple[int, ...], ...]:
        """Row numbers of the table, one tuple per fragment; no fragment is empty."""
        ...


@dataclass(frozen=True)
class Whole:
    """The model is one fragment."""

    name: ClassVar[str] = "whole"

    def assign(self, specs: Sequence[TensorSpec]) -> tuple[tuple[int, ...], ...]:
        return (tuple(range(len(specs))),)


@dataclass(frozen=True)
class Even:
    """Consecutive tensors in ``num_fragments`` runs of nearly equal size.

    Args:
        num_fragments: At least 1 and at most the number of tensors.
    """

    num_fragments: int
    name: ClassVar[str] = "even"

    def __post_init__(self) -> None:
        _check_num_fragments(self.num_fragments)

    def assign(self, specs: Sequence[TensorSpec]) -> tuple[tuple[int, ...], ...]:
        if self.num_fragments > len(specs):
            raise ConfigError(
                f"num_fragments={self.num_fragments!r}: must be at most the {len(specs)} trainable tensors of the "
                f"model; use {len(specs)} or fewer"
            )
        total = sum(spec.numel for spec in specs)
        fragments: list[tuple[int, ...]] = []
        current: list[int] = []
        seen = 0
        for row, spec in enumerate(specs):
            current.append(row)
            seen += spec.numel
            open_fragments = self.num_fragments - len(fragments) - 1
            rows_left = len(specs) - row - 1
            is_full = seen * self.num_fragments >= total * (len(fragments) + 1)
            if open_fragments and (is_full or rows_left == open_fragments):
                fragments.append(tuple(current))
                current = []
        return (*fragments, tuple(current))


@dataclass(frozen=True)
class Layers:
    """Groups of transformer blocks, strided or sequential, as in Streaming DiLoCo.

    The first number between dots in a name is its layer (``model.layers.7.mlp.weight`` is in layer 7). Tensors
    before any layer (embeddings) join the first fragment; those after the last (final norm, head) join the last.

    Args:
        num_fragments: Groups to make, at most the number of layers. The paper groups 3 layers each.
        strided: Layer i goes to fragment ``i mod num_fragments``; otherwise neighbours stay together.

    Reference: Douillard et al., 2025, arXiv:2501.18512, section 2.2.
    """

    num_fragments: int
    strided: bool = True
    name: ClassVar[str] = "layers"

    def __post_init__(self) -> None:
        _check_num_fragments(self.num_fragments)

    def assign(self, specs: Sequence[TensorSpec]) -> tuple[tuple[int, ...], ...]:
        layers = [_layer_of(spec.name) for spec in specs]
        found = sorted({layer for layer in layers if layer is not None})
        if len(found) < self.num_fragments:
            raise ConfigError(
                f"num_fragments={self.num_fragments!r}: must be at most the {len(found)} numbered layers of the model; "
                "use fewer, or fragment_by='size' (Even) for a model without numbered layers"
            )
        place = {layer: i for i, layer in enumerate(found)}
        fragments: list[list[int]] = [[] for _ in range(self.num_fragments)]
        home = 0
        for row, layer in enumerate(layers):
            if layer is not None:
                home = self._home(place[layer], len(found))
            elif any(fragments[i] for i in range(1, self.num_fragments)):
                home = self.num_fragments - 1
            fragments[home].append(row)
        return tuple(tuple(rows) for rows in fragments)

    def _home(self, place: int, num_layers: int) -> int:
        return place % self.num_fragments if self.strided else place * self.num_fragments // num_layers


def _check_num_fragments(num_fragments: int) -> None:
    check_whole("num_fragments", num_fragments)
    if num_fragments < 1:
        raise ConfigError(f"num_fragments={num_fragments!r}: must be at least 1; use 1 for the whole model")


def _layer_of(name: str) -> int | None:
    match = re.search(r"(?:^|\.)(\d+)\.", name)
    return int(match.group(1)) if match else None
