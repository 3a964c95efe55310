"""What all tests share: one thread, one seed, repeatable property tests."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# Derandomized: a red run is red again on the next machine. No deadline: shared cores are slow at times.
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")


@pytest.fixture
def seed() -> int:
    """Seed torch's global generator and say with what."""
    torch.manual_seed(0)
    return 0
