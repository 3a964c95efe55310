"""The scripts for machines with a card: all their Python runs here, in the interpreter, and the kernels compile."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.sh"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    surroundings = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=surroundings, cwd=ROOT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so() -> None:
    result = run(SCRIPT)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        "device=cuda: must be an NVIDIA card that torch sees; run this on a machine with one, "
        "or try --device cpu --interpret --params 100000\n"
    )


def test_a_cpu_needs_the_interpreter() -> None:
    result = run(SCRIPT, "--device", "cpu")
    assert result.returncode == 2
    assert result.stderr.startswith("device=cpu: must be used with --interpret; ")


@needs_triton
def test_the_whole_check_in_a_tiny_form(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    tiny = ("--params", "16384", "10000000000000", "--every", "80", "--out", str(out))
    result = run(SCRIPT, "--device", "cpu", "--interpret", *tiny)
    assert result.returncode == 0, result.stderr
    found = json.loads(out.read_text())
    assert found["bits"]["differing"] == {}
    assert f"bits: {found['bits']['cases']} of {found['bits']['cases']} cases equal" in result.stdout
    assert found["bits"]["cases"] >= 4
    small, too_large = found["sizes"][:2], found["sizes"][2:]
    assert [(row["params"], row["dtype"]) for row in small] == [(16384, "float32"), (16384, "bfloat16")]
    for row in small:
        assert set(row["gigabytes_per_s"]) == {"sanity", "encode", "settle", "copy"}
        assert all(rate > 0 for rate in row["gigabytes_per_s"].values())
        assert row["of_copy"]["copy"] == 1
    assert all(row["left_out"].startswith("needs ") for row in too_large)
    assert list(found["simulation"]["methods"]) == ["sparseloco", "diloco"]


@needs_triton
def test_a_difference_is_named_and_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import gpu_check
    from tests.kernels import triton_cases

    monkeypatch.setattr(triton_cases, "encode_differences", lambda case, device: ["residual 0"])
    bits = gpu_check.check_bits(gpu_check.Device(torch.device("cpu")), every=100)
    assert len(bits["differing"]) == len(triton_cases.encode_cases()[::100])
    assert "DIFFERS  encode: shape=(8, 8) k=1: ['residual 0']" in capsys.readouterr().out


@needs_triton
def test_kernels_compile_for_a_card_without_fusing(tmp_path: Path) -> None:
    """Offline, for compute capability 9.0: no product is fused with a sum, and no small number is flushed to zero."""
    out = tmp_path / "compiled.json"
    command = (sys.executable, "-m", "benchmarks.triton_compile", "--out", str(out))
    result = run(*command, PYTHONPATH=os.pathsep.join(["src", *sys.path]), TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert result.returncode == 0, result.stderr
    table = json.loads(out.read_text())
    assert {"encode float32", "encode bfloat16", "settle float32", "settle bfloat16"} <= set(table)
    for name, row in table.items():
        assert (row["fused"], row["flushing"]) == (0, 0), name
        assert not {i for i in row["float_instructions"] if "div" in i and "rn" not in i}, name
        assert row["spilled_bytes"] == 0, name
    residual_arithmetic = {"mul.rn.f32", "add.rn.f32", "sub.rn.f32"}
    assert residual_arithmetic <= set(table["encode float32"]["float_instructions"])
