"""What prepared text holds, as plain figures."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparseloco.data.cache import read_manifest
from sparseloco.data.sampler import permute
from sparseloco.data.tokens import SPLITS, Dataset
from sparseloco.errors import ConfigError

_SAMPLE_TOKENS = 64


def describe_dataset(dataset: Dataset, num_samples: int = 0) -> dict[str, Any]:
    """Token counts by split and source, bytes a token, hashes, and pieces of the train split as text.

    Args:
        dataset: A dataset of the cache.
        num_samples: Pieces of text, from places that are the same every time.

    Raises:
        ConfigError: if the dataset was made by hand and is in no cache.
    """
    if dataset.entry is None:
        raise ConfigError("dataset=made by hand: must be in the cache; make it with open_dataset or prepare")
    manifest = read_manifest(dataset.entry)
    return {
        "corpus": dataset.corpus_name,
        "corpus_sha256": dataset.corpus_sha256,
        "num_documents": sum(source.num_documents for source in dataset.sources),
        "num_skipped": manifest["corpus"]["num_skipped"],
        "num_duplicates": manifest["corpus"]["num_duplicates"],
        "tokenizer": manifest["tokenizer"],
        "splits": {name: _sizes(split.num_tokens, split.num_bytes) for name, split in dataset.splits.items()},
        "sources": [
            {
                "name": source.name,
                "weight": source.weight,
                "num_documents": source.num_documents,
                "splits": {name: _sizes(source.num_tokens[name], source.num_bytes[name]) for name in SPLITS},
            }
            for source in dataset.sources
        ],
        "entry": str(dataset.entry),
        "files": manifest["files"],
        "samples": _samples(dataset, num_samples),
    }


def _sizes(num_tokens: int, num_bytes: int) -> dict[str, Any]:
    return {"num_tokens": num_tokens, "num_bytes": num_bytes, "bytes_per_token": num_bytes / max(1, num_tokens)}


def _samples(dataset: Dataset, count: int) -> list[str]:
    """Decoded windows of the train split; end tokens are spelled out."""
    tokens = dataset.split("train").tokens
    num_windows = max(1, len(tokens) // _SAMPLE_TOKENS)
    windows = permute(np.arange(min(count, num_windows)), num_windows, seed=0, epoch=0)
    pieces = (tokens[w * _SAMPLE_TOKENS : (w + 1) * _SAMPLE_TOKENS].tolist() for w in windows.tolist())
    return [dataset.tokenizer.decode(piece, skip_special_tokens=False) for piece in pieces]
