"""The native encoder against the definition, bit for bit, for every instruction set that this machine has."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from sparseloco.channel import LARGEST, Channel, ChannelState, ErrorFeedback
from sparseloco.compress.topk import TopK
from sparseloco.compress.values import SignTwoLevel
from sparseloco.errors import ConfigError
from sparseloco.kernels import native
from sparseloco.kernels.geometry import block_geometry
from sparseloco.layout import Chunks, Flat, Layout, Tiles
from sparseloco.reduce import Mean
from sparseloco.types import Payload, Source, TensorSpec
from tests.kernels.fixed_section import fixed_section

needs_native = pytest.mark.skipif(
    not native.available(), reason="the native kernels are not built (tools/native.sh) or are switched off"
)
pytestmark = [needs_native, pytest.mark.usefixtures("definition")]


@dataclass(frozen=True)
class Case:
    """A layout, the shape of a parameter, and what is kept of it."""

    name: str
    shape: tuple[int, ...]
    k: int
    layout: Layout = field(default_factory=Tiles)
    chunk_size: int = 4096


CASES = [
    Case("k=1", (128, 128), 1),
    Case("k=2", (64, 192), 2),
    Case("k=16", (128, 64), 16),
    Case("k=63", (64, 128), 63),
    Case("k=64, two groups", (320, 256), 64),
    Case("k=65", (64, 128), 65),
    Case("k=256, two groups", (192, 192), 256),
    Case("k=1024", (128, 64), 1024),
    Case("k=4095", (64, 64), 4095),
    Case("k=4096", (64, 64), 4096),
    Case("ragged", (130, 70), 64),
    Case("panels", (200, 130), 100, Tiles(64, 64, panels=3)),
    Case("small tiles, many groups", (130, 70), 16, Tiles(8, 8), 64),
    Case("odd tiles", (40, 50), 3, Tiles(7, 5, panels=2), 35),
    Case("vector", (10000,), 64),
    Case("conv", (20, 3, 5, 5), 5, Tiles(6, 32), 192),
    Case("runs", (3000,), 9, Chunks(100), 100),
    Case("one value", (), 64),
    Case("tiny", (3, 5), 64),
    Case("largest chunk", (256, 256), 700, Tiles(128, 256), 32768),
]


def _random(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def _whole(shape: tuple[int, ...], seed: int, high: int) -> Tensor:
    return torch.randint(-high, high + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


# Pattern -> (anchor, delta to take off it) of a shape; what the live type cannot hold is rounded.
PATTERNS: dict[str, Callable[[tuple[int, ...]], tuple[Tensor, Tensor]]] = {
    "normal": lambda s: (_random(s, 1), _random(s, 2, 0.01)),
    "heavy ties": lambda s: (torch.zeros(s), _whole(s, 3, 2) / 4),
    "all equal": lambda s: (torch.ones(s), torch.full(s, 0.25)),
    "equal magnitudes": lambda s: (torch.zeros(s), 0.375 * (2.0 * (_whole(s, 4, 1) > 0) - 1)),
    "zeros": lambda s: (torch.zeros(s), torch.zeros(s)),
    "idle": lambda s: (_random(s, 5), torch.zeros(s)),
    "signed zeros": lambda s: (torch.zeros(s), _whole(s, 6, 1) * 0.0),
    "few are not zero": lambda s: (torch.zeros(s), _random(s, 7) * (_whole(s, 8, 200) == 0)),
    "subnormal": lambda s: (torch.zeros(s), _whole(s, 9, 50000) * 2.0**-140),
    "huge": lambda s: (torch.zeros(s), (_random(s, 10) * 9e36).clamp(-0.99 * LARGEST, 0.99 * LARGEST)),
    "one outlier": lambda s: (torch.zeros(s), _outlier(_random(s, 11, 1e-3))),
    "sorted": lambda s: (torch.zeros(s), torch.linspace(-1, 2, max(1, math.prod(s)))[: math.prod(s)].reshape(s)),
    "wide range": lambda s: (torch.zeros(s), _random(s, 12) * torch.exp2(_whole(s, 13, 40))),
}


def _outlier(x: Tensor) -> Tensor:
    x.reshape(-1)[x.numel() // 2] = 1e30
    return x


@pytest.fixture(autouse=True)
def set_of_before() -> Iterator[None]:
    before = native.instruction_set()
    yield
    native.use(before)


@pytest.fixture(params=native.INSTRUCTION_SETS)
def isa(request: pytest.FixtureRequest) -> str:
    if not native.use(request.param):
        pytest.skip(f"this machine has no {request.param}")
    return request.param


def channel_of(case: Case, decay: float | None) -> Channel:
    feedback = None if decay is None else ErrorFeedback(decay)
    return Channel(layout=case.layout, compressor=TopK(case.k, case.chunk_size), reducer=Mean(), feedback=feedback)


def made(
    case: Case, pattern: str, dtype: torch.dtype, decay: float | None = 0.95
) -> tuple[Channel, ChannelState, Tensor]:
    """Channel, state with the pattern's anchor, and the live parameter."""
    anchor, delta = PATTERNS[pattern](case.shape)
    channel = channel_of(case, decay)
    state = channel.init([TensorSpec("w", case.shape, dtype)], [anchor])
    return channel, state, (anchor.to(dtype).float() - delta).to(dtype)


