"""A run that goes on from a model by a relative path is resumed from another folder, or says what it lacks."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from sparseloco.config import load_config, to_toml
from sparseloco.model import known_by_content, located
from tests.unit.test_cli import CONFIG, Call, call

__all__ = ["call"]
SIZES = CONFIG[CONFIG.index("hidden_size") : CONFIG.index("[data]")]


def test_a_model_by_a_relative_path_is_found_from_elsewhere(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("train", "run.toml", "--out", "first").code == 0
    Path("on.toml").write_text(CONFIG.replace(SIZES, 'pretrained = "first/model"\n'))
    assert call("train", "on.toml", "--out", "mine", "--set", "checkpoint.every=2").code == 0
    written = Path("mine/config.toml").read_text()
    assert tomllib.loads(written)["model"]["pretrained"] == str(Path("first/model").resolve())
    assert to_toml(located(load_config("mine/config.toml"))) == written, "what is located stays as it is"
    digest = json.loads(Path("mine/summary.json").read_text())["digest"]
    shutil.rmtree("mine/checkpoints/step-00000004")
    home, elsewhere = Path.cwd(), Path("elsewhere")
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    ended = call("train", "--resume", "../mine", "--data", "../text.txt", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["digest"] == digest

    shutil.move(home / "first", home / "moved")
    ended = call("train", "--resume", "../mine", "--data", "../text.txt")
    rule = "must be an existing file or folder, or a name on the Hub; check the path"
    assert ended == (2, "", f"error: model.pretrained={str(home / 'first' / 'model')!r}: {rule}\n")
    again = ["train", "--resume", "../mine", "--data", "../text.txt", "--set", "model.pretrained=../moved/model"]
    assert call(*again).code == 0, "the same model in another place"
    settings = json.loads((home / "moved/model/config.json").read_text())
    (home / "moved/model/config.json").write_text(json.dumps(settings | {"rms_norm_eps": 0.5}))
    ended = call(*again)
    assert ended.code == 2
    assert "must come from this run, but model.pretrained is 'config.json, sha256 " in ended.err


def test_a_name_on_the_hub_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("on.toml").write_text(CONFIG.replace(SIZES, 'config = "someone/model"\n'))
    config = load_config("on.toml")
    assert located(config) == config
    assert known_by_content(config) == {}
    Path("someone").mkdir()
    Path("someone/model").write_text("{}")
    assert located(config).model.config == str(tmp_path / "someone/model")
    assert list(known_by_content(config)) == ["model.config"]
