"""Resume and Ctrl-C from the command line: what is said, what is left on the disk, which processes are left."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sparseloco.cli import runs
from tests.cli import Call, Ended
from tests.unit.test_cli import CONFIG, call

__all__ = ["call"]
ROOT = Path(__file__).parents[2]
LONG = ["--set", "train.steps=20000", "--set", "train.evaluate_every=20000"]


def steps(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder, "checkpoints").iterdir())


def test_resume_of_a_finished_run_gives_the_same_again(call: Call) -> None:
    assert call("train", "run.toml", "--out", "mine", "--set", "checkpoint.every=1").code == 0
    assert steps("mine") == ["step-00000003", "step-00000004"]
    summary, lines = Path("mine/summary.json").read_text(), Path("mine/metrics.jsonl").read_text()
    ended = call("train", "--resume", "mine")
    assert ended.code == 0, ended.err
    assert "sparseloco: resuming at step 4, token 256, from mine/checkpoints/step-00000004\n" in ended.err
    again = json.loads(Path("mine/summary.json").read_text())
    clock = {"seconds", "seconds_in_sync"}
    assert {k: v for k, v in json.loads(summary).items() if k not in clock} == {
        k: v for k, v in again.items() if k not in clock
    }
    assert Path("mine/metrics.jsonl").read_text() == lines


def test_a_damaged_checkpoint_is_passed_over_aloud(call: Call) -> None:
    call("train", "run.toml", "--out", "mine", "--set", "checkpoint.every=3")
    digest = json.loads(Path("mine/summary.json").read_text())["digest"]
    path = Path("mine/checkpoints/step-00000004/peer-0001.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    ended = call("train", "run.toml", "--out", "mine", "--set", "checkpoint.every=3", "--resume", "--json")
    assert ended.code == 0, ended.err
    assert f"warning: a checkpoint is passed over: {path}: size=" in ended.err
    assert json.loads(ended.out)["digest"] == digest
    for path in Path("mine/checkpoints").rglob("*.safetensors"):
        path.write_bytes(b"")
    ended = call("train", "--resume", "mine")
    assert ended.code == 2
    last = "error: mine/checkpoints: must hold a whole checkpoint; start anew in another folder\n"
    assert ended.err.endswith(last)


def test_another_run_is_refused_and_nothing_is_lost(call: Call) -> None:
    call("train", "run.toml", "--out", "mine")
    before = {path: path.read_bytes() for path in Path("mine").rglob("*") if path.is_file()}
    ended = call("train", "run.toml", "--out", "mine", "--resume", "--set", "algorithm.k=4")
    assert (ended.code, ended.err.splitlines()[-1]) == (
        2,
        "error: mine/checkpoints/step-00000004: must come from this run, but algorithm.k is 8 there and 4 here; resume "
        "with the same settings, text and model, or start anew in another folder",
    )
    Path("text.txt").write_text(Path("text.txt").read_text() + "another end")
    ended = call("train", "--resume", "mine")
    assert ended.code == 2
    assert "must come from this run, but corpus.sha256 is '" in ended.err
    assert {path: path.read_bytes() for path in Path("mine").rglob("*") if path.is_file()} == before


def test_a_refused_resume_changes_nothing_in_the_folder(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that may change between two starts are written only once the state has been loaded and accepted."""
    from sparseloco.replica import Replica

    call("train", "run.toml", "--out", "mine", "--set", "checkpoint.every=1")
    newest = Path("mine/checkpoints/step-00000004/shared.safetensors")
    newest.write_bytes(newest.read_bytes()[:-1])  # passed over, and removed once the run goes on
    Path("mine/checkpoints/.step-00000005.partial").mkdir()
    before = {path: path.read_bytes() for path in Path("mine").rglob("*") if path.is_file()}
    again = ("train", "--resume", "mine", "--set", "train.log_every=1", "--set", "checkpoint.every=0")
    load = Replica.load_private_state

    def refuse(replica: Replica, state: Any) -> None:
        load(replica, state | {"fingerprint": "00"} if replica.peer == 1 else state)

    with monkeypatch.context() as patched:
        patched.setattr(Replica, "load_private_state", refuse)
        ended = call(*again)
    assert ended.code == 2
    assert "error: fingerprint='00': must be '" in ended.err
    assert {path: path.read_bytes() for path in Path("mine").rglob("*") if path.is_file()} == before
    assert Path("mine/checkpoints/.step-00000005.partial").is_dir()
    ended = call(*again)
    assert ended.code == 0, ended.err
    assert tomllib.loads(Path("mine/config.toml").read_text())["train"]["log_every"] == 1
    assert sorted(path.name for path in Path("mine/checkpoints").iterdir()) == ["step-00000003", "step-00000004"]


def test_resume_without_a_checkpoint_starts_at_the_beginning(call: Call) -> None:
    ended = call("train", "run.toml", "--out", "new", "--resume")
    assert ended.code == 0, ended.err
    assert "sparseloco: no checkpoint in new, starting at step 0\n" in ended.err


def test_resume_must_know_the_folder(call: Call) -> None:
    ended = call("train", "run.toml", "--resume")
    assert (ended.code, ended.err) == (
        2,
        "error: --resume: must know the folder of the run; add --out DIR, or name the folder instead of CONFIG.toml\n",
    )


def test_an_unfinished_run_is_not_overwritten(call: Call) -> None:
    call("train", "run.toml", "--out", "mine")
    Path("mine/summary.json").unlink()
    ended = call("train", "run.toml", "--out", "mine")
    assert (ended.code, ended.err) == (
        2,
        "error: --out 'mine': holds checkpoints of a run that is not finished; continue it with --resume, replace it "
        "with --overwrite, or choose another folder\n",
    )


