"""What is done with trained models: export, measure. Generation is in ``sparseloco.model``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec

from sparseloco.cli.runs import read_dataset
from sparseloco.cli.screen import Screen
from sparseloco.config import load_config
from sparseloco.data import load_corpus
from sparseloco.errors import ConfigError
from sparseloco.evaluation import Evaluation, evaluate_split, evaluate_text
from sparseloco.harness import check_tasks, run_tasks
from sparseloco.model import find_model, load_model, load_tokenizer
from sparseloco.settings import RunConfig, TrainConfig

_LONGEST_WINDOW = 512


def evaluate(
    place: Path, data: str | None, tasks: Path | None, max_tokens: int | None, screen: Screen
) -> dict[str, Any]:
    """Figures of a model: on the held-out text of its run, on another text, or on tasks.

    Raises:
        ConfigError: if there is no model, or nothing to measure it on.
    """
    folder = find_model(place)
    if tasks is not None:
        check_tasks(tasks)
    config = load_config(place / "config.toml") if (place / "config.toml").is_file() else None
    if config is None and data is None and tasks is None:
        raise ConfigError(f"--data: missing, since {str(place)!r} is no run with text of its own; name a text")
    figures: dict[str, Any] = {"model": str(folder)}
    if data is not None:
        figures.update(_on_text(folder, data, config, max_tokens))
    elif config is not None and tasks is None:
        figures.update(_on_run(place, folder, config, max_tokens, screen))
    if tasks is not None:
        figures["tasks"] = run_tasks(folder, tasks, batch_size=config.train.batch_size if config else 8)
    return figures


def in_words(figures: dict[str, Any]) -> list[str]:
    """The same as lines of text."""
    lines: list[str] = []
    if "loss" in figures:
        lines.append(
            f"{figures['data']}: loss {figures['loss']:.4f} nats per token, perplexity {figures['perplexity']:.2f}, "
            f"{figures['bits_per_byte']:.4f} bits per byte, on {figures['tokens']:,} tokens"
        )
    for task, row in figures.get("tasks", {}).items():
        lines.append(f"{task}: {', '.join(f'{name} {value:.4g}' for name, value in row.items())}")
    return lines


def _on_run(place: Path, folder: Path, config: RunConfig, max_tokens: int | None, screen: Screen) -> dict[str, Any]:
    dataset = read_dataset(config, screen)
    trained_on = json.loads((place / "summary.json").read_text(encoding="utf-8"))["corpus_sha256"]
    if dataset.corpus_sha256 != trained_on:
        raise ConfigError(
            f"data={dataset.corpus_name!r}: must still be the text of the run (hash {trained_on[:8]}, now "
            f"{dataset.corpus_sha256[:8]}); name a text with --data"
        )
    result = evaluate_split(load_model(folder), dataset, "test", _limited(config.train, max_tokens))
    return _figures(f"{dataset.corpus_name}, test split", result)


def _on_text(folder: Path, data: str, config: RunConfig | None, max_tokens: int | None) -> dict[str, Any]:
    corpus, model = load_corpus(data), load_model(folder)
    tokenizer: Any = load_tokenizer(folder)
    source: Any = model
    longest = getattr(source.config, "max_position_embeddings", None) or _LONGEST_WINDOW
    length = config.train.sequence_length if config else min(longest, _LONGEST_WINDOW)
    base = config.train if config else TrainConfig(sequence_length=length, autocast="off")
    result = evaluate_text(
        model,
        lambda text: tokenizer.encode(text, add_special_tokens=False, verbose=False),
        tokenizer.eos_token_id,
        [document.text for document in corpus.documents],
        _limited(base, max_tokens),
    )
    return _figures(corpus.name, result)


def _limited(settings: TrainConfig, max_tokens: int | None) -> TrainConfig:
    if max_tokens is None:
        return settings
    return msgspec.structs.replace(settings, evaluation_tokens=max_tokens)


def _figures(data: str, result: Evaluation) -> dict[str, Any]:
    return {
        "data": data,
        "loss": result.loss,
        "perplexity": math.exp(min(result.loss, 700.0)),
        "bits_per_byte": result.bits_per_byte,
        "tokens": result.tokens,
    }
