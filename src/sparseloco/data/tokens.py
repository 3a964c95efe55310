"""The tokenizer and the tokens: byte-level BPE, and splits of a corpus as memory-mapped arrays.

``tokenizers`` is imported only inside functions. Knows nothing of where the files are kept.
"""

from __future__ import annotations

import array
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sparseloco.data.documents import Texts
from sparseloco.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPLITS = ("train", "validation", "test")
END_TOKEN = "<|end|>"
END_TOKEN_ID = 0
MIN_VOCAB_SIZE = 257
MOST_TRAINED_BYTES = 1 << 30
_BATCH_CHARACTERS = 1 << 20
_BYTE_NAME = re.compile("<0x[0-9A-F]{2}>")

Progress = Callable[[str, int, int], None]
"""Called as ``progress(stage, done, in_all)`` in bytes of text; stages are "reading" (where ``in_all`` is 0, for not
known), "tokenizer" and "tokens"."""


@dataclass(frozen=True)
class TokenSplit:
    """One split as one row of tokens, an end token behind each document.

    Attributes:
        name: "train", "validation" or "test".
        tokens: One-dimensional uint16 or uint32 array, memory-mapped.
        num_bytes: UTF-8 bytes that the tokens stand for; end tokens stand for none.
    """

    name: str
    tokens: np.ndarray
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens, end tokens included."""
        return len(self.tokens)


@dataclass(frozen=True)
class SourceTokens:
    """What one source gave to a dataset.

    Attributes:
        name: Name of the source.
        weight: Share of the training windows relative to the others; 0 at all of them for their share of the text.
        train: Its part of the train split.
        num_documents: Documents, in all splits.
        num_tokens: Tokens by split.
        num_bytes: UTF-8 bytes by split.
    """

    name: str
    weight: float
    train: TokenSplit
    num_documents: int
    num_tokens: Mapping[str, int]
    num_bytes: Mapping[str, int]


@dataclass(frozen=True)
class Dataset:
    """A corpus as tokens.

    Attributes:
        vocab_size: Size of the tokenizer's vocabulary; smaller than was asked if the corpus is tiny.
        tokenizer: The byte-level BPE that was trained on the train split, or the one that was given.
        corpus_name: Short name for reports.
        corpus_sha256: Hash of the corpus' text.
        splits: The splits by name.
        token_bytes: int64 ``[vocab_size]``, UTF-8 bytes that each token stands for, so that bits per byte of
            any windows is ``sum(loss) / token_bytes[targets].sum() / ln 2``. The end token stands for none.
        end_token_id: Token that ends every document.
        sources: Where the text comes from; empty for a dataset that was made by hand.
        entry: Folder of the cache that holds it, with ``tokenizer.json`` and ``manifest.json``.
    """

    vocab_size: int
    tokenizer: Tokenizer
    corpus_name: str
    corpus_sha256: str
    splits: Mapping[str, TokenSplit]
    token_bytes: Tensor
    end_token_id: int = END_TOKEN_ID
    sources: tuple[SourceTokens, ...] = ()
    entry: Path | None = None

    @property
    def end_token(self) -> str:
        """Text of the token that ends every document."""
        token = self.tokenizer.id_to_token(self.end_token_id)
        assert token is not None
        return token

    def split(self, name: str) -> TokenSplit:
        """The split "train", "validation" or "test"."""
        return self.splits[name]


def check_vocabulary(model_vocab_size: int, dataset: Dataset) -> None:
    """Refuse a model whose vocabulary is not the tokenizer's.

    Raises:
        ConfigError: if the sizes differ.
    """
    if model_vocab_size != dataset.vocab_size:
        raise ConfigError(
            f"vocab_size={model_vocab_size}: the model's vocabulary must be the tokenizer's, which has "
            f"{dataset.vocab_size} tokens on {dataset.corpus_name!r}; build the model with "
            f"vocab_size={dataset.vocab_size}"
        )


def check_windows(dataset: Dataset, sequence_length: int) -> None:
    """Refuse a dataset in which some split does not fill one window of ``sequence_length + 1`` tokens.

    Raises:
        ConfigError: if a split is too short; it says how many tokens there are and how many are needed.
    """
    for split in dataset.splits.values():
        if split.num_tokens < sequence_length + 1:
            sizes = ", ".join(f"{other.name} {other.num_tokens}" for other in dataset.splits.values())
            raise ConfigError(
                f"data={dataset.corpus_name!r}: each split needs at least sequence_length + 1 = "
                f"{sequence_length + 1} tokens, but there are only {sizes}; "
                "give more text or a smaller train.sequence_length"
            )


def train_tokenizer(texts: Sequence[str], vocab_size: int, progress: Progress | None = None) -> Tokenizer:
    """Train a byte-level BPE; any text survives encode and decode unchanged.

    Of more than 1 GiB of text, evenly spaced documents of about so many bytes are taken.

    Args:
        texts: Documents of the train split.
        vocab_size: 256 bytes, the end token (id 0) and merges; a tiny corpus may have too few merges to fill
            it.
        progress: Told how much text has been read.

    Raises:
        ConfigError: if ``vocab_size`` has no room for the bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"data.vocab_size={vocab_size}: must be at least {MIN_VOCAB_SIZE} (256 bytes and the end token); use 1024"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_watched(_sample(texts), "tokenizer", progress), trainer)
    return as_plain_text(tokenizer)