def native_blocks(case: Case, live: Tensor, state: ChannelState, residual: list[Tensor]) -> list[native.EncoderBlock]:
    blocks = native.encoder_blocks(case.layout, live, state.anchor, residual, k=case.k, chunk_size=case.chunk_size)
    assert blocks is not None
    return blocks


def encode(blocks: list[native.EncoderBlock], decay: float, threads: int) -> list[bytes]:
    code = SignTwoLevel()
    sections = native.encode(blocks, decay=decay, low=code.low, high=code.high, threads=threads)
    return [section.numpy().tobytes() for section in sections]


def expected_sections(payload: Payload, state: ChannelState) -> list[bytes]:
    return [
        fixed_section(parts["index"], parts["code"], parts["scale"], state.shapes[j].chunk_size)
        for j, parts in sorted(payload.blocks.items())
    ]


def bits(blocks: list[Tensor]) -> list[bytes]:
    return [block.contiguous().numpy().tobytes() for block in blocks]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_payload_and_residual_are_the_definitions(case: Case, pattern: str, dtype: torch.dtype) -> None:
    channel, state, live = made(case, pattern, dtype)
    sets = [name for name in native.INSTRUCTION_SETS if native.use(name)]
    assert "scalar" in sets
    runs = [(name, threads) for name in sets for threads in (1, 2, 3)]
    residuals = {run: [block.clone() for block in state.residual] for run in runs}
    for number in range(2):  # the second round starts from what the first one left
        payload = channel.outgoing([Source(state.anchor, live)], state, key=number)
        sections = expected_sections(payload, state)
        for name, threads in runs:
            native.use(name)
            blocks = native_blocks(case, live, state, residuals[name, threads])
            assert encode(blocks, 0.95, threads) == sections, (name, threads, number)
            assert bits(residuals[name, threads]) == bits(state.residual), (name, threads, number)


