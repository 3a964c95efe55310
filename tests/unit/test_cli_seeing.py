"""The verbs that show things, and what other verbs show: watch, doctor, cite, logs, writers, completion."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparseloco.cli import runs
from sparseloco.presets import PRESETS
from tests.unit.test_cli import Call, call, names, process

__all__ = ["call"]  # the fixture


def test_cite_prints_bibtex_and_json(call: Call) -> None:
    text = call("cite", "sparseloco").out
    assert text.startswith("% method\n@misc{sarfi2025sparseloco,\n")
    rows = json.loads(call("cite", "sparseloco", "--json").out)
    assert [row["role"] for row in rows][:2] == ["method", "error feedback"]
    assert rows[0]["arxiv"] == "2508.15706"
    assert rows[0]["bibtex"] in text
    ended = call("cite", "sparsloco")
    listed = ", ".join(PRESETS)
    assert (ended.code, ended.err) == (
        2,
        f"error: preset='sparsloco': must be one of {listed}; did you mean 'sparseloco'?\n",
    )
    assert call("cite", "muon").err == f"error: preset='muon': must be one of {listed}; choose one of them\n"


def test_doctor_prints_a_page_and_json(call: Call) -> None:
    ended = call("doctor")
    assert ended.code == 0, ended.err
    for section in ("versions", "devices", "threads", "compiler", "disk", "cache", "speed", "extras"):
        assert f"\n{section} " in "\n" + ended.out, section
    found = json.loads(call("doctor", "--json").out)
    assert found["cache"]["writable"] is True
    assert all({"what", "why", "remedy"} == set(finding) for finding in found["findings"])


def test_watch_shows_a_finished_run_and_ends(call: Call) -> None:
    assert call("train", "run.toml", "--out", "mine").code == 0
    ended = call("watch", "mine")
    assert ended.code == 0, ended.err
    assert ended.out == ""
    assert ended.err.startswith("mine: 4 steps, loss ")
    records = [json.loads(line) for line in call("watch", "mine", "--json").out.splitlines()]
    assert records == [json.loads(line) for line in Path("mine/metrics.jsonl").read_text().splitlines()]
    assert call("watch", "nowhere").err == (
        "error: folder='nowhere': must hold the config.toml of one run; give a run's folder\n"
    )


def test_watch_of_an_interrupted_run_says_how_it_goes_on(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def at_once(*_: str) -> Iterator[Callable[[], bool]]:
        yield lambda: True

    long = ["--set", "train.steps=24", "--out", "mine"]
    assert call("train", "run.toml", *long[:-1], "straight").code == 0
    with monkeypatch.context() as patched:
        patched.setattr(runs, "stop_signals", at_once)
        assert call("train", "run.toml", *long).code == 130
    fate = "RUN='mine': was interrupted at step 10 after saving; continue it with: sparseloco train --resume mine"
    ended = call("watch", "mine")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.splitlines()[-1] == fate
    ended = call("watch", "mine", "--json")
    assert (ended.code, ended.err) == (1, fate + "\n")
    assert json.loads(ended.out.splitlines()[-1]) == {"kind": "interrupted", "step": 10, "saved": True}
    assert call("train", "--resume", "mine").code == 0
    kinds = [
        [json.loads(line)["kind"] for line in Path(out, "metrics.jsonl").read_text().splitlines()]
        for out in ("mine", "straight")
    ]
    assert kinds[0] == kinds[1], "the record of the interruption is gone with the interruption"
    assert call("watch", "mine").code == 0


def test_the_log_names_peer_and_round(call: Call) -> None:
    ended = call("train", "run.toml", "--out", "mine", "--verbose")
    told = [line.split(" ", 1)[1] for line in ended.err.splitlines() if ": applied" in line]
    assert [line.partition(",")[0] for line in told] == ["peer 0", "peer 1"] * 2
    assert [line.split(", ")[1] for line in told] == ["round 0"] * 2 + ["round 1"] * 2
    assert ": applied" not in call("train", "run.toml", "--out", "mine", "--overwrite").err
    assert call("train", "run.toml", "--out", "mine", "--overwrite", "--verbose", "--json").err == ""


def test_step_lines_hold_what_the_view_shows(call: Call) -> None:
    call("train", "run.toml", "--out", "mine", "--set", "train.log_every=2")
    lines = [json.loads(line) for line in Path("mine/metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "step"][-1]
    summary = json.loads(Path("mine/summary.json").read_text())
    assert last["bytes_sent"] == summary["bytes_sent_per_replica"]
    # Frames are as short as their positions allow, so rounds differ a little.
    assert last["round_bytes"] * summary["rounds"] == pytest.approx(last["bytes_sent"], rel=0.05)
    assert last["compression"] == summary["compression"]
    assert last["delta_norm"] > 0
    assert last["residual_norm"] > 0


@pytest.mark.mp
@pytest.mark.usefixtures("forked_workers")
def test_one_worker_as_a_process_is_warned_about_in_one_line(call: Call) -> None:
    ended = call("train", "run.toml", "--workers", "1", "--processes", "--json")
    assert ended.code == 0
    assert ended.err == "warning: group=1 rank: one replica alone synchronizes with nobody; use 2 or more\n"


@pytest.mark.mp
@pytest.mark.usefixtures("forked_workers")
def test_the_log_of_processes_names_every_peer(call: Call) -> None:
    ended = call("train", "run.toml", "--out", "mine", "--processes", "--verbose")
    told = {line.split(" ", 1)[1].partition(", fragment")[0] for line in ended.err.splitlines() if ": applied" in line}
    assert {"peer 0, round 0", "peer 1, round 0"} <= told


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_run_logs_to_tensorboard_anew_each_time(call: Call) -> None:
    pytest.importorskip("tensorboard")
    for _ in range(2):
        ended = call("train", "run.toml", "--out", "mine", "--overwrite", "--set", 'logging.to=["tensorboard"]')
        assert ended.code == 0, ended.err
        assert len(names("mine/tensorboard")) == 1


def test_a_missing_extra_is_said_before_anything_is_written(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseloco import writers

    monkeypatch.setattr(writers.importlib.util, "find_spec", lambda _: None)
    for verb in ("train", "compare"):
        ended = call(verb, "run.toml", "--set", 'logging.to=["trackio"]')
        assert ended.code == 2
        assert ended.out == ""
        assert 'run pip install "sparseloco[trackio]" or leave it out' in ended.err
    assert not Path("runs").exists()


def test_report_shows_an_interval_over_seeds(call: Call) -> None:
    for seed in "01":
        assert call("train", "run.toml", "--set", f"train.seed={seed}", "--out", f"seed{seed}").code == 0
    ended = call("report", "seed0", "seed1", "--out", "page")
    assert "over seeds, mean \u00b1 half the width of its 95 % interval:" in ended.out
    answer = json.loads(call("report", "seed0", "seed1", "--json").out)
    (row,) = answer["over_seeds"]
    assert (row["label"], row["seeds"]) == ("sparseloco", [0, 1])
    losses = [run["held_out_loss"] for run in answer["runs"]]
    assert row["held_out_loss"]["mean"] == pytest.approx(sum(losses) / 2)


def test_completion_is_offered(tmp_path: Path) -> None:
    ended = process("--help", cwd=tmp_path)
    assert "--install-completion" in ended.stdout


def test_help_and_the_package_alone_load_no_torch() -> None:
    probe = "import sys, sparseloco; assert 'torch' not in sys.modules; print(len(dir(sparseloco)) > 20)"
    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr) == ("True\n", "")


def test_every_public_name_is_found_where_it_is_made() -> None:
    import sparseloco

    for name in sparseloco.__all__:
        assert getattr(sparseloco, name) is not None
        assert name in dir(sparseloco)
    from sparseloco.replica import Replica

    assert sparseloco.Replica is Replica
    with pytest.raises(AttributeError, match="module 'sparseloco' has no attribute 'Replik'"):
        sparseloco.Replik  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_one_worker_is_a_warning_and_many_need_one_command(call: Call) -> None:
    """C-77: one replica alone is said aloud. C-78: --workers 4 starts everything on one machine."""
    assert "one replica alone synchronizes with nobody" in call("train", "run.toml", "--workers", "1", "--json").err
    summary = json.loads(call("train", "run.toml", "--workers", "4", "--json").out)
    assert summary["workers"] == 4
    assert summary["bytes_received_per_replica"] == pytest.approx(3 * summary["bytes_sent_per_replica"], rel=0.05)
    assert runs.is_torchrun() is False
