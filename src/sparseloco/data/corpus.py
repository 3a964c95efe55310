"""Where text comes from, and how it is cut into documents and split by document.

Every rule here is a pure function of the text, so all peers that hold the same files see the same splits.
Knows nothing of tokens.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sparseloco.errors import ConfigError

STDLIB = "stdlib"
_NOT_STDLIB = frozenset({"test", "tests", "idlelib", "idle_test", "site-packages", "dist-packages"})
_PIECE = 4096
_LONGEST_PIECE = 4 * _PIECE
_LONGEST_FILE = 16 * _PIECE


class Document(NamedTuple):
    """One unit of text: it is in one split as a whole, and an end token follows it.

    Attributes:
        doc_id: File name relative to the corpus, with the number of the piece where a file was cut.
        text: The text, with LF line ends.
    """

    doc_id: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents without blank or repeated ones, in a stable order.

    Attributes:
        name: Short name for reports; never an absolute path.
        sha256: Hash of the documents' hashes, in order; it does not depend on file names.
        documents: All documents.
        num_skipped: Files that are not UTF-8 text or could not be read.
        num_duplicates: Documents left out because an equal one is there, so no text is in two splits.
    """

    name: str
    sha256: str
    documents: tuple[Document, ...]
    num_skipped: int = 0
    num_duplicates: int = 0

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return sum(len(document.text.encode()) for document in self.documents)


def load_corpus(path: str | os.PathLike[str] = STDLIB) -> Corpus:
    """Read a corpus from the standard library, a text file, or a directory of text files.

    - ``"stdlib"``: every ``*.py`` of the running interpreter's standard library, without its tests, IDLE and
      installed packages; one document a file. It differs between Python versions, so the name carries the
      version.
    - A file: cut into pieces by ``cut_text``, each of them a document.
    - A directory: all files below it in sorted order, without names that begin with a dot. One document a
      file; a file over 64 Ki characters is cut like a single file, so that a folder of a few books can be
      split.

    Raises:
        ConfigError: if the path does not exist, holds no text, or a single file is not UTF-8 text.
    """
    if os.fspath(path) == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [file for file in _walk(root) if file.suffix == ".py" and not _NOT_STDLIB.intersection(file.parts)]
        return _collect(path, f"stdlib-{platform.python_version()}", root, files, longest=None)
    source = Path(path).expanduser()
    if source.is_dir() and os.fspath(path):
        return _collect(path, source.resolve().name, source, _walk(source), longest=_LONGEST_FILE)
    if not source.is_file():
        raise ConfigError(
            f"data.path={os.fspath(path)!r}: must be an existing text file or directory, or 'stdlib'; check the path"
        )
    if _read_text(source) is None:
        raise ConfigError(f"data.path={os.fspath(path)!r}: must be readable UTF-8 text; convert the file first")
    return _collect(path, source.name, source.parent, [Path(source.name)], longest=0)


def cut_text(text: str) -> Iterator[str]:
    """Cut a text into pieces of a few KB whose concatenation is the text.

    A piece ends behind the first blank line (two line ends in a row) after 4,096 characters; where there is
    none within 16,384 characters, behind the first line end after 4,096; where there is none either, at
    16,384. A remainder of less than 2,048 characters stays with the piece before it.
    """
    start = 0
    while start < len(text):
        end = _piece_end(text, start)
        if len(text) - end < _PIECE // 2:
            end = len(text)
        yield text[start:end]
        start = end


def split_documents(corpus: Corpus, validation_fraction: float, test_fraction: float) -> dict[str, list[str]]:
    """Split by document: in the order of their SHA-256, the first go to test, the next to validation.

    Each of the two takes documents until it has its fraction of the corpus' bytes, at least one document. So
    the splits do not depend on file names, a few changed documents move few others, and the documents inside
    a split come in random order: its first windows are a fair sample of it.

    Returns:
        Texts of "train", "validation" and "test", none of them empty.

    Raises:
        ConfigError: if a fraction is out of range or there are fewer documents than splits.
    """
    for name, fraction in (("validation_fraction", validation_fraction), ("test_fraction", test_fraction)):
        if not 0 < fraction < 1:
            raise ConfigError(f"data.{name}={fraction!r}: must be above 0 and below 1; use 0.02")
    if validation_fraction + test_fraction >= 1:
        raise ConfigError(
            f"data.validation_fraction={validation_fraction!r}: must be below 1 - test_fraction = "
            f"{1 - test_fraction:g}, or nothing is left to train on; use 0.02 for both"
        )
    texts = sorted((document.text for document in corpus.documents), key=_digest)
    if len(texts) < 3:
        raise ConfigError(
            f"data={corpus.name!r}: train, validation and test need at least one document each, but there "
            f"are only {len(texts)} different documents ({corpus.num_bytes} bytes); give more text, a "
            "single file of at least 12 KB"
        )
    total, position = corpus.num_bytes, 0
    splits: dict[str, list[str]] = {}
    for name, fraction, num_kept in (("test", test_fraction, 2), ("validation", validation_fraction, 1)):
        first, size = position, 0
        while position < len(texts) - num_kept and (position == first or size < fraction * total):
            size += len(texts[position].encode())
            position += 1
        splits[name] = texts[first:position]
    return {"train": texts[position:], "validation": splits["validation"], "test": splits["test"]}


def _piece_end(text: str, start: int) -> int:
    for border in ("\n\n", "\n"):
        found = text.find(border, start + _PIECE, start + _LONGEST_PIECE)
        if found >= 0:
            return found + len(border)
    return min(start + _LONGEST_PIECE, len(text))


def _collect(path: str | os.PathLike[str], name: str, root: Path, files: Iterable[Path], longest: int | None) -> Corpus:
    """Read ``files`` (relative to ``root``); those over ``longest`` characters are cut into pieces."""
    documents: dict[bytes, Document] = {}
    num_skipped = num_duplicates = 0
    for file in files:
        text = _read_text(root / file)
        if text is None:
            num_skipped += 1
            continue
        cut = longest is not None and len(text) > longest
        for number, piece in enumerate(cut_text(text) if cut else (text,)):
            if not piece.strip():
                continue
            digest = _digest(piece)
            num_duplicates += digest in documents
            documents.setdefault(digest, Document(f"{file.as_posix()}#{number}" if cut else file.as_posix(), piece))
    if not documents:
        raise ConfigError(
            f"data.path={os.fspath(path)!r}: holds no text ({num_skipped} files skipped as not UTF-8 text); "
            "give a text file or a directory of text files"
        )
    sha256 = hashlib.sha256(b"".join(documents)).hexdigest()
    return Corpus(name, sha256, tuple(documents.values()), num_skipped, num_duplicates)


def _walk(root: Path) -> list[Path]:
    """Files below ``root``, relative to it and sorted; linked directories are not followed."""
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name).relative_to(root) for name in files if not name.startswith(".")]
    return sorted(found, key=lambda file: file.parts)


def _read_text(file: Path) -> str | None:
    """Text of a file, or None if it is not a readable UTF-8 text file (a NUL byte makes it binary)."""
    try:
        if not file.is_file():
            return None
        raw = file.read_bytes()
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None
    return None if "\0" in text else text.replace("\r\n", "\n").replace("\r", "\n")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
