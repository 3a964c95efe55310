"""What the tests of the command line share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import Call, Ended, enter, run


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run the command line in this process, in an empty folder; returns its exit code and what it printed."""
    enter(tmp_path, monkeypatch)

    def call(*arguments: str) -> Ended:
        capsys.readouterr()
        code = run(*arguments)
        return Ended(code, *capsys.readouterr())

    return call
