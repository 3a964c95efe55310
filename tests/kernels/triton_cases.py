"""Blocks on which the Triton kernels must have the bits of the definition; benchmarks/gpu_check.py runs them too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from sparseloco.channel import LARGEST, Channel, ChannelState, ErrorFeedback
from sparseloco.compress import SignTwoLevel, TopK
from sparseloco.kernels import triton_blocks
from sparseloco.kernels.geometry import TileGeometry, tensor_geometry
from sparseloco.layout import Chunks, Layout, Tiles
from sparseloco.merge import Blend, Carry, Replace
from sparseloco.outer import Sgd
from sparseloco.reduce import Mean
from sparseloco.types import Envelope, Key, Merge, Parts, Source, TensorSpec

PATTERNS = ("normal", "heavy", "ties", "zeros", "constant", "subnormal", "signed_zeros", "large")


@dataclass(frozen=True)
class Case:
    """One tensor, its pattern of values, and one round of ``peers`` replicas."""

    shape: tuple[int, ...] = (16, 16)
    k: int = 5
    layout: Layout = field(default_factory=lambda: Tiles(8, 8))
    dtype: torch.dtype = torch.float32
    pattern: str = "normal"
    decay: float = 0.95
    feedback: bool = True
    over: str = "contributors"
    peers: int = 2
    merge: Merge = field(default_factory=Replace)
    outer: Sgd = field(default_factory=lambda: Sgd(lr=0.05))
    spare_cols: int = 0
    code: SignTwoLevel = field(default_factory=SignTwoLevel)

    def __str__(self) -> str:
        usual = Case()
        differing = [f"{n}={v}" for n, v in vars(self).items() if v != getattr(usual, n)]
        return " ".join(differing) or "usual"

    @property
    def channel(self) -> Channel:
        side = self.layout.block_shapes((4096 * 64,))[0].chunk_size
        compressor = TopK(k=min(self.k, side), chunk_size=side, values=self.code)
        feedback = ErrorFeedback(self.decay) if self.feedback else None
        return Channel(layout=self.layout, compressor=compressor, reducer=Mean(self.over), feedback=feedback)


@dataclass
class Worlds:
    """The same start twice: ``state`` and ``live`` are the definition's, the others the kernels'."""

    case: Case
    channel: Channel
    states: list[ChannelState]
    lives: list[Tensor]
    snapshot: Tensor
    residuals: list[Tensor]
    anchors: list[Tensor]
    velocities: list[Tensor]
    mine: Tensor
    blocks: tuple[TileGeometry, ...]


def values(pattern: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Float32 numbers of a kind that has broken kernels before."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator)
    sign = torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0)
    size = torch.randint(-12, 5, shape, generator=generator)
    whole = torch.randint(0, 1 << 12, shape, generator=generator, dtype=torch.int32)
    made = {
        "normal": normal,
        "heavy": torch.ldexp(normal, size),
        "ties": torch.round(normal),
        "zeros": torch.zeros(shape),
        "constant": torch.full(shape, 0.3),
        "subnormal": whole.view(torch.float32) * sign,
        "signed_zeros": torch.zeros(shape) * sign,
        "large": (normal * 1.5e36).clamp(-5e36, 5e36),
    }
    return made[pattern]


def worlds(case: Case, device: torch.device) -> Worlds:
    """State of all peers after some local steps, with something left over from earlier rounds."""
    channel = case.channel
    start = values(case.pattern, case.shape, 1)
    spec = TensorSpec("w", case.shape, case.dtype)
    states = [channel.init([spec], [start]) for _ in range(max(1, case.peers))]
    lives: list[Tensor] = []
    for peer, state in enumerate(states):
        for j, residual in enumerate(state.residual):
            residual.copy_(values(case.pattern, tuple(residual.shape), 100 * peer + j))
        moved = start if case.pattern in ("zeros", "subnormal") else values(case.pattern, case.shape, 10 + peer)
        lives.append(moved.to(case.dtype))
    mine = strided(lives[0], case.spare_cols, device)
    blocks = tensor_geometry(case.layout, mine)
    assert blocks is not None
    return Worlds(
        case,
        channel,
        states,
        lives,
        lives[0].clone(),
        [r.to(device, copy=True) for r in states[0].residual],
        [a.to(device, copy=True) for a in states[0].anchor],
        [torch.zeros_like(a, device=device) for a in states[0].anchor],
        mine,
        blocks,
    )


def strided(tensor: Tensor, spare_cols: int, device: torch.device) -> Tensor:
    """A copy whose rows lie ``spare_cols`` elements apart from each other, with NaN in between."""
    if not spare_cols:
        return tensor.to(device, copy=True)
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + spare_cols), math.nan, dtype=tensor.dtype, device=device)
    view = wide[..., : tensor.shape[-1]]
    view.copy_(tensor)
    return view


def encode_differences(case: Case, device: torch.device) -> list[str]:
    """What differs between encode on ``device`` and ``Channel.outgoing`` on the CPU; nothing should."""
    world = worlds(case, device)
    wrong = [] if triton_blocks.is_sane(world.mine, LARGEST) else ["is_sane"]
    sent = next(posted(world)).payload.blocks
    for j, block in enumerate(world.blocks):
        got = triton_blocks.encode_block(
            world.anchors[j], world.mine, world.residuals[j] if case.feedback else None, geometry=block,
            decay=case.decay, kept=sent[j]["index"].shape[1], low=case.code.low, high=case.code.high,
        )  # fmt: skip
        wrong += [f"{name} {j}" for name, part in sent[j].items() if not same(got[name], part)]
    left = zip(world.residuals, world.states[0].residual, strict=True)
    return wrong + [f"residual {j}" for j, (mine, theirs) in enumerate(left) if not same(mine, theirs)]


def settle_differences(case: Case, device: torch.device) -> list[str]:
    """What differs between settle on ``device`` and ``Channel.settle_`` on the CPU; nothing should."""
    world = worlds(case, device)
    inbox = list(posted(world))[: case.peers]
    state, live = world.states[0], world.lives[0]
    live.copy_((live.float() * 1.01).to(case.dtype))  # it has gone on since its post
    world.mine.copy_(live)
    snapshot = [world.snapshot] if case.merge.needs_snapshot else None
    wrong: list[str] = []
    for step in range(2 if case.outer.momentum else 1):  # a velocity is seen in the second step only
        norm = world.channel.settle_(
            inbox, state, [live], outer=case.outer, merge=case.merge, snapshot=snapshot, step=step
        )
        settled = [settle_block(world, j, inbox, device) for j in range(len(world.blocks))]
        wrong += [f"sane {j}" for j, block in enumerate(settled) if not block.sane]
        mine = math.sqrt(sum(block.square for block in settled))
        # The definition's norm is a float32 sum of squares: last bits differ, and the largest are infinite there.
        if not math.isclose(mine, norm, rel_tol=1e-5, abs_tol=1e-22) and not math.isinf(norm):
            wrong.append(f"norm {mine} for {norm}")
    wrong += [f"anchor {j}" for j, a in enumerate(state.anchor) if not same(world.anchors[j], a)]
    if case.outer.momentum and case.peers:
        wrong += [f"velocity {j}" for j, o in enumerate(state.outer) if not same(world.velocities[j], o["velocity"])]
    return wrong + ([] if same(world.mine, live) else ["live"])


def posted(world: Worlds) -> Iterator[Envelope]:
    """Every peer's payload by the definition."""
    for peer, (state, live) in enumerate(zip(world.states, world.lives, strict=True)):
        payload = world.channel.outgoing([Source(list(state.anchor), live)], state, key=0)
        yield Envelope(key=Key(0, 0), peer=peer, weight=1 + 3 * peer, fingerprint="", digest="", payload=payload)


