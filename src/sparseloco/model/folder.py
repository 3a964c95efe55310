"""A trained model as a folder: written whole or not at all, found again, and read.

The folder is what ``save_pretrained`` writes, with the tokenizer beside the weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from sparseloco.errors import ConfigError
from sparseloco.model.causal import load_pretrained, quiet, reason_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

MODEL_FOLDER = "model"
"""Name of the folder inside a run folder."""


def save_model(model: nn.Module, tokenizer: Tokenizer, end_token: str, folder: Path) -> None:
    """Write a model and its tokenizer, so that ``transformers`` loads both; replaces an earlier folder as a whole.

    Tied weights are written once. The files ask for a cache of keys and values when text is generated, and end it
    with ``end_token``.

    Args:
        model: A model of ``transformers``.
        tokenizer: The tokenizer of its text.
        end_token: Its token between documents.
        folder: Where to; folders above are made.

    Raises:
        ConfigError: if the folder cannot be written; what was there stays.
    """
    from safetensors import SafetensorError
    from transformers import PreTrainedTokenizerFast

    source: Any = model
    longest = getattr(source.config, "max_position_embeddings", None)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end_token,
        clean_up_tokenization_spaces=False,
        **({"model_max_length": longest} if isinstance(longest, int) else {}),
    )
    end = tokenizer.token_to_id(end_token)

    with new_folder(folder) as place, quiet():
        try:
            source.save_pretrained(place)
        except SafetensorError as error:  # what its own writer makes of an OSError
            raise OSError(str(error)) from error
        wrapped.save_pretrained(place)
        for name in ("config.json", "generation_config.json"):
            _mend_settings(place / name, end, source.config.vocab_size)
        _add_attention(place / "config.json", source.config)
        is_kept = _reads_back(place, tokenizer)
    if not is_kept:
        warnings.warn(
            f"{MODEL_FOLDER}/: AutoTokenizer of transformers reads every tokenizer of {source.config.model_type} "
            "models with rules of its own; load this one with PreTrainedTokenizerFast",
            stacklevel=2,
        )


def export_model(source: Path, folder: Path) -> list[str]:
    """Copy the folder of a model to another place, whole or not at all.

    Returns:
        Names of the files.

    Raises:
        ConfigError: if the place holds something else, or cannot be written.
    """
    if folder.resolve() == source.resolve() or (folder.exists() and not _may_replace(folder)):
        raise ConfigError(f"--out {str(folder)!r}: must be new, empty or hold an earlier export; choose another")
    with new_folder(folder) as place:
        shutil.copytree(source, place, dirs_exist_ok=True)
    return sorted(path.name for path in folder.iterdir())


def find_model(place: Path) -> Path:
    """The folder of the model in a run folder, or the folder itself if it is one of a model.

    Raises:
        ConfigError: if there is no model; it says what the folder is.
    """
    if (place / MODEL_FOLDER / "config.json").is_file():
        return place / MODEL_FOLDER
    if (place / "config.json").is_file():
        return place
    if (place / "config.toml").is_file():
        raise ConfigError(
            f"{str(place)!r}: must hold {MODEL_FOLDER}/, which a finished run leaves there; let the run finish, "
            "without --no-model in train and with --models in compare"
        )
    if runs := sorted(path.parent.parent.name for path in place.glob(f"*/{MODEL_FOLDER}/config.json")):
        raise ConfigError(f"{str(place)!r}: must be one run, but holds {', '.join(runs)}; name {place / runs[0]}")
    raise ConfigError(f"{str(place)!r}: must be a run folder or the folder of a model; check the path")


def load_model(folder: Path) -> nn.Module:
    """The model of a folder, in evaluation mode.

    Raises:
        ConfigError: if it cannot be read.
    """
    return load_pretrained(str(folder), "model").eval()


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model, as ``transformers`` has it.

    Raises:
        ConfigError: if there is none, or it needs code of its own.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer goes by the model in the folder, and for some models puts rules of its own in place of the file's.
    kind = PreTrainedTokenizerFast if (Path(folder) / "tokenizer.json").is_file() else AutoTokenizer
    try:
        found: Any = kind.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:
        raise ConfigError(
            f"tokenizer={str(folder)!r}: must be a tokenizer that transformers can read ({reason_of(error)}); "
            "export the run again"
        ) from error
    return found


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside ``folder`` that takes its place when the block ends without an error.

    Raises:
        ConfigError: if something cannot be written.
    """
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        os.chmod(temporary, 0o755)
        yield temporary
        for file in temporary.iterdir():  # safetensors makes files that only their owner can read
            os.chmod(file, 0o644)
        _replace(temporary, folder)
    except OSError as error:
        raise ConfigError(
            f"{str(folder)!r}: must be a folder that can be written ({error.strerror or error}); make room or choose "
            "another"
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _replace(new: Path, folder: Path) -> None:
    if not folder.exists():
        os.replace(new, folder)
        return
    old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    os.replace(folder, old)
    try:
        os.replace(new, folder)
    except OSError:
        os.replace(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _add_attention(file: Path, config: Any) -> None:
    """Plain attention is read back as such, since the fused one rounds differently."""
    if getattr(config, "_attn_implementation", None) == "eager":
        settings = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(
            json.dumps({**settings, "attn_implementation": "eager"}, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )


def _may_replace(folder: Path) -> bool:
    return folder.is_dir() and (not any(folder.iterdir()) or (folder / "config.json").is_file())


def _reads_back(folder: Path, tokenizer: Tokenizer) -> bool:
    """Whether ``AutoTokenizer`` cuts text as ``tokenizer`` does."""
    from transformers import AutoTokenizer

    found: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    mine, other = (json.loads(words.to_str()) for words in (tokenizer, found.backend_tokenizer))
    return all(mine[part] == other[part] for part in ("normalizer", "pre_tokenizer", "model"))


def _mend_settings(file: Path, end: int | None, vocab_size: int) -> None:
    """Special tokens of another tokenizer become the end token; generation may use its cache."""
    if not file.is_file():
        return
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["use_cache"] = True
    settings["eos_token_id"] = end
    for name in ("bos_token_id", "pad_token_id"):
        token = settings.get(name)
        if isinstance(token, int) and not 0 <= token < vocab_size:
            settings[name] = end
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
