"""The bench: baseline against an obvious reference, limits, clock, memory and sizes. No speed is asserted."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import defaultdict

import pytest
import torch
from torch import Tensor

from sparseloco.bench import clock, grid, limits, paths, plain, sample, sizes
from sparseloco.bench.problem import CHUNK, Case, Problem, real_sets, uniform_sets
from sparseloco.compress import Float32, SignOneLevel, SignTwoLevel, Statistical
from sparseloco.errors import ConfigError
from sparseloco.kernels import native

TINY = Case(128, 16)


def inputs(seed: int = 0, side: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    start, live, residual = torch.randn(3, side, side, generator=generator)
    return start, live, residual


def tile_of(matrix: Tensor, row: int, col: int) -> list[float]:
    return matrix[64 * row : 64 * (row + 1), 64 * col : 64 * (col + 1)].reshape(-1).tolist()


def bins(values: list[float]) -> list[float]:
    """The released quantizer, one value at a time."""
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    codes = [min(3, max(0, round((v - mean) / (6 * deviation / 4)) + 2)) for v in values]
    means = {code: [v for v, c in zip(values, codes, strict=True) if c == code] for code in codes}
    return [sum(means[code]) / len(means[code]) for code in codes]


@pytest.mark.parametrize("lean", [False, True])
def test_baseline_sends_what_an_obvious_loop_sends(lean: bool) -> None:
    start, live, residual = inputs()
    feedback = 0.95 * residual + start - live
    before = residual.clone()
    message = plain.PlainPipeline(k=16, lean=lean).encode(start, live, residual)
    kept: list[tuple[int, int, int, float]] = []
    for row in range(2):
        for col in range(2):
            values = tile_of(feedback, row, col)
            largest = sorted(range(CHUNK), key=lambda n: -abs(values[n]))[:16]
            kept.extend((row, col, n, values[n]) for n in largest)
    sent = torch.zeros(128, 128)
    for (row, col, n, _), value in zip(kept, bins([value for *_, value in kept]), strict=True):
        sent[64 * row + n // 64, 64 * col + n % 64] = value
    torch.testing.assert_close(residual, feedback - sent)
    assert not torch.equal(residual, before)
    anchor, target = torch.zeros(128, 128), torch.empty(128, 128)
    plain.PlainPipeline(k=16).decode_apply([message], anchor, target)
    torch.testing.assert_close(anchor, -sent)
    assert torch.equal(anchor, target)
    assert message.nbytes == 4 * 16 * 5 // 2 + 16, "12 bits and a byte for each of 64 values, and four floats"


@pytest.mark.parametrize("lean", [False, True])
def test_baseline_takes_the_mean_over_contributors(lean: bool) -> None:
    pipeline = plain.PlainPipeline(k=1024, lr=0.5, lean=lean)
    messages = [pipeline.encode(*inputs(seed)) for seed in range(3)]
    sums: dict[tuple[int, int], list[float]] = defaultdict(list)
    for message in messages:
        index = plain.unpack_12_bits(message.positions)
        value = message.lookup[message.codes.long()]
        for chunk, (places, values) in enumerate(zip(index.tolist(), value.tolist(), strict=True)):
            for place, number in zip(places, values, strict=True):
                sums[chunk, place].append(number)
    assert max(map(len, sums.values())) == 3
    expected = torch.ones(128, 128)
    for (chunk, place), numbers in sums.items():
        row, col = 64 * (chunk // 2) + place // 64, 64 * (chunk % 2) + place % 64
        expected[row, col] -= 0.5 * sum(numbers) / len(numbers)
    anchor, live = torch.ones(128, 128), torch.empty(128, 128, dtype=torch.bfloat16)
    pipeline.decode_apply(messages, anchor, live)
    torch.testing.assert_close(anchor, expected)
    assert torch.equal(live, anchor.bfloat16())


def test_baseline_refuses_a_mean_that_is_not_finite() -> None:
    message = plain.PlainPipeline(k=16).encode(*inputs())
    bad = message._replace(lookup=torch.full((4,), math.nan))
    with pytest.raises(FloatingPointError, match="not finite"):
        plain.PlainPipeline(k=16).decode_apply([bad], *inputs()[:2])


def test_twelve_bits() -> None:
    assert plain.pack_12_bits(torch.tensor([[0x123, 0xABC]])).tolist() == [[0x23, 0xC1, 0xAB]]
    index = torch.randint(0, CHUNK, (5, 64), generator=torch.Generator().manual_seed(0))
    assert torch.equal(plain.unpack_12_bits(plain.pack_12_bits(index)), index)


@pytest.mark.parametrize("kernels", ["torch", ""])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_limits_do_what_their_names_say(dtype: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSELOCO_KERNELS", kernels)
    problem = Problem(Case(128, 16, dtype))
    anchor, live, residual = problem.matrices
    expected = residual * 0.95 + anchor - live
    limits.ef_pass(residual, anchor, live, 0.95)
    torch.testing.assert_close(residual, expected)
    stepped = anchor.clone() if native.available() else anchor - 0.25  # the native pass writes back what it read
    limits.apply_pass(anchor, live, 0.25)
    assert torch.equal(anchor, stepped)
    assert torch.equal(live, stepped.to(live.dtype))
    assert residual.data_ptr() == problem.state.residual[0].data_ptr(), "passes work on the state itself"


def test_cases_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"^side=100: must be a positive multiple of 64; the baseline pads nothing$"):
        Case(100, 64)
    with pytest.raises(ConfigError, match=r"^k=3: must be even and between 2 and 4096; the baseline packs two"):
        Case(64, 3)
    with pytest.raises(ConfigError, match=r"^dtype='float16': must be one of float32, bfloat16; choose one of them$"):
        Case(64, 64, "float16")


def test_paths_agree_and_frames_decode() -> None:
    fast, definition = Problem(TINY), Problem(TINY)
    assert paths.fast().encode(fast) == paths.DEFINITION.encode(definition)
    assert torch.equal(fast.state.residual[0], definition.state.residual[0])
    frames = [paths.frame(fast, peer) for peer in range(3)]
    assert len(set(frames)) == 3, "peers send different sets"
    paths.fast().decode_apply(fast, frames)
    paths.DEFINITION.decode_apply(definition, frames)
    assert torch.equal(fast.live, definition.live)
    assert not torch.equal(fast.live, Problem(TINY).live)
    envelope = paths.fast().unpack(fast, frames[1])
    assert paths.fast().pack(fast, envelope) == frames[1]
    assert torch.equal(paths.DEFINITION.unpack(fast, frames[1]).payload.blocks[0]["index"].long(), fast.kept_by(1)[0])


def test_variants_take_turns_and_are_warmed_up() -> None:
    order: list[str] = []
    ticks = iter(range(1000))
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    timings = clock.take_turns(calls, budget_s=0, clock=lambda: float(next(ticks)))
    assert order == ["a", "b"] * (1 + clock.LEAST_CALLS)
    assert timings["a"].seconds == [1.0] * clock.LEAST_CALLS
    limited = clock.take_turns({"a": lambda: None}, budget_s=1e9, most_calls=5)
    assert len(limited["a"].seconds) == 5


def test_median_and_spread() -> None:
    timing = clock.Timing(seconds=[1.0, 2.0, 3.0, 4.0, 10.0])
    assert timing.median == 3.0
    assert timing.spread == pytest.approx(2 / 3), "quartiles 2 and 4"
    assert clock.Timing(seconds=[1.0]).spread == 0.0


def test_every_operation_of_a_case_is_measured() -> None:
    rows = [row for some in grid.measure(TINY, threads=1, peers=[1, 2], budget_s=0) for row in some]
    operations = list(dict.fromkeys(row.operation for row in rows))
    assert operations == grid.operation_names([1, 2]) == ["encode", "decode_r1", "decode_r2", "pack", "unpack"]
    by_operation = {name: [row.variant for row in rows if row.operation == name] for name in operations}
    assert by_operation["encode"] == by_operation["decode_r2"]
    assert by_operation["encode"] == ["fast", "definition", "plain", "plain_lean", "limit"]
    assert by_operation["pack"] == by_operation["unpack"] == ["fast", "definition", "plain"]
    assert {row.calls for row in rows} == {clock.LEAST_CALLS}
    assert all(row.ms_per_m > 0 for row in rows)


def test_sets() -> None:
    index = uniform_sets(3, 64)
    assert index.shape == (3, 64)
    assert bool((index.diff(dim=1) > 0).all())
    assert int(index.max()) < CHUNK
    chunks = torch.zeros(2, CHUNK)
    chunks[0, 7], chunks[1, 9] = -5.0, 4.0
    assert real_sets(chunks, 1).tolist() == [[7], [9]]


def test_bits_of_positions_are_above_the_bound() -> None:
    rows = sizes.index_rows([64, 1024])
    assert [(row.sets, row.k) for row in rows] == [("uniform", 64), ("uniform", 1024), ("real", 64), ("real", 1024)]
    assert rows[0].bound == pytest.approx(7.364, abs=1e-3), "log2 C(4096, 64) / 64"
    for row in rows:
        assert row.index_fixed >= row.index > 0
        assert row.payload == pytest.approx(row.index + 2 + 16 / row.k, abs=1e-3)
    assert all(row.over_bound > 1 for row in rows if row.sets == "uniform")


def test_figures_of_a_frame_follow_from_its_length() -> None:
    problem = Problem(Case(256, 64))
    length = len(paths.frame(problem, 0))
    found = sizes.frame_figures(256, 64)
    assert found["bits_per_kept"] == pytest.approx(8 * length / (16 * 64), abs=1e-4)
    assert found["compression"] == pytest.approx(4 * 256**2 / length, abs=1e-2)
    assert found["bits_per_kept_fixed"] >= found["bits_per_kept"]


def test_stored_sample_and_errors_of_codes_on_it() -> None:
    kept, chunks = sample.kept_values(), sample.chunks()
    assert chunks.shape[1] == CHUNK
    assert {value.shape[1] for value in kept if value.shape[1] > 60} == {64}
    assert all(bool(value.isfinite().all()) for value in [*kept, chunks])
    # A code that keeps only signs leaves about a twentieth; the released one has a bin for all of a tensor.
    errors = sizes.value_errors()
    assert errors["sign_two_level"] < errors["sign_one_level"] < errors["statistical"]
    assert sizes.value_error(Float32(), kept) == 0
    obvious = [torch.tensor([[1.0, -1.0, 2.0, -2.0]])]
    assert sizes.value_error(SignOneLevel(), obvious) == pytest.approx((4 * 0.25 / 10) ** 0.5)
    assert errors["fitted_two_level"] < errors["sign_two_level"], "levels of each tensor's own can only be better"
    assert {code.name for code in (SignTwoLevel(), SignOneLevel(), Statistical())} < set(errors)
    two = torch.tensor([[1.0, 1.0, -3.0, 1.0]])
    assert sizes.fitted_error([two]) == pytest.approx(0), "two magnitudes are two levels"


@pytest.mark.mp
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_peak_memory_counts_torch_and_native_code() -> None:
    """In a process of its own, since the peak of this one has seen everything."""
    probe = """
import ctypes, torch
from sparseloco.bench import memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def native(size):
    place = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size)))
    libc.memset(place, 1, ctypes.c_size_t(size))
    libc.free(place)
memory._no_huge_pages()
native(1000), torch.ones(1000)
print(memory.peak_above(lambda: torch.ones(6_000_000)), memory.peak_above(lambda: native(24_000_000)))
"""
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env={**os.environ, **environment},
    )
    if "None" in ended.stdout:
        pytest.skip("this system does not let a process reset its peak")
    for found in map(int, ended.stdout.split()):
        assert 24e6 - 1e6 < found < 24e6 + 3e6
