"""What a rank does that torchrun has started again: it resumes by itself, with those who came back."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sparseloco.cli import app, runs
from tests.cli import Call
from tests.unit.test_cli import call

__all__ = ["call"]
MINE = "runs/run-sparseloco"


class Started(Exception):
    """What the trainer was called with."""

    def __init__(self, config: Any, folder: Path, resume: Any) -> None:
        super().__init__()
        self.config, self.folder, self.resume = config, folder, resume


@pytest.fixture
def rank(call: Call, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of rank 0 of three, the first time, and a run that its job has begun."""

    def train_rank(config: Any, algorithm: Any, dataset: Any, out: Path, *, resume: Any, **_: Any) -> None:
        raise Started(config, out, resume)

    assert call("train", "run.toml", "--set", "checkpoint.every=1", "--out", MINE).code == 0
    Path(MINE, "summary.json").unlink()
    Path(MINE, ".job").write_text("this one")
    monkeypatch.setattr(runs, "train_rank", train_rank)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "this one")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    return monkeypatch


def started(*arguments: str) -> Started:
    with pytest.raises(Started) as caught:
        app(["train", "run.toml", "--out", *arguments])
    return caught.value


def test_a_first_start_is_as_ever(rank: pytest.MonkeyPatch, call: Call) -> None:
    refused = "error: train.workers=2: must be the 3 ranks that torchrun started; pass --workers 3\n"
    assert call("train", "run.toml", "--out", "other").err == refused
    first = started("other", "--workers", "3")
    assert (first.resume, str(first.folder)) == (None, "other")
    assert first.config.train.workers == 3
    assert Path("other/.job").read_text() == "this one"
    assert "holds checkpoints of a run that is not finished" in call("train", "run.toml", "--out", MINE).err


@pytest.mark.parametrize("ranks", ["3", "1"])
def test_a_folder_must_be_named(ranks: str, rank: pytest.MonkeyPatch, call: Call) -> None:
    """Else the ranks of one run might write to several, as one finds that of another."""
    rank.setenv("WORLD_SIZE", ranks)
    assert call("train", "run.toml", "--workers", "3").err == (
        "error: --out: must be given under torchrun, since ranks that each look for a free folder may find several; "
        "add --out runs/mine\n"
    )
    assert [path.name for path in Path("runs").iterdir()] == ["run-sparseloco"]


@pytest.mark.parametrize("more", [(), ("--overwrite",)])
def test_a_restart_resumes_with_as_many_workers_as_came_back(
    more: tuple[str, ...], rank: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with --overwrite, which was meant for the first start."""
    rank.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    again = started(MINE, *more)
    assert again.resume.step == 4
    assert (str(again.folder), again.config.train.workers) == (MINE, 3)
    assert again.config.transport.kind == "process_group"
    said = capsys.readouterr().err
    assert "sparseloco: restart 2 by torchrun, with 3 ranks, continues as --resume does\n" in said
    assert "sparseloco: resuming at step 4, token 256, from runs/run-sparseloco/checkpoints/step-00000004\n" in said


@pytest.mark.parametrize("number", ["0", "1"], ids=["rank 0", "rank 1"])
def test_a_restart_of_ranks_that_died_before_the_run_began_still_overwrites(
    number: str, rank: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What lies there is of another job; it is not resumed under the settings of this one."""
    rank.setenv("RANK", number)
    rank.setenv("TORCHELASTIC_RUN_ID", "another")
    rank.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert started(MINE, "--overwrite").resume is None
    if number == "0":
        assert "restart 1 by torchrun, with 3 ranks, starts, since it had not come to that\n" in capsys.readouterr().err
        assert list(Path(MINE, "checkpoints").glob("*")) == []
        assert Path(MINE, ".job").read_text() == "another"
        assert started(MINE, "--overwrite").resume is None, "it has no checkpoint yet"
        assert "continues as --resume does\n" in capsys.readouterr().err


def test_a_launcher_that_names_no_job_does_not_replace_its_own_run(rank: pytest.MonkeyPatch) -> None:
    rank.delenv("TORCHELASTIC_RUN_ID")
    rank.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    Path(MINE, ".job").unlink()
    assert started(MINE, "--overwrite").resume.step == 4


def test_without_overwrite_it_is_refused_as_a_first_start_is(rank: pytest.MonkeyPatch, call: Call) -> None:
    rank.setenv("TORCHELASTIC_RUN_ID", "another")
    rank.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert "holds checkpoints of a run that is not finished" in call("train", "run.toml", "--out", MINE).err
    assert started(MINE, "--resume").resume.step == 4


def test_a_run_without_torchrun_is_of_no_job(rank: pytest.MonkeyPatch, call: Call) -> None:
    """Else a later job of the same name would take it for its own."""
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        rank.delenv(name)
    assert call("train", "run.toml", "--out", MINE, "--overwrite").code == 0
    assert not Path(MINE, ".job").exists()


def test_a_restart_without_a_run_starts_it(rank: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rank.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert started("other").resume is None
    assert "restart 1 by torchrun, with 3 ranks, starts, since it had not come to that\n" in capsys.readouterr().err
    assert tomllib.loads(Path("other/config.toml").read_text())["train"]["workers"] == 3
    assert started("other").resume is None
    assert "sparseloco: no checkpoint in other, starting at step 0\n" in capsys.readouterr().err


def test_a_restart_with_one_rank_alone_resumes_too(rank: pytest.MonkeyPatch, call: Call) -> None:
    """It holds all replicas, as the command without torchrun does; and starts no second run beside the first."""
    rank.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    rank.setenv("WORLD_SIZE", "1")
    done = call("train", "run.toml", "--out", MINE)
    assert done.code == 0
    assert "restart 1 by torchrun, with one rank, which holds all replicas, continues as --resume does\n" in done.err
    assert "resuming at step 4, token 256, from runs/run-sparseloco/checkpoints/step-00000004\n" in done.err
    assert json.loads(Path(MINE, "summary.json").read_text())["workers"] == 2


def test_a_restart_outside_of_torchrun_is_none(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables alone, left over in a shell, change nothing."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "gone")
    assert call("train", "run.toml").code == 0
    assert json.loads(Path(MINE, "summary.json").read_text())["workers"] == 2
