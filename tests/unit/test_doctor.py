"""Doctor: what it finds on this machine, and what follows from what it finds on others."""

from __future__ import annotations

import copy
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sparseloco.cli import doctor

HEALTHY: dict[str, Any] = {
    "devices": {"cuda": ["a GPU"], "mps": False, "fast_bf16": True},
    "threads": {"usable_cores": 8, "torch": 8, "OMP_NUM_THREADS": None},
    "compiler": {"found": True, "version": "c++ 12"},
    "kernels": {"path": "avx2"},
    "disk": {"free_here_bytes": 1e12},
    "cache": {"folder": "cache", "writable": True, "free_bytes": 1e12},
    "speed": {"encode_values_per_s": 2e8},
}


def whats(**changes: dict[str, Any]) -> list[str]:
    found = copy.deepcopy(HEALTHY)
    for section, figures in changes.items():
        found[section] |= figures
    return [finding.what for finding in doctor.findings(found)]


def test_examination_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSELOCO_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(doctor, "_PROBE_SIDE", 64)
    found = doctor.examine()
    assert json.loads(json.dumps(found)) == found
    assert found["cache"]["folder"] == str(tmp_path / "not" / "yet")
    assert found["cache"]["writable"]
    assert list(tmp_path.iterdir()) == [], "nothing stays"
    assert found["versions"]["torch"]
    assert found["threads"]["usable_cores"] >= 1
    assert all(value > 0 for value in found["speed"].values())
    assert set(found["extras"]) == set(doctor.EXTRAS)


def test_findings_say_what_is_slow_and_why() -> None:
    assert whats() == ["GPU"], "C-58: payloads are CPU bytes, said where a GPU is found"
    assert whats(cache={"writable": False})[0] == "cache cache"
    assert "disk" in whats(disk={"free_here_bytes": 1e9})
    assert "bfloat16" in whats(devices={"fast_bf16": False})
    assert "threads" in whats(threads={"torch": 1, "OMP_NUM_THREADS": "1"})
    assert "compiler" in whats(compiler={"found": False})
    assert "kernels" in whats(kernels={"path": "torch"})
    assert "encoding" in whats(speed={"encode_values_per_s": 1e6})
    assert "no GPU" in whats(devices={"cuda": []})
    assert whats(devices={"cuda": [], "mps": True}) == ["GPU"]


def test_the_index_cache_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSELOCO_CACHE", str(tmp_path))

    def refuse(**_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    assert not doctor._cache()["writable"]


def test_figures_in_words() -> None:
    assert doctor.in_words("free_bytes", 1e9) == "1.00 GB"
    assert doctor.in_words("float32_flops", 216e9) == "216 GFLOP/s"
    assert doctor.in_words("encode_values_per_s", 135e6) == "135 M/s"
    assert doctor.in_words("mps", False) == "no"
    assert doctor.in_words("cuda", []) == "none"
    assert doctor.in_words("cuda", ["a", "b"]) == "a, b"
    assert [doctor.title(name) for name in ("free_here_bytes", "OMP_NUM_THREADS")] == ["free here", "OMP_NUM_THREADS"]


def test_every_extra_is_known_to_the_doctor_and_the_quick_start() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    extras = set(project["optional-dependencies"]) - {"dev"}
    assert set(doctor.EXTRAS) == extras - {"docs"}
    page = (root / "docs" / "index.md").read_text("utf-8")
    assert all(f"`{extra}`" in page for extra in extras)
