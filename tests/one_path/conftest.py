"""One group of two ranks for all tests that need processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mp import Group


@pytest.fixture(scope="session")
def pair() -> Iterator[Group]:
    """Two ranks; they start with the first call and live until the session ends."""
    group = Group(2)
    yield group
    group.close()
