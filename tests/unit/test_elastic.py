"""What a rank does that torchrun has started again: it resumes by itself, with those who came back."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sparseloco.cli import app, runs
from sparseloco.cli.folders import free_folder, last_folder
from tests.cli import Call
from tests.unit.test_cli import call

__all__ = ["call"]


class Started(Exception):
    """What the trainer was called with."""

    def __init__(self, config: Any, folder: Path, resume: Any) -> None:
        super().__init__()
        self.config, self.folder, self.resume = config, folder, resume


@pytest.fixture
def rank(call: Call, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of rank 0 of three, the first time."""

    def train_rank(config: Any, algorithm: Any, dataset: Any, out: Path, *, resume: Any, **_: Any) -> None:
        raise Started(config, out, resume)

    assert call("train", "run.toml", "--set", "checkpoint.every=1").code == 0  # in runs/run-sparseloco
    Path("runs/run-sparseloco/summary.json").unlink()
    monkeypatch.setattr(runs, "train_rank", train_rank)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    return monkeypatch


def started(*arguments: str) -> Started:
    with pytest.raises(Started) as caught:
        app(["train", "run.toml", *arguments])
    return caught.value


def test_a_first_start_is_as_ever(rank: pytest.MonkeyPatch, call: Call) -> None:
    refused = "error: train.workers=2: must be the 3 ranks that torchrun started; pass --workers 3\n"
    assert call("train", "run.toml").err == refused
    first = started("--workers", "3")
    assert (first.resume, str(first.folder)) == (None, "runs/run-sparseloco-2")
    assert first.config.train.workers == 3
    assert (
        "holds checkpoints of a run that is not finished"
        in call("train", "run.toml", "--out", "runs/run-sparseloco").err
    )


@pytest.mark.parametrize("arguments", [(), ("--out", "runs/run-sparseloco"), ("--overwrite",)])
def test_a_restart_resumes_with_as_many_workers_as_came_back(
    arguments: tuple[str, ...], rank: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with --overwrite, which was meant for the first start."""
    rank.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    again = started(*arguments)
    assert again.resume.step == 4
    assert (str(again.folder), again.config.train.workers) == ("runs/run-sparseloco", 3)
    assert again.config.transport.kind == "process_group"
    said = capsys.readouterr().err
    assert "sparseloco: restart 2 by torchrun, with 3 ranks, continues as --resume does\n" in said
    assert "sparseloco: resuming at step 4, token 256, from runs/run-sparseloco/checkpoints/step-00000004\n" in said


def test_a_restart_without_a_checkpoint_starts_anew(
    rank: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = started("--out", "other")
    assert again.resume is None
    assert "sparseloco: no checkpoint in other, starting at step 0\n" in capsys.readouterr().err
    assert tomllib.loads(Path("other/config.toml").read_text())["train"]["workers"] == 3


def test_a_restart_with_one_rank_alone_resumes_too(rank: pytest.MonkeyPatch, call: Call) -> None:
    """It holds all replicas, as the command without torchrun does; and starts no second run beside the first."""
    rank.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    rank.setenv("WORLD_SIZE", "1")
    done = call("train", "run.toml")
    assert done.code == 0
    assert "restart 1 by torchrun, with one rank, which holds all replicas, continues as --resume does\n" in done.err
    assert "resuming at step 4, token 256, from runs/run-sparseloco/checkpoints/step-00000004\n" in done.err
    assert json.loads(Path("runs/run-sparseloco/summary.json").read_text())["workers"] == 2
    assert not Path("runs/run-sparseloco-2").exists()


def test_a_restart_outside_of_torchrun_is_none(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable alone, left over in a shell, changes nothing."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert call("train", "run.toml", "--out", "mine").code == 0
    assert json.loads(Path("mine/summary.json").read_text())["workers"] == 2


def test_the_last_folder_is_the_one_before_the_free_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["demo-sparseloco", "demo-sparseloco-2", "demo-sparseloco-3"]
    for before, name in zip([names[0], *names], names, strict=False):
        assert last_folder("demo", "sparseloco").name == before
        assert free_folder("demo", "sparseloco").name == name
        free_folder("demo", "sparseloco").mkdir(parents=True)
