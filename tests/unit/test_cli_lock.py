"""One writer per run folder: who comes second is told, nothing is touched, and a killed process leaves no lock."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparseloco.cli import lock, runs
from sparseloco.cli.folders import LOCK
from sparseloco.errors import ConfigError
from tests.unit.test_cli import Call, call, names

__all__ = ["call"]
HOLDER = """
import sys
from pathlib import Path
from sparseloco.cli.lock import only_writer
with only_writer(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def refusal(folder: str, pid: int) -> str:
    words = "wait for it or choose another --out"
    return f"error: RUN={folder!r}: is being written by another process (pid {pid}); {words}\n"


def contents(folder: str) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.mp
def test_a_folder_of_another_process_is_refused_until_that_is_gone(call: Call) -> None:
    assert call("train", "run.toml", "--out", "mine").code == 0
    src = str(Path(lock.__file__).parents[2])
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, "mine"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": src},
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == "held\n"
    before = contents("mine")
    for arguments in (["run.toml", "--out", "mine", "--overwrite"], ["--resume", "mine"]):
        assert call("train", *arguments) == (2, "", refusal("mine", holder.pid))
    assert contents("mine") == before
    assert lock.is_held(Path("mine")) is True
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert LOCK in names("mine"), "a killed process removes nothing, but holds nothing either"
    assert lock.is_held(Path("mine")) is False
    ended = call("train", "--resume", "mine")
    assert ended.code == 0, ended.err
    assert LOCK not in names("mine")


@pytest.mark.parametrize("held", ["both", "both/dense"])
def test_a_comparison_holds_its_folder_and_every_entry(call: Call, held: str) -> None:
    with lock.only_writer(Path(held)):
        assert call("compare", "run.toml", "--out", "both") == (2, "", refusal(held, os.getpid()))
        assert not Path("both/sparse").exists()
    assert not Path(held).exists(), "a folder that was made for nothing is removed again"


def test_no_second_run_gets_into_a_comparison_under_way(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, bool | None]] = []

    def look(*_: Any, **__: Any) -> None:
        tried.extend((name, lock.is_held(Path(name))) for name in ("both", "both/sparse", "both/dense"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(runs, "train", look)
        assert call("compare", "run.toml", "--out", "both").code == 130
    assert tried == [("both", True), ("both/sparse", True), ("both/dense", True)]
    assert names("both") == ["sparse"]
    Path("both/dense").mkdir()
    Path("both/dense", LOCK).touch()  # as kill -9 leaves it
    assert call("compare", "run.toml", "--out", "both").code == 0


def test_what_another_did_while_text_was_read_is_seen(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    read = runs.read_dataset

    def slowly(*arguments: Any) -> Any:
        monkeypatch.setattr(runs, "read_dataset", read)
        assert call("train", "run.toml", "--out", "mine").code == 0
        return read(*arguments)

    monkeypatch.setattr(runs, "read_dataset", slowly)
    ended = call("train", "run.toml", "--out", "mine")
    assert ended.code == 2
    assert "holds a finished run; replace it with --overwrite" in ended.err


def test_a_lock_of_a_process_that_just_ended_is_not_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening the file and locking it, its holder removes it and a third process makes a new one."""
    flock, others = fcntl.flock, []

    def late(handle: int, how: int) -> None:
        if not others:
            others.append(handle)
            (tmp_path / LOCK).unlink()
            (tmp_path / LOCK).touch()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with lock.only_writer(tmp_path):
        assert lock.is_held(tmp_path) is True
        assert (tmp_path / LOCK).read_text() == f"{os.getpid()}\n"
    assert names(tmp_path) == []


def test_a_file_system_without_locks_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(handle: int, how: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    held = lock.only_writer(tmp_path)
    with pytest.warns(UserWarning, match="is on a file system without locks .Operation not supported., so two proc"):
        held.__enter__()
    assert lock.is_held(tmp_path) is None
    lock.check_not_held(tmp_path)
    held.__exit__(None, None, None)
    assert names(tmp_path) == []

    def broken(handle: int, how: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(ConfigError, match=r"must be a folder that can be written \(Input/output error\)"):
        lock.only_writer(tmp_path).__enter__()


def test_child_processes_do_not_inherit_the_lock(tmp_path: Path) -> None:
    with lock.only_writer(tmp_path):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    assert lock.is_held(tmp_path) is False
    child.communicate(b"\n")
