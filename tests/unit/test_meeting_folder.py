"""Where processes of one machine meet: nothing is left of it, not even by those that were killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sparseloco.transport.meeting import meeting_folder

HOLD = """
import sys, tempfile
from sparseloco.transport.meeting import meeting_folder
tempfile.tempdir = sys.argv[1]
with meeting_folder() as folder:
    (folder / "rendezvous").write_text("peers")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of these tests."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def fail_inside() -> None:
    with meeting_folder() as folder:
        assert folder.parent == Path(tempfile.gettempdir())
        (folder / "rendezvous").write_text("peers")
        raise ZeroDivisionError


def test_it_is_gone_after_the_block_even_by_an_error(place: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert list(place.iterdir()) == []


@pytest.mark.mp
def test_a_killed_process_leaves_its_folder_until_the_next_start_and_a_living_one_keeps_it(place: Path) -> None:
    others = place / "sparseloco-mine"
    others.mkdir()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(place)], **pipes) as process:
        assert process.stdout is not None
        held = Path(process.stdout.readline().strip())
        with meeting_folder() as mine:
            assert {path.name for path in place.iterdir()} == {held.name, mine.name, others.name}
            assert sorted(path.name for path in held.iterdir()) == ["lock", "rendezvous"]
        process.send_signal(signal.SIGKILL)
    assert held.exists()
    with meeting_folder() as mine:
        assert {path.name for path in place.iterdir()} == {mine.name, others.name}
    assert list(place.iterdir()) == [others]
