"""The model that the settings of a run ask for, and whether it fits the text."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from sparseloco.data import Dataset, check_vocabulary, vocabulary_size
from sparseloco.errors import ConfigError
from sparseloco.model.causal import causal_model, causal_specs
from sparseloco.model.folder import load_tokenizer
from sparseloco.model.llama import build_model, parameter_specs
from sparseloco.model.parts import vocabulary_of
from sparseloco.settings import RunConfig
from sparseloco.types import TensorSpec


def build_run_model(config: RunConfig, vocab_size: int) -> nn.Module:
    """The model that a run trains, from its settings.

    Args:
        config: Settings of the run.
        vocab_size: Tokens of the tokenizer; a model by name or path has a vocabulary of its own.
    """
    if config.model.is_named:
        return causal_model(**_named(config), seed=config.train.seed)
    return build_model(vocab_size=vocab_size, seed=config.train.seed, **_sizes(config))


def tensor_table(config: RunConfig) -> tuple[TensorSpec, ...]:
    """Tensors of the model of a run; one from numbers has the vocabulary that was given or asked for."""
    if config.model.is_named:
        return causal_specs(**_named(config))
    return parameter_specs(vocab_size=vocabulary_size(config.data), **_sizes(config))


def located(config: RunConfig) -> RunConfig:
    """The same settings with the absolute path of a model that is on this disk; a name on the Hub stays as it is.

    A run folder holds these, so that a resume from another working directory finds the same model, and never one of
    that name on the Hub. Settings that were located once stay as they are.
    """
    found = {name: str(path.resolve()) for name, path in _places(config).items()}
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, **found))


def known_by_content(config: RunConfig) -> dict[str, str]:
    """The settings that name a model on this disk, with a hash of its ``config.json`` in place of the path.

    So the same model may lie elsewhere when a run is resumed. Its trained weights are those of the checkpoint, and its
    frozen ones are compared one by one.
    """
    found: dict[str, str] = {}
    for name, path in _places(config).items():
        file = path / "config.json" if path.is_dir() else path
        if file.is_file():
            found[f"model.{name}"] = f"config.json, sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"
    return found


def check_tokens(config: RunConfig, model: nn.Module, dataset: Dataset) -> None:
    """Refuse a model that would read other tokens than the text has.

    A model that comes with a tokenizer needs that very tokenizer; its vocabulary may then be padded. Any other needs
    a vocabulary of the tokenizer's size.

    Raises:
        ConfigError: if vocabularies differ.
    """
    where = config.model.pretrained
    own = _tokenizer_vocabulary(where) if where else None
    if own is None or vocabulary_of(model) < dataset.vocab_size:
        check_vocabulary(vocabulary_of(model), dataset)
    elif own != dataset.tokenizer.get_vocab():
        raise ConfigError(
            f"model.pretrained={where!r}: its tokenizer ({len(own)} tokens) must be that of the text, which is another "
            f"one ({dataset.vocab_size} tokens on {dataset.corpus_name!r}), or its tokens would mean something else; "
            "use the text and data settings that it was trained with"
        )


def _tokenizer_vocabulary(where: str) -> dict[str, int] | None:
    try:
        return load_tokenizer(where).get_vocab()
    except ConfigError:
        return None


def _places(config: RunConfig) -> dict[str, Path]:
    """Those of ``config`` and ``pretrained`` that are on this disk."""
    named = {"config": config.model.config, "pretrained": config.model.pretrained}
    paths = {name: Path(where).expanduser() for name, where in named.items() if where}
    return {name: path for name, path in paths.items() if path.exists()}


def _named(config: RunConfig) -> dict[str, Any]:
    return {
        "config": config.model.config,
        "pretrained": config.model.pretrained,
        "shape": config.model.shape,
        "sequence_length": config.train.sequence_length,
    }


def _sizes(config: RunConfig) -> dict[str, Any]:
    model = config.model
    return {
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "num_heads": model.num_heads,
        "intermediate_size": model.intermediate_size,
        "tie_embeddings": model.tie_embeddings,
        "sequence_length": config.train.sequence_length,
    }