def test_other_workers_are_said_aloud_c21(call: Call) -> None:
    call("train", "run.toml", "--out", "mine", "--set", "checkpoint.every=2")
    for path in Path("mine/checkpoints/step-00000004").iterdir():
        path.unlink()
    ended = call("train", "--resume", "mine", "--workers", "3")
    assert ended.code == 0, ended.err
    assert (
        "warning: train.workers=3: the checkpoint has 2; peers 2 to 2 are new and start from the shared state without "
        "a residual\n"
    ) in ended.err


def test_compare_resumes_every_entry(call: Call) -> None:
    first = json.loads(call("compare", "run.toml", "--out", "both", "--json").out)
    ended = call("compare", "run.toml", "--out", "both", "--resume")
    assert ended.code == 0, ended.err
    assert ended.err.count("resuming at step 4") == 2
    again = json.loads(Path("both/comparison.json").read_text())
    assert [run["digest"] for run in again] == [run["digest"] for run in first]
    before = {path: path.read_bytes() for path in Path("both").rglob("*") if path.is_file()}
    ended = call("compare", "run.toml", "--out", "both", "--resume", "--set", "train.seed=1")
    assert ended.code == 2
    assert "must come from this run, but train.seed is 0 there and 1 here" in ended.err
    assert {path: path.read_bytes() for path in Path("both").rglob("*") if path.is_file()} == before


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """As if Ctrl-C had been pressed before the first round border of every run."""

    @contextlib.contextmanager
    def at_once(*_: str) -> Iterator[Callable[[], bool]]:
        yield lambda: True

    with monkeypatch.context() as patched:
        patched.setattr(runs, "stop_signals", at_once)
        yield patched


def told_to_continue(ended: Ended) -> list[str]:
    """Words of the command that an interrupted one names, without its program."""
    assert ended.code == 130, ended.err
    program, *words = shlex.split(ended.err.splitlines()[-1].partition("; continue with: ")[2])
    assert program == "sparseloco"
    return words


def test_an_interrupted_comparison_names_the_command_that_goes_on(call: Call, stopping: pytest.MonkeyPatch) -> None:
    long = ["--set", "train.steps=12", "--set", "train.evaluate_every=12"]
    words = told_to_continue(call("compare", "run.toml", *long, "--out", "both two", "--models", "--json"))
    assert words == ["compare", "run.toml", *long, "--out", "both two", "--resume", "--models", "--json"]
    stopping.undo()
    ended = call(*words)
    assert ended.code == 0, ended.err
    assert [run["steps"] for run in json.loads(ended.out)] == [12, 12]
    assert Path("both two/sparse/model").is_dir()


def test_an_interrupted_run_is_continued_with_its_options(call: Call, stopping: pytest.MonkeyPatch) -> None:
    long = ["--set", "train.steps=12", "--set", "train.evaluate_every=12", "--out", "mine"]
    words = told_to_continue(call("train", "run.toml", *long, "--no-model"))
    assert words == ["train", "--resume", "mine", "--no-model"]
    stopping.undo()
    assert call(*words).code == 0
    assert not Path("mine/model").exists()


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    """A run in a session of its own, once it has written its first line of metrics."""
    (tmp_path / "run.toml").write_text(CONFIG)
    lines = (f"Line {number} says that {number * 7919 % 1000} is not {number % 13}.\n" for number in range(2000))
    (tmp_path / "text.txt").write_text("".join(lines))
    process = subprocess.Popen(
        [sys.executable, "-m", "sparseloco", "train", "run.toml", "--out", "mine", *LONG, *arguments],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "SPARSELOCO_CACHE": "cache"},
    )
    metrics = tmp_path / "mine" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 2):
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()[1]
    return process


def assert_none_left(group: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    raise AssertionError("a process is left")


@pytest.mark.mp
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("processes", [False, True], ids=["simulated", "processes"])
def test_the_first_signal_stops_after_saving_c39(processes: bool, number: int, tmp_path: Path) -> None:
    """C-39: as Ctrl-C does, the signal goes to every process of the group."""
    process = start(tmp_path, *(["--processes"] if processes else []))
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert_none_left(process.pid)
    (folder,) = (tmp_path / "mine" / "checkpoints").iterdir()
    step = int(folder.name.removeprefix("step-"))
    assert step % 2 == 0
    assert err.splitlines()[-2:] == [
        "stopping at the next round border, after saving; once more to stop at once",
        f"interrupted: sparseloco stopped at step {step} after saving; continue with: sparseloco train --resume mine",
    ]


@pytest.mark.mp
@pytest.mark.slow
@pytest.mark.parametrize("processes", [False, True], ids=["simulated", "processes"])
def test_the_second_signal_ends_at_once_c39(processes: bool, tmp_path: Path) -> None:
    # A round so long that its border does not come.
    long_round = ["--set", "algorithm.inner_steps=20000", "--set", "train.log_every=1"]
    process = start(tmp_path, *long_round, *(["--processes"] if processes else []))
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert_none_left(process.pid)
    assert err.splitlines()[-1].startswith("interrupted: a run folder without summary.json is not finished; start it")


@pytest.mark.mp
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_runs_end_in_the_same_bits(tmp_path: Path) -> None:
    """The short form of benchmarks/kill_resume.py."""
    script = ROOT / "benchmarks" / "kill_resume.py"
    ended = subprocess.run(
        [sys.executable, str(script), "--kills", "3", "--seed", "1"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(ended.stdout)
    assert result["kills"] == 3
    assert result["runs_with_the_same_bits"] == result["runs"]
