"""The command line: what it prints, what it leaves on the disk, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparseloco.cli import app, runs, screen
from sparseloco.config import load_config, to_toml
from sparseloco.metrics import Status
from sparseloco.presets import PRESETS
from tests.cli import Call, names, process, run_file, text

CONFIG = run_file(
    more="""
[[compare]]
label = "Sparse"

[[compare]]
label = "Dense"
preset = "diloco"
inner_steps = 2
tuned = ["outer_momentum"]
"""
)
RUN_FILES = ["checkpoints", "config.toml", "loss_over_bytes.png", "loss_over_tokens.png", "metrics.jsonl",
             "report.html", "summary.json"]  # fmt: skip


@pytest.fixture
def call(cli: Call) -> Call:
    """In a folder with a configuration and a small text."""
    Path("run.toml").write_text(CONFIG)
    Path("text.txt").write_text(text())
    return cli


@pytest.mark.usefixtures("real_charts")
def test_train_leaves_a_run_folder(call: Call) -> None:
    ended = call("train", "run.toml", "--set", "train.seed=3", "--out", "here/mine")
    assert ended.code == 0, ended.err
    assert names("here/mine") == sorted([*RUN_FILES, "model"])
    assert "report: here/mine/report.html\nmodel: here/mine/model\n" in ended.out
    assert "Held-out loss" in ended.out
    assert "sparseloco: 4 steps, " in ended.err
    shown = json.loads(Path("here/mine/summary.json").read_text())["validation_loss"]
    assert f"validation {shown:.3f}," in ended.err.splitlines()[-1], "the last evaluation, not the one before"
    config = load_config("run.toml", ["train.seed=3"])
    assert load_config("here/mine/config.toml") == config
    assert Path("here/mine/config.toml").read_text() == to_toml(config)
    summary = json.loads(Path("here/mine/summary.json").read_text())
    assert (summary["label"], summary["rounds"], summary["workers"]) == ("sparseloco", 2, 2)
    again = "sparseloco train run.toml --set train.seed=3 --out here/mine"
    assert again in Path("here/mine/report.html").read_text()


def test_train_again_gives_the_same_from_the_resolved_file(call: Call) -> None:
    first = json.loads(call("train", "run.toml", "--out", "a", "--json").out)
    again = json.loads(call("train", "a/config.toml", "--out", "b", "--json").out)
    assert again["digest"] == first["digest"]
    assert again["held_out_loss"] == first["held_out_loss"]


def test_json_is_all_of_stdout(call: Call) -> None:
    ended = call("train", "run.toml", "--data", "text.txt", "--json")
    assert json.loads(ended.out) == json.loads(Path("runs/run-sparseloco/summary.json").read_text())
    assert ended.err == ""
    assert call("train", "run.toml", "--json").code == 0
    assert names("runs") == ["run-sparseloco", "run-sparseloco-2"]


def test_one_worker_is_warned_about_in_one_line(call: Call) -> None:
    ended = call("train", "run.toml", "--workers", "1", "--json")
    assert ended.code == 0
    assert ended.err.startswith("warning: num_peers=1: one replica alone synchronizes with nobody")
    assert ended.err.count("\n") == 1


def test_compare_leaves_a_folder_for_each_run(call: Call) -> None:
    ended = call("compare", "run.toml", "--out", "both")
    assert ended.code == 0, ended.err
    pages = ["loss_over_bytes.png", "loss_over_tokens.png", "report.html"]
    assert names("both") == ["comparison.json", "dense", *pages, "sparse"]
    assert names("both/dense") == names("both/sparse") == RUN_FILES
    assert "report: both/report.html" in ended.out
    assert [line for line in ended.err.splitlines() if line.startswith("[")] == ["[1/2] Sparse", "[2/2] Dense"]
    listed = json.loads(Path("both/comparison.json").read_text())
    assert [(row["label"], row["folder"], row["tuned"]) for row in listed] == [
        ("Sparse", "sparse", []),
        ("Dense", "dense", ["outer_momentum"]),
    ]
    assert listed[0]["tokens"] == listed[1]["tokens"] == 4 * 2 * 2 * 16
    assert "Dense: outer_momentum" in Path("both/report.html").read_text()

    only = call("compare", "run.toml", "--out", "both", "--only", "Dense", "--json", "--overwrite")
    assert [row["label"] for row in json.loads(only.out)] == ["Dense"]


def test_report_takes_runs_and_comparisons(call: Call) -> None:
    call("compare", "run.toml", "--out", "both")
    call("train", "run.toml", "--out", "mine")
    ended = call("report", "both", "mine", "--out", "page")
    assert ended.code == 0, ended.err
    assert "report: page/report.html" in ended.out
    page = Path("page/report.html").read_text()
    assert "Dense: outer_momentum" in page
    answer = json.loads(call("report", "both", "mine", "--json").out)
    assert answer["report"] == "runs/report/report.html"
    assert [run["label"] for run in answer["runs"]] == ["Sparse", "Dense", "sparseloco"]
    assert call("report", "nowhere").code == 2
    Path("both/comparison.json").write_text("{}")
    assert "both/comparison.json: must hold the runs of a comparison" in call("report", "both").err


def test_describe_needs_no_text(call: Call) -> None:
    Path("text.txt").unlink()
    ended = call("describe", "run.toml", "--json")
    assert ended.code == 0, ended.err
    sparse, dense = json.loads(ended.out)
    assert (sparse["label"], sparse["preset"], sparse["portable"]) == ("Sparse", "sparseloco", True)
    assert sparse["density"] == pytest.approx(8 / 64, rel=0.1)
    assert dense["density"] is None
    assert dense["compression"] == pytest.approx(1.0, rel=0.02)
    assert sparse["parameters"] == dense["parameters"] == dense["dense_bytes_per_round"] / 4
    memory, size = sparse["memory_bytes_per_rank"], 4 * sparse["parameters"]
    assert memory == {
        "parameters": size,
        "gradients": size,
        "inner optimizer": 2 * size,
        "anchor": size,
        "residual": size,
        "snapshot": 0,
        "outer optimizer": 0,
        "compressor": 0,
        "payload": 2 * sparse["bytes_sent_per_round"],
    }
    memory = dense["memory_bytes_per_rank"]
    assert (memory["residual"], memory["outer optimizer"]) == (0, size)
    assert not Path("runs").exists()


def test_describe_agrees_with_the_run(call: Call) -> None:
    described = json.loads(call("describe", "run.toml", "--only", "Sparse", "--json").out)[0]
    summary = json.loads(call("train", "run.toml", "--json").out)
    assert summary["parameters"] == described["parameters"]
    # Described are frames of a fixed size; one process sends compact ones, which depend on the positions.
    assert 0.9 < summary["bytes_sent_per_replica"] / described["bytes_sent_per_replica"] < 1.1
    assert summary["compression"] == pytest.approx(described["compression"], rel=0.1)
    dense = json.loads(call("describe", "run.toml", "--only", "Dense", "--json").out)[0]
    call("compare", "run.toml", "--out", "one", "--only", "Dense", "--json")
    summary = json.loads(Path("one/dense/summary.json").read_text())
    assert summary["bytes_sent_per_replica"] == dense["bytes_sent_per_replica"]


@pytest.mark.parametrize("preset", PRESETS)
def test_describe_knows_every_preset(call: Call, preset: str) -> None:
    Path("one.toml").write_text(f'[algorithm]\npreset = "{preset}"\n')
    ended = call("describe", "one.toml")
    assert ended.code == 0, ended.err
    assert "compression" in ended.out
    assert "memory: all" in ended.out


def test_describe_lists_presets(call: Call) -> None:
    assert all(f" {name} " in call("describe", "--list").out for name in ["sparseloco", "powersgd"])
    rows = json.loads(call("describe", "--list", "--json").out)
    assert [row["preset"] for row in rows] == list(PRESETS)
    assert rows[list(PRESETS).index("ef_signsgd")]["keywords"] == {"lr": 0.001}
    assert call("describe").err == (
        "error: CONFIG.toml: missing argument; name a file, or list the presets with --list\n"
    )


@pytest.mark.parametrize("verb", ["train", "compare"])
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.kk=3", "algorithm: unknown key 'kk'; did you mean 'k'?"),
        ("algorithm.k=65", "algorithm.k=65: must be between 1 and chunk_size=64; use a larger chunk_size or a"),
        ("algorithm.inner_steps=0", "algorithm.inner_steps=0: must be at least 1; use 1 to synchronize after"),
        ("model.num_heads=3", "hidden_size=16: must be a multiple of 2 * num_heads = 6"),
        ("data.path=none.txt", "data.path='none.txt': must be an existing text file or directory, or 'stdlib'"),
        ("data.path=empty.txt", "data.path='empty.txt': holds no text"),
        ("data.path=tiny.txt", "data='tiny.txt': train, validation and test need at least one document each"),
        ("train.sequence_length=9000", "data='text.txt': each split needs at least sequence_length + 1 = 9001 tokens"),
        ("transport.kind=process_group", "transport.kind='process_group': must be started by torchrun"),
        ("train.workers=100000000", "train.workers=100000000: must fit into the "),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(call: Call, verb: str, override: str, message: str) -> None:
    Path("empty.txt").write_text("")
    Path("tiny.txt").write_text("only a line\n")
    extra = ["--set", "train.evaluation_tokens=9000"] if "length" in override else []
    ended = call(verb, "run.toml", "--set", override, *extra)
    assert ended.code == 2
    assert message in ended.err
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert ended.out == ""
    assert not Path("runs").exists()


def test_processes_and_torchrun_have_their_own_trainers(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        pass

    def asked(name: str) -> Callable[..., None]:
        def train(*_: Any, **__: Any) -> None:
            raise Asked(name)

        return train

    for name in ("train", "train_processes", "train_rank"):
        monkeypatch.setattr(runs, name, asked(name))
    with pytest.raises(Asked, match=r"^train$"):
        app(["train", "run.toml"])
    with pytest.raises(Asked, match=r"^train_processes$"):
        app(["train", "run.toml", "--processes"])
    assert tomllib.loads(Path("runs/run-sparseloco-2/config.toml").read_text())["train"]["processes"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(Asked, match=r"^train_rank$"):
            app(["train", "run.toml", "--out", f"rank{rank}"])
    assert tomllib.loads(Path("rank0/config.toml").read_text())["transport"]["kind"] == "process_group"
    assert not Path("rank1").exists()
    assert "must not start a comparison" in call("compare", "run.toml").err


def test_a_report_without_matplotlib_has_no_charts_but_a_warning(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs.importlib.util, "find_spec", lambda name: None)
    ended = call("train", "run.toml", "--out", "mine")
    assert ended.code == 0
    warning = 'matplotlib is not installed, so the report has no charts; run pip install "sparseloco[plot]"'
    assert f"warning: {warning}\n" in ended.err
    assert "No charts: matplotlib was not installed" in Path("mine/report.html").read_text()
    assert names("mine") == ["checkpoints", "config.toml", "metrics.jsonl", "model", "report.html", "summary.json"]


def test_status_lines_leave_out_what_is_not_known() -> None:
    early = Status(1, 10, float("nan"), None, 12_345.0, 0, 75.0)
    assert screen.status_line(early) == "12.3 k tokens/s, sent 0 B, 1 min 15 s left"
    late = Status(10, 10, 3.21, 3.5, 12_345.0, 1_000_000, 0.0)
    assert screen.status_line(late) == "loss 3.210, validation 3.500, 12.3 k tokens/s, sent 1.00 MB"


def test_help_is_quick_and_has_an_example(tmp_path: Path) -> None:
    probe = (
        "import sys; from sparseloco.cli import app\n"
        "try: app(['compare', '--help'])\n"
        "except SystemExit: pass\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=100, check=False)
    *text, loaded = ended.stdout.splitlines()
    assert "Example: sparseloco compare examples/demo.toml" in "\n".join(text)
    assert not {"torch", "numpy", "transformers", "tokenizers", "matplotlib", "msgspec"} & set(loaded.split()), (
        ended.stderr
    )


def test_module_is_the_command(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text('[algorithm]\npreset = "sparseloco"\ninner_step = 15\n')
    ended = process("train", "bad.toml", cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr == "error: algorithm: unknown key 'inner_step'; did you mean 'inner_steps'?\n"
    assert names(tmp_path) == ["bad.toml"]
