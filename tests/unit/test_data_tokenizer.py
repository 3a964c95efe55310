"""Tokenizers that are given: files, folders, SentencePiece, the hub; and the sentences for what is none."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sparseloco.data import describe_dataset, open_dataset, open_tokenizer, vocabulary_size
from sparseloco.data.settings import DataConfig
from sparseloco.data.tokens import token_byte_lengths, train_tokenizer
from sparseloco.errors import ConfigError

TEXT = [f"Tale {n} of naïve cats \U0001f642: {'and then ' * (n % 7)}{n * n}.\n" for n in range(400)]


def write_byte_level(path: Path) -> Path:
    """A tokenizer as GPT-2's: byte level, the end token at the end of the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=299, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(["<|endoftext|>"])
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return path


def write_sentencepiece(path: Path, **settings: Any) -> Any:
    spm = pytest.importorskip("sentencepiece", reason="needs the extra `sentencepiece`")
    pytest.importorskip("google.protobuf", reason="needs the extra `sentencepiece`")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT), model_writer=file, byte_fallback=True, minloglevel=2, **settings
        )
    return spm.SentencePieceProcessor(model_file=str(path))


def refusal(name: Path | str, end_token: str = "") -> str:
    with pytest.raises(ConfigError) as error:
        open_tokenizer(str(name), end_token)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_file_decides_the_vocabulary_and_the_end(tmp_path: Path) -> None:
    path = write_byte_level(tmp_path / "tokenizer.json")
    (tmp_path / "tales.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXT))
    config = DataConfig(path=str(tmp_path / "tales.jsonl"), tokenizer=str(path), vocab_size=4096)
    dataset = open_dataset(config, tmp_path / "cache")
    assert vocabulary_size(config) == dataset.vocab_size == 300
    assert dataset.end_token_id == 299
    assert dataset.split("test").tokens[-1] == 299
    for split in dataset.splits.values():
        assert int(dataset.token_bytes[split.tokens.tolist()].sum()) == split.num_bytes
        texts = dataset.tokenizer.decode(split.tokens.tolist(), skip_special_tokens=False).split("<|endoftext|>")
        assert set(texts[:-1]) <= set(TEXT)
    assert describe_dataset(dataset)["tokenizer"] == {
        "name": str(path), "vocab_size": 300, "end_token": "<|endoftext|>", "end_token_id": 299,
    }  # fmt: skip


def test_same_text_with_another_tokenizer_is_another_entry(tmp_path: Path) -> None:
    path = write_byte_level(tmp_path / "tokenizer.json")
    (tmp_path / "tales.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXT))
    settings = {"path": str(tmp_path / "tales.jsonl"), "vocab_size": 300}
    ends = [{}, {"tokenizer": str(path)}, {"tokenizer": str(path), "end_token": "!"}]
    entries = {open_dataset(DataConfig(**settings, **end), tmp_path / "cache").entry for end in ends}
    assert len(entries) == 3


def test_folder_says_its_end_token(tmp_path: Path) -> None:
    write_byte_level(tmp_path / "model" / "tokenizer.json")
    for said in ("!", {"content": "!"}):
        (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"eos_token": said}))
        assert open_tokenizer(str(tmp_path / "model")).end_token == "!"
    assert open_tokenizer(str(tmp_path / "model"), "?").end_token == "?"
    (tmp_path / "model" / "tokenizer_config.json").write_text("nonsense")
    assert open_tokenizer(str(tmp_path / "model")).end_token == "<|endoftext|>"


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sentencepiece_gives_the_tokens_of_sentencepiece(tmp_path: Path, kind: str) -> None:
    original = write_sentencepiece(tmp_path / "spm" / "tokenizer.model", model_type=kind, vocab_size=400)
    for place in (tmp_path / "spm", tmp_path / "spm" / "tokenizer.model"):
        given = open_tokenizer(str(place))
        assert (given.tokenizer.get_vocab_size(), given.end_token) == (400, "</s>")
        for text in (*TEXT[:50], "unseen \u4f60\u597d", "a  b\n\tc "):
            assert given.tokenizer.encode(text, add_special_tokens=False).ids == original.encode(text)


