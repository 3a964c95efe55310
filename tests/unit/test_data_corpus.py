"""Corpora: what is read, how it is cut and split, and the sentences for what cannot be."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseloco.data import Corpus, Document, load_corpus, split_documents
from sparseloco.data.corpus import cut_text
from sparseloco.errors import ConfigError


def write(folder: Path, **files: str | bytes) -> Path:
    for name, content in files.items():
        file = folder / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def paragraphs(count: int) -> str:
    return "".join(f"Paragraph {number} says {number * number}.\n\n" for number in range(count))


def made_of(*texts: str) -> Corpus:
    return Corpus("made", "0" * 64, tuple(Document(str(i), text) for i, text in enumerate(texts)))


def test_stdlib_is_source_without_tests_and_installed_packages() -> None:
    corpus = load_corpus()
    names = {document.doc_id for document in corpus.documents}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not [name for name in names if {"test", "tests", "idlelib", "site-packages"} & set(name.split("/"))]
    assert all(name.endswith(".py") for name in names)
    assert corpus.name.startswith("stdlib-3.")
    assert corpus.num_bytes > 5_000_000
    assert (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").is_file()


def test_directory_is_read_in_order_and_counts_what_it_leaves_out(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "text",
        b="second\r\nline",
        a__c="first",
        z="first",
        blank=" \n",
        binary=b"MZ\0\1",
        latin=b"caf\xe9",
        bom=b"\xef\xbb\xbfthird",
    )
    write(folder, **{".hidden": "no", ".git__config": "no"})
    corpus = load_corpus(folder)
    assert corpus.documents == (
        Document("a/c", "first"),
        Document("b", "second\nline"),
        Document("bom", "third"),
    )
    assert (corpus.name, corpus.num_skipped, corpus.num_duplicates) == ("text", 2, 1)


def test_names_of_files_do_not_matter_to_the_hash(tmp_path: Path) -> None:
    one = load_corpus(write(tmp_path / "one", a="x", b="y"))
    two = load_corpus(write(tmp_path / "two", c="x", d="y"))
    other = load_corpus(write(tmp_path / "other", a="x", b="z"))
    assert one.sha256 == two.sha256 != other.sha256


def test_file_is_cut_and_large_files_of_a_directory_too(tmp_path: Path) -> None:
    text = paragraphs(4000)
    write(tmp_path, **{"book.txt": text, "note.txt": "short"})
    alone = load_corpus(tmp_path / "book.txt")
    assert (alone.name, "".join(document.text for document in alone.documents)) == ("book.txt", text)
    assert all(4096 <= len(document.text) <= 4096 + 40 for document in alone.documents[:-1])
    assert 2048 <= len(alone.documents[-1].text) <= 4096 + 40 + 2048
    both = load_corpus(tmp_path)
    assert both.documents == (*alone.documents, Document("note.txt", "short"))


@given(st.lists(st.sampled_from(["\n\n", "\n", "word ", "w" * 1500, "é" * 5000]), max_size=60))
def test_pieces_join_to_the_text(parts: list[str]) -> None:
    text = "".join(parts)
    pieces = list(cut_text(text))
    assert "".join(pieces) == text
    assert all(len(piece) <= 16_384 + 2 + 2048 for piece in pieces)
    assert all(len(piece) >= 2048 for piece in pieces[1:])


def test_pieces_end_at_the_best_border_there_is() -> None:
    body = "x" * 5000
    assert [len(piece) for piece in cut_text(f"{body}\n{body}\n\n{body}")] == [10_003, 5000]
    assert [len(piece) for piece in cut_text(f"{body}\n{body}")] == [5001, 5000]
    assert [len(piece) for piece in cut_text("x" * 20_000)] == [16_384, 3616]


@given(
    st.sets(st.text("abcdefgh", min_size=1, max_size=30), min_size=3, max_size=40),
    st.sampled_from([(0.02, 0.02), (0.3, 0.3), (0.5, 0.49), (1e-9, 0.9)]),
)
def test_every_document_is_in_one_split_and_none_is_empty(texts: set[str], fractions: tuple[float, float]) -> None:
    splits = split_documents(made_of(*texts), *fractions)
    assert sorted(text for split in splits.values() for text in split) == sorted(texts)
    assert all(splits[name] for name in ("train", "validation", "test"))
    backwards = split_documents(made_of(*sorted(texts, reverse=True)), *fractions)
    assert backwards == splits


def test_fractions_are_kept_to_a_document() -> None:
    texts = [f"{number:05d}" * 20 for number in range(1000)]
    splits = split_documents(made_of(*texts), 0.02, 0.05)
    assert {name: len(split) for name, split in splits.items()} == {
        "train": 930,
        "validation": 20,
        "test": 50,
    }


@pytest.mark.parametrize(
    ("fractions", "text"),
    [
        ((0.0, 0.02), "data.validation_fraction=0.0: must be above 0 and below 1; use 0.02"),
        ((0.02, 1.0), "data.test_fraction=1.0: must be above 0 and below 1; use 0.02"),
        (
            (0.6, 0.5),
            "data.validation_fraction=0.6: must be below 1 - test_fraction = 0.5, or nothing is left to "
            "train on; use 0.02 for both",
        ),
    ],
)
def test_fractions_out_of_range(fractions: tuple[float, float], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        split_documents(made_of("a", "b", "c"), *fractions)
    assert str(error.value) == text


def test_too_few_documents() -> None:
    with pytest.raises(ConfigError) as error:
        split_documents(made_of("one", "two"), 0.02, 0.02)
    assert str(error.value) == (
        "data='made': train, validation and test need at least one document each, but there are only 2 "
        "different documents (6 bytes); give more text, a single file of at least 12 KB"
    )


@pytest.mark.parametrize(
    ("files", "path", "text"),
    [
        ({}, "nothing", "must be an existing text file or directory, or 'stdlib'; check the path"),
        ({"x": b"\0"}, "x", "must be readable UTF-8 text; convert the file first"),
        ({"x": ""}, "x", "holds no text (0 files skipped as not UTF-8 text)"),
        ({"x__y": b"\xff", "x__z": "\n"}, "x", "holds no text (1 files skipped as not UTF-8 text)"),
    ],
)
def test_no_text(tmp_path: Path, files: dict[str, str | bytes], path: str, text: str) -> None:
    write(tmp_path, **files)
    with pytest.raises(ConfigError) as error:
        load_corpus(tmp_path / path)
    assert str(error.value).startswith(f"data.path={str(tmp_path / path)!r}: ")
    assert text in str(error.value)


def test_empty_path_is_not_the_current_directory() -> None:
    with pytest.raises(ConfigError, match=r"data\.path='': must be an existing"):
        load_corpus("")
