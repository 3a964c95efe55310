"""The native digest gives the lanes of ``bits.digest_lanes``, whose own laws are in ``tests/unit/test_bits.py``."""

from __future__ import annotations

import pytest
import torch

from sparseloco.bits import digest_lanes
from sparseloco.kernels import native_settle
from tests.contracts.cases import heavy_tailed
from tests.kernels.reference import SETS, needs_native, use

pytestmark = needs_native

# One run of 64 words and less, several runs, several strips of rows, rows in several pieces.
SHAPES = [(1, 1), (3, 5), (7, 64), (5, 200), (40, 4096), (2, 70_000), (1, 140_001), (9000, 3)]


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
def test_lanes_are_those_of_the_definition(instruction_set: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    use(instruction_set)
    block = (heavy_tailed(shape, 3, torch.float64) * 1000).to(dtype)
    for salt in (0, 5, 2**61 + 3):
        want = digest_lanes(block, salt)
        for threads in (1, 2, 3):
            assert native_settle.digest_lanes(block, salt, threads=threads) == want


def test_strides_and_empty_blocks() -> None:
    block = heavy_tailed((12, 9), 1, torch.float32)
    assert native_settle.digest_lanes(block.T, 7) == digest_lanes(block.T, 7)
    for shape in [(0, 4), (4, 0)]:
        assert native_settle.digest_lanes(torch.zeros(shape), 7) == (0, 0)
