"""The bench as a whole: jobs, figures from injected rows, the strawman rule, output, and the verb."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sparseloco.bench import chart, child, figures, run, show
from sparseloco.cli import benching
from sparseloco.errors import ConfigError, SparseLocoError
from tests.unit.test_cli import Call, call, process

__all__ = ["call"]  # the fixture

TINY = run.Settings(side=128, grid_side=64, ks=(16, 64), dtypes=("float32",), threads=(1,), budget_s=0)
MUST_HAVE = {
    "encode_speedup", "decode_speedup_r8", "decode_speedup_r16", "encode_over_limit", "temp_bytes_per_param",
    "index_bits_over_bound", "bits_per_kept", "compression", "bits_per_kept_fixed", "value_error",
}  # fmt: skip


def here(arguments: Mapping[str, Any], environment: Mapping[str, str], step: Callable[[str, int], None]) -> Any:
    """A job in this process; memory needs one of its own."""
    if arguments["job"] == "temporaries":
        for count, variant in enumerate(arguments["variants"], start=1):
            step(variant, count)
        return {variant: {"encode": 0.02, "decode_r8": None} for variant in arguments["variants"]}
    job = dict(arguments)
    *steps, last = child.JOBS[job.pop("job")](**job)
    for count, said in enumerate(steps, start=1):
        step(said["step"], count)
    return last["result"]


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run_child", here)
    monkeypatch.setattr(run, "K_GRID", (64,))
    monkeypatch.setattr(figures, "STRAWMAN", 1e9)


@pytest.fixture
def tiny(in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benching.run, "QUICK", TINY)


def row(operation: str, variant: str, ms: float, **case: Any) -> dict[str, Any]:
    common = {"side": 128, "k": 64, "dtype": "float32", "threads": 1, "spread": 0.01, "faults_per_m": 0.0, "calls": 3}
    return {"operation": operation, "variant": variant, **common, "ms_per_m": ms, **case}


INJECTED = [
    *(
        row("encode", name, ms)
        for name, ms in {"fast": 0.8, "plain": 10.0, "plain_lean": 8.0, "limit": 0.5, "definition": 12.0}.items()
    ),
    *(
        row(f"decode_r{count}", name, ms)
        for count in (8, 16)
        for name, ms in {"fast": 0.5, "plain": 6.0, "plain_lean": 3.0, "limit": 0.25, "definition": 9.0}.items()
    ),
    row("encode", "fast", 99.0, k=16),
    row("encode", "limit", 0.6, k=16, spread=0.05),
    row("encode", "fast", 99.0, threads=2),
]


def test_ratios_come_from_the_headline_alone() -> None:
    times = figures.headline_times(INJECTED, k=64, side=128)
    found = figures.ratios(times)
    assert found["encode_speedup"] == 12.5
    assert found["encode_speedup_lean"] == 10.0
    assert found["encode_over_limit"] == 1.6
    assert found["decode_speedup_r8"] == found["decode_speedup_r16"] == 12.0
    assert found["decode_over_limit_r16"] == 2.0
    assert found["decode_speedup_r8_lean"] == 6.0
    assert found["plain_over_limit"] == {"encode": 20.0, "decode_r8": 24.0, "decode_r16": 24.0}
    assert figures.noise(INJECTED) == {"spread_median": 0.01, "spread_worst": 0.05, "limit_moved": 1.2}


def test_a_strawman_is_refused() -> None:
    figures.check_baseline({"encode": 30.0, "decode_r8": 21.0, "decode_r16": 41.0})
    with pytest.raises(ConfigError) as refused:
        figures.check_baseline({"encode": 20.0, "decode_r8": 30.04, "decode_r16": 50.0})
    assert str(refused.value) == (
        "plain_over_limit[decode_r8]=30.0: must be at most 30, or the baseline is a strawman and no speed-up counts; "
        "run again on a quiet machine, then look for waste in bench/plain.py"
    )


def test_worst_temporaries_and_positions_are_reported() -> None:
    index = [{"sets": "uniform", "over_bound": over} for over in (1.01, 1.02)] + [{"sets": "real", "over_bound": 9.0}]
    bits = dict.fromkeys(("bits_per_kept", "bits_per_kept_fixed", "bits_over_bound", "compression"), 1.0)
    temporaries = {"fast": {"encode": 0.02, "decode_r8": 0.3}, "plain": {"encode": 9.0, "decode_r8": None}}
    found = figures.assemble(INJECTED, {**bits, "index": index, "value_error": {}}, temporaries, 64, 128)
    assert found["index_bits_over_bound"] == 1.02
    assert found["temp_bytes_per_param"] == 0.3
    unseen = {"fast": {"encode": None, "decode_r8": None}}
    assert (
        figures.assemble(INJECTED, {**bits, "index": index, "value_error": {}}, unseen, 64, 128)["temp_bytes_per_param"]
        is None
    )


@pytest.mark.usefixtures("in_process")
def test_whole_bench_in_this_process() -> None:
    seen: list[tuple[int, int]] = []
    found = run.measure(TINY, lambda what, done, total: seen.append((done, total)))
    assert json.loads(json.dumps(found)) == found
    assert set(found) >= MUST_HAVE
    assert [done for done, _ in seen] == list(range(1, seen[-1][1] + 1)), "each step is told once, and all are"
    assert {(r["side"], r["k"]) for r in found["timings"]} == {(128, 64), (64, 16), (64, 64)}
    assert found["how"]["headline"] == "128 x 128, k = 64, float32, 1 thread"


def test_allocator_and_threads_are_set_before_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, Any, dict[str, str]]] = []

    def keep(arguments: Mapping[str, Any], environment: dict[str, str], step: Callable[[str, int], None]) -> Any:
        started.append((arguments["job"], arguments.get("threads"), environment))
        return here({**arguments, "threads": 1} if "threads" in arguments else arguments, environment, step)

    monkeypatch.setattr(run, "run_child", keep)
    monkeypatch.setattr(run, "K_GRID", (64,))
    run.measure(run.Settings(side=64, grid_side=64, ks=(64,), dtypes=("float32",), threads=(1, 2), budget_s=0))
    assert [(job, threads) for job, threads, _ in started] == [
        ("bits", None), ("temporaries", None), ("timings", 1), ("timings", 1), ("timings", 2),
    ]  # fmt: skip
    for job, threads, environment in started:
        assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == str(threads or 1)
        if job == "timings":
            assert int(environment["MALLOC_MMAP_THRESHOLD_"]) > 1e9 < int(environment["MALLOC_TRIM_THRESHOLD_"])
    assert started[1][2]["MALLOC_TRIM_THRESHOLD_"] == "0", "memory is measured where freed memory goes back at once"


@pytest.mark.mp
def test_a_child_measures_and_its_errors_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    case = {"side": 64, "k": 16, "dtype": "float32"}
    job = {"job": "timings", "cases": [case], "threads": 1, "peers": [1], "budget_s": 0, "variants": ["plain"]}
    told: list[tuple[str, int]] = []
    rows = run.run_child(job, run.TUNED, lambda what, count: told.append((what, count)))
    assert [r["operation"] for r in rows if r["variant"] == "plain"] == ["encode", "decode_r1", "pack", "unpack"]
    assert told == [("k = 16, float32, 1 thread", count) for count in (1, 2, 3, 4)]
    with pytest.raises(SparseLocoError, match=r"^bench process=1: must end with 0, and did timings; see its own words"):
        run.run_child({**job, "cases": [{**case, "side": 3}]}, {}, lambda what, count: None)
    assert "side=3: must be a positive multiple of 64" in capfd.readouterr().err


@pytest.mark.mp
@pytest.mark.slow
def test_quick_bench_in_its_own_processes(tmp_path: Path) -> None:
    ended = process("bench", "--quick", "--side", "256", "--json", cwd=tmp_path)
    assert ended.returncode in (0, benching.STRAWMAN), "which of them is a matter of speed"
    found = json.loads(ended.stdout)
    assert set(found) >= MUST_HAVE
    assert found["index_bits_over_bound"] == max(r["over_bound"] for r in found["index"] if r["sets"] == "uniform")
    assert {r["k"] for r in found["index"]} == set(run.K_GRID)
    assert list(tmp_path.iterdir()) == [], "nothing is written"


@pytest.mark.usefixtures("tiny")
def test_verb_prints_tables(call: Call) -> None:
    ended = call("bench", "--quick")
    assert ended.code == 0, ended.err
    for text in ("128 x 128, k = 64, float32, 1 thread", "decode + apply, R = 16", "log2 C(4096, k) / k"):
        assert text in ended.out
    assert "temporaries: 0.02 bytes per parameter" in ended.out
    assert "error of kept values on real pseudo-gradients: sign and two levels 0.03" in ended.out


@pytest.mark.usefixtures("tiny")
def test_verb_prints_one_json_object_and_fails_after_it(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = call("bench", "--quick", "--side", "64", "--json")
    assert ended.code == 0
    assert ended.err == ""
    assert set(json.loads(ended.out)) >= MUST_HAVE
    monkeypatch.setattr(figures, "STRAWMAN", 1e-9)
    ended = call("bench", "--quick", "--json")
    assert ended.code == 1
    assert set(json.loads(ended.out)) >= MUST_HAVE
    assert ended.err.startswith("error: plain_over_limit[")
    assert ended.err.count("\n") == 1


def test_what_cannot_be_measured_is_refused_at_once(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("bench", "--side", "100").err == (
        "error: side=100: must be a positive multiple of 64; the baseline pads nothing\n"
    )
    assert call("bench", "--plot", "a.jpg").err == "error: --plot 'a.jpg': must end in .png or .svg; name such a file\n"
    assert call("bench", "--quick", "--plot", "a.png").err == (
        "error: --plot: must stand without --quick, which measures one k only; leave one of them out\n"
    )
    monkeypatch.setattr(benching.importlib.util, "find_spec", lambda name: None)
    ended = call("bench", "--plot", "a.png")
    assert ended.code == 2
    assert ended.err.startswith("error: --plot: needs matplotlib, which is not installed; run pip install")


def test_an_interrupt_is_one_line(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_child", stop)
    ended = call("bench", "--quick", "--json")
    assert (ended.code, ended.out, ended.err) == (130, "", "interrupted: nothing was written\n")


def test_lines_say_what_was_not_seen() -> None:
    found: dict[str, Any] = dict.fromkeys(("bits_per_kept", "bits_per_kept_fixed", "compression"), 9.8)
    found |= {"temp_bytes_per_param": None, "value_error": {"sign_two_level": 0.0317}}
    found |= {"noise": {"spread_median": 0.02, "spread_worst": 0.5, "limit_moved": 1.1}}
    found["how"] = {"path": "torch definition", "limit": "native", "clock": "medians"}
    told = list(show.lines(found))
    assert "temporaries: not seen on this system" in told
    assert "error of kept values on real pseudo-gradients: sign and two levels 0.032" in told
    assert "the limit moved by 10.0 %" in told[-2]
    assert told[-1] == "measured: torch definition; limit: native; medians"


@pytest.mark.parametrize("name", ["k.png", "k.svg"])
def test_plot_has_a_line_per_variant(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [{**r, "k": k} for r in INJECTED if r["k"] == 64 and r["threads"] == 1 for k in (16, 64, 256)]
    chart.time_over_k(rows, tmp_path / name)
    written = (tmp_path / name).read_bytes()
    if name.endswith(".png"):
        assert written.startswith(b"\x89PNG")
    else:
        text = written.decode()
        for word in ("sparseloco", "plain PyTorch", "memory limit", "definition in torch", "256"):
            assert word in text


def test_an_interruption_ends_the_process_that_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []
    original = subprocess.Popen

    def popen(*_: Any, **kwargs: Any) -> subprocess.Popen[str]:
        endless = "import json, time\nprint(json.dumps({'step': 'one'}), flush=True)\ntime.sleep(600)"
        started.append(original([sys.executable, "-c", endless], **kwargs))
        return started[0]

    def interrupted(what: str, count: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(KeyboardInterrupt):
        run.run_child({"job": "bits"}, {}, interrupted)
    assert started[0].returncode == -signal.SIGTERM
