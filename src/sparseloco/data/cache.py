"""A corpus is tokenized once: entries on disk that are complete or absent, and checked when they are opened.

An entry is a folder ``<key>`` with ``tokenizer.json``, one ``<split>.bin`` of raw tokens a split, and
``manifest.json`` with sizes and hashes. It is built beside its place and renamed into it, under a lock.
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
from pathlib import Path
from typing import Any

import numpy as np

from sparseloco.data.corpus import Corpus, split_documents
from sparseloco.data.tokens import (
    SPLITS,
    Dataset,
    Progress,
    TokenSplit,
    load_tokenizer,
    token_byte_lengths,
    token_dtype,
    train_tokenizer,
    write_tokens,
)
from sparseloco.errors import ConfigError

_FORMAT = 1
_MANIFEST = "manifest.json"
_TOKENIZER = "tokenizer.json"


class _DamagedEntry(Exception):
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

    Raises:
        ConfigError: if a setting is out of range, the corpus is too small, or the cache is not writable.
    """
    identity: dict[str, Any] = {
        "format": _FORMAT,
        "corpus_sha256": corpus.sha256,
        "vocab_size": vocab_size,
        "validation_fraction": validation_fraction,
        "test_fraction": test_fraction,
    }
    root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    entry = root / hashlib.sha256(_canonical(identity)).hexdigest()[:32]
    # Without the lock first, so that a finished entry in a folder that is not writable serves too.
    with contextlib.suppress(_DamagedEntry, FileNotFoundError):
        return _open(entry, identity, corpus)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(entry.with_suffix(".lock")):
            return _open_or_build(entry, identity, corpus, progress)
    except OSError as error:
        raise ConfigError(
            f"cache_dir={str(root)!r}: cannot be used ({error.strerror or error}); "
            "free some space or set SPARSELOCO_CACHE to another folder"
        ) from error


def _open_or_build(entry: Path, identity: dict[str, Any], corpus: Corpus, progress: Progress | None) -> Dataset:
    """Under the lock: what another process may have finished meanwhile, else a new entry."""
    try:
        return _open(entry, identity, corpus)
    except FileNotFoundError:
        pass
    except _DamagedEntry as damage:
        warnings.warn(f"cache entry {entry.name} is damaged ({damage}) and is built again", stacklevel=3)
        shutil.rmtree(entry)
    for leftover in entry.parent.glob(f"{entry.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = entry.with_name(f"{entry.name}.tmp-{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        _build(temporary, identity, corpus, progress)
        _install(temporary, entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return _open(entry, identity, corpus)


def _build(folder: Path, identity: dict[str, Any], corpus: Corpus, progress: Progress | None) -> None:
    texts = split_documents(corpus, identity["validation_fraction"], identity["test_fraction"])
    tokenizer = train_tokenizer(texts["train"], identity["vocab_size"], progress)
    tokenizer.save(str(folder / _TOKENIZER))
    splits: dict[str, dict[str, int]] = {}
    for name in SPLITS:
        num_tokens = write_tokens(folder / f"{name}.bin", tokenizer, texts[name], progress)
        splits[name] = {
            "num_tokens": num_tokens,
            "num_bytes": sum(len(text.encode()) for text in texts[name]),
        }
    content = {
        "identity": identity,
        "splits": splits,
        "files": {file.name: _sha256(file) for file in folder.iterdir()},
    }
    manifest = {"content": content, "sha256": hashlib.sha256(_canonical(content)).hexdigest()}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True), encoding="utf-8")


def _install(temporary: Path, entry: Path) -> None:
    """Give a finished folder its name; where locks do not exist, another process may have been first."""
    try:
        os.replace(temporary, entry)
    except OSError:
        if not (entry / _MANIFEST).is_file():
            raise


def _open(entry: Path, identity: dict[str, Any], corpus: Corpus) -> Dataset:
    """Open an entry after every byte of it was checked.

    Raises:
        FileNotFoundError: if there is no entry.
        _DamagedEntry: if a file is missing or differs from the manifest.
    """
    if not entry.is_dir():
        raise FileNotFoundError(entry)
    content = _checked_manifest(entry, identity)
    for name, sha256 in content["files"].items():
        try:
            found = _sha256(entry / name)
        except OSError as error:
            raise _DamagedEntry(f"{name} cannot be read: {error.strerror or error}") from error
        if found != sha256:
            raise _DamagedEntry(f"{name} has another hash than its manifest says")
    tokenizer = load_tokenizer(entry / _TOKENIZER)
    dtype = token_dtype(tokenizer.get_vocab_size())
    splits = {
        name: TokenSplit(
            name=name,
            tokens=np.memmap(entry / f"{name}.bin", dtype=dtype, mode="r"),
            num_bytes=content["splits"][name]["num_bytes"],
        )
        for name in SPLITS
    }
    return Dataset(
        vocab_size=tokenizer.get_vocab_size(),
        tokenizer=tokenizer,
        corpus_name=corpus.name,
        corpus_sha256=corpus.sha256,
        splits=splits,
        token_bytes=token_byte_lengths(tokenizer),
    )


def _checked_manifest(entry: Path, identity: dict[str, Any]) -> dict[str, Any]:
    try:
        manifest = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
        content = manifest["content"]
        intact = manifest["sha256"] == hashlib.sha256(_canonical(content)).hexdigest()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _DamagedEntry(f"{_MANIFEST} is missing or unreadable") from error
    if not intact or content["identity"] != identity:
        raise _DamagedEntry(f"{_MANIFEST} does not match its checksum")
    return content


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Exclusive lock between processes, freed when one dies; without ``fcntl``, renaming alone must do."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with file.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
