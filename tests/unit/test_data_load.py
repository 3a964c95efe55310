"""From settings to tokens: streamed, done once, remembered, and nothing left behind when it fails."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparseloco.config import parse_config, to_toml
from sparseloco.data import (
    SPLITS,
    Dataset,
    describe_dataset,
    find_dataset,
    load_corpus,
    open_dataset,
    open_entry,
    prepare,
)
from sparseloco.data import load as load_module
from sparseloco.data.documents import DocumentWriter
from sparseloco.data.settings import DataConfig, SourceConfig
from sparseloco.errors import ConfigError


def tales(word: str, count: int = 600) -> list[str]:
    return [f"Tale {n} of {word}: {'and then ' * (n % 7)}{n * n}.\n" for n in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tales.txt").write_text("\n".join(tales("text")))
    rows = "".join(json.dumps({"text": text}) + "\n" for text in tales("rows", 200))
    (tmp_path / "rows.jsonl").write_text(rows)
    return tmp_path


def data(folder: Path, **changes: Any) -> DataConfig:
    sources = (
        SourceConfig(path=str(folder / "tales.txt"), name="prose", weight=3.0),
        SourceConfig(path=str(folder / "rows.jsonl"), weight=1.0),
    )
    return DataConfig(
        **{"sources": sources, "vocab_size": 300, "validation_fraction": 0.1, "test_fraction": 0.1, **changes}
    )


def decoded(dataset: Dataset, split: str) -> str:
    return dataset.tokenizer.decode(dataset.split(split).tokens.tolist(), skip_special_tokens=False)


def refuse_to_read(*_: object) -> None:
    pytest.fail("read the text again")


def test_one_source_is_what_prepare_makes_of_the_corpus(folder: Path) -> None:
    path = str(folder / "tales.txt")
    streamed = open_dataset(DataConfig(path=path, vocab_size=300), folder / "one")
    whole = prepare(load_corpus(path), 300, cache_dir=folder / "two")
    assert streamed.entry is not None
    assert whole.entry is not None
    assert streamed.entry.name == whole.entry.name
    assert all(np.array_equal(streamed.split(name).tokens, whole.split(name).tokens) for name in SPLITS)
    assert (streamed.corpus_name, streamed.corpus_sha256) == ("tales.txt", whole.corpus_sha256)


def test_second_call_reads_no_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_dataset(data(folder), folder / "cache")
    monkeypatch.setattr(load_module, "read_documents", refuse_to_read)
    for config in (data(folder), data(folder, per_worker="source")):
        again = open_dataset(config, folder / "cache")
        assert (again.corpus_name, again.entry) == ("prose+rows.jsonl", first.entry)
        assert [(source.name, source.weight) for source in again.sources] == [("prose", 3.0), ("rows.jsonl", 1.0)]
    assert find_dataset(data(folder), folder / "cache").entry == first.entry


def test_changed_file_is_read_again(folder: Path) -> None:
    first = open_dataset(data(folder), folder / "cache")
    with (folder / "rows.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(ConfigError, match="is not prepared, or its files have changed since"):
        find_dataset(data(folder), folder / "cache")
    again = open_dataset(data(folder), folder / "cache")
    assert again.sources[1].num_documents == first.sources[1].num_documents + 1


def test_sources_are_split_each_by_itself_and_mixed_where_they_are_evaluated(folder: Path) -> None:
    dataset = open_dataset(data(folder), folder / "cache")
    for name in SPLITS:
        assert sum(source.num_tokens[name] for source in dataset.sources) == dataset.split(name).num_tokens
        assert all(source.num_tokens[name] > 0 for source in dataset.sources)
    prose, rows = dataset.sources
    assert np.array_equal(np.concatenate([prose.train.tokens, rows.train.tokens]), dataset.split("train").tokens)
    texts = [dataset.tokenizer.decode(part.train.tokens.tolist()) for part in (prose, rows)]
    assert ("of text" in texts[0], "of rows" in texts[0], "of rows" in texts[1]) == (True, False, True)
    kinds = ["rows" if "of rows" in text else "text" for text in decoded(dataset, "test").split("<|end|>")[:-1]]
    assert {"rows", "text"} == set(kinds) != set(kinds[:1])
    assert kinds != sorted(kinds)


def test_text_in_two_sources_counts_once(folder: Path) -> None:
    (folder / "copy.jsonl").write_text("".join((folder / "rows.jsonl").read_text().splitlines(keepends=True)[50:]))
    with (folder / "copy.jsonl").open("a") as file:
        file.writelines(json.dumps({"text": f"new {n}"}) + "\n" for n in range(9))
    sources = (SourceConfig(path=str(folder / "rows.jsonl")), SourceConfig(path=str(folder / "copy.jsonl")))
    dataset = open_dataset(data(folder, sources=sources), folder / "cache")
    assert [source.num_documents for source in dataset.sources] == [200, 9]
    assert describe_dataset(dataset)["num_duplicates"] == 150


def test_documents_are_never_all_in_memory(tmp_path: Path) -> None:
    """Peak memory of reading and splitting 200 MB stays far below that."""
    line = json.dumps({"text": "word " * 2000})
    with (tmp_path / "big.jsonl").open("w") as file:
        file.writelines(line.replace("word", f"w{n}", 1) + "\n" for n in range(6000))
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from sparseloco.data.documents import DocumentWriter, Texts\n"
        "from sparseloco.data.load import _collect\n"
        "from sparseloco.data.corpus import split_numbers\n"
        "from sparseloco.data.settings import SourceConfig\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "writer = DocumentWriter(Path(sys.argv[2]))\n"
        "corpus = _collect([SourceConfig(path=sys.argv[1])], writer, None)\n"
        "numbers, _ = split_numbers(corpus, 0.1, 0.1)['train']\n"
        "texts = Texts(corpus.documents, numbers, corpus.documents.sizes)\n"
        "print(sum(len(text) for text in texts), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "big.jsonl"), str(tmp_path / "spool")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    num_characters, kib = map(int, out)
    assert num_characters > 40_000_000
    assert kib < 20_000


def test_failures_leave_nothing_and_lose_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = folder / "cache"
    first = open_dataset(data(folder), cache)
    kept = sorted(path.name for path in cache.iterdir())

    def full(self: DocumentWriter, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    changed = data(folder, sources=data(folder).sources[:1])
    with monkeypatch.context() as patch:
        patch.setattr(DocumentWriter, "add", full)
        with pytest.raises(ConfigError) as error:
            open_dataset(changed, cache)
    assert str(error.value) == (
        f"cache_dir={str(cache)!r}: cannot be used (No space left on device); free some space or set SPARSELOCO_CACHE "
        "to another folder"
    )
    (folder / "rows.jsonl").write_text('{"text": "x"}\nnonsense\n')
    with pytest.raises(ConfigError, match="line 2: must be one JSON object"):
        open_dataset(data(folder), cache)
    assert sorted(path.name for path in cache.iterdir() if path.suffix != ".lock") == [
        name for name in kept if not name.endswith(".lock")
    ]
    assert first.entry is not None
    assert open_entry(first.entry).corpus_sha256 == first.corpus_sha256


def test_empty_splits(folder: Path) -> None:
    (folder / "two.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n{"text": "a"}\n')
    sources = (*data(folder).sources[:1], SourceConfig(path=str(folder / "two.jsonl"), weight=1.0))
    with pytest.raises(ConfigError) as error:
        open_dataset(data(folder, sources=sources), folder / "cache")
    assert str(error.value) == (
        "data='two.jsonl': train, validation and test need at least one document each, but there are only 2 different "
        "documents (2 bytes); give more text, a single file of at least 12 KB"
    )
    (folder / "none.jsonl").write_text('{"text": null}\n{"text": " "}\n')
    with pytest.raises(ConfigError, match=r"holds no text \(1 files or rows skipped as not UTF-8 text\)"):
        open_dataset(DataConfig(path=str(folder / "none.jsonl")), folder / "cache")


def test_damaged_memory_and_damaged_entry_are_made_again(folder: Path) -> None:
    cache = folder / "cache"
    first = open_dataset(data(folder), cache)
    (memory,) = cache.glob("text-*.json")
    for content in ("", "{}", '{"entry": "gone", "name": "x", "sources": []}'):
        memory.write_text(content)
        assert open_dataset(data(folder), cache).entry == first.entry
    assert first.entry is not None
    (first.entry / "test.bin").unlink()
    with pytest.warns(UserWarning, match="is damaged"):
        assert open_dataset(data(folder), cache).entry == first.entry


def test_open_entry_wants_an_entry(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        open_entry(tmp_path)
    assert str(error.value) == (
        f"cache={str(tmp_path)!r}: must be a finished entry of the cache (manifest.json is missing or unreadable); "
        "prepare the text again with: sparseloco data prepare CONFIG.toml"
    )


def test_figures(folder: Path) -> None:
    dataset = open_dataset(data(folder), folder / "cache")
    figures = describe_dataset(dataset, 2)
    assert json.loads(json.dumps(figures)) == figures
    assert figures["corpus"] == "prose+rows.jsonl"
    assert figures["splits"]["train"]["num_tokens"] == dataset.split("train").num_tokens
    assert figures["splits"]["train"]["bytes_per_token"] > 1
    assert [source["name"] for source in figures["sources"]] == ["prose", "rows.jsonl"]
    assert set(figures["files"]) == {"tokenizer.json", "train.bin", "validation.bin", "test.bin"}
    assert len(figures["samples"]) == 2
    assert all(sample in decoded(dataset, "train") for sample in figures["samples"])


@pytest.mark.parametrize(
    ("section", "text"),
    [
        (
            'path = "x"\n[[data.sources]]\npath = "y"',
            "data.path='x': must not stand beside [[data.sources]]; make it one of the sources",
        ),
        ('[[data.sources]]\nname = "y"', "data.sources.0: has no path; add one"),
        (
            '[[data.sources]]\npath = "y"\nwait = 1',
            "data.sources.0: unknown key 'wait'; did you mean 'weight'?",
        ),
        (
            'sources = ["a"]',
            "data.sources=['a']: must be a list of entries; write [[data.sources]] before each of them",
        ),
        (
            '[[data.sources]]\npath = "y"\nweight = -1.0\n',
            "data.sources.weight=-1.0: must not be negative; use 0 at all sources for their share of the text",
        ),
        (
            '[[data.sources]]\npath = "a/y"\n[[data.sources]]\npath = "b/y"',
            "data.sources.name='y': must differ between sources; name each of them",
        ),
        (
            '[[data.sources]]\npath = "a"\nweight = 1.0\n[[data.sources]]\npath = "b"',
            "data.sources: 'b' has no weight but others have; give every source a weight or none",
        ),
        (
            'per_worker = "source"',
            "data.per_worker='source': needs at least two [[data.sources]] to deal out; add one or use 'iid'",
        ),
        (
            '[[data.sources]]\npath = "a"\nsubset = "en"',
            "data.sources.subset='en': is for format='hf' only; set the format or leave it out",
        ),
        (
            'end_token = "x"',
            "data.end_token='x': is for a tokenizer that is given; set data.tokenizer or leave this out",
        ),
        (
            'format = "csv"',
            'data.format=\'csv\': must be one of "auto", "text", "jsonl", "parquet", "hf"; the default is "auto"',
        ),
    ],
)
def test_settings_that_do_not_fit(section: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(f'[algorithm]\npreset = "sparseloco"\ninner_steps = 5\n[data]\n{section}\n')
    assert str(error.value) == text


def test_settings_survive_a_file(folder: Path) -> None:
    config = parse_config(
        '[algorithm]\npreset = "sparseloco"\ninner_steps = 5\n[data]\nper_worker = "source"\n'
        '[[data.sources]]\npath = "a"\n'
        '[[data.sources]]\npath = "b"\nformat = "hf"\nsubset = "en"\n',
        ["data.sources.0.weight=2.0", "data.sources.1.weight=1"],
    )
    assert [source.weight for source in config.data.sources] == [2.0, 1.0]
    assert parse_config(to_toml(config)) == config
