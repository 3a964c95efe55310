"""Triton kernels in Triton's interpreter: every bit is that of the torch definition. `make triton` installs Triton."""

from __future__ import annotations

import importlib.util
import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparseloco.channel import LARGEST, _is_sane
from sparseloco.compress import SignTwoLevel
from sparseloco.errors import ConfigError, DivergenceError
from sparseloco.kernels import triton_blocks
from sparseloco.kernels.geometry import TileGeometry
from sparseloco.layout import Tiles
from sparseloco.outer import Sgd
from sparseloco.types import Parts
from tests.kernels.triton_cases import (
    Case,
    encode_cases,
    encode_differences,
    posted,
    same,
    settle_block,
    settle_cases,
    settle_differences,
    worlds,
)

CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
GEOMETRY = TileGeometry(0, 1, 8, 0, 0, 1, 1, 8, 8, 8)
CODE = SignTwoLevel()


def encode(start: Tensor, live: Tensor, geometry: TileGeometry = GEOMETRY, kept: int = 5, **changed: Tensor) -> Parts:
    residual = changed.get("residual", torch.zeros_like(start))
    return triton_blocks.encode_block(
        start, live, residual, geometry=geometry, decay=1.0, kept=kept, low=CODE.low, high=CODE.high
    )


def settle(live: Tensor, inbox: list[tuple[int, Parts]], **settings: object) -> triton_blocks.Settled:
    usual = {"over": "peers", "low": CODE.low, "high": CODE.high, "lr": 1.0, "largest": LARGEST}
    return triton_blocks.settle_block(torch.zeros(1, 64), live, inbox, geometry=GEOMETRY, **{**usual, **settings})


@needs_triton
@pytest.mark.parametrize("case", encode_cases(), ids=str)
def test_encode_has_the_bits_of_the_definition(case: Case) -> None:
    assert encode_differences(case, CPU) == []


@needs_triton
@pytest.mark.parametrize("case", settle_cases(), ids=str)
def test_settle_has_the_bits_of_the_definition(case: Case) -> None:
    assert settle_differences(case, CPU) == []


def test_the_issue_asks_for_240_different_cases() -> None:
    assert len({str(case) for case in encode_cases()}) >= 240


@needs_triton
def test_peers_that_send_the_same_positions_share_a_coordinate() -> None:
    """Supports of random peers hardly meet, so here all of them overlap."""
    case = Case((8, 8), k=64, peers=3)
    positions = [envelope.payload.blocks[0]["index"] for envelope in posted(worlds(case, CPU))]
    assert all(torch.equal(positions[0], other) for other in positions[1:])
    assert settle_differences(case, CPU) == []


@needs_triton
def test_large_weights_count_exactly() -> None:
    """Weights up to 2**29 - 1 whose sum needs more than 31 bits."""
    case = Case((8, 8), k=64, peers=5)
    world = worlds(case, CPU)
    inbox = [replace(envelope, weight=2**29 - 1 - envelope.peer) for envelope in posted(world)]
    world.mine.copy_(world.lives[0])
    world.channel.settle_(
        inbox, world.states[0], [world.lives[0]], outer=case.outer, merge=case.merge, snapshot=None, step=0
    )
    assert settle_block(world, 0, inbox, CPU).sane
    assert same(world.anchors[0], world.states[0].anchor[0])
    assert same(world.mine, world.lives[0])


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sanity_is_that_of_the_definition(dtype: torch.dtype) -> None:
    border = torch.tensor(LARGEST, dtype=dtype)
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    neighbours = [(border.view(whole) + step).view(dtype) for step in (-1, 0, 1)]
    verdicts: list[bool] = []
    for value in (*neighbours, torch.tensor(math.inf), torch.tensor(math.nan), torch.tensor(0.0)):
        for sign in (1, -1):
            wide = torch.full((70, 65), math.nan, dtype=dtype)
            tensor = wide[:, :64]
            tensor.fill_(1.0)
            tensor[69, 63] = value * sign
            verdicts.append(triton_blocks.is_sane(tensor, LARGEST))
            assert verdicts[-1] == _is_sane(tensor) == triton_blocks.is_sane(tensor.contiguous(), LARGEST)
    assert verdicts[:2] == [True, True]
    assert not any(verdicts[2:10])
    assert triton_blocks.is_sane(torch.zeros(0, 3, dtype=dtype), LARGEST)
    assert triton_blocks.is_sane(torch.ones(4, 6, dtype=dtype).T, LARGEST)  # a copy would be needed: torch decides