@pytest.mark.parametrize("decay", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("case", [CASES[4], CASES[10]], ids=lambda case: case.name)
def test_any_decay(isa: str, case: Case, decay: float) -> None:
    channel, state, live = made(case, "normal", torch.float32, decay)
    for block in state.residual:
        block.copy_(_random(tuple(block.shape), 20, 0.02))
    residual = [block.clone() for block in state.residual]
    payload = channel.outgoing([Source(state.anchor, live)], state, key=0)
    assert encode(native_blocks(case, live, state, residual), decay, 2) == expected_sections(payload, state)
    assert bits(residual) == bits(state.residual)


@pytest.mark.parametrize("case", [CASES[4], CASES[10], CASES[15]], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_without_error_feedback(isa: str, case: Case, dtype: torch.dtype) -> None:
    channel, state, live = made(case, "normal", dtype, None)
    payload = channel.outgoing([Source(state.anchor, live)], state, key=0)
    assert encode(native_blocks(case, live, state, []), 1.0, 2) == expected_sections(payload, state)


def test_rows_of_a_wider_matrix(isa: str) -> None:
    case = Case("window", (130, 70), 64)
    channel, state, live = made(case, "normal", torch.float32)
    wide = torch.full((130, 100), 7.0)
    wide[:, 10:80] = live
    residual = [block.clone() for block in state.residual]
    payload = channel.outgoing([Source(state.anchor, live)], state, key=0)
    assert encode(native_blocks(case, wide[:, 10:80], state, residual), 0.95, 1) == expected_sections(payload, state)
    assert bits(residual) == bits(state.residual)


def test_many_tensors_in_one_call(isa: str) -> None:
    made_of = [made(case, "normal", torch.float32) for case in CASES]
    residuals = [[block.clone() for block in state.residual] for _, state, _ in made_of]
    blocks = [
        block
        for case, (_, state, live), residual in zip(CASES, made_of, residuals, strict=True)
        for block in native_blocks(case, live, state, residual)
    ]
    sections = encode(blocks, 0.95, 3)
    expected: list[bytes] = []
    for channel, state, live in made_of:
        expected += expected_sections(channel.outgoing([Source(state.anchor, live)], state, key=0), state)
    assert sections == expected
    assert encode([], 0.95, 3) == []


def test_infinite_residuals_do_not_leave_memory(isa: str) -> None:
    """The definition refuses such deltas, so bits do not matter; positions must still be K different ones."""
    case = Case("infinite", (64, 64), 64)
    _, state, live = made(case, "normal", torch.float32)
    for value in (math.inf, math.nan):
        residual = [torch.full_like(block, value) for block in state.residual]
        (section,) = encode(native_blocks(case, live, state, residual), 0.95, 1)
        assert len(section) == 40 + 24 + 16 + 2
        assert sum(byte.bit_count() for byte in section[40:64]) == 64


@pytest.mark.parametrize("decay", [0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_ef_pass_is_error_feedback_alone(isa: str, dtype: torch.dtype, decay: float) -> None:
    case = Case("ragged", (130, 70), 64)
    _, state, live = made(case, "normal", dtype)
    residual = [_random(tuple(block.shape), 21) for block in state.residual]
    start = [block.to(dtype).float() for block in state.anchor]
    expected = [
        r.mul(decay).add(s - end.float()) for r, s, end in zip(residual, start, case.layout.split(live), strict=True)
    ]
    native.ef_pass(native_blocks(case, live, state, residual), decay=decay, threads=2)
    assert bits(residual) == bits(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 3])
def test_largest_magnitudes(isa: str, dtype: torch.dtype, threads: int) -> None:
    tensors = [_random((n,), n).to(dtype) for n in (1, 2, 3, 17, 63, 64, 65, 1000, 4097, 600001)]
    tensors += [
        _random((50, 40), 1).to(dtype)[:, 3:20],
        _random((6, 5, 4), 2).to(dtype)[1:, :, :],
        torch.zeros(0, dtype=dtype),
    ]
    tensors += [torch.tensor(-3.0, dtype=dtype), torch.zeros(5, dtype=dtype), torch.full((3,), -0.0, dtype=dtype)]
    expected = [float(t.abs().amax()) if t.numel() else 0.0 for t in tensors]
    assert native.max_magnitudes(tensors, threads=threads) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, -math.nan])
@pytest.mark.parametrize("size", [1, 7, 333, 300_000])
def test_what_is_not_finite_is_seen_anywhere(isa: str, dtype: torch.dtype, bad: float, size: int) -> None:
    for at in {0, min(1, size - 1), size // 3, size // 2, max(0, size - 2), size - 1}:
        x = torch.ones(size, dtype=dtype)
        x[at] = bad
        assert native.max_magnitudes([x, torch.ones(3)], threads=2) == [math.inf, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_limit_is_the_definitions(dtype: torch.dtype) -> None:
    border = torch.tensor(LARGEST, dtype=dtype)
    above, below = torch.tensor(math.inf, dtype=dtype), torch.tensor(0.0, dtype=dtype)
    values = [below, torch.nextafter(border, below), border, torch.nextafter(border, above), above, above * 0]
    expected = [bool(value.abs().amax() < LARGEST) for value in values]
    assert expected == [True, True, False, False, False, False]
    assert native.are_below(values, LARGEST, threads=1) == expected
    assert native.are_below([-value for value in values], LARGEST, threads=1) == expected
    assert native.are_below([torch.zeros(0, dtype=dtype)], LARGEST, threads=1) == [True]


def test_what_is_left_to_the_definition() -> None:
    block = torch.zeros(1, 16)

    def blocks(live: Tensor, layout: Layout, anchor: Tensor = block, residual: Tensor = block) -> object:
        return native.encoder_blocks(layout, live, [anchor], [residual], k=1, chunk_size=16)

    assert blocks(torch.zeros(4, 4), Tiles(4, 4)) is not None
    assert blocks(torch.zeros(4, 4).T[:2], Tiles(4, 4)) is None
    assert blocks(torch.zeros(4, 4, dtype=torch.float16), Tiles(4, 4)) is None
    assert blocks(torch.zeros(4, 4, dtype=torch.float64), Tiles(4, 4)) is None
    assert blocks(torch.zeros(4, 4, device="meta"), Tiles(4, 4)) is None
    assert blocks(torch.zeros(4, 4), Flat()) is None
    assert blocks(torch.zeros(4, 4), Tiles(4, 4), anchor=block.double()) is None
    assert blocks(torch.zeros(4, 4), Tiles(4, 4), residual=torch.zeros(1, 32)[:, ::2]) is None
    large = torch.zeros(1, 40000)
    assert native.encoder_blocks(Chunks(40000), large, [large], [large], k=1, chunk_size=40000) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kept": 0}, "kept=0: must be between 1 and the chunk size; see kept_per_chunk"),
        ({"kept": 17}, "kept=17: must be between 1 and the chunk size; see kept_per_chunk"),
        ({"start": torch.zeros(1, 15)}, "start=wrong array: must be contiguous float32 [N, C]; see kernels/native.py"),
        ({"residual": torch.zeros(2, 16)}, "residual=wrong array: must be contiguous float32 [N, C]"),
        ({"live": torch.zeros(4, 3)}, "geometry=outside of the tensor: must lie in it; see kernels/geometry.py"),
        ({"live": torch.zeros(4, 4).half()}, "live=dtype: must be float32 or bfloat16; use the definition for others"),
    ],
    ids=["kept 0", "kept 17", "start", "residual", "live", "dtype"],
)
def test_wrong_arrays_are_refused(change: dict[str, object], message: str) -> None:
    zeros = torch.zeros(4, 4)
    blocks = native.encoder_blocks(Tiles(4, 4), zeros, [torch.zeros(1, 16)], [torch.zeros(1, 16)], k=1, chunk_size=16)
    assert blocks is not None
    wrong = blocks[0]._replace(**change)
    with pytest.raises(ValueError, match=re.escape(message)):
        native.ef_pass([wrong], decay=1.0, threads=1)


def test_larger_chunks_are_refused() -> None:
    large = torch.zeros(1, 40000)
    block = native.EncoderBlock(large, large, None, block_geometry(Chunks(40000), (40000,))[0], 1)
    message = "chunk=40000x1: must have 1 to 32768 values; use the definition for larger ones"
    with pytest.raises(ValueError, match=message):
        native.ef_pass([block], decay=1.0, threads=1)


def test_geometry_with_absurd_numbers_is_refused() -> None:
    blocks = native.encoder_blocks(Tiles(4, 4), torch.zeros(4, 4), [torch.zeros(1, 16)], [], k=1, chunk_size=16)
    assert blocks is not None
    for name in blocks[0].geometry._fields:
        for number in (-1, 2**31, 2**62, -(2**63), 2**63 - 1):
            wrong = blocks[0]._replace(geometry=blocks[0].geometry._replace(**{name: number}))
            with pytest.raises(ValueError, match="must"):
                native.ef_pass([wrong], decay=1.0, threads=1)


def test_a_set_must_exist() -> None:
    with pytest.raises(ConfigError) as caught:
        native.use("mmx")
    assert str(caught.value) == "SPARSELOCO_ISA='mmx': must be one of scalar, avx2, avx512; unset it to choose"


def in_forks(*variables: str) -> list[str]:
    """What processes print about their kernels that get at them with a variable each, forked where torch is loaded."""
    program = (
        "import os, sys, torch\n"
        "os.dup2(1, 2)\n"
        "for given in sys.argv[1:]:\n"
        "    if not os.fork():\n"
        "        os.environ.update([given.split('=')])\n"
        "        from sparseloco.kernels import native\n"
        "        print(native.available(), native.instruction_set())\n"
        "        sys.exit()\n"
        "    os.wait()\n"
        "    print('---', flush=True)\n"
    )
    command = [sys.executable, "-c", program, *variables]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return ended.stdout.split("---\n")[:-1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each variable is tried in a fork")
def test_the_environment_chooses() -> None:
    scalar, torch_alone, no_set, no_kernels = in_forks(
        "SPARSELOCO_ISA=scalar", "SPARSELOCO_KERNELS=torch", "SPARSELOCO_ISA=sse9", "SPARSELOCO_KERNELS=Torch"
    )
    assert scalar == "True scalar\n"
    assert torch_alone.startswith("False ")
    assert "SPARSELOCO_ISA='sse9': must be one of scalar, avx2, avx512; unset it to choose" in no_set
    assert "SPARSELOCO_KERNELS='Torch': must be torch or triton; unset it to use the native kernels" in no_kernels