def settle_block(world: Worlds, j: int, inbox: list[Envelope], device: torch.device) -> triton_blocks.Settled:
    """Block ``j`` of a world by the kernel."""
    case, outer = world.case, world.case.outer
    received: list[tuple[int, Parts]] = [
        (e.weight, {name: part.to(device) for name, part in e.payload.blocks[j].items()}) for e in inbox
    ]
    snapshot = world.snapshot.to(device) if case.merge.needs_snapshot else None
    dense = tensor_geometry(case.layout, world.snapshot)
    assert dense is not None
    return triton_blocks.settle_block(
        world.anchors[j], world.mine, received,
        geometry=world.blocks[j], over=case.over, low=case.code.low, high=case.code.high, lr=float(outer.lr),
        largest=LARGEST, weight_decay=outer.weight_decay, momentum=outer.momentum, nesterov=outer.nesterov,
        velocity=world.velocities[j] if outer.momentum else None,
        alpha=case.merge.alpha if isinstance(case.merge, Blend) else None,
        snapshot=snapshot, snapshot_stride=dense[j].row_stride,
    )  # fmt: skip


def same(mine: Tensor, theirs: Tensor) -> bool:
    """Equal shapes, types and bits, signs of zeros included."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[mine.element_size()]
    return torch.equal(mine.cpu().contiguous().view(whole), theirs.contiguous().view(whole))


DTYPES = (torch.float32, torch.bfloat16)
PLACES: tuple[tuple[tuple[int, ...], Layout, int], ...] = (
    ((26, 13), Tiles(8, 8, panels=3), 5),
    ((21,), Tiles(4, 4, panels=2), 3),
    ((7, 3, 5), Tiles(4, 4), 2),
    ((100,), Chunks(24), 5),
    ((5, 7), Chunks(64), 40),
    ((), Tiles(8, 8), 1),
    ((70, 66), Tiles(64, 64), 64),
)
"""Shapes with their layouts and k: panels, ragged edges, vectors, runs, a scalar, whole chunks of 4096."""


def encode_cases() -> list[Case]:
    """Every branch of the encode kernel, with few chunks each: the interpreter is slow."""
    found = [
        Case(pattern=pattern, dtype=dtype, k=k, shape=shape, spare_cols=spare)
        for pattern, dtype in product(PATTERNS, DTYPES)
        for k in (1, 5, 16, 63, 64)
        for shape, spare in (((8, 8), 0), ((8, 11), 3))
    ]
    found += [Case((8, 16), pattern=p, dtype=d, decay=b) for p, d, b in product(PATTERNS, DTYPES, (0.0, 0.3, 0.5, 1.0))]
    found += [Case(s, k, layout, dtype=d) for (s, layout, k), d in product(PLACES, DTYPES)]
    found += [Case((64, 64), k, Tiles(64, 64), pattern=p) for k in (64, 4096) for p in ("heavy", "ties", "constant")]
    found += [Case(feedback=False, dtype=d) for d in DTYPES]
    return [*found, Case(code=SignTwoLevel(1.0, 2.0)), Case((8, 8), 3, pattern="ties", code=SignTwoLevel(0.5, 1.5))]


def settle_cases() -> list[Case]:
    """Every branch of the settle kernel."""
    found = [
        Case(pattern=pattern, dtype=dtype, over=over, shape=(9, 11))
        for pattern, dtype, over in product(PATTERNS, DTYPES, ("contributors", "peers"))
    ]
    found += [
        Case(merge=merge, over=over, peers=peers, dtype=dtype, spare_cols=spare, pattern="heavy")
        for merge in (Replace(), Blend(0.3), Carry())
        for over, dtype, spare in (("contributors", torch.float32, 0), ("peers", torch.bfloat16, 5))
        for peers in (0, 1, 2, 8)
    ]
    optimizers = (
        Sgd(lr=0.7, momentum=0.9, nesterov=True),
        Sgd(lr=0.7, momentum=0.9),
        Sgd(lr=1.0, weight_decay=0.01),
        Sgd(lr=0.3, momentum=0.5, weight_decay=0.1),
    )
    found += [Case((8, 16), outer=outer, dtype=dtype) for outer, dtype in product(optimizers, DTYPES)]
    found += [Case(s, k, layout, dtype=d) for (s, layout, k), d in zip(PLACES, DTYPES * 4, strict=False)]
    return [*found, Case((8, 8), k=64), Case((8, 8), code=SignTwoLevel(1.0, 2.0)), Case(merge=Blend(0.0))]
