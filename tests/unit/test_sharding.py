"""Shards without processes: places, panels, and the work of a channel shared out among them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparseloco.bits import add_digests
from sparseloco.channel import Channel, ErrorFeedback
from sparseloco.compress import Dense, Quantize, ScaledSign, SignOneLevel, TopK
from sparseloco.errors import ConfigError
from sparseloco.kernels import native
from sparseloco.lane import Lane
from sparseloco.layout import Tiled, Tiles
from sparseloco.local import InnerSteps
from sparseloco.merge import Blend, Replace
from sparseloco.outer import Sgd
from sparseloco.panels import Panels, piece_of
from sparseloco.reduce import Mean
from sparseloco.sharding import Place, check_panels, local_views, shards_of
from sparseloco.types import Envelope, Key, TensorSpec

SHAPES = [(64, 20), (40, 3, 5), (16,), (8, 7), (61, 9), (9,), (5, 4), (1,), (3, 6)]
"""Eight shards of the last five: short last ones and empty ones."""

CHANNELS = {
    "sparseloco": Channel(
        layout=Tiles(4, 8, panels=8), feedback=ErrorFeedback(), compressor=TopK(5, 32), reducer=Mean()
    ),
    "one-level": Channel(
        layout=Tiles(4, 8, panels=8),
        feedback=ErrorFeedback(),
        compressor=TopK(5, 32, SignOneLevel()),
        reducer=Mean(over="peers"),
    ),
    "dense": Channel(layout=Panels(8), compressor=Dense(), reducer=Mean(over="peers")),
    "quantize": Channel(layout=Panels(8), compressor=Quantize(4), reducer=Mean(over="peers")),
    "scaled-sign": Channel(
        layout=Panels(8), feedback=ErrorFeedback(1.0), compressor=ScaledSign(), reducer=Mean(over="peers")
    ),
}


def places_of(shape: tuple[int, ...], count: int) -> Iterator[Place]:
    """As FSDP2 cuts dim 0."""
    size = -(-shape[0] // count)
    for shard in range(count):
        first = min(shape[0], shard * size)
        yield Place(shape, first, min(shape[0], first + size), shard, count)


def aligned(shape: tuple[int, ...], count: int, panels: int) -> bool:
    try:
        check_panels([("x", place) for place in places_of(shape, count)], panels)
    except ConfigError:
        return False
    return True


def values(peer: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7 + peer))


def lane_of(channel: Channel, specs: list[TensorSpec], live: list[Tensor], places: list[Place]) -> Lane:
    state = channel.init(specs, live, places)
    merge = Blend(0.5) if isinstance(channel.layout, Panels) else Replace()
    return Lane(live, InnerSteps(), channel, Sgd(0.7, 0.9, nesterov=True), merge, state)


def two_rounds(
    channel: Channel, specs: list[TensorSpec], places: list[Place]
) -> tuple[list[Lane], list[dict[str, Any]]]:
    """Two peers that hold these places; their lanes, and all parts that they sent."""
    starts = [values(-1, place.shape)[place.first : place.last] for place in places]
    lanes = [lane_of(channel, specs, [start.clone() for start in starts], places) for _ in range(2)]
    sent = []
    for round_ in range(2):
        inbox = []
        for peer, lane in enumerate(lanes):
            for tensor, place in zip(lane.live(), places, strict=True):
                tensor.sub_(values(10 * round_ + peer, place.shape)[place.first : place.last])
            posted = lane.post(0, key=0)
            assert posted.payload is not None
            sent.append(dict(posted.payload.tensors))
            inbox.append(
                Envelope(
                    key=Key(round_, 0),
                    peer=peer,
                    weight=1 + peer,
                    fingerprint="0" * 16,
                    digest=posted.digest,
                    payload=posted.payload,
                )
            )
        for lane in lanes:
            lane.channel.settle_(
                inbox, lane.state, lane.live(), outer=lane.outer, merge=lane.merge, snapshot=None, step=1
            )
    return lanes, sent


@pytest.mark.parametrize("definition", [False, True], ids=["kernels", "definition"])
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("name", CHANNELS)
def test_shards_together_are_the_whole(name: str, count: int, definition: bool) -> None:
    """C-51: messages, anchors, residuals, live values and digests, whatever the number of shards."""
    channel = CHANNELS[name]
    assert isinstance(channel.layout, Tiled)
    shapes = [shape for shape in SHAPES if aligned(shape, count, channel.layout.panels)]
    assert len(shapes) >= 4
    specs = [TensorSpec(f"t{i}", shape, torch.float32) for i, shape in enumerate(shapes)]
    whole, sent = two_rounds(channel, specs, [Place(shape, 0, shape[0]) for shape in shapes])
    rows = [[list(places_of(shape, count))[shard] for shape in shapes] for shard in range(count)]
    with native.definition_only() if definition else nullcontext():
        parts = [two_rounds(channel, specs, row) for row in rows]
    for number, message in enumerate(sent):
        for part in message:
            assert torch.equal(torch.cat([shard[number][part] for _, shard in parts]), message[part]), part
    for peer, lane in enumerate(whole):
        mine = [lanes[peer] for lanes, _ in parts]
        for i in range(len(specs)):
            assert torch.equal(torch.cat([shard.live()[i] for shard in mine]), lane.live()[i])
            assert torch.equal(torch.cat([shard.anchors()[i] for shard in mine]), lane.anchors()[i])
        for j, residual in enumerate(lane.state.residual):
            assert torch.equal(torch.cat([shard.state.residual[j] for shard in mine]), residual)
        assert len({path for shard in mine for path, _ in shard.block_paths()}) == len(lane.block_paths())
        digests = [digest_of(shard) for shard in mine]
        assert add_digests(digests) == digest_of(lane)
        assert len(set(digests)) == count


def digest_of(lane: Lane) -> str:
    low, high = lane.digest_lanes()
    return f"{low & (2**64 - 1):016x}{high & (2**64 - 1):016x}"


def test_panels_of_a_place_are_numbered_over_the_whole_tensor() -> None:
    assert [list(place.panels(8)) for place in places_of((61, 9), 4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [list(place.panels(4)) for place in places_of((5, 4), 4)] == [[0], [1], [2], []]
    assert list(Place((), 0, 1).panels(4)) == [0]


def test_one_shard_keeps_the_layout() -> None:
    layout = Tiles(panels=3)
    assert piece_of(layout, Place((5, 2), 0, 5)) is layout


def test_edges_of_shards_must_be_edges_of_panels() -> None:
    message = (
        r"panels=4: must have an edge at every edge of a shard, and w of 10 rows in 2 shards has one at row 5; "
        r"use panels=2"
    )
    with pytest.raises(ConfigError, match=message):
        check_panels([("w", place) for place in places_of((10, 3), 2)], 4)
    check_panels([("w", place) for place in places_of((10, 3), 2)], 2)


def test_local_views_of_a_plain_module_are_its_parameters() -> None:
    """A tied parameter counts once, under its first name."""
    model = nn.ModuleDict({"a": nn.Linear(3, 2, bias=False), "b": nn.Linear(3, 2, bias=False)})
    model["b"].weight = model["a"].weight  # pyright: ignore
    views = local_views(model)
    assert list(views) == ["a.weight"]
    assert views["a.weight"].tensor.data_ptr() == model["a"].weight.data_ptr()  # pyright: ignore
    assert views["a.weight"].place == Place((2, 3), 0, 2)
    assert shards_of(views).count == 1
    assert shards_of(views).agree(False) is False
