"""Whether failures leave memory behind, with the collector off."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

from sparseloco.errors import Unavailable


def flat_while(fail: Callable[[], object], *, keep: bool) -> bool:
    """Whether 200 failures of a MiB and more leave less than 16 KiB each behind, enough for the frames of an error."""
    errors: list[Unavailable] = []
    failed: list[None] = []

    def once() -> None:
        try:  # pytest.raises would tie a knot of its own that only the collector undoes
            fail()
        except Unavailable as error:
            failed.append(None)
            if keep:
                errors.append(error)

    once()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(200):
            once()
        left = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        gc.enable()
    assert len(failed) == 201
    return left < 200 * (16 << 10)
