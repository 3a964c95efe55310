"""Documents of one source as a stream: text, JSONL, Parquet, and whatever ``datasets`` can read.

Nothing here holds more than a file of text, a line or a batch of rows. Every error names the file or the field.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from sparseloco.data.corpus import STDLIB, clean_text, read_text, stdlib_files, text_pieces, walk
from sparseloco.data.settings import SourceConfig
from sparseloco.errors import ConfigError

ROW_BATCH = 1024
_JSONL = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_PARQUET = (".parquet",)
_CHUNK_CHARACTERS = 1 << 20

Skipped = Callable[[], None]
"""Called once for each file or row that holds no text."""


def detect_format(source: SourceConfig) -> str:
    """The format that a source says, or that the names of its files tell.

    Raises:
        ConfigError: if a folder holds JSONL and Parquet, or there is nothing at the path.
    """
    if source.format != "auto":
        return source.format
    path = Path(source.path).expanduser()
    if source.path == STDLIB:
        return "text"
    if not path.exists():
        raise ConfigError(
            f"data.path={source.path!r}: must be an existing text file or directory, or 'stdlib'; check the path, or "
            "set format='hf' for a dataset of the hub"
        )
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        return "hf"
    names = [file.name for file in walk(path)] if path.is_dir() else [path.name]
    found = [kind for kind, ends in (("jsonl", _JSONL), ("parquet", _PARQUET)) if any(n.endswith(ends) for n in names)]
    if len(found) > 1:
        raise ConfigError(
            f"data.path={source.path!r}: holds JSONL and Parquet files, and one source has one format; set its format"
        )
    return found[0] if found else "text"


def files_of(source: SourceConfig) -> list[Path]:
    """The files that a source on this machine is read from, in order; none for a dataset of the hub.

    Raises:
        ConfigError: if there are none.
    """
    kind = detect_format(source)
    if source.path == STDLIB and kind == "text":
        root, files = stdlib_files()
        return [root / file for file in files]
    path = Path(source.path).expanduser()
    if kind == "hf" and not path.exists():
        return []
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(
            f"data.path={source.path!r}: must be an existing text file or directory, or 'stdlib'; check the path"
        )
    ends = {"jsonl": _JSONL, "parquet": _PARQUET}.get(kind, ("",))
    files = [path / file for file in walk(path) if file.name.endswith(ends)]
    if not files:
        raise ConfigError(f"data.path={source.path!r}: holds no {kind} file; check path and format")
    return files


def read_documents(source: SourceConfig, skipped: Skipped) -> Iterator[str]:
    """Texts of a source in a stable order, with LF line ends, blank ones left out.

    Raises:
        ConfigError: if a file cannot be read, a field is missing, or an extra is not installed.
    """
    kind = detect_format(source)
    texts = _READERS[kind](source, skipped)
    if source.max_documents:
        texts = itertools.islice(texts, source.max_documents)
    return (text for text in texts if text.strip())


def _read_text_files(source: SourceConfig, skipped: Skipped) -> Iterator[str]:
    path = Path(source.path).expanduser()
    if source.path != STDLIB and path.is_file():
        yield from _read_one_text(source, path)
        return
    for file in files_of(source):
        text = read_text(file)
        if text is None:
            skipped()
            continue
        yield from text_pieces(text, whole=source.path == STDLIB)


def _read_one_text(source: SourceConfig, path: Path) -> Iterator[str]:
    """A single file is never held as a whole, however large it is."""
    from sparseloco.data.corpus import cut_stream

    def chunks(file: IO[str]) -> Iterator[str]:
        while chunk := file.read(_CHUNK_CHARACTERS):
            if "\0" in chunk:
                raise ConfigError(f"data.path={source.path!r}: must be readable UTF-8 text; convert the file first")
            yield chunk

    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from cut_stream(chunks(file))
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.path={source.path!r}: must be readable UTF-8 text; convert the file first") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _read_jsonl(source: SourceConfig, skipped: Skipped) -> Iterator[str]:
    for path in files_of(source):
        try:
            with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        row = _json_object(path, number, line)
                        yield from _text_of(row, source, f"{path} line {number}", skipped)
        except (OSError, EOFError) as error:
            raise _unreadable(path, error) from error


def _json_object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"{path} line {number}: must be one JSON object ({error}); mend or remove the line"
        ) from error
    if not isinstance(row, dict):
        raise ConfigError(f"{path} line {number}: must be one JSON object; mend or remove the line")
    return row


def _read_parquet(source: SourceConfig, skipped: Skipped) -> Iterator[str]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise _missing_extra(source, "parquet", "data") from error
    for path in files_of(source):
        try:
            with parquet.ParquetFile(path) as file:
                names = file.schema_arrow.names
                if source.text_field not in names:
                    raise _missing_field(source, str(path), names)
                for batch in file.iter_batches(batch_size=ROW_BATCH, columns=[source.text_field]):
                    for value in batch.column(0).to_pylist():
                        yield from _text_of({source.text_field: value}, source, str(path), skipped)
        except (OSError, arrow.ArrowException) as error:
            raise _unreadable(path, error) from error


def _read_hf(source: SourceConfig, skipped: Skipped) -> Iterator[str]:
    rows = iter(_open_hf(source))
    where = f"{source.path} split {source.split}"
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # whatever a reader or the network raises, in one sentence
            raise _no_dataset(source, error) from error
        yield from _text_of(row, source, where, skipped)


def _open_hf(source: SourceConfig) -> Any:
    """A dataset of the hub, of a folder of data files, or one that ``save_to_disk`` wrote; rows are streamed."""
    try:
        import datasets
    except ImportError as error:
        raise _missing_extra(source, "hf", "hf") from error
    path = Path(source.path).expanduser()
    saved = any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))
    try:
        if saved:
            found = datasets.load_from_disk(str(path))
            return found[source.split] if isinstance(found, datasets.DatasetDict) else found
        return datasets.load_dataset(
            str(path) if path.exists() else source.path,
            source.subset or None,
            split=source.split,
            revision=source.revision or None,
            streaming=True,
        )
    except Exception as error:  # the library raises many kinds, all of which mean the same here
        raise _no_dataset(source, error) from error


def _text_of(row: dict[str, Any], source: SourceConfig, where: str, skipped: Skipped) -> Iterator[str]:
    if source.text_field not in row:
        raise _missing_field(source, where, list(row))
    value = row[source.text_field]
    if value is None:
        skipped()
    elif isinstance(value, str):
        yield clean_text(value)
    else:
        raise ConfigError(
            f"data.text_field={source.text_field!r}: must hold text, but in {where} it holds {type(value).__name__}; "
            "name another field"
        )


def _missing_field(source: SourceConfig, where: str, names: list[str]) -> ConfigError:
    there = ", ".join(map(repr, names)) or "no fields"
    return ConfigError(f"data.text_field={source.text_field!r}: is not in {where}, which has {there}; name one of them")


def _missing_extra(source: SourceConfig, kind: str, extra: str) -> ConfigError:
    return ConfigError(
        f'data.path={source.path!r}: format {kind!r} needs further packages; run: pip install "sparseloco[{extra}]"'
    )


def _no_dataset(source: SourceConfig, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return ConfigError(
        f"data.path={source.path!r}: cannot be read as a dataset, split {source.split!r} ({reason}); check name, "
        "subset, split and the network"
    )


def _unreadable(path: Path, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
    return ConfigError(f"{path}: cannot be read ({reason}); mend the file or take it out")


_READERS: dict[str, Callable[[SourceConfig, Skipped], Iterator[str]]] = {
    "text": _read_text_files,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "hf": _read_hf,
}
