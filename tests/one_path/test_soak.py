"""C-37: the short form of benchmarks/soak.py. Counts must be equal, memory has a generous bound, no clock is read."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from benchmarks import soak
from tests.forked import Workers

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc, as Linux has it")


@pytest.mark.mp
def test_c37_forty_rounds_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C-37: messages in flight, evaluations, logs and checkpoints; each rank holds what it held after ten rounds."""
    out = tmp_path / "soak.json"
    monkeypatch.setattr(soak, "multiprocessing", Workers())
    assert soak.main(["--rounds", "40", "--every", "10", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["same_digest"]
    assert len(found["readings"]) == 2
    for readings in found["readings"]:
        assert [each["round"] for each in readings] == [10, 20, 30, 40]
        for name in soak.COUNTS:
            assert len({each[name] for each in readings}) == 1, name
            assert readings[0][name] > 0
        assert soak.growth(readings) < soak.ALLOWED_GROWTH


def test_a_reading_sees_what_is_held() -> None:
    before = soak.reading(1)
    tensors = [torch.zeros(3) for _ in range(5)]
    held = threading.Event()
    thread = threading.Thread(target=held.wait)
    thread.start()
    with open(__file__) as file:
        after = soak.reading(2)
        assert file.readable()
    held.set()
    thread.join()
    assert after["tensors"] == before["tensors"] + len(tensors)
    assert after["threads"] == before["threads"] + 1
    assert after["descriptors"] == before["descriptors"] + 1
    assert after["resident_bytes"] > 2**20


def test_growth_is_complained_about() -> None:
    first = {"round": 10, "resident_bytes": 1000, "threads": 4, "descriptors": 9, "tensors": 50}
    assert soak.complaints([first, {**first, "round": 20, "resident_bytes": 1100}]) == []
    worse = {"round": 20, "resident_bytes": 1101, "threads": 5, "descriptors": 8, "tensors": 50}
    assert soak.complaints([first, worse]) == [
        "threads: 4 at round 10, 5 at round 20",
        "descriptors: 9 at round 10, 8 at round 20",
        "resident memory: grew 1.101 times, 1.1 is allowed",
    ]
