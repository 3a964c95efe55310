"""What the tests of kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sparseloco.kernels import native


@pytest.fixture
def definition() -> Iterator[None]:
    """The channel asks no kernel: it is what kernels are compared with."""
    with native.definition_only():
        yield
