"""One group of two ranks and one of four for all tests that need processes."""

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


@pytest.fixture(scope="session")
def four() -> Iterator[Group]:
    """Four ranks that know a Llama, whose import in four processes takes its time."""
    from tests.one_path import shards

    group = Group(4)
    group.run(shards.ready, limit=300)
    yield group
    group.close()