def load_tokenizer(file: Path) -> Tokenizer:
    """Read a tokenizer that ``Tokenizer.save`` wrote."""
    from tokenizers import Tokenizer

    return as_plain_text(Tokenizer.from_file(str(file)))


def vocabulary_of(tokenizer: Tokenizer) -> int:
    """One more than the largest token, which is the number of tokens where none is left out."""
    return max(tokenizer.get_vocab_size(), 1 + max(tokenizer.get_vocab().values(), default=0))


def token_byte_lengths(tokenizer: Tokenizer) -> Tensor:
    """int64 ``[vocab_size]``: UTF-8 bytes that each token stands for, 0 for tokens that are no text.

    Exact for byte-level tokenizers. For others it counts a space for each mark of one, and what a normalizer has
    changed counts as it is written in the vocabulary.
    """
    added = tokenizer.get_added_tokens_decoder()
    is_byte_level = '"ByteLevel"' in tokenizer.to_str()
    lengths: list[int] = []
    for token in range(vocabulary_of(tokenizer)):
        name = tokenizer.id_to_token(token) or ""
        if token in added:
            lengths.append(0 if added[token].special else len(name.encode()))
        elif is_byte_level:
            # The byte-level alphabet writes each byte as one character.
            lengths.append(len(name))
        elif _BYTE_NAME.fullmatch(name):
            lengths.append(1)
        else:
            lengths.append(len(name.replace("\u2581", " ").removeprefix("##").encode()))
    return torch.tensor(lengths, dtype=torch.int64)


def token_dtype(vocab_size: int) -> np.dtype:
    """Smallest little-endian type that holds every token."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def write_tokens(
    file: Path,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    progress: Progress | None = None,
    *,
    end_token_id: int = END_TOKEN_ID,
) -> np.ndarray:
    """Encode documents into a file of raw tokens, an end token behind each; all cores encode.

    Returns:
        int64 ``[len(texts)]``: the tokens of each document, its end token counted.
    """
    dtype, lengths = token_dtype(vocabulary_of(tokenizer)), array.array("q")
    with file.open("wb") as stream:
        for batch in _batches(_watched(texts, "tokens", progress)):
            for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                ids = np.array([*encoding.ids, end_token_id], dtype=dtype)
                stream.write(ids.tobytes())
                lengths.append(len(ids))
    return np.array(lengths, dtype=np.int64)


def as_plain_text(tokenizer: Tokenizer) -> Tokenizer:
    """Let a tokenizer treat the names of special tokens as text."""
    # A document that spells the end token out is text like any other; the file does not store this setting.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Batches of about a million characters: enough for the encoder's threads, little memory."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _watched(texts: Sequence[str], stage: str, progress: Progress | None) -> Iterator[str]:
    if progress is None:
        yield from texts
        return
    total, done = num_bytes_of(texts), 0
    for text in texts:
        yield text
        done += len(text.encode())
        progress(stage, done, total)


def num_bytes_of(texts: Sequence[str]) -> int:
    """UTF-8 bytes of some texts."""
    return texts.num_bytes if isinstance(texts, Texts) else sum(len(text.encode()) for text in texts)


def _sample(texts: Sequence[str]) -> Sequence[str]:
    """All texts, or evenly spaced ones where there is more text than a tokenizer needs to be trained on."""
    return texts[:: -(-num_bytes_of(texts) // MOST_TRAINED_BYTES) or 1]
