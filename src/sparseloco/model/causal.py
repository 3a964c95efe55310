"""Any causal language model that ``transformers`` knows: new from a configuration, or continued from weights.

``transformers`` is imported only inside functions. Code that comes with a model is never run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparseloco.errors import ConfigError
from sparseloco.model.parts import seeded, table_of
from sparseloco.types import TensorSpec


def causal_model(
    *,
    config: str = "",
    pretrained: str = "",
    shape: Mapping[str, Any] | None = None,
    sequence_length: int,
    seed: int = 0,
) -> nn.Module:
    """A causal language model on the CPU, in float32.

    Args:
        config: A ``config.json``, a folder that holds one, or a name on the Hub: random weights from the seed.
        pretrained: A folder of ``save_pretrained``, or a name on the Hub: its weights.
        shape: Keys of a ``config.json`` with ``model_type`` among them: random weights from the seed.
        sequence_length: Longest window that it will see.
        seed: Key of initial weights, in 0..2**63 - 1.

    Raises:
        ConfigError: if there is no such model, it needs code of its own, some weights are missing, or it has fewer
            positions than ``sequence_length``.
    """
    found = _read_config(config, pretrained, shape, sequence_length)
    with seeded(seed):
        if config or shape:
            return _from_config(found, *_named(config, pretrained, shape))
        return load_pretrained(pretrained, "model.pretrained")


def causal_specs(
    *, config: str = "", pretrained: str = "", shape: Mapping[str, Any] | None = None, sequence_length: int
) -> tuple[TensorSpec, ...]:
    """Tensor table of ``causal_model``'s model, tied parameters once; no weights are read or allocated.

    Raises:
        ConfigError: as ``causal_model``, missing weights aside.
    """
    found = _read_config(config, pretrained, shape, sequence_length)
    with torch.device("meta"):
        return table_of(_from_config(found, *_named(config, pretrained, shape)))


def load_pretrained(where: str, name: str) -> nn.Module:
    """Weights and configuration of a folder or of a name on the Hub, in float32 and ready to be trained.

    Raises:
        ConfigError: if it cannot be read or lacks weights; it begins with ``name``.
    """
    from transformers import AutoModelForCausalLM

    place = _place(where, name)
    with _readable(name, where), quiet():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            place, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
        )
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"{name}={where!r}: must hold all weights of {type(model).__name__}, but lacks {len(missing)}, for "
            f"example {missing[0]}; name a model that was saved whole"
        )
    return model.train()


@contextmanager
def quiet() -> Iterator[None]:
    """``transformers`` draws and says nothing inside this block: what matters becomes a sentence of ours."""
    from transformers.utils import logging

    was_shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if was_shown:
            logging.enable_progress_bar()


def reason_of(error: Exception) -> str:
    """The first line of what an error says, with its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])


def _named(config: str, pretrained: str, shape: Mapping[str, Any] | None) -> tuple[str, str]:
    """The setting that says which model it is, and its value."""
    if shape:
        return "model.shape.model_type", str(shape.get("model_type"))
    return ("model.config", config) if config else ("model.pretrained", pretrained)


def _read_config(config: str, pretrained: str, shape: Mapping[str, Any] | None, sequence_length: int) -> Any:
    from transformers import AutoConfig

    name, where = _named(config, pretrained, shape)
    if shape:
        found: Any = _config_of_shape(dict(shape), name, where)
    else:
        place = _place(where, name)
        with _readable(name, where):
            found = AutoConfig.from_pretrained(place, trust_remote_code=False)
    longest = getattr(found, "max_position_embeddings", None)
    if isinstance(longest, int) and longest < sequence_length:
        raise ConfigError(
            f"train.sequence_length={sequence_length}: must be at most {longest}, the positions of {name}={where!r}; "
            f"use {longest} or less"
        )
    return found


def _config_of_shape(keys: dict[str, Any], name: str, where: str) -> Any:
    """A configuration from its keys; transformers would store a misspelled one and say nothing."""
    from transformers import CONFIG_MAPPING

    keys.pop("model_type", None)
    if where not in CONFIG_MAPPING:
        near = get_close_matches(where, list(CONFIG_MAPPING), n=1)
        hint = f"did you mean {near[0]!r}?" if near else 'write, for example, "llama"'
        raise ConfigError(f"{name}={where!r}: must be a model that transformers knows; {hint}")
    kind: Any = CONFIG_MAPPING[where]
    with _readable(name, where):
        known = {*kind().to_dict(), *kind.attribute_map}
    for key, value in keys.items():
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise ConfigError(f"model.shape.{key}={value!r}: must be a key of {kind.__name__}; {hint}")
    try:
        return kind(**keys)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{name}={where!r}: must have keys in [model.shape] that {kind.__name__} takes ({reason}); mend them"
        ) from error


def _from_config(found: Any, name: str, where: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with _readable(name, where):
        model: Any = AutoModelForCausalLM.from_config(found, dtype=torch.float32, trust_remote_code=False)
    return model


def _place(where: str, name: str) -> str:
    """The path as it is, or a name on the Hub; what can only be a path must exist."""
    path = Path(where).expanduser()
    if path.exists():
        return str(path)
    if path.is_absolute() or where.startswith((".", "~")) or where.count("/") > 1 or path.suffix == ".json":
        raise ConfigError(f"{name}={where!r}: must be an existing file or folder, or a name on the Hub; check the path")
    return where


@contextmanager
def _readable(name: str, where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ConfigError(
            f"{name}={where!r}: must be a causal language model that transformers can read without code of the "
            f"model's own ({reason_of(error)}); give a folder, or a name on the Hub that can be reached"
        ) from error
