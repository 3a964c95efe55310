"""Tokens: any text survives, every byte is counted, and checks name the numbers in conflict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseloco.data import END_TOKEN, END_TOKEN_ID, Dataset, TokenSplit, check_vocabulary, check_windows
from sparseloco.data.tokens import (
    load_tokenizer,
    token_byte_lengths,
    token_dtype,
    train_tokenizer,
    write_tokens,
)
from sparseloco.errors import ConfigError

TOKENIZER = train_tokenizer(["the cat and the hat and the bat\n" * 20, "naïve café"], 280)


def dataset(**num_tokens: int) -> Dataset:
    splits = {name: TokenSplit(name, np.zeros(n, np.uint16), n) for name, n in num_tokens.items()}
    return Dataset(300, TOKENIZER, "tiny.txt", "0" * 64, splits, torch.ones(300))


@given(st.text())
def test_any_text_survives_and_its_bytes_are_counted(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert int(token_byte_lengths(TOKENIZER)[ids].sum()) == len(text.encode())


def test_end_token_spelled_out_is_text(tmp_path: Path) -> None:
    assert TOKENIZER.token_to_id(END_TOKEN) == END_TOKEN_ID
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    again = load_tokenizer(tmp_path / "tokenizer.json")
    for tokenizer in (TOKENIZER, again):
        assert END_TOKEN_ID not in tokenizer.encode(f"a{END_TOKEN}b").ids
    assert token_byte_lengths(again)[END_TOKEN_ID] == 0


def test_written_tokens_are_documents_with_an_end_token_behind_each(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    texts = ["the cat", "", "Ünïcode\n"]
    file = tmp_path / "x.bin"
    counts = write_tokens(file, TOKENIZER, texts, lambda *event: seen.append(event))
    ids = np.fromfile(file, dtype=token_dtype(280)).tolist()
    assert ids == [token for text in texts for token in [*TOKENIZER.encode(text).ids, END_TOKEN_ID]]
    assert counts.sum() == len(ids)
    assert seen == [("tokens", 7, 17), ("tokens", 7, 17), ("tokens", 17, 17)]


def test_training_is_the_same_every_time_and_may_end_early() -> None:
    texts = ["abc abc abd"] * 3
    first, second = train_tokenizer(texts, 400), train_tokenizer(texts, 400)
    assert first.to_str() == second.to_str()
    assert 257 < first.get_vocab_size() < 400


def test_width_of_tokens() -> None:
    assert (token_dtype(65_536).itemsize, token_dtype(65_537).itemsize) == (2, 4)


def test_vocabulary_without_room_for_the_bytes() -> None:
    with pytest.raises(ConfigError) as error:
        train_tokenizer(["x"], 256)
    assert str(error.value) == ("data.vocab_size=256: must be at least 257 (256 bytes and the end token); use 1024")


def test_vocabulary_mismatch() -> None:
    check_vocabulary(300, dataset(train=1))
    with pytest.raises(ConfigError) as error:
        check_vocabulary(1024, dataset(train=1))
    assert str(error.value) == (
        "vocab_size=1024: the model's vocabulary must be the tokenizer's, which has 300 tokens on "
        "'tiny.txt'; build the model with vocab_size=300"
    )


def test_splits_that_do_not_fill_a_window() -> None:
    check_windows(dataset(train=500, validation=129, test=129), 128)
    with pytest.raises(ConfigError) as error:
        check_windows(dataset(train=500, validation=129, test=128), 128)
    assert str(error.value) == (
        "data='tiny.txt': each split needs at least sequence_length + 1 = 129 tokens, but there are only "
        "train 500, validation 129, test 128; give more text or a smaller train.sequence_length"
    )


def test_import_of_data_and_model_loads_no_tokenizer() -> None:
    probe = (
        "import sys, sparseloco.data, sparseloco.model;print({'tokenizers', 'transformers', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
