"""Tokenizers that are given instead of trained: ``tokenizer.json``, SentencePiece models, names on the hub.

All become the same type as a trained one, so nothing behind this module knows where a tokenizer is from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sparseloco.data.tokens import as_plain_text
from sparseloco.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_TOKENS = ("<|end|>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>", "[SEP]")
"""Usual names of the token that ends a document, in the order in which they are tried."""
_NUM_CHECKED = 50
_MOST_UNKNOWN = 0.1
_PROBES = ("The quick brown fox, 12 times.", "  two  spaces\n\tand a tab\n", "na\u00efve \u4f60\u597d \U0001f642")


@dataclass(frozen=True)
class GivenTokenizer:
    """A tokenizer and the token that ends a document.

    Attributes:
        name: What the settings call it.
        tokenizer: The tokenizer.
        end_token: Name of the token.
        end_token_id: Its number.
    """

    name: str
    tokenizer: Tokenizer
    end_token: str
    end_token_id: int


def open_tokenizer(name: str, end_token: str = "") -> GivenTokenizer:
    """Load a tokenizer from a file, a folder or the hub.

    Args:
        name: ``tokenizer.json`` or another file of that kind, a ``.model`` file of SentencePiece, a folder that holds
            either, or a name on the hub.
        end_token: Token that ends a document; "" looks for what its settings say and for the usual names.

    Raises:
        ConfigError: if there is none, it cannot be read, or no token ends a document.
    """
    path = Path(name).expanduser()
    settings: dict[str, Any] = {}
    if path.is_dir():
        settings = _settings_in(path)
        path = next((path / file for file in ("tokenizer.json", "tokenizer.model") if (path / file).is_file()), path)
        if path.is_dir():
            raise ConfigError(
                f"data.tokenizer={name!r}: must hold tokenizer.json or tokenizer.model; name another folder or a file"
            )
    if path.is_file():
        tokenizer = _from_sentencepiece(name, path) if path.suffix == ".model" else _from_file(name, path)
    elif path.suffix in (".json", ".model") or name.count("/") > 1 or name.startswith((".", "~")):
        raise ConfigError(
            f"data.tokenizer={name!r}: must be an existing file or folder, or a name on the hub; check it"
        )
    else:
        tokenizer, settings = _from_hub(name)
    # Some files carry the length of one model's inputs, which would cut documents off.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return _with_end(name, as_plain_text(tokenizer), end_token, settings)


def check_knows(given: GivenTokenizer, texts: Sequence[str]) -> None:
    """Refuse a tokenizer that was made for other text.

    Raises:
        ConfigError: if it does not know a tenth or more of the tokens of the first texts.
    """
    model = json.loads(given.tokenizer.to_str())["model"]
    unknown = model.get("unk_id")
    if unknown is None and model.get("unk_token"):
        unknown = given.tokenizer.token_to_id(model["unk_token"])
    batch = given.tokenizer.encode_batch_fast(list(texts[:_NUM_CHECKED]), add_special_tokens=False)
    tokens = [token for encoding in batch for token in encoding.ids]
    fraction = sum(token == unknown for token in tokens) / max(1, len(tokens))
    if fraction >= _MOST_UNKNOWN:
        raise ConfigError(
            f"data.tokenizer={given.name!r}: does not know {fraction:.0%} of the tokens of this text; use one that was "
            "made for such text, or leave it out to train one"
        )


def _with_end(name: str, tokenizer: Tokenizer, asked: str, settings: dict[str, Any]) -> GivenTokenizer:
    said = settings.get("eos_token")
    said = said.get("content", "") if isinstance(said, dict) else said
    for token in [asked] if asked else [said, *END_TOKENS]:
        number = tokenizer.token_to_id(token) if token else None
        if token and number is not None:
            return GivenTokenizer(name, tokenizer, token, number)
    if asked:
        raise ConfigError(
            f"data.end_token={asked!r}: must be a token of {name!r}, which has {tokenizer.get_vocab_size()} others; "
            "name one of those"
        )
    raise ConfigError(
        f"data.tokenizer={name!r}: has no token of a usual name that ends a document; name one with data.end_token"
    )


def _settings_in(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _from_file(name: str, path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  # the library raises bare exceptions
        _refuse(name, "must be a tokenizer.json of the tokenizers library", error)


def _from_hub(name: str) -> tuple[Tokenizer, dict[str, Any]]:
    from huggingface_hub import hf_hub_download

    try:
        tokenizer = _from_file(name, Path(hf_hub_download(name, "tokenizer.json")))
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  # not there, not reachable, not allowed: one sentence for all
        _refuse(name, "must be an existing file or folder, or a name on the hub that can be reached", error)
    try:
        return tokenizer, _settings_in(Path(hf_hub_download(name, "tokenizer_config.json")).parent)
    except Exception:  # noqa: BLE001  # optional: it only says which token ends a document
        return tokenizer, {}


def _from_sentencepiece(name: str, path: Path) -> Tokenizer:
    """A SentencePiece model as a tokenizer of the usual type, checked against SentencePiece itself."""
    try:
        from sentencepiece import SentencePieceProcessor
        from sentencepiece import sentencepiece_model_pb2 as pieces
        from transformers.convert_slow_tokenizer import SpmConverter

        convert = SpmConverter.build_tokenizer_from_spm_proto
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"data.tokenizer={name!r}: SentencePiece models need further packages; run: "
            'pip install "sparseloco[sentencepiece]"'
        ) from error
    raw = path.read_bytes()
    try:
        original = SentencePieceProcessor(model_proto=raw)
        model: Any = vars(pieces)["ModelProto"].FromString(raw)  # made at run time, so unknown to type checkers
        is_unigram = model.trainer_spec.model_type == model.trainer_spec.UNIGRAM
        if is_unigram:
            vocabulary: Any = [(piece.piece, piece.score) for piece in model.pieces]
        else:
            vocabulary = {piece.piece: number for number, piece in enumerate(model.pieces)}
        # "legacy" puts the mark of a word in front of every text, also where leading spaces were taken off.
        tokenizer = convert(model, vocabulary, legacy=True)
    except Exception as error:  # noqa: BLE001  # bytes of any kind come in here
        _refuse(name, "must be a SentencePiece model", error)
    tokenizer.add_special_tokens([p.piece for p in model.pieces if p.type == model.SentencePiece.CONTROL])
    _check_same(name, tokenizer, original, _PROBES)
    return tokenizer


def _check_same(name: str, tokenizer: Tokenizer, original: Any, texts: Sequence[str]) -> None:
    for text in texts:
        if tokenizer.encode(text, add_special_tokens=False).ids != original.encode(text):
            raise ConfigError(
                f"data.tokenizer={name!r}: gives other tokens for {text!r} after it was converted from SentencePiece; "
                "use the tokenizer.json of the same model"
            )


def _refuse(name: str, rule: str, error: Exception) -> NoReturn:
    reason = " ".join(str(error).split())[:160]
    raise ConfigError(f"data.tokenizer={name!r}: {rule} ({reason}); name another one") from error
