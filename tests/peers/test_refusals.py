"""How much memory it takes to refuse: C-69 and C-70 in one process that does nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory of a process is read from /proc")
def test_all_refusals_take_less_than_a_gigabyte(tmp_path: Path) -> None:
    """The whole process, torch included; of it, the refusals are less than 100 MB above what honest training takes."""
    command = [sys.executable, "-m", "tests.peers.refusals", str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["refused"]) == 17
    assert found["peak_bytes"] < 10**9
    assert found["peak_bytes"] - found["honest_bytes"] < 10**8
