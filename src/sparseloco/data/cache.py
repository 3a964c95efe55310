"""A corpus is tokenized once: entries on disk that are complete or absent, and checked when they are opened.

An entry is a folder ``<key>`` with ``tokenizer.json``, one ``<split>.bin`` of raw tokens a split, and
``manifest.json`` with sizes, hashes, and what each source gave. It is built beside its place and renamed into it, under
a lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sparseloco.data.corpus import Corpus, split_numbers
from sparseloco.data.documents import Texts, index_of
from sparseloco.data.tokenizer import GivenTokenizer, check_knows
from sparseloco.data.tokens import (
    END_TOKEN,
    SPLITS,
    Dataset,
    Progress,
    SourceTokens,
    TokenSplit,
    load_tokenizer,
    token_byte_lengths,
    token_dtype,
    train_tokenizer,
    vocabulary_of,
    write_tokens,
)
from sparseloco.errors import ConfigError

_FORMAT = 2
_MANIFEST = "manifest.json"
_TOKENIZER = "tokenizer.json"


class DamagedEntry(Exception):
    """A cache entry is not what its manifest says; the text is the reason."""


def default_cache_dir() -> Path:
    """``$SPARSELOCO_CACHE``, else ``$XDG_CACHE_HOME/sparseloco``, else ``~/.cache/sparseloco``."""
    if own := os.environ.get("SPARSELOCO_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparseloco"


def prepare(
    corpus: Corpus,
    vocab_size: int,
    validation_fraction: float = 0.02,
    test_fraction: float = 0.02,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    given: GivenTokenizer | None = None,
) -> Dataset:
    """Split a corpus, train its tokenizer, tokenize all of it; or open what an earlier call made.

    Processes that call this at once do the work once. A damaged entry is built again, with a warning.

    Args:
        corpus: What ``load_corpus`` returned.
        vocab_size: Size of the vocabulary, at least 257.
        validation_fraction: Share of the bytes that goes to validation, above 0.
        test_fraction: Share of the bytes that goes to test, above 0.
        cache_dir: Where entries are kept; default ``default_cache_dir()``.
        progress: Told how far the work is; see ``Progress``.
        given: A tokenizer to use; then none is trained and ``vocab_size`` does not matter.

    Raises:
        ConfigError: if a setting is out of range, the corpus is too small, or the cache is not writable.
    """
    identity = _identity(corpus, vocab_size, validation_fraction, test_fraction, given)
    root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    entry = root / hashlib.sha256(_canonical(identity)).hexdigest()[:32]
    # Without the lock first, so that a finished entry in a folder that is not writable serves too.
    with contextlib.suppress(DamagedEntry, FileNotFoundError):
        return _named(_open(entry, identity), corpus)
    with usable(root), locked(entry.with_suffix(".lock")):
        return _named(_open_or_build(entry, identity, corpus, progress, given), corpus)


def open_entry(entry: Path) -> Dataset:
    """Open a finished entry of the cache by its folder.

    Raises:
        ConfigError: if it is none, or damaged.
    """
    try:
        return _open(entry, None)
    except (FileNotFoundError, DamagedEntry) as error:
        raise ConfigError(
            f"cache={str(entry)!r}: must be a finished entry of the cache ({error}); prepare the text again with: "
            "sparseloco data prepare CONFIG.toml"
        ) from error


def _named(dataset: Dataset, corpus: Corpus) -> Dataset:
    """An entry may have been made of the same text under another name."""
    sources = [replace(source, name=part.name) for source, part in zip(dataset.sources, corpus.all_parts, strict=True)]
    return replace(dataset, corpus_name=corpus.name, sources=tuple(sources))


@contextlib.contextmanager
def usable(root: Path) -> Iterator[None]:
    """A folder that is made if need be; what the system refuses inside this block is said in one sentence."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(
            f"cache_dir={str(root)!r}: cannot be used ({error.strerror or error}); "
            "free some space or set SPARSELOCO_CACHE to another folder"
        ) from error


def _identity(
    corpus: Corpus,
    vocab_size: int,
    validation_fraction: float,
    test_fraction: float,
    given: GivenTokenizer | None,
) -> dict[str, Any]:
    """Everything that decides the bytes of an entry; what is as it always was adds nothing."""
    identity: dict[str, Any] = {
        "format": _FORMAT,
        "corpus_sha256": corpus.sha256,
        "validation_fraction": validation_fraction,
        "test_fraction": test_fraction,
    }
    if given is None:
        identity["vocab_size"] = vocab_size
    else:
        sha256 = hashlib.sha256(given.tokenizer.to_str().encode()).hexdigest()
        identity["tokenizer"] = {"sha256": sha256, "end_token": given.end_token}
    if corpus.parts:
        identity["sources"] = [[part.name, part.stop - part.start] for part in corpus.parts]
    return identity


