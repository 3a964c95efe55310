"""From the settings to a dataset: sources are read as a stream, once, and not at all if nothing has changed.

What was read is remembered under a stamp of the settings and of names, sizes and times of all files. As long as the
stamp stays the same, the entry of the cache is opened without reading any text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from sparseloco.data.cache import default_cache_dir, locked, open_entry, prepare, usable
from sparseloco.data.corpus import STDLIB, Corpus, Part, corpus_name
from sparseloco.data.documents import DocumentWriter, as_bytes
from sparseloco.data.settings import DataConfig, SourceConfig
from sparseloco.data.sources import detect_format, files_of, read_documents
from sparseloco.data.tokenizer import GivenTokenizer, open_tokenizer
from sparseloco.data.tokens import Dataset, Progress, vocabulary_of
from sparseloco.errors import ConfigError

_STAMP_FORMAT = 1
_PROGRESS_BYTES = 1 << 20


def open_dataset(
    config: DataConfig,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """The tokens of ``[data]``: opened if they were made before, else made.

    Documents go to a file in the cache while they are read, and from there into tokens, so text of any size fits; the
    file is removed at the end. Processes that call this at once do the work once.

    Args:
        config: The settings.
        cache_dir: Where entries are kept; default ``default_cache_dir()``.
        progress: Told how far the work is; see ``Progress``.

    Raises:
        ConfigError: if a source or the tokenizer cannot be used, or the cache cannot be written.
    """
    root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    given = open_tokenizer(config.tokenizer, config.end_token) if config.tokenizer else None
    if (dataset := _remembered(config, root, given)) is not None:
        return dataset
    with usable(root), locked(root / f"{_stamp(config, given)}.lock"):
        # Another process may have been first.
        return _remembered(config, root, given) or _read_and_prepare(config, root, given, progress)


def find_dataset(config: DataConfig, cache_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Like ``open_dataset``, but only what is there already.

    Raises:
        ConfigError: if it was not prepared, or its files have changed since.
    """
    root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    given = open_tokenizer(config.tokenizer, config.end_token) if config.tokenizer else None
    if (dataset := _remembered(config, root, given)) is None:
        raise ConfigError(
            f"data={_name_of(config.all_sources)!r}: is not prepared, or its files have changed since; run: sparseloco "
            "data prepare CONFIG.toml"
        )
    return dataset


def vocabulary_size(config: DataConfig) -> int:
    """Size of the vocabulary before any text is read: the given tokenizer's, or the one that is asked for."""
    if not config.tokenizer:
        return config.vocab_size
    return vocabulary_of(open_tokenizer(config.tokenizer, config.end_token).tokenizer)


