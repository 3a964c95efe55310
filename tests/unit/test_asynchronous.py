"""Checkpoints that a thread writes while training goes on: the same files, one at a time, errors as warnings."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from sparseloco import checkpoint
from sparseloco.background import Background
from sparseloco.errors import Interrupted
from sparseloco.trainer import CHECKPOINTS
from tests import runs
from tests.runs import METHODS

pytestmark = pytest.mark.filterwarnings("ignore:buffers=:UserWarning")


def test_the_files_are_those_of_a_run_that_waits(tmp_path: Path) -> None:
    """C-24: state is copied at the border, on the training thread; what is written later holds no later bit."""
    algorithm = METHODS["sparseloco_delayed"]()
    kept = {}
    for name, asynchronous in (("here", False), ("thread", True)):
        settings = runs.config(every=1, keep=99, asynchronous=asynchronous)
        runs.simulated(tmp_path / name, settings, algorithm)
        kept[name] = [runs.checkpoint_at(tmp_path / name, step) for step in range(1, runs.STEPS + 1)]
    assert runs.outcome(tmp_path / "thread") == runs.outcome(tmp_path / "here")
    for mine, other in zip(kept["thread"], kept["here"], strict=True):
        for peer in ("peer-0000", "peer-0001"):
            assert runs.same(mine.part(peer), other.part(peer))
        assert runs.same(mine.part("shared")["replica"], other.part("shared")["replica"])


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C-27: the file of step 4 is held back until step 7 is done; that of step 8 waits for it."""
    reached, durably, steps = threading.Event(), checkpoint.write_durably, []

    def slow(path: Path, data: bytes) -> None:
        assert reached.wait(60), "training does not go on"
        durably(path, data)

    def progress(status: Any) -> None:
        steps.append(status.step)
        if status.step == 7:
            reached.set()

    monkeypatch.setattr(checkpoint, "write_durably", slow)
    settings = runs.config(every=4, keep=1, asynchronous=True)
    runs.simulated(tmp_path, settings, METHODS["sparseloco"](), progress=progress)
    assert steps[:7] == [1, 2, 3, 4, 5, 6, 7]
    assert [path.name for path in (tmp_path / CHECKPOINTS).iterdir()] == ["step-00000011"]


def test_an_error_of_the_writer_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = checkpoint.write_durably

    def full(path: Path, data: bytes) -> None:
        if "step-00000004" in path.parent.name:
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(checkpoint, "write_durably", full)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs.simulated(tmp_path, runs.config(every=2, keep=9, asynchronous=True), METHODS["sparseloco"]())
    told = [str(each.message) for each in caught if "checkpoint" in str(each.message)]
    assert told == [
        f"{tmp_path}/checkpoints: checkpoint of step 4 cannot be written (No space left on device); free space there "
        "or make it writable; that of step 2 stays"
    ]
    names = sorted(path.name for path in (tmp_path / CHECKPOINTS).iterdir())
    assert names == [f"step-{step:08}" for step in (2, 6, 8, 10, 11)]


def test_a_stop_waits_until_all_is_written(tmp_path: Path) -> None:
    settings = runs.config(steps=24, asynchronous=True)
    with pytest.raises(Interrupted, match=r"^stopped at step 12 after saving$"):
        runs.simulated(tmp_path, settings, METHODS["sparseloco"](), stop=lambda: True)
    assert runs.newest(tmp_path).step == 12


def test_a_stop_says_that_nothing_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_durably", full)
    settings = runs.config(steps=24, asynchronous=True)
    with (
        pytest.warns(UserWarning, match="step 12 cannot be written"),
        pytest.raises(Interrupted, match=r"^stopped at step 12 without a checkpoint$"),
    ):
        runs.simulated(tmp_path, settings, METHODS["sparseloco"](), stop=lambda: True)


def test_one_task_at_a_time_and_its_error_once() -> None:
    done: list[int] = []
    first = threading.Event()
    work = Background()
    work.wait()
    work.start(lambda: first.wait(60) and done.append(1))
    assert done == []
    first.set()
    work.start(lambda: done.append(2))
    work.wait()
    assert done == [1, 2]
    work.start(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        work.wait()
    work.wait()