def _open_or_build(
    entry: Path,
    identity: dict[str, Any],
    corpus: Corpus,
    progress: Progress | None,
    given: GivenTokenizer | None,
) -> Dataset:
    """Under the lock: what another process may have finished meanwhile, else a new entry."""
    try:
        return _open(entry, identity)
    except FileNotFoundError:
        pass
    except DamagedEntry as damage:
        warnings.warn(f"cache entry {entry.name} is damaged ({damage}) and is built again", stacklevel=3)
        shutil.rmtree(entry)
    for leftover in entry.parent.glob(f"{entry.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = entry.with_name(f"{entry.name}.tmp-{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        _build(temporary, identity, corpus, progress, given)
        _install(temporary, entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return _open(entry, identity)


def _build(
    folder: Path,
    identity: dict[str, Any],
    corpus: Corpus,
    progress: Progress | None,
    given: GivenTokenizer | None,
) -> None:
    chosen = split_numbers(corpus, identity["validation_fraction"], identity["test_fraction"])
    _, sizes = index_of(corpus.documents)
    texts = {name: Texts(corpus.documents, numbers, sizes) for name, (numbers, _) in chosen.items()}
    if given is None:
        tokenizer, end_token_id = train_tokenizer(texts["train"], identity["vocab_size"], progress), 0
    else:
        tokenizer, end_token_id = given.tokenizer, given.end_token_id
        check_knows(given, texts["validation"])
    tokenizer.save(str(folder / _TOKENIZER))
    rows: list[dict[str, Any]] = [
        {"name": part.name, "num_documents": part.stop - part.start, "num_tokens": {}, "num_bytes": {}}
        for part in corpus.all_parts
    ]
    splits: dict[str, dict[str, int]] = {}
    for name in SPLITS:
        numbers, parts = chosen[name]
        lengths = write_tokens(folder / f"{name}.bin", tokenizer, texts[name], progress, end_token_id=end_token_id)
        splits[name] = {"num_tokens": int(lengths.sum()), "num_bytes": texts[name].num_bytes}
        for row, tokens, num_bytes in zip(
            rows, _sums(parts, lengths, len(rows)), _sums(parts, sizes[numbers], len(rows)), strict=True
        ):
            row["num_tokens"][name], row["num_bytes"][name] = tokens, num_bytes
    content = {
        "identity": identity,
        "corpus": {
            "name": corpus.name,
            "sha256": corpus.sha256,
            "num_skipped": corpus.num_skipped,
            "num_duplicates": corpus.num_duplicates,
        },
        "tokenizer": {
            "name": given.name if given else "trained on the train split",
            "vocab_size": vocabulary_of(tokenizer),
            "end_token": given.end_token if given else END_TOKEN,
            "end_token_id": end_token_id,
        },
        "sources": rows,
        "splits": splits,
        "files": {file.name: _sha256(file) for file in folder.iterdir()},
    }
    manifest = {"content": content, "sha256": hashlib.sha256(_canonical(content)).hexdigest()}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True), encoding="utf-8")


def _sums(group: np.ndarray, values: np.ndarray, num_groups: int) -> list[int]:
    """Sum of the values of each group."""
    sums = np.zeros(num_groups, dtype=np.int64)
    np.add.at(sums, group, values)
    return sums.tolist()


def _install(temporary: Path, entry: Path) -> None:
    """Give a finished folder its name; where locks do not exist, another process may have been first."""
    try:
        os.replace(temporary, entry)
    except OSError:
        if not (entry / _MANIFEST).is_file():
            raise


def _open(entry: Path, identity: dict[str, Any] | None) -> Dataset:
    """Open an entry after every byte of it was checked.

    Raises:
        FileNotFoundError: if there is no entry.
        DamagedEntry: if a file is missing or differs from the manifest.
    """
    if not entry.is_dir():
        raise FileNotFoundError(f"there is no folder {entry.name}")
    content = _checked_manifest(entry, identity)
    for name, sha256 in content["files"].items():
        try:
            found = _sha256(entry / name)
        except OSError as error:
            raise DamagedEntry(f"{name} cannot be read: {error.strerror or error}") from error
        if found != sha256:
            raise DamagedEntry(f"{name} has another hash than its manifest says")
    tokenizer = load_tokenizer(entry / _TOKENIZER)
    dtype = token_dtype(vocabulary_of(tokenizer))
    splits = {
        name: TokenSplit(
            name=name,
            tokens=np.memmap(entry / f"{name}.bin", dtype=dtype, mode="r"),
            num_bytes=content["splits"][name]["num_bytes"],
        )
        for name in SPLITS
    }
    return Dataset(
        vocab_size=vocabulary_of(tokenizer),
        tokenizer=tokenizer,
        corpus_name=content["corpus"]["name"],
        corpus_sha256=content["identity"]["corpus_sha256"],
        splits=splits,
        token_bytes=token_byte_lengths(tokenizer),
        end_token_id=content["tokenizer"]["end_token_id"],
        sources=_sources(content["sources"], splits["train"]),
        entry=entry,
    )


def _sources(rows: list[dict[str, Any]], train: TokenSplit) -> tuple[SourceTokens, ...]:
    """The sources, each with its stretch of the train split."""
    found: list[SourceTokens] = []
    start = 0
    for row in rows:
        stop = start + row["num_tokens"]["train"]
        part = TokenSplit(f"train of {row['name']}", train.tokens[start:stop], row["num_bytes"]["train"])
        found.append(SourceTokens(row["name"], 0.0, part, row["num_documents"], row["num_tokens"], row["num_bytes"]))
        start = stop
    return tuple(found)


def read_manifest(entry: Path) -> dict[str, Any]:
    """What the manifest of a finished entry says, checked against its own hash.

    Raises:
        DamagedEntry: if it is missing or damaged.
    """
    return _checked_manifest(entry, None)


def _checked_manifest(entry: Path, identity: dict[str, Any] | None) -> dict[str, Any]:
    try:
        manifest = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
        content = manifest["content"]
        intact = manifest["sha256"] == hashlib.sha256(_canonical(content)).hexdigest()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedEntry(f"{_MANIFEST} is missing or unreadable") from error
    if not intact or (identity is not None and content["identity"] != identity):
        raise DamagedEntry(f"{_MANIFEST} does not match its checksum")
    if content["identity"]["format"] != _FORMAT:
        raise DamagedEntry("it was written by another version")
    return content


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Exclusive lock between processes, freed when one dies; without ``fcntl``, renaming alone must do."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with file.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
