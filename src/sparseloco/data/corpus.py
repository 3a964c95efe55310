"""Where text comes from, and how it is cut into documents and split by document.

Every rule here is a pure function of the text, so all peers that hold the same files see the same splits.
Knows nothing of tokens.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparseloco.data.documents import Document, Texts, index_of, order_of
from sparseloco.errors import ConfigError

STDLIB = "stdlib"
_NOT_STDLIB = frozenset({"test", "tests", "idlelib", "idle_test", "site-packages", "dist-packages"})
_PIECE = 4096
_LONGEST_PIECE = 4 * _PIECE
_LONGEST_FILE = 16 * _PIECE


@dataclass(frozen=True)
class Part:
    """Documents of one source, which stand together in a corpus.

    Attributes:
        name: Name of the source.
        start: Number of its first document.
        stop: Number behind its last one.
    """

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Corpus:
    """Documents without blank or repeated ones, in a stable order.

    Attributes:
        name: Short name for reports; never an absolute path.
        sha256: Hash of the documents' hashes, in order; it does not depend on file names.
        documents: All documents; in memory, or in a file.
        num_skipped: Files that are not UTF-8 text or could not be read, and rows without text.
        num_duplicates: Documents left out because an equal one is there, so no text is in two splits.
        parts: The sources, one behind the other; none means one source.
    """

    name: str
    sha256: str
    documents: Sequence[Document]
    num_skipped: int = 0
    num_duplicates: int = 0
    parts: tuple[Part, ...] = ()

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """The sources, of which the whole corpus is one if none are named."""
        return self.parts or (Part(self.name, 0, len(self.documents)),)

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return int(index_of(self.documents)[1].sum())


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
        root, files = stdlib_files()
        return _collect(path, corpus_name(path), root, files, longest=None)
    source = Path(path).expanduser()
    if source.is_dir() and os.fspath(path):
        return _collect(path, corpus_name(path), source, walk(source), longest=_LONGEST_FILE)
    if not source.is_file():
        raise ConfigError(
            f"data.path={os.fspath(path)!r}: must be an existing text file or directory, or 'stdlib'; check the path"
        )
    if read_text(source) is None:
        raise ConfigError(f"data.path={os.fspath(path)!r}: must be readable UTF-8 text; convert the file first")
    return _collect(path, source.name, source.parent, [Path(source.name)], longest=0)


def corpus_name(path: str | os.PathLike[str]) -> str:
    """Short name of a corpus: the last part of its path, or the version of the standard library."""
    if os.fspath(path) == STDLIB:
        return f"stdlib-{platform.python_version()}"
    source = Path(path).expanduser()
    return source.resolve().name if source.is_dir() else source.name


def stdlib_files() -> tuple[Path, list[Path]]:
    """Root of the running interpreter's standard library, and the files of it that are a corpus."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return root, [file for file in walk(root) if file.suffix == ".py" and not _NOT_STDLIB.intersection(file.parts)]


def text_pieces(text: str, *, whole: bool) -> Iterable[str]:
    """A file of a directory as documents: one, or pieces if it is over 64 Ki characters and need not stay whole."""
    return (text,) if whole or len(text) <= _LONGEST_FILE else cut_text(text)


def clean_text(text: str) -> str:
    """LF line ends, and no half characters, which have no UTF-8."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def cut_stream(chunks: Iterable[str]) -> Iterator[str]:
    """Like ``cut_text`` on the chunks joined, with a few of them in memory."""
    rest = ""
    for chunk in chunks:
        rest += chunk
        start = 0
        # Enough behind a piece to know where it ends, and that it is not the last but one.
        while len(rest) - start > _LONGEST_PIECE + _PIECE:
            end = _piece_end(rest, start)
            yield rest[start:end]
            start = end
        rest = rest[start:]
    yield from cut_text(rest)


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

    Every source is split by itself, so each has its share of every split. Held-out documents of several sources
    are mixed, and those to train on stand source by source.

    Returns:
        Texts of "train", "validation" and "test", none of them empty.

    Raises:
        ConfigError: if a fraction is out of range or a source has fewer documents than there are splits.
    """
    _, sizes = index_of(corpus.documents)
    chosen = split_numbers(corpus, validation_fraction, test_fraction)
    return {name: list(Texts(corpus.documents, numbers, sizes)) for name, (numbers, _) in chosen.items()}


def split_numbers(
    corpus: Corpus, validation_fraction: float, test_fraction: float
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """As ``split_documents``, but the numbers of the documents of each split, and of the parts that they are in."""
    _check_fractions(validation_fraction, test_fraction)
    digests, sizes = index_of(corpus.documents)
    chosen: dict[str, list[np.ndarray]] = {"train": [], "validation": [], "test": []}
    for part in corpus.all_parts:
        numbers = part.start + order_of(digests[part.start : part.stop])
        _check_part(part, len(numbers), int(sizes[numbers].sum()))
        num_test = _first_of(sizes[numbers], test_fraction, num_kept=2)
        num_held_out = num_test + _first_of(sizes[numbers], validation_fraction, num_kept=1, behind=num_test)
        chosen["test"].append(numbers[:num_test])
        chosen["validation"].append(numbers[num_test:num_held_out])
        chosen["train"].append(numbers[num_held_out:])
    starts = np.array([part.start for part in corpus.all_parts])
    splits: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name, of_parts in chosen.items():
        numbers = np.concatenate(of_parts)
        if name != "train":
            numbers = numbers[order_of(digests[numbers])]
        splits[name] = (numbers, np.searchsorted(starts, numbers, side="right") - 1)
    return splits


def _first_of(sizes: np.ndarray, fraction: float, *, num_kept: int, behind: int = 0) -> int:
    """How many documents from ``behind`` on make up a fraction of the bytes: at least one, and so that some stay."""
    before = np.cumsum(sizes[behind:]) - sizes[behind:]
    wanted = int(np.searchsorted(before, fraction * sizes.sum(), side="left"))
    return max(1, min(wanted, len(sizes) - num_kept - behind))


def _check_part(part: Part, num_documents: int, num_bytes: int) -> None:
    if num_documents < 3:
        raise ConfigError(
            f"data={part.name!r}: train, validation and test need at least one document each, but there "
            f"are only {num_documents} different documents ({num_bytes} bytes); give more text, a "
            "single file of at least 12 KB"
        )


def _check_fractions(validation_fraction: float, test_fraction: float) -> None:
    for name, fraction in (("validation_fraction", validation_fraction), ("test_fraction", test_fraction)):
        if not 0 < fraction < 1:
            raise ConfigError(f"data.{name}={fraction!r}: must be above 0 and below 1; use 0.02")
    if validation_fraction + test_fraction >= 1:
        raise ConfigError(
            f"data.validation_fraction={validation_fraction!r}: must be below 1 - test_fraction = "
            f"{1 - test_fraction:g}, or nothing is left to train on; use 0.02 for both"
        )


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
        text = read_text(root / file)
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


def walk(root: Path) -> list[Path]:
    """Files below ``root``, relative to it and sorted; linked directories are not followed."""
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name).relative_to(root) for name in files if not name.startswith(".")]
    return sorted(found, key=lambda file: file.parts)


def read_text(file: Path) -> str | None:
    """Text of a file, or None if it is not a readable UTF-8 text file (a NUL byte makes it binary)."""
    try:
        if not file.is_file():
            return None
        raw = file.read_bytes()
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None
    return None if "\0" in text else clean_text(text)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
