"""Each preset equals the recursion of its paper.

Models are float64 wherever both need not round alike, so that equality or a tolerance of 1e-12 leaves no room for
anything but rounding. Outer factors are numbers that float32 holds exactly (0.75, 0.875), since the library rounds
them to float32; the published 0.7 and 0.9 have a case of their own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparseloco import keys, presets, sgd
from sparseloco.compress import values
from tests.driver import INNER, anchor, residual, train
from tests.parity import recursions
from tests.toy import start

F64 = torch.float64
RECURSIONS = {
    "ddp", "local_sgd", "diloco", "streaming", "demo", "ef_signsgd", "powersgd", "qsparse", "sparseloco",
}  # fmt: skip


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), f"tensor {i} differs by up to {(a - b).abs().max().item():.2e}"


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a - b).abs().max().item() <= tolerance, f"tensor {i}: {(a - b).abs().max().item():.2e}"


def test_recursions_are_independent_and_short() -> None:
    source = Path(recursions.__file__).read_text("utf-8")
    assert "import sparseloco" not in source
    assert "from sparseloco" not in source
    lengths = {
        node.name: len({n.lineno for stmt in node.body for n in ast.walk(stmt) if isinstance(n, ast.stmt)})
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
    }
    assert set(lengths) >= RECURSIONS
    assert {name: n for name, n in lengths.items() if n > (40 if name == "sparseloco" else 21)} == {}


@pytest.mark.parametrize("clip", [None, 0.5])
def test_ddp_is_adamw_on_the_mean_gradient(clip: float | None) -> None:
    found = anchor(train(presets.ddp(inner=INNER, clip_norm=clip), peers=3, steps=12))
    assert_same(found, recursions.ddp(start(), 3, 12, clip))


@pytest.mark.parametrize("weights", [None, (1, 2, 4)], ids=["local_sgd", "fed_avg"])
def test_local_sgd_averages_parameters(weights: tuple[int, ...] | None) -> None:
    algorithm = presets.local_sgd(inner_steps=4, inner=sgd(0.1))
    found = anchor(train(algorithm, peers=3, steps=12, dtype=F64, weights=weights))
    # The paper averages parameters, we take a mean of differences off the anchor: a few float64 roundings apart.
    assert_close(found, recursions.local_sgd(start(F64), 3, 3, 4, 0.1, weights), 1e-14)


@pytest.mark.parametrize(("lr", "mu"), [(0.75, 0.875), (1.0, 0.0), (0.5, 0.0)])
def test_diloco_is_nesterov_on_the_mean_delta(lr: float, mu: float) -> None:
    algorithm = presets.diloco(inner_steps=4, outer_lr=lr, outer_momentum=mu, inner=INNER)
    found = anchor(train(algorithm, peers=3, steps=20, dtype=F64))
    assert_same(found, recursions.diloco(start(F64), 3, 5, 4, lr, mu))


def test_diloco_with_published_factors() -> None:
    algorithm = presets.diloco(inner_steps=4, inner=INNER)
    found = anchor(train(algorithm, peers=3, steps=20, dtype=F64))
    # 0.7 and 0.9 are rounded to float32 in the library, which is 4e-8 off; parameters are of order 1.
    assert_close(found, recursions.diloco(start(F64), 3, 5, 4, 0.7, 0.9), 1e-6)


@pytest.mark.parametrize("bits", [32, 4])
@pytest.mark.parametrize(("delay", "alpha"), [(0, 0.0), (1, 0.5), (2, 0.25)])
def test_streaming_diloco_syncs_fragments_in_turn(bits: int, delay: int, alpha: float) -> None:
    algorithm = presets.streaming_diloco(
        inner_steps=4, num_fragments=2, fragment_by="size", delay=delay, alpha=alpha, bits=bits,
        outer_lr=0.75, outer_momentum=0.875, inner=INNER,
    )  # fmt: skip
    cohort = train(algorithm, peers=3, steps=18, dtype=F64)
    parts = algorithm.fragments.assign(cohort.replicas[0].specs)
    assert parts == ((0,), (1, 2, 3))
    expected = recursions.streaming(start(F64), 3, 18, 4, parts, delay, alpha, 0.75, 0.875, bits)
    assert_same(anchor(cohort), expected)


@pytest.mark.parametrize(("side", "k"), [(4, 3), (8, 5)])
def test_demo_sends_cosines_and_steps_by_sign(side: int, k: int) -> None:
    lr, decay, wd = 2.0**-6, 0.96875, 0.125
    algorithm = presets.demo(lr=lr, k=k, tile=side, decay=decay, weight_decay=wd)
    found = anchor(train(algorithm, peers=3, steps=12, dtype=F64))
    # The step is lr times a sign, so the transforms' rounding cannot be seen.
    assert_same(found, recursions.demo(start(F64), 3, 12, lr, k, side, decay, wd))


def test_ef_signsgd_is_algorithm_2() -> None:
    found = anchor(train(presets.ef_signsgd(lr=2.0**-5), peers=3, steps=12, dtype=F64))
    assert_same(found, recursions.ef_signsgd(start(F64), 3, 12, 2.0**-5))


def test_powersgd_alternates_its_factors() -> None:
    algorithm = presets.powersgd(lr=2.0**-5, rank=2, momentum=0.875)
    first = train(algorithm, peers=3, steps=0, dtype=F64).replicas[0].shared_state()
    bases = [first.get(f"codec/{name}/0/basis") for name in ("0.weight", "0.bias", "2.weight", "2.bias")]
    assert [basis is not None for basis in bases] == [True, False, True, False]
    found = anchor(train(algorithm, peers=3, steps=12, dtype=F64))
    # QR here, Gram-Schmidt there: the same basis to rounding, and twelve steps of it.
    assert_close(found, recursions.powersgd(start(F64), 3, 12, 2.0**-5, 0.875, bases), 1e-12)


def test_qsparse_local_sgd_rounds_with_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All uniform numbers come from ``keys.uniform``; they are written down as drawn and read by the recursion."""
    drawn: list[Tensor] = []

    def recording(*args: object) -> Tensor:
        drawn.append(keys.uniform(*args))  # pyright: ignore[reportArgumentType]
        return drawn[-1]

    def by_chunk() -> Iterator[Tensor]:
        for numbers in drawn:
            yield from numbers

    monkeypatch.setattr(values, "uniform", recording)
    algorithm = presets.qsparse_local_sgd(inner_steps=4, k=5, chunk_size=16, levels=4, inner=sgd(0.1))
    found = anchor(train(algorithm, peers=3, steps=12, dtype=F64))
    expected = recursions.qsparse(start(F64), 3, 3, 4, 0.1, 5, 16, 4, by_chunk())
    flat = torch.cat([numbers.flatten() for numbers in drawn])
    assert len(flat.unique()) > 0.99 * len(flat), "peers, rounds and blocks draw numbers of their own"
    # The norm of a chunk travels as float32; a matrix row and a vector may be summed in another order.
    assert_close(found, expected, 1e-6)


