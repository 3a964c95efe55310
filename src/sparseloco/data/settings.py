"""``[data]`` and ``[[data.sources]]``: which text, which tokenizer, and who sees what.

``settings`` re-exports these; they stand here because the rest of this package takes them as arguments.
"""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import Literal

import msgspec

from sparseloco.errors import ConfigError

Format = Literal["auto", "text", "jsonl", "parquet", "hf"]
FORMATS = ("auto", "text", "jsonl", "parquet", "hf")
PER_WORKER = ("iid", "source")


class SourceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[[data.sources]]``: one of several places that text comes from.

    Attributes:
        path: A file, a folder, "stdlib", or for format "hf" also the name of a dataset on the hub.
        name: Its name in tables and errors; the last part of the path if it is left out.
        format: "text", "jsonl", "parquet" or "hf"; "auto" tells the first three apart by the names of the files.
        text_field: Field or column that holds the text, for all formats but "text".
        weight: Share of the training windows that come from here, relative to the other sources; 0 at all of them
            means each source's share of the text.
        subset: Name of a configuration of the dataset, for "hf".
        split: Split of the dataset that is read, for "hf".
        revision: Commit or tag of a dataset on the hub, for "hf"; the newest if it is left out.
        max_documents: Documents that are read at most; 0 for all.
    """

    path: str
    name: str = ""
    format: Format = "auto"
    text_field: str = "text"
    weight: float = 0.0
    subset: str = ""
    split: str = "train"
    revision: str = ""
    max_documents: int = 0

    def __post_init__(self) -> None:
        check_source("data.sources", self.path, self.format, self.text_field)
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ConfigError(
                f"data.sources.weight={self.weight!r}: must not be negative; use 0 at all sources for their share of "
                "the text"
            )
        if self.max_documents < 0:
            raise ConfigError(f"data.sources.max_documents={self.max_documents}: must be at least 0; use 0 for all")
        for name in ("subset", "revision"):
            if getattr(self, name) and self.format != "hf":
                raise ConfigError(
                    f"data.sources.{name}={getattr(self, name)!r}: is for format='hf' only; set the format or leave "
                    "it out"
                )

    @property
    def label(self) -> str:
        """The name, or the last part of the path."""
        return self.name or PurePath(self.path).name or self.path


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[data]``: the text.

    Attributes:
        path: A text file, a directory of text files, or "stdlib" for the standard library's own source; also JSONL
            and Parquet, see ``format``. Stands alone: with ``[[data.sources]]`` it must be left out.
        format: "text", "jsonl", "parquet" or "hf" (datasets); "auto" tells the first three apart by file names.
        text_field: Field or column that holds the text, for all formats but "text".
        sources: ``[[data.sources]]``: several places that text comes from.
        per_worker: "iid": every worker sees all sources alike; "source": the sources are dealt out to the workers.
        tokenizer: A ``tokenizer.json``, a folder with one, a SentencePiece model or a name on the hub; the model's
            vocabulary is then this tokenizer's. If left out, one is trained on the text.
        end_token: The token of ``tokenizer`` that ends a document; found by its usual names if left out.
        vocab_size: Tokens of the tokenizer that is trained on the text; a tiny corpus may give fewer.
        validation_fraction: Share of the text for validation.
        test_fraction: Share of the text for the held-out loss.
    """

    path: str = "stdlib"
    format: Format = "auto"
    text_field: str = "text"
    sources: tuple[SourceConfig, ...] = ()
    per_worker: Literal["iid", "source"] = "iid"
    tokenizer: str = ""
    end_token: str = ""
    vocab_size: int = 1024
    validation_fraction: float = 0.02
    test_fraction: float = 0.02

    def __post_init__(self) -> None:
        check_source("data", self.path, self.format, self.text_field)
        if self.vocab_size < 257:
            raise ConfigError(
                f"data.vocab_size={self.vocab_size}: must be at least 257 (256 bytes and the end token); use 1024"
            )
        self._check_fractions()
        self._check_sources()
        if self.per_worker not in PER_WORKER:
            raise ConfigError(
                f"data.per_worker={self.per_worker!r}: must be one of {', '.join(PER_WORKER)}; choose one of them"
            )
        if self.per_worker == "source" and len(self.sources) < 2:
            raise ConfigError(
                "data.per_worker='source': needs at least two [[data.sources]] to deal out; add one or use 'iid'"
            )
        if self.end_token and not self.tokenizer:
            raise ConfigError(
                f"data.end_token={self.end_token!r}: is for a tokenizer that is given; set data.tokenizer or leave "
                "this out"
            )

    @property
    def all_sources(self) -> tuple[SourceConfig, ...]:
        """The sources, of which a lone ``path`` is one."""
        return self.sources or (SourceConfig(path=self.path, format=self.format, text_field=self.text_field),)

    def _check_fractions(self) -> None:
        for name in ("validation_fraction", "test_fraction"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise ConfigError(f"data.{name}={value!r}: must be above 0 and below 1; use 0.02")
        if self.validation_fraction + self.test_fraction >= 1:
            raise ConfigError(
                f"data.validation_fraction={self.validation_fraction!r}: must be below 1 - test_fraction = "
                f"{1 - self.test_fraction:g}, or nothing is left to train on; use 0.02 for both"
            )

    def _check_sources(self) -> None:
        if self.sources and self.path != "stdlib":
            raise ConfigError(
                f"data.path={self.path!r}: must not stand beside [[data.sources]]; make it one of the sources"
            )
        labels = [source.label for source in self.sources]
        for label in labels:
            if labels.count(label) > 1:
                raise ConfigError(f"data.sources.name={label!r}: must differ between sources; name each of them")
        weights = [source.weight for source in self.sources]
        if any(weights) and not all(weights):
            missing = labels[weights.index(0)]
            raise ConfigError(
                f"data.sources: {missing!r} has no weight but others have; give every source a weight or none"
            )


def check_source(where: str, path: str, format: str, text_field: str) -> None:
    """Refuse what no source can have."""
    if not path:
        raise ConfigError(f"{where}.path='': must name a text file or directory, or 'stdlib'; give a path")
    if format not in FORMATS:
        raise ConfigError(f"{where}.format={format!r}: must be one of {', '.join(FORMATS)}; choose one of them")
    if not text_field:
        raise ConfigError(f"{where}.text_field='': must name a field; use \"text\"")
