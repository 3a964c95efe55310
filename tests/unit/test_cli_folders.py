"""What --out may hold: our own earlier runs are recognised by content, and nobody else's files are touched."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from sparseloco.cli import folders, runs
from sparseloco.errors import DivergenceError
from tests.unit.test_cli import Call, call, names

__all__ = ["call"]


def contents(folder: str) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def refused(out: str, what: str, why: str) -> str:
    rule = f"must be new, empty or hold nothing but an earlier {what}"
    return f"error: --out {out!r}: {rule}, but {why}; choose another\n"


@pytest.mark.parametrize(
    ("files", "of_train", "of_compare"),
    [
        (["thesis.txt"], "it has no metrics.jsonl", "'thesis.txt' is there"),
        (["config.toml"], "it has no metrics.jsonl", "'config.toml' is there"),
        (["config.toml", "report.html", "summary.json"], "it has no metrics.jsonl", "'config.toml' is there"),
        (["config.toml", "metrics.jsonl"], "it has no config.toml with [algorithm]", "'config.toml' is there"),
        (["metrics.jsonl"], "it has no config.toml with [algorithm]", "'metrics.jsonl' is there"),
        (["report.html"], "it has no metrics.jsonl", "it has no comparison.json and no folder of a run"),
        (["model/config.json", "checkpoints/x"], "it has no metrics.jsonl", "'checkpoints' is there"),
        (["sparse/config.toml", "report.html"], "it has no metrics.jsonl", "'sparse' is there"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("option", [[], ["--overwrite"], ["--resume"]], ids=["plain", "overwrite", "resume"])
def test_files_of_others_are_left_alone(
    call: Call, files: list[str], of_train: str, of_compare: str, option: list[str]
) -> None:
    for name in files:
        path = Path("notes", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("name = 'mine'\n")
    before = contents("notes")
    assert call("train", "run.toml", "--out", "notes", *option) == (2, "", refused("notes", "run", of_train))
    ended = call("compare", "run.toml", "--out", "notes", *option)
    if "--resume" in option:
        of_compare = "it has no comparison.json and no folder of a run"
    assert ended == (2, "", refused("notes", "comparison", of_compare))
    assert contents("notes") == before


def test_a_file_beside_a_run_or_a_comparison_is_seen(call: Call) -> None:
    assert call("train", "run.toml", "--out", "mine").code == 0
    assert call("compare", "run.toml", "--out", "both").code == 0
    for folder in ("mine", "both"):
        Path(folder, "thesis.txt").write_text("keep")
    before = contents("mine") | contents("both")
    ended = call("train", "run.toml", "--out", "mine", "--overwrite")
    assert ended == (2, "", refused("mine", "run", "'thesis.txt' is there"))
    ended = call("compare", "run.toml", "--out", "both", "--overwrite")
    assert ended == (2, "", refused("both", "comparison", "'thesis.txt' is there"))
    assert call("compare", "run.toml", "--out", "mine", "--overwrite").code == 2
    assert call("train", "run.toml", "--out", "both", "--overwrite").code == 2
    assert contents("mine") | contents("both") == before
    assert call("train", "--resume", "mine").code == 0, "a run that goes on removes nothing"
    assert Path("mine/thesis.txt").read_text() == "keep"


def test_a_finished_run_is_replaced_only_on_demand(call: Call) -> None:
    assert call("train", "run.toml", "--out", "mine").code == 0
    assert call("compare", "run.toml", "--out", "both").code == 0
    before = contents("mine") | contents("both")
    way = "replace it with --overwrite, or choose another folder"
    ended = call("train", "run.toml", "--out", "mine")
    assert ended == (2, "", f"error: --out 'mine': holds a finished run; {way}\n")
    ended = call("compare", "run.toml", "--out", "both")
    assert ended == (2, "", f"error: --out 'both': holds a finished comparison; {way}\n")
    ended = call("train", "run.toml", "--out", "both/dense")
    assert ended == (2, "", f"error: --out 'both/dense': holds a finished run; {way}\n")
    assert contents("mine") | contents("both") == before
    assert call("train", "run.toml", "--out", "mine", "--overwrite", "--set", "train.seed=1").code == 0
    assert contents("mine")[Path("mine/config.toml")] != before[Path("mine/config.toml")]
    assert call("compare", "run.toml", "--out", "both", "--overwrite").code == 0
    ended = call("train", "--resume", "mine", "--overwrite")
    assert ended == (2, "", "error: --overwrite: must not stand beside --resume; keep one of them\n")


def test_a_run_that_failed_makes_way_for_the_next(call: Call) -> None:
    ended = call("train", "run.toml", "--out", "mine", "--set", "algorithm.outer_lr=1e30")
    assert (ended.code, ended.out) == (2, "")
    assert "must be finite; lower optimizer.lr or algorithm.outer_lr, lengthen optimizer.warmup" in ended.err
    assert ended.err.splitlines()[-1].startswith("error: ")
    assert names("mine") == ["config.toml", "metrics.jsonl"]
    assert call("train", "run.toml", "--out", "mine").code == 0


def test_folders_that_cannot_be_used(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "x" * 300
    for verb in ("train", "compare"):
        ended = call(verb, "run.toml", "--out", long)
        rule = "must be readable (File name too long); choose another"
        assert ended == (2, "", f"error: --out {long!r}: {rule}\n")
        assert "must be a folder, but is a file" in call(verb, "run.toml", "--out", "text.txt").err
    for arguments in (["train", "--resume", long], ["report", long], ["watch", long], ["generate", long]):
        ended = call(*arguments)
        assert ended.code == 2
        assert "File name too long" in ended.err
        assert ended.err.count("\n") == 1

    def read_only(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folders, "write_atomically", read_only)
    ended = call("train", "run.toml", "--out", "mine")
    rule = "must be a folder that can be written (Permission denied); choose another"
    assert ended == (2, "", f"error: --out 'mine': {rule}\n")


def test_a_report_replaces_only_our_own_page(call: Call) -> None:
    assert call("train", "run.toml", "--out", "mine").code == 0
    Path("notes").mkdir()
    Path("notes/report.html").write_text("<p>mine</p>")
    ended = call("report", "mine", "--out", "notes")
    rule = "its report.html was not written by sparseloco; choose another"
    assert ended == (2, "", f"error: --out 'notes': {rule}\n")
    assert Path("notes/report.html").read_text() == "<p>mine</p>"
    assert [call("report", "mine", "--out", "page").code for _ in range(2)] == [0, 0]
    assert call("report", "mine").code == 0


@pytest.mark.parametrize("error", [RuntimeError("DefaultCPUAllocator: can't allocate memory: 5 TB"), MemoryError()])
def test_running_out_of_memory_is_one_sentence(call: Call, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(runs, "train", fail)
    assert call("train", "run.toml") == (
        2,
        "",
        "error: train.batch_size=2: must fit into the memory of this machine, and it ran out; lower it or raise "
        "train.accumulation, or take fewer workers, shorter sequences or a smaller model\n",
    )


def test_too_many_workers_are_refused_early(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 250_000, "SC_PAGE_SIZE": 4096}.get)
    ended = call("train", "run.toml", "--workers", "100", "--processes")
    assert ended.code == 2
    assert ended.err.startswith(
        "error: train.workers=100: must fit into the 1.02 GB of memory of this machine, but need "
    )
    assert ended.err.endswith("; use 6 or fewer\n")
    ended = call("train", "run.toml", "--set", "model.hidden_size=100000", "--set", "model.num_heads=4")
    assert ended.err.endswith("; use a smaller model\n")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (DivergenceError("train_loss=nan at step 3:\n must be finite"), 2, "error: train_loss=nan at step 3: must be"),
        (KeyboardInterrupt(), 130, "interrupted: a run folder without summary.json is not finished; start it"),
    ],
    ids=["diverged", "interrupted"],
)
def test_a_failed_run_leaves_no_summary(
    call: Call, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    assert call("train", "run.toml", "--out", "mine").code == 0
    assert call("compare", "run.toml", "--out", "both").code == 0

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(runs, "train", fail)
    for verb, folder in (("train", "mine"), ("compare", "both")):
        ended = call(verb, "run.toml", "--out", folder, "--overwrite")
        assert ended.code == code
        assert line in ended.err.splitlines()[-1]
        assert ended.out == ""
    assert names("mine") == ["config.toml", "metrics.jsonl"]
    assert not {"comparison.json", "report.html"} & set(names("both"))
    assert names("both/sparse") == ["config.toml", "metrics.jsonl"]


def test_free_folders_never_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert folders.free_folder("sparseloco", "sparseloco") == Path("runs/sparseloco")
    Path("runs/demo").mkdir(parents=True)
    assert folders.free_folder("demo") == Path("runs/demo-2")
    assert len(folders.free_folder("x" * 300).name) < 255


def test_a_run_does_not_make_way_for_one_that_reads_from_it(call: Call) -> None:
    assert call("train", "run.toml", "--out", "mine").code == 0
    before = contents("mine")
    for setting in ("model.pretrained=mine/model", "data.tokenizer=mine/model", "data.path=mine/metrics.jsonl"):
        ended = call("train", "run.toml", "--out", "mine", "--overwrite", "--set", setting)
        assert ended.code == 2, setting
        assert contents("mine") == before, setting
    assert "must not hold what the run reads, 'mine/metrics.jsonl'; choose another" in ended.err


def test_resume_of_a_finished_run_without_checkpoints_keeps_it(call: Call) -> None:
    assert call("train", "run.toml", "--out", "mine").code == 0
    shutil.rmtree("mine/checkpoints")
    before = contents("mine")
    ended = call("train", "--resume", "mine")
    assert ended.code == 2
    assert "'mine' holds a finished run without a checkpoint to go on from; choose another --out" in ended.err
    assert contents("mine") == before


def test_a_run_is_continued_in_place(call: Call) -> None:
    assert call("train", "run.toml", "--out", "mine").code == 0
    ended = call("train", "--resume", "mine", "--out", "other")
    rule = "must be left out beside a run folder, which is continued in place; drop it"
    assert ended == (2, "", f"error: --out 'other': {rule}\n")
    assert not Path("other").exists()