def _remembered(config: DataConfig, root: Path, given: GivenTokenizer | None) -> Dataset | None:
    """The entry that the present stamp leads to; None if there is none or it cannot be used any more."""
    try:
        known = json.loads(_memory(root, _stamp(config, given)).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    try:
        dataset = open_entry(root / known["entry"])
        pairs = zip(dataset.sources, known["sources"], strict=True)
        sources = tuple(replace(source, name=name) for source, name in pairs)
        return _weighted(replace(dataset, corpus_name=known["name"], sources=sources), config)
    except (ValueError, KeyError, TypeError):  # a ConfigError is a ValueError
        return None


def _read_and_prepare(
    config: DataConfig, root: Path, given: GivenTokenizer | None, progress: Progress | None
) -> Dataset:
    stamp = _stamp(config, given)
    for leftover in root.glob(f"{stamp}.text-*"):
        leftover.unlink(missing_ok=True)
    spool = root / f"{stamp}.text-{uuid.uuid4().hex}"
    with _writer(spool) as writer:
        corpus = _collect(config.all_sources, writer, progress)
        dataset = prepare(
            corpus,
            config.vocab_size,
            config.validation_fraction,
            config.test_fraction,
            cache_dir=root,
            progress=progress,
            given=given,
        )
    # A file that changed while it was read is read again the next time.
    if _stamp(config, given) == stamp and dataset.entry is not None:
        names = [source.name for source in dataset.sources]
        known = {"entry": dataset.entry.name, "name": dataset.corpus_name, "sources": names}
        temporary = spool.with_suffix(".json")
        temporary.write_text(json.dumps(known), encoding="utf-8")
        os.replace(temporary, _memory(root, stamp))
    return _weighted(dataset, config)


@contextlib.contextmanager
def _writer(path: Path) -> Iterator[DocumentWriter]:
    writer = DocumentWriter(path)
    try:
        yield writer
    finally:
        writer.close()
        path.unlink(missing_ok=True)


def _collect(sources: Sequence[SourceConfig], writer: DocumentWriter, progress: Progress | None) -> Corpus:
    """Write all documents of all sources, one source behind the other, and leave out repeated ones."""
    num_skipped = 0

    def skipped() -> None:
        nonlocal num_skipped
        num_skipped += 1

    ends: list[int] = []
    told = 0
    for source in sources:
        before = len(writer)
        for text in read_documents(source, skipped):
            writer.add(text)
            if progress is not None and writer.num_bytes - told >= _PROGRESS_BYTES:
                told = writer.num_bytes
                progress("reading", told, 0)
        if len(writer) == before:
            raise ConfigError(
                f"data.path={source.path!r}: holds no text ({num_skipped} files or rows skipped as not UTF-8 text); "
                "give a text file or a directory of text files"
            )
        ends.append(len(writer))
    documents, kept = writer.finish()
    stops = np.searchsorted(kept, ends)
    names = [_label(source) for source in sources]
    parts = [Part(n, int(start), int(stop)) for n, start, stop in zip(names, [0, *stops[:-1]], stops, strict=True)]
    return Corpus(
        name=_name_of(sources),
        sha256=hashlib.sha256(as_bytes(documents.digests)).hexdigest(),
        documents=documents,
        num_skipped=num_skipped,
        num_duplicates=len(writer) - len(kept),
        parts=tuple(parts) if len(parts) > 1 else (),
    )


def _weighted(dataset: Dataset, config: DataConfig) -> Dataset:
    pairs = zip(dataset.sources, config.all_sources, strict=True)
    return replace(dataset, sources=tuple(replace(tokens, weight=source.weight) for tokens, source in pairs))


def _label(source: SourceConfig) -> str:
    return source.name or (corpus_name(source.path) if source.path == STDLIB else source.label)


def _name_of(sources: Sequence[SourceConfig]) -> str:
    if len(sources) == 1:
        return sources[0].name or corpus_name(sources[0].path)
    return "+".join(map(_label, sources))


def _memory(root: Path, stamp: str) -> Path:
    return root / f"{stamp}.json"


def _stamp(config: DataConfig, given: GivenTokenizer | None) -> str:
    """Hash of everything that decides an entry, with names, sizes and times in place of the text.

    A dataset of the hub is known by its name and revision alone.
    """
    settings = msgspec.to_builtins(config)
    for name in ("sources", "path", "format", "text_field", "per_worker"):
        del settings[name]
    if given is not None:
        settings["tokenizer"] = hashlib.sha256(given.tokenizer.to_str().encode()).hexdigest()
        settings["end_token"] = given.end_token
    stamps = [_source_stamp(source) for source in config.all_sources]
    raw = json.dumps([_STAMP_FORMAT, settings, stamps], sort_keys=True).encode()
    return f"text-{hashlib.sha256(raw).hexdigest()[:32]}"


def _source_stamp(source: SourceConfig) -> object:
    settings = {**msgspec.to_builtins(source), "weight": 0.0, "format": detect_format(source)}
    files = []
    for file in files_of(source):
        try:
            state = file.stat()
        except OSError as error:
            raise ConfigError(
                f"{file}: cannot be read ({error.strerror or error}); mend the file or take it out"
            ) from error
        files.append([str(file.absolute()), state.st_size, state.st_mtime_ns])
    return [settings, files, corpus_name(STDLIB) if source.path == STDLIB else ""]
