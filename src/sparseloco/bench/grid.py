"""One case of the grid: every operation by every variant, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from sparseloco.bench import limits, paths, plain
from sparseloco.bench.clock import take_turns
from sparseloco.bench.problem import Case, Problem

FAST, DEFINITION, PLAIN, LIMIT = "fast", "definition", "plain", "limit"
VARIANTS = (FAST, DEFINITION, PLAIN, LIMIT)
"""Keys of the output: this machine's path, plain torch as definition, the baseline, the memory passes."""
LEAN = "plain_lean"
"""The baseline again with a faster mean; measured wherever the baseline decodes."""

Calls = dict[str, Callable[[], object]]


class Row(NamedTuple):
    """Time of one operation by one variant.

    Attributes:
        ms_per_m: Median milliseconds per million parameters: process time with one thread, else wall time.
        spread: Distance of the quartiles over the median.
        faults_per_m: Median pages mapped per million parameters.
        calls: Measured calls.
    """

    operation: str
    variant: str
    side: int
    k: int
    dtype: str
    threads: int
    ms_per_m: float
    spread: float
    faults_per_m: float
    calls: int


def measure(
    case: Case, *, threads: int, peers: Sequence[int], budget_s: float, variants: Sequence[str] = VARIANTS
) -> Iterator[list[Row]]:
    """Rows of one case, operation by operation."""
    clock = time.process_time if threads == 1 else time.perf_counter
    for name, calls in operations(case, peers, variants):
        timings = take_turns(calls, budget_s=budget_s, clock=clock)
        yield [
            Row(
                name,
                variant,
                case.side,
                case.k,
                case.dtype,
                threads,
                round(1e3 * timing.median / case.millions, 5),
                round(timing.spread, 4),
                round(sorted(timing.faults)[len(timing.faults) // 2] / case.millions, 1),
                len(timing.seconds),
            )
            for variant, timing in timings.items()
        ]


def operation_names(peers: Sequence[int]) -> list[str]:
    """What is measured of each case, in order."""
    return ["encode", *(f"decode_r{count}" for count in peers), "pack", "unpack"]


def operations(case: Case, peers: Sequence[int], variants: Sequence[str]) -> Iterator[tuple[str, Calls]]:
    """Each operation with a call per variant; limits exist for encode and decode only.

    Encode comes first: decode writes the live parameters, after which a delta would be zero.
    """
    problems = {variant: Problem(case) for variant in variants}
    used = {name: path for name, path in _paths().items() if name in variants}
    encodes: Calls = {name: _bind(path.encode, problems[name]) for name, path in used.items()}
    if PLAIN in variants:
        inputs = _plain_inputs(problems[PLAIN])
        encodes[PLAIN] = _bind(_pipeline(case).encode, *inputs)
        encodes[LEAN] = _bind(replace(_pipeline(case), lean=True).encode, *inputs)
    if LIMIT in variants:
        anchor, live, residual = problems[LIMIT].matrices
        encodes[LIMIT] = _bind(limits.ef_pass, residual, anchor, live, 0.95)
    yield "encode", encodes
    for count in peers:
        yield f"decode_r{count}", _decodes(case, problems, used, count)
    yield from _packing(case, problems, used)


def _paths() -> dict[str, paths.Path]:
    return {FAST: paths.fast(), DEFINITION: paths.DEFINITION}


def _decodes(case: Case, problems: dict[str, Problem], used: dict[str, paths.Path], count: int) -> Calls:
    first = next(iter(problems.values()))
    frames = [paths.frame(first, peer) for peer in range(count)] if used else []
    calls: Calls = {name: _bind(path.decode_apply, problems[name], frames) for name, path in used.items()}
    if PLAIN in problems:
        anchor, live, _ = problems[PLAIN].matrices
        messages = [message(first, peer) for peer in range(count)]
        calls[PLAIN] = _bind(_pipeline(case).decode_apply, messages, anchor, live)
        calls[LEAN] = _bind(replace(_pipeline(case), lean=True).decode_apply, messages, anchor, live)
    if LIMIT in problems:
        anchor, live, _ = problems[LIMIT].matrices
        calls[LIMIT] = _bind(limits.apply_pass, anchor, live, 1e-3)
    return calls


def _packing(case: Case, problems: dict[str, Problem], used: dict[str, paths.Path]) -> Iterator[tuple[str, Calls]]:
    first = next(iter(problems.values()))
    packs: Calls = {name: _bind(path.pack, problems[name], paths.payload(first, 0)) for name, path in used.items()}
    unpacks: Calls = {name: _bind(path.unpack, problems[name], paths.frame(first, 0)) for name, path in used.items()}
    if PLAIN in problems:
        index_NK = first.kept[0]
        packs[PLAIN] = _bind(plain.pack_12_bits, index_NK)
        unpacks[PLAIN] = _bind(plain.unpack_12_bits, plain.pack_12_bits(index_NK))
    if packs:
        yield "pack", packs
        yield "unpack", unpacks


def message(problem: Problem, peer: int) -> plain.Message:
    """What the baseline sends for the positions and values of ``peer``."""
    index_NK, value_NK = problem.kept_by(peer)
    return plain.Message(plain.pack_12_bits(index_NK), *plain.quantize(value_NK))


def _pipeline(case: Case) -> plain.PlainPipeline:
    return plain.PlainPipeline(case.k)


def _plain_inputs(problem: Problem) -> tuple[object, ...]:
    return problem.matrices


def _bind(call: Callable[..., object], *arguments: object) -> Callable[[], object]:
    return lambda: call(*arguments)