@pytest.mark.parametrize("over", ["contributors", "peers"])
@pytest.mark.parametrize(("side", "k", "lr"), [(4, 3, 1.0), (8, 5, 0.75)], ids=["C-15 lr 1", "C-15 lr 0.75"])
def test_sparseloco_is_algorithm_1_c15(over: str, side: int, k: int, lr: float) -> None:
    """C-15: the outer lr enters once, and a tile of a non-square matrix is a square, not a row."""
    algorithm = presets.sparseloco(
        inner_steps=4, k=k, tile=side, decay=0.9375, mean_over=over, outer_lr=lr, inner=INNER
    )  # fmt: skip
    cohort = train(algorithm, peers=3, steps=24, dtype=F64)
    levels = (values.SignTwoLevel().low, values.SignTwoLevel().high)
    theta, errors = recursions.sparseloco(start(F64), 3, 6, 4, k, side, 0.9375, lr, over, levels)
    assert_same(anchor(cohort), theta)
    for replica, error in zip(cohort.replicas, errors, strict=True):
        norm = sum(float(e.square().sum()) for e in error) ** 0.5
        assert replica.residual_norm() == pytest.approx(norm, rel=1e-14)  # tiles are summed in another order
        vector = residual(replica)["residual/2.bias/0"]
        assert torch.equal(vector.flatten(), error[3])
