"""Text from a trained model: the same text for the same seed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparseloco.errors import ConfigError
from sparseloco.model.folder import load_model, load_tokenizer
from sparseloco.model.parts import seeded


@dataclass(frozen=True)
class Generated:
    """What a model has written.

    Attributes:
        prompt: The text that was given.
        text: The text that follows it.
        tokens: Tokens of ``text``, a last end token included.
    """

    prompt: str
    text: str
    tokens: int


def generate(
    folder: Path,
    prompt: str,
    *,
    max_tokens: int = 100,
    temperature: float = 0.8,
    seed: int = 0,
    stream: Callable[[str], None] | None = None,
) -> Generated:
    """Continue a text with the model of a folder.

    Args:
        folder: A model with its tokenizer, as ``save_model`` writes it.
        prompt: Text to continue; an empty one starts a document.
        max_tokens: Tokens to write at most; fewer if the model's positions end before.
        temperature: Spread of the draws; 0 always takes the likeliest token.
        seed: Key of the draws.
        stream: Called with each piece of the text as soon as it is known.

    Raises:
        ConfigError: if a setting is out of range, the prompt leaves no position free, or the folder cannot be read.
    """
    if max_tokens < 1:
        raise ConfigError(f"max_tokens={max_tokens}: must be at least 1; use 100")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature={temperature!r}: must be at least 0 and finite; use 0.8, or 0 for no chance")
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    asked = torch.tensor([tokenizer.encode(prompt, verbose=False) or [tokenizer.eos_token_id]])
    room = _room(model, asked.shape[1], max_tokens)
    settings: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    if temperature > 0:
        settings = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    source: Any = model
    with seeded(seed), torch.no_grad():
        written = source.generate(
            asked,
            attention_mask=torch.ones_like(asked),
            max_new_tokens=room,
            pad_token_id=tokenizer.eos_token_id,
            streamer=_streamer(tokenizer, stream) if stream else None,
            **settings,
        )[0]
    whole, before = (_text(tokenizer, row) for row in (written, asked[0]))
    return Generated(prompt, whole[len(before) :], len(written) - asked.shape[1])


def _room(model: Any, used: int, max_tokens: int) -> int:
    """Tokens that can be written after ``used`` of them."""
    longest = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(longest, int):
        return max_tokens
    if used >= longest:
        raise ConfigError(
            f"prompt={used} tokens: must leave room in the model's {longest} positions; give a shorter prompt"
        )
    if used + max_tokens > longest:
        warnings.warn(
            f"max_tokens={max_tokens}: the model has {longest} positions and the prompt takes {used}, so the text "
            f"ends after {longest - used} tokens",
            stacklevel=3,
        )
    return min(max_tokens, longest - used)


def _text(tokenizer: Any, tokens: Any) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _streamer(tokenizer: Any, stream: Callable[[str], None]) -> Any:
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            stream(text)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True, clean_up_tokenization_spaces=False)
