"""A run names text of the hub: what has the same name on a peer's disk is never read in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparseloco.cli.peer_runs import config_of, create_run
from sparseloco.errors import ConfigError
from tests.peers.joins import prepare
from tests.peers.runs import identity, make_run

SAID = (
    r"^data\.path='owner/name': must be read from the hub in a run, but here lies a file or folder of that name; start "
    r"from another folder, or pass text of your own to join with --data$"
)
HUB = {"path": "owner/name", "format": "hf"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, in which ``owner/name`` holds what could be read as a dataset."""
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "owner" / "name" / "train.jsonl").write_text('{"text": "private"}\n')
    return tmp_path


@pytest.mark.parametrize("data", [HUB, {"sources": [{"path": "stdlib"}, HUB]}])
def test_a_folder_of_that_name_is_refused(folder: Path, data: dict[str, Any]) -> None:
    run = msgspec.structs.replace(make_run(), data=data)
    with pytest.raises(ConfigError, match=SAID):
        config_of(run, folder / "tokenizer.json")


def test_it_is_read_where_it_is_asked_for_or_elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 24}
    changes: dict[str, Any] = {"data": HUB, "algorithm": {"preset": "sparseloco"}, "model": model}
    run = msgspec.structs.replace(make_run(), **changes)
    own = config_of(run, folder / "tokenizer.json", data="owner/name")
    assert (own.data.path, own.data.format) == ("owner/name", "auto")
    (folder / "empty").mkdir()
    monkeypatch.chdir(folder / "empty")
    assert config_of(run, folder / "tokenizer.json").data.format == "hf"


def test_a_run_is_not_made_from_it(folder: Path) -> None:
    """Else the tokenizer would be that of another text, and the owner would not know."""
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(text.replace("[data]", '[data]\npath = "owner/name"\nformat = "hf"'))
    with pytest.raises(ConfigError, match=SAID):
        create_run("store", folder / "run.toml", [], identity(9), None)
    assert not (folder / "store").exists()
