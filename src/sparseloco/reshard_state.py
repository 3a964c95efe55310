"""State of a replica on another number of shards: the rows and chunks of one shard from those of all others.

Every tensor in the state of a shard is a run of dim 0 of that of the whole replica: rows of a parameter, chunks of a
block. So the shards' tensors, one after another, are the whole's, and a shard of another number takes its run of them.
Pure functions on state dicts; a tensor may lie on a disk, where only what is taken is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseloco.algorithm import Algorithm
from sparseloco.bits import add_digests, hex_digest
from sparseloco.errors import CheckpointError
from sparseloco.panels import piece_of
from sparseloco.sharding import Place
from sparseloco.types import TensorSpec

StateDict = dict[str, Any]
_NOTHING = hex_digest(0, 0)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on a disk.

    Attributes:
        shape: Its shape.
        read: Gives its entries ``first`` to ``last`` (exclusive) of dim 0; all of it for None.
    """

    shape: tuple[int, ...]
    read: Callable[[tuple[int, int] | None], Tensor]


class Cut(NamedTuple):
    """Entries ``first`` to ``last`` (exclusive) of ``length`` of dim 0."""

    first: int
    last: int
    length: int


@dataclass(frozen=True)
class Cuts:
    """What one shard holds of a replica.

    Attributes:
        shard: Its number, from 0.
        count: Shards of the replica.
        rows: Of each trainable tensor, in the order of the model's.
        chunks: Of each block of each tensor.
        tensors: Names of the tensors of each fragment, in order.
    """

    shard: int
    count: int
    rows: Mapping[str, Cut]
    chunks: Mapping[str, tuple[Cut, ...]]
    tensors: tuple[tuple[str, ...], ...]

    def block(self, path: str) -> Cut | None:
        """Chunks of ``<tensor>/<block>``; None for a tensor that is never sharded, such as a buffer."""
        name, _, number = path.rpartition("/")
        return self.chunks[name][int(number)] if name in self.chunks else None

    def part(self, fragment: int, number: int) -> Cut | None:
        """Chunks of a block by its number in the fragment."""
        if fragment >= len(self.tensors):  # the fragment of synced buffers
            return None
        return [cut for name in self.tensors[fragment] for cut in self.chunks[name]][number]


def cuts_of(algorithm: Algorithm, specs: Sequence[TensorSpec], places: Mapping[str, Place]) -> Cuts:
    """What the shard at ``places`` holds.

    Args:
        algorithm: Its layout cuts tensors into blocks, its rule makes fragments.
        specs: Table of the trainable tensors.
        places: By name; of one that is not sharded all of it.
    """
    first = places[specs[0].name]
    rows = {
        spec.name: Cut(places[spec.name].first, places[spec.name].last, spec.shape[0] if spec.shape else 1)
        for spec in specs
    }
    return Cuts(
        shard=first.shard,
        count=first.num_shards,
        rows=rows,
        chunks={spec.name: _chunks(algorithm, places[spec.name]) for spec in specs},
        tensors=tuple(tuple(specs[i].name for i in rows) for rows in algorithm.fragments.assign(specs)),
    )


def reshard_shared(states: Sequence[StateDict], cuts: Cuts) -> StateDict:
    """Shared state of one shard.

    Args:
        states: Of all shards that the replica had, in order; of one alone if it was not sharded.
        cuts: The shard that the state is for.

    Raises:
        CheckpointError: naming a tensor that is not that of the whole.
    """
    found: StateDict = {}
    for path in states[0]:
        kind, _, rest = path.partition("/")
        values = [state[path] for state in states]
        if kind == "awaited":
            found[path] = _own_share(values, cuts)
        elif kind in ("outer", "codec"):
            found[path] = _taken(path, values, cuts.block(rest.rpartition("/")[0]))
        else:
            found[path] = _taken(path, values, cuts.block(rest) if kind == "anchor" else None)
    found.pop("shard", None)
    return found | ({"shard": f"shard {cuts.shard} of {cuts.count}"} if cuts.count > 1 else {})


def reshard_private(states: Sequence[StateDict], cuts: Cuts) -> StateDict:
    """Private state of one shard; random state and buffers are those of the shard of its number, or of the last.

    Args:
        states: As in :func:`reshard_shared`, of one peer.
        cuts: The shard that the state is for.

    Raises:
        CheckpointError: naming a tensor that is not that of the whole.
    """
    own = min(cuts.shard, len(states) - 1)
    found: StateDict = {}
    for path, value in states[own].items():
        kind, _, rest = path.partition("/")
        values = [state[path] for state in states]
        if kind == "live":
            found[path] = _taken(path, values, cuts.rows.get(rest))
        elif kind == "residual":
            found[path] = _taken(path, values, cuts.block(rest))
        elif kind == "in_flight":
            found[path] = _message(path, values, cuts)
        elif kind == "optimizer" and value is not None:
            found[path] = _optimizer(values, cuts)
        else:
            found[path] = _loaded(value)
    return found