def test_bytes_of_tokens_that_are_not_byte_level(tmp_path: Path) -> None:
    write_sentencepiece(tmp_path / "a.model", vocab_size=400, normalization_rule_name="identity")
    tokenizer = open_tokenizer(str(tmp_path / "a.model")).tokenizer
    lengths = token_byte_lengths(tokenizer)
    assert int(lengths[tokenizer.token_to_id("</s>")]) == 0
    assert int(lengths[tokenizer.token_to_id("<0x41>")]) == 1
    text = "naïve cats \U0001f642 and then"
    # The mark in front of the first word is no byte of the text.
    assert int(lengths[tokenizer.encode(text, add_special_tokens=False).ids].sum()) == len(text.encode()) + 1


def test_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_byte_level(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "!"}')

    def fetch(name: str, file: str) -> str:
        if name != "some/model":
            raise OSError(f"{name} is not\na repository")
        return str(path.parent / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    given = open_tokenizer("some/model")
    assert (given.name, given.end_token, given.tokenizer.get_vocab_size()) == ("some/model", "!", 300)
    assert refusal("other/model") == (
        "data.tokenizer='other/model': must be an existing file or folder, or a name on the hub that can be reached "
        "(other/model is not a repository); name another one"
    )


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    missing = tmp_path / "missing.json"
    assert refusal(missing) == (
        f"data.tokenizer={str(missing)!r}: must be an existing file or folder, or a name on the hub; check it"
    )
    (tmp_path / "wrong.json").write_text('{"a": 1}')
    text = refusal(tmp_path / "wrong.json")
    assert text.startswith(
        f"data.tokenizer={str(tmp_path / 'wrong.json')!r}: must be a tokenizer.json of the tokenizers"
    )
    assert text.endswith("; name another one")
    assert "must hold tokenizer.json or tokenizer.model" in refusal(tmp_path)
    path = write_byte_level(tmp_path / "tokenizer.json")
    assert refusal(path, "<nope>") == (
        f"data.end_token='<nope>': must be a token of {str(path)!r}, which has 300 others; name one of those"
    )


def test_no_token_ends_a_document(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    path = tmp_path / "letters.json"
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(path))
    assert refusal(path) == (
        f"data.tokenizer={str(path)!r}: has no token of a usual name that ends a document; name one with data.end_token"
    )


def test_wrong_and_missing_sentencepiece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentencepiece", reason="needs the extra `sentencepiece`")
    path = tmp_path / "x.model"
    path.write_bytes(b"no model at all")
    assert refusal(path).startswith(f"data.tokenizer={str(path)!r}: must be a SentencePiece model (")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    assert refusal(path) == (
        f"data.tokenizer={str(path)!r}: SentencePiece models need further packages; run: pip install "
        '"sparseloco[sentencepiece]"'
    )


def test_much_text_is_sampled_to_train_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr("sparseloco.data.tokens.MOST_TRAINED_BYTES", 4000)
    train_tokenizer(TEXT, 300, lambda _, done, total: seen.append(total))
    assert 2000 < seen[-1] < 6000


def test_settings_for_one_model_do_not_cut_documents_off(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    path = write_byte_level(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(path))
    given = open_tokenizer(str(path))
    assert given.tokenizer.decode(given.tokenizer.encode(TEXT[6]).ids) == TEXT[6]


def test_tokenizer_of_other_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "Tale": 1, "</s>": 7}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    (tmp_path / "tales.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXT))
    config = DataConfig(path=str(tmp_path / "tales.jsonl"), tokenizer=str(tmp_path / "words.json"))
    assert vocabulary_size(config) == 8  # numbers are left out, and the model needs a row for each up to the last
    with pytest.raises(ConfigError) as error:
        open_dataset(config, tmp_path / "cache")
    assert str(error.value).startswith(f"data.tokenizer={str(tmp_path / 'words.json')!r}: does not know 9")
    assert str(error.value).endswith("made for such text, or leave it out to train one")
