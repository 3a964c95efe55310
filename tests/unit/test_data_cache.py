"""The cache: complete or absent, checked, rebuilt aloud, and safe for processes that come at once."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from sparseloco.data import SPLITS, Corpus, Dataset, default_cache_dir, load_corpus, prepare
from sparseloco.errors import ConfigError

NAMES = ("manifest.json", "test.bin", "tokenizer.json", "train.bin", "validation.bin")


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    file = tmp_path / "tales.txt"
    file.write_text("".join(f"Tale {n}: é {'and then ' * (n % 7)}{n * n}.\n\n" for n in range(900)), encoding="utf-8")
    return load_corpus(file)


def same(one: Dataset, two: Dataset) -> bool:
    return all(np.array_equal(one.split(name).tokens, two.split(name).tokens) for name in SPLITS) and (
        one.tokenizer.to_str() == two.tokenizer.to_str()
    )


def entry_of(cache: Path) -> Path:
    (entry,) = [path for path in cache.iterdir() if path.is_dir()]
    return entry


def test_dataset_is_what_the_corpus_says(corpus: Corpus, tmp_path: Path) -> None:
    dataset = prepare(corpus, 400, 0.1, 0.2, cache_dir=tmp_path / "cache")
    assert (dataset.vocab_size, dataset.corpus_name, dataset.corpus_sha256) == (
        400,
        "tales.txt",
        corpus.sha256,
    )
    assert sum(split.num_bytes for split in dataset.splits.values()) == corpus.num_bytes
    for split in dataset.splits.values():
        tokens = torch.from_numpy(split.tokens.astype(np.int64))
        assert int(dataset.token_bytes[tokens].sum()) == split.num_bytes
        assert split.num_tokens == len(tokens)
        assert split.tokens[-1] == 0
    texts = [document.text for document in corpus.documents]
    for text in dataset.tokenizer.decode(dataset.split("test").tokens, skip_special_tokens=False).split("<|end|>")[:-1]:
        assert text in texts


def test_second_call_opens_what_the_first_made(corpus: Corpus, tmp_path: Path) -> None:
    events: list[str] = []
    first = prepare(corpus, 400, cache_dir=tmp_path / "cache", progress=lambda stage, *_: events.append(stage))
    assert list(dict.fromkeys(events)) == ["tokenizer", "tokens"]
    second = prepare(corpus, 400, cache_dir=tmp_path / "cache", progress=lambda *_: pytest.fail("worked twice"))
    assert same(first, second)
    assert sorted(file.name for file in entry_of(tmp_path / "cache").iterdir()) == list(NAMES)


def test_each_setting_has_its_entry(corpus: Corpus, tmp_path: Path) -> None:
    for vocab_size, validation, test in ((300, 0.1, 0.1), (301, 0.1, 0.1), (300, 0.2, 0.1), (300, 0.1, 0.2)):
        prepare(corpus, vocab_size, validation, test, cache_dir=tmp_path / "cache")
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", ["missing", "shorter", "flipped"])
def test_damaged_entry_is_built_again_aloud(corpus: Corpus, tmp_path: Path, name: str, damage: str) -> None:
    cache = tmp_path / "cache"
    first = prepare(corpus, 300, cache_dir=cache)
    file = entry_of(cache) / name
    raw = bytearray(file.read_bytes())
    file.unlink()  # Not in place: the first dataset still maps the old file.
    raw[len(raw) // 2] ^= 1
    if damage != "missing":
        file.write_bytes(raw if damage == "flipped" else raw[: len(raw) // 2])
    with pytest.warns(UserWarning, match=r"cache entry [0-9a-f]{32} is damaged \(.*\) and is built again"):
        again = prepare(corpus, 300, cache_dir=cache)
    assert same(first, again)
    with warnings.catch_warnings(action="error"):
        assert same(first, prepare(corpus, 300, cache_dir=cache))


def test_manifest_of_other_settings_is_damage(corpus: Corpus, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    prepare(corpus, 300, cache_dir=cache)
    one = entry_of(cache)
    one.rename(tmp_path / "kept")
    prepare(corpus, 310, cache_dir=cache)
    other = entry_of(cache)
    (tmp_path / "kept" / "manifest.json").replace(other / "manifest.json")
    with pytest.warns(UserWarning, match="does not match its checksum"):
        assert prepare(corpus, 310, cache_dir=cache).vocab_size == 310


def test_failed_build_leaves_nothing(corpus: Corpus, tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    cache = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, 300, cache_dir=cache, progress=stop)
    with pytest.raises(ConfigError, match="vocab_size=3"):
        prepare(corpus, 3, cache_dir=cache)
    assert {path.suffix for path in cache.iterdir()} == {".lock"}


def test_leftovers_of_a_killed_build_are_removed(corpus: Corpus, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    prepare(corpus, 300, cache_dir=cache)
    entry = entry_of(cache)
    leftover = entry.rename(cache / f"{entry.name}.tmp-0123")
    prepare(corpus, 300, cache_dir=cache)
    assert not leftover.exists()


def test_folder_that_cannot_be_used(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError) as error:
        prepare(corpus, 300, cache_dir=tmp_path / "file" / "cache")
    assert str(error.value) == (
        f"cache_dir={str(tmp_path / 'file' / 'cache')!r}: cannot be used (Not a directory); free some space "
        "or set SPARSELOCO_CACHE to another folder"
    )


def test_place_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPARSELOCO_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == Path.home() / ".cache" / "sparseloco"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "sparseloco"
    monkeypatch.setenv("SPARSELOCO_CACHE", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"


@pytest.mark.mp
def test_processes_at_once_do_the_work_once(corpus: Corpus, tmp_path: Path) -> None:
    script = (
        "import json, sys; from sparseloco.data import load_corpus, prepare; events = [];"
        "data = prepare(load_corpus(sys.argv[1]), 400, cache_dir=sys.argv[2],"
        " progress=lambda *event: events.append(event));"
        "print(json.dumps([len(events) > 0, data.split('train').tokens.tolist()]))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "tales.txt"), str(tmp_path / "cache")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    worked, tokens = zip(*(json.loads(process.communicate(timeout=60)[0]) for process in started), strict=True)
    assert sum(worked) == 1
    assert tokens[0] == tokens[1] == tokens[2]
    assert tokens[0] == prepare(corpus, 400, cache_dir=tmp_path / "own").split("train").tokens.tolist()
