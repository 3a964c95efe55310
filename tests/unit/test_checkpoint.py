"""Checkpoints on the disk: whole or absent, checked when read, and never more of them than was said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseloco import CheckpointError, checkpoint
from sparseloco.checkpoint import Checkpoint, CheckpointFolder
from tests.runs import same

STATE: dict[str, Any] = {
    "tensors": [torch.arange(6.0).view(2, 3).t(), torch.tensor(2.5, dtype=torch.bfloat16), torch.zeros(0, 4)],
    "numbers": (1, 0.1, -1e-300, float("inf"), True, None, "text"),
    "by_number": {0: torch.tensor([1], dtype=torch.uint8), "0": 1},
}


def write(folder: CheckpointFolder, step: int, state: Any = STATE, **more: Any) -> Path:
    for name in ("shared", "peer-0000"):
        folder.write_part(step, name, state)
    return folder.finish(
        step, parts=["shared", "peer-0000"], facts={"tokens": step}, files={"log": b"x" * step}, **more
    )


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write(CheckpointFolder(tmp_path / "run" / "checkpoints"), 7)
    assert names(path) == ["index.json", "log", "peer-0000.safetensors", "shared.safetensors"]
    found = Checkpoint.open(path)
    assert (found.step, found.facts, found.read("log")) == (7, {"tokens": 7}, b"xxxxxxx")
    assert same(found.part("shared"), STATE)


def test_tensors_that_share_memory_are_separate_after_a_load(tmp_path: Path) -> None:
    whole = torch.arange(8.0)
    write(CheckpointFolder(tmp_path), 1, {"whole": whole, "again": whole, "half": whole[4:]})
    loaded = Checkpoint.open(tmp_path / "step-00000001").part("shared")
    loaded["whole"].zero_()
    assert torch.equal(loaded["again"], whole)
    assert torch.equal(loaded["half"], whole[4:])


def test_only_tensors_and_plain_values_are_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        CheckpointFolder(tmp_path).write_part(1, "shared", {"a": [object()]})
    assert str(caught.value) == "shared/a/0=object: must be a tensor or a plain value to be saved; convert it"


def test_retention_and_what_lies_in_the_future(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (1, 2, 3):
        write(folder, step)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    # Resumed at step 2 after all: the third belongs to a past that was left.
    write(folder, 2)
    assert names(tmp_path) == ["step-00000002"]


def test_the_disk_never_holds_more_than_one_above_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    durably, rmtree = checkpoint.write_durably, checkpoint.shutil.rmtree

    def count(*_: Any) -> None:
        nonlocal most
        most = max(most, len(list(tmp_path.iterdir())))

    def counting_write(path: Path, data: bytes) -> None:
        durably(path, data)
        count()

    def counting_remove(path: Path, **kwargs: Any) -> None:
        count()
        rmtree(path, **kwargs)

    monkeypatch.setattr(checkpoint, "write_durably", counting_write)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", counting_remove)
    for step in range(1, 7):
        write(CheckpointFolder(tmp_path, keep=2), step)
    assert most == 3


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "removed":
        path.unlink()
    elif how == "cut":
        path.write_bytes(data[:-2])
    elif how == "flipped":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:
        path.write_bytes(b"")


@pytest.mark.parametrize("how", ["removed", "cut", "flipped", "empty"])
@pytest.mark.parametrize("name", ["index.json", "shared.safetensors", "peer-0000.safetensors", "log"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(name: str, how: str, tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    write(folder, 5)
    path = write(folder, 8) / name
    if (name, how) == ("index.json", "flipped"):
        path.write_bytes(path.read_bytes().replace(b'"size"', b'"sice"'))
    else:
        damage(path, how)
    found, refused = folder.newest()
    assert found is not None
    assert found.step == 5
    (reason,) = refused
    assert reason.startswith(f"{path}: ")
    assert reason.endswith(f"; remove {path.parent}")


def test_a_damaged_checkpoint_does_not_count_for_retention(tmp_path: Path) -> None:
    """Only what is older than the newest that was written stays beside it."""
    folder = CheckpointFolder(tmp_path, keep=2)
    write(folder, 5)
    damage(write(folder, 8) / "log", "cut")
    write(folder, 6)
    assert names(tmp_path) == ["step-00000005", "step-00000006"]


def test_nothing_unfinished_is_taken_and_the_next_start_removes_it(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    write(folder, 3)
    folder.write_part(4, "shared", STATE)
    found, refused = folder.newest()
    assert found is not None
    assert (found.step, refused) == (3, [])
    folder.begin(3)
    assert names(tmp_path) == ["step-00000003"]
    folder.begin(None)
    assert names(tmp_path) == []


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = write(CheckpointFolder(tmp_path), 1)
    index = path / "index.json"
    index.write_text(index.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match=r"format=2: must be 1; use the version that wrote it$"):
        Checkpoint.open(path)


@pytest.mark.parametrize("name", ["peer-0000.safetensors", "index.json"])
def test_a_full_disk_is_one_sentence_and_costs_no_earlier_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path)
    write(folder, 3)
    durably = checkpoint.write_durably

    def full(path: Path, data: bytes) -> None:
        if path.name == name:
            raise OSError(28, "No space left on device")
        durably(path, data)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write_durably", full)
        with pytest.raises(CheckpointError) as caught:
            write(folder, 4)
    assert str(caught.value) == (
        f"{tmp_path}: checkpoint of step 4 cannot be written (No space left on device); free space there or make it "
        "writable"
    )
    found, refused = folder.newest()
    assert found is not None
    assert (found.step, refused) == (3, [])
    write(folder, 5)
    assert names(tmp_path) == ["step-00000003", "step-00000005"]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    """As root nothing is read-only, so a file stands in the way."""
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"checkpoint of step 1 cannot be written \(Not a directory\); free"):
        write(CheckpointFolder(tmp_path / "file"), 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_one_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match=r"cannot be written \(Permission denied\); free space there or make it"):
        write(CheckpointFolder(tmp_path / "checkpoints"), 1)


def test_a_part_that_does_not_come_is_named(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, patience_s=0.05)
    folder.write_part(1, "shared", STATE)
    with pytest.raises(CheckpointError, match=r"partial: shared, peer-0001: must come within 0\.05 s; look at what"):
        folder.finish(1, parts=["shared", "peer-0001"], facts={}, files={})


def test_a_part_that_another_process_could_not_write_is_not_waited_for(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.write_part(1, "shared", STATE)
    (tmp_path / ".step-00000001.partial" / "failed").touch()
    with pytest.raises(CheckpointError, match=r"partial: must be written by all processes; look at what the others"):
        folder.finish(1, parts=["shared", "peer-0001"], facts={}, files={})


def test_a_process_that_runs_ahead_waits_its_turn(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, patience_s=0.05)
    folder.write_part(1, "peer-0001", STATE, in_turn=True)
    with pytest.raises(CheckpointError, match=r"the checkpoint before step 2: must come within 0\.05 s; look at what"):
        folder.write_part(2, "peer-0001", STATE, in_turn=True)
    folder.finish(1, parts=["peer-0001"], facts={}, files={})
    folder.write_part(3, "peer-0001", STATE, in_turn=True)


def test_parts_of_other_processes_are_waited_for(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.write_part(1, "shared", STATE)
    late = (
        "import sys, time; from pathlib import Path; from sparseloco.checkpoint import CheckpointFolder;"
        "time.sleep(0.3); CheckpointFolder(Path(sys.argv[1])).write_part(1, 'peer-0000', {'a': 1})"
    )
    with subprocess.Popen([sys.executable, "-c", late, str(tmp_path)]):
        path = folder.finish(1, parts=["shared", "peer-0000"], facts={}, files={})
    assert Checkpoint.open(path).part("peer-0000") == {"a": 1}
