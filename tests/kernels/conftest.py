"""What the tests of kernels share."""

from __future__ import annotations

import pytest


@pytest.fixture
def definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The channel asks no kernel: it is what kernels are compared with."""
    monkeypatch.setenv("SPARSELOCO_KERNELS", "torch")
