"""Sources: four formats give the same documents, and what cannot be read is one sentence."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sparseloco.data import load_corpus
from sparseloco.data.corpus import cut_stream, cut_text
from sparseloco.data.settings import SourceConfig
from sparseloco.data.sources import detect_format, read_documents
from sparseloco.errors import ConfigError

TEXTS = ["first document", "naïve\r\nsecond", "", "third \U0001f642"]
READ = ["first document", "naïve\nsecond", "third \U0001f642"]


def read(path: Path | str, **settings: Any) -> list[str]:
    return list(read_documents(SourceConfig(path=str(path), **settings), lambda: None))


def skipped(path: Path | str, **settings: Any) -> int:
    count: list[None] = []
    list(read_documents(SourceConfig(path=str(path), **settings), lambda: count.append(None)))
    return len(count)


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def write_parquet(path: Path, **columns: list[Any]) -> Path:
    arrow = pytest.importorskip("pyarrow", reason="needs the extra `data`")
    parquet = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.table(columns), path)
    return path


def refusal(path: Path | str, **settings: Any) -> str:
    with pytest.raises(ConfigError) as error:
        read(path, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz"])
def test_jsonl(tmp_path: Path, name: str) -> None:
    path = write_jsonl(tmp_path / name, [{"text": text, "n": 1} for text in TEXTS])
    assert read(path) == READ
    path = write_jsonl(tmp_path / "other" / name, [{"body": text} for text in TEXTS])
    assert read(path, text_field="body") == READ


def test_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", text=[*TEXTS, None], n=[1, 2, 3, 4, 5])
    assert (read(path), skipped(path)) == (READ, 1)


def test_many_rows_are_read_in_batches(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", text=[f"row {n}" for n in range(3000)])
    assert read(path) == [f"row {n}" for n in range(3000)]


def test_folder_is_read_in_order_and_told_by_its_names(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows" / "b.jsonl", [{"text": "3"}])
    write_jsonl(tmp_path / "rows" / "a.jsonl", [{"text": "1"}, {"text": "2"}])
    (tmp_path / "rows" / "README.md").write_text("not read")
    assert read(tmp_path / "rows") == ["1", "2", "3"]
    write_parquet(tmp_path / "rows" / "c.parquet", text=["4"])
    assert refusal(tmp_path / "rows") == (
        f"data.path={str(tmp_path / 'rows')!r}: holds JSONL and Parquet files, and one source has one format; set its "
        "format"
    )
    assert read(tmp_path / "rows", format="parquet") == ["4"]


def test_max_documents(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": str(n)} for n in range(100)])
    assert read(path, max_documents=3) == ["0", "1", "2"]


def test_text_is_what_load_corpus_reads(tmp_path: Path) -> None:
    book = "".join(f"Paragraph {n}\r\nsays {n * n}.\n\n" for n in range(9000))
    (tmp_path / "book.txt").write_bytes(b"\xef\xbb\xbf" + book.encode())
    (tmp_path / "note.txt").write_text("short")
    for path in (tmp_path, tmp_path / "book.txt"):
        assert read(path) == [document.text for document in load_corpus(path).documents]


@pytest.mark.parametrize("size", [1, 7, 1000, 10_000])
def test_stream_is_cut_as_a_whole_text_is(size: int) -> None:
    text = "word " * 3000 + "\n\n" + "x" * 40_000 + "\n" + "é\n" * 9000
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    assert list(cut_stream(chunks)) == list(cut_text(text))


def test_half_characters_do_not_break_the_encoding(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "half \\ud83d"}\n')
    assert read(path) == ["half ?"]


def test_datasets_folder_and_saved_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra `hf`")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    write_jsonl(tmp_path / "rows" / "train.jsonl", [{"text": text} for text in TEXTS])
    assert read(tmp_path / "rows", format="hf") == READ
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    assert detect_format(SourceConfig(path=str(tmp_path / "saved"))) == "hf"
    assert read(tmp_path / "saved") == READ
    assert "split 'nope'" in refusal(tmp_path / "rows", format="hf", split="nope")


def test_dataset_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra `hf`")

    def gone(*_: object, **__: object) -> None:
        raise FileNotFoundError("Couldn't reach\nthe hub")

    monkeypatch.setattr(datasets, "load_dataset", gone)
    assert refusal("nobody/nothing", format="hf") == (
        "data.path='nobody/nothing': cannot be read as a dataset, split 'train' (Couldn't reach the hub); check name, "
        "subset, split and the network"
    )


@pytest.mark.parametrize(("module", "format", "extra"), [("pyarrow", "parquet", "data"), ("datasets", "hf", "hf")])
def test_missing_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, format: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "x.parquet").write_bytes(b"")
    assert refusal(tmp_path / "x.parquet", format=format) == (
        f"data.path={str(tmp_path / 'x.parquet')!r}: format {format!r} needs further packages; run: pip install "
        f'"sparseloco[{extra}]"'
    )


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("{", "must be one JSON object (Expecting property name enclosed in double quotes: line 2 column 1 (char 2))"),
        ("[1]", "must be one JSON object"),
    ],
)
def test_lines_that_are_no_objects(tmp_path: Path, line: str, rule: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "x"}}\n{line}\n')
    assert refusal(path) == f"{path} line 2: {rule}; mend or remove the line"


def test_fields(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x", "id": 3}])
    assert refusal(path, text_field="body") == (
        f"data.text_field='body': is not in {path} line 1, which has 'text', 'id'; name one of them"
    )
    assert refusal(path, text_field="id") == (
        f"data.text_field='id': must hold text, but in {path} line 1 it holds int; name another field"
    )
    table = write_parquet(tmp_path / "a.parquet", body=["x"])
    assert refusal(table) == f"data.text_field='text': is not in {table}, which has 'body'; name one of them"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs the extra `data`")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but not really")
    assert refusal(tmp_path / "a.parquet").startswith(f"{tmp_path / 'a.parquet'}: cannot be read (")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 100)[:-20])
    assert refusal(tmp_path / "a.jsonl.gz") == (
        f"{tmp_path / 'a.jsonl.gz'}: cannot be read (Compressed file ended before the end-of-stream marker was "
        "reached); mend the file or take it out"
    )
    (tmp_path / "b.txt").write_bytes(b"fine" * 1000 + b"\xff")
    assert refusal(tmp_path / "b.txt") == (
        f"data.path={str(tmp_path / 'b.txt')!r}: must be readable UTF-8 text; convert the file first"
    )


def test_nothing_there(tmp_path: Path) -> None:
    assert "must be an existing text file or directory" in refusal(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "holds no parquet file" in refusal(tmp_path / "empty", format="parquet")