@needs_triton
def test_a_chunk_that_leaves_the_range_stays_and_is_named() -> None:
    """The definition refuses the block; here the other chunks have moved, which its error allows."""
    case = Case((8, 16), pattern="large", outer=Sgd(lr=1.2), peers=1)
    world = worlds(case, CPU)
    # The scale is below 1e37 and leaves its replica; the anchor after the step would not be.
    world.states[0].residual[0].copy_(torch.tensor([[1.0], [5e36]]).expand(2, 64))
    inbox = list(posted(world))
    before, live = world.anchors[0].clone(), world.mine.clone()
    with pytest.raises(DivergenceError, match="anchor of w=not finite"):
        world.channel.settle_(
            inbox, world.states[0], [world.lives[0]], outer=case.outer, merge=case.merge, snapshot=None, step=0
        )
    settled = settle_block(world, 0, inbox, CPU)
    assert not settled.sane
    assert torch.equal(world.anchors[0][1], before[1])
    assert torch.equal(world.mine[:, 8:], live[:, 8:])
    assert not torch.equal(world.anchors[0][0], before[0])
    assert torch.equal(world.mine[:, :8].reshape(-1), world.anchors[0][0])


@needs_triton
def test_unsupported_blocks_are_refused() -> None:
    """What supports() says no to is left to the caller, with one sentence."""
    yes = {"chunk_size": 4096, "dtype": torch.float32, "device": CPU}
    assert triton_blocks.supports(**yes)
    assert not triton_blocks.supports(**{**yes, "chunk_size": 4097})
    assert not triton_blocks.supports(**{**yes, "dtype": torch.float64})
    assert not triton_blocks.supports(**{**yes, "device": torch.device("meta")})
    wide = TileGeometry(0, 1, 1, 0, 0, 1, 1, 1, 8192, 8192)
    with pytest.raises(ConfigError, match=r"block=torch.float32 in chunks of 8192 on cpu: must be .* at most 4096"):
        encode(torch.zeros(1, 8192), torch.zeros(1, 8192), wide)


def test_without_triton_nothing_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not triton_blocks.supports(chunk_size=64, dtype=torch.float32, device=CPU)
    assert triton_blocks.is_sane(torch.ones(3), LARGEST)
    assert not triton_blocks.is_sane(torch.tensor([1.0, math.nan]), LARGEST)


@needs_triton
@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"start": torch.zeros(2, 64)}, "anchor=(2, 64): must be (1, 64) as its geometry says; take both of one block"),
        ({"start": torch.zeros(1, 64).double()}, "anchor=torch.float64 (1, 64): must be contiguous float32 (1, 64)"),
        ({"residual": torch.zeros(1, 128)[:, ::2]}, "residual=torch.float32 (1, 64): must be contiguous float32"),
        (
            {"live": torch.zeros(7, 8)},
            "live=(7, 8): must hold element 63 as its geometry says; take both",
        ),
        ({"kept": 65}, "kept=65: must be between 1 and the chunk's 64 values; take k from the method"),
    ],
    ids=["shape", "type", "strides", "memory", "kept"],
)
def test_encode_refuses_tensors_that_do_not_fit(bad: dict[str, object], text: str) -> None:
    good: dict[str, object] = {"start": torch.zeros(1, 64), "live": torch.zeros(8, 8)}
    with pytest.raises(ConfigError, match=re.escape(text)):
        encode(**{**good, **bad})  # pyright: ignore[reportArgumentType]


@needs_triton
def test_settle_refuses_tensors_that_do_not_fit() -> None:
    live = torch.zeros(8, 8)
    parts = encode(torch.randn(1, 64), live)
    with pytest.raises(ConfigError, match=re.escape("index=torch.int64 (1, 5) on cpu: must be torch.int16 (1, 5)")):
        settle(live, [(1, {**parts, "index": parts["index"].long()})])
    with pytest.raises(ConfigError, match=r"code=.*\(1, 4\).*; decode the frame with this block's table"):
        settle(live, [(1, {**parts, "code": parts["code"][:, :4]})])
    with pytest.raises(ConfigError, match=r"velocity=None: must be a tensor with momentum=0\.9; start it at zero"):
        settle(live, [(1, parts)], momentum=0.9)
    with pytest.raises(ConfigError, match=re.escape("alpha=0.5: must be None with a snapshot; choose Blend or Carry")):
        settle(live, [(1, parts)], alpha=0.5, snapshot=live.clone())
    with pytest.raises(ConfigError, match=r"snapshot=torch\.bfloat16 .* must be torch\.float32 \(8, 8\); clone live"):
        settle(live, [(1, parts)], snapshot=live.bfloat16())
    with pytest.raises(ConfigError, match="over='all': must be 'contributors' or 'peers'; choose one of them"):
        settle(live, [(1, parts)], over="all")


@needs_triton
def test_positions_outside_the_chunk_touch_nothing() -> None:
    """Frames are checked when they are decoded; this is the last fence before memory."""
    live, layout = torch.zeros(8, 8), Tiles(8, 8)
    parts = encode(torch.randn(1, 64), live)
    wild = {**parts, "index": torch.tensor([[-7, 64, 32767, -32768, 3]], dtype=torch.int16)}
    assert settle(live, [(1, wild)]).sane
    (chunk,) = layout.split(live)
    assert chunk.nonzero().tolist() == [[0, 3]]