def reshard_inboxes(inboxes: Sequence[Sequence[Any]], cuts: Cuts) -> list[Any]:
    """Messages in flight for one shard: ``[[round, fragment], [{peer, ..., digest, tensors}, ...]]`` each.

    Args:
        inboxes: What each shard that the replica had was sent.
        cuts: The shard that they are for.

    Raises:
        CheckpointError: naming a part that is not that of the whole.
    """
    found: list[Any] = []
    for same in zip(*inboxes, strict=True):
        key = same[0][0]
        envelopes = zip(*(rows for _, rows in same), strict=True)
        found.append([key, [_row(key[1], each, cuts) for each in envelopes]])
    return found


def _row(fragment: int, envelopes: Sequence[StateDict], cuts: Cuts) -> StateDict:
    tensors = {
        name: _taken(name, [each["tensors"][name] for each in envelopes], _part(fragment, name, cuts))
        for name in envelopes[0]["tensors"]
    }
    digest = _own_share([each["digest"] for each in envelopes], cuts)
    return {**envelopes[0], "digest": digest, "tensors": tensors}


def _message(path: str, values: Sequence[Any], cuts: Cuts) -> Any:
    """What is remembered of a message: ``in_flight/<fragment>/<round>/<what>/<name>``."""
    _, fragment, _, what, *name = path.split("/")
    if what == "digest":
        return _own_share(values, cuts)
    if what == "abstained":  # all shards abstain together, for one cause
        return values[0]
    cut = cuts.rows.get(name[0]) if what == "snapshot" else _part(int(fragment), name[0], cuts)
    return _taken(path, values, cut)


def _part(fragment: int, name: str, cuts: Cuts) -> Cut | None:
    """Chunks of a part of a payload, which is named ``<block>.<what>``."""
    return cuts.part(fragment, int(name.partition(".")[0]))


def _optimizer(states: Sequence[StateDict], cuts: Cuts) -> StateDict:
    """Moments are sharded as their parameter is; counters are alike at all shards."""
    rows = list(cuts.rows.values())
    moments = {
        number: {
            name: _taken(
                f"optimizer/{number}/{name}",
                [state["state"][number][name] for state in states],
                rows[number] if getattr(value, "shape", ()) else None,
            )
            for name, value in values.items()
        }
        for number, values in states[0]["state"].items()
    }
    return {**states[0], "state": moments}


def _own_share(digests: Sequence[str], cuts: Cuts) -> str:
    """A digest of a moment that is past: only the sum over all shards is known, so the first stands for all."""
    return add_digests(digests) if cuts.shard == 0 else _NOTHING


def _taken(path: str, values: Sequence[Any], cut: Cut | None) -> Any:
    """The entries of a cut out of tensors that follow one another; anything else is alike at all shards."""
    if cut is None or not isinstance(values[0], (Tensor, StoredTensor)):
        return _loaded(values[0])
    lengths = [value.shape[0] if value.shape else 1 for value in values]
    if sum(lengths) != cut.length:
        raise CheckpointError(
            f"{path}={lengths} entries at the shards: must be {cut.length} together; resume with the model it came from"
        )
    found: list[Tensor] = []
    start = 0
    for value, length in zip(values, lengths, strict=True):
        first, last = max(cut.first - start, 0), min(cut.last - start, length)
        if first < last:
            found.append(_loaded(value) if last - first == length else _rows(value, first, last))
        start += length
    if not found:
        return _rows(values[0], 0, 0)
    return found[0] if len(found) == 1 else torch.cat(found)


def _rows(value: Tensor | StoredTensor, first: int, last: int) -> Tensor:
    return value.read((first, last)) if isinstance(value, StoredTensor) else value[first:last]


def _loaded(value: Any) -> Any:
    """The value itself, read from the disk where it lies there."""
    if isinstance(value, StoredTensor):
        return value.read(None)
    return [_loaded(each) for each in value] if isinstance(value, list) else value


def _chunks(algorithm: Algorithm, place: Place) -> tuple[Cut, ...]:
    here = (place.last - place.first, *place.shape[1:]) if place.shape else ()
    layout = piece_of(algorithm.channel.layout, place)
    shapes, firsts = layout.block_shapes(here), layout.first_chunks(here)
    wholes = algorithm.channel.layout.block_shapes(place.shape)
    return tuple(
        Cut(first, first + shape.num_chunks, whole.num_chunks)
        for first, shape, whole in zip(firsts, shapes, wholes, strict=True)
    )
