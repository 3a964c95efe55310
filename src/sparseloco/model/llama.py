"""The model of the main job: a Llama that is built from its numbers.

``transformers`` is imported only when a model is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sparseloco.errors import ConfigError
from sparseloco.model.parts import seeded, table_of
from sparseloco.types import TensorSpec

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def build_model(
    *,
    vocab_size: int,
    hidden_size: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    intermediate_size: int = 352,
    sequence_length: int = 128,
    tie_embeddings: bool = True,
    seed: int = 0,
) -> LlamaForCausalLM:
    """Build a Llama on the CPU with random weights that follow from the seed alone.

    The global random state is left as it was. Keys and values are not cached.

    Args:
        vocab_size: Tokens of the tokenizer; token 0 ends a document.
        hidden_size: Width; a multiple of ``2 * num_heads``, since rotary positions turn pairs of values.
        num_layers: Blocks.
        num_heads: Attention heads, each with keys and values of its own.
        intermediate_size: Width inside the gated feed-forward part.
        sequence_length: Longest window.
        tie_embeddings: Use one matrix for tokens in and out.
        seed: Key of the initial weights, in 0..2**63 - 1.

    Raises:
        ConfigError: if a size is out of range.
    """
    return _build(
        "cpu",
        seed,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=sequence_length,
        tie_word_embeddings=tie_embeddings,
    )


def parameter_specs(
    *,
    vocab_size: int,
    hidden_size: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    intermediate_size: int = 352,
    sequence_length: int = 128,
    tie_embeddings: bool = True,
) -> tuple[TensorSpec, ...]:
    """Tensor table of ``build_model``'s model, tied parameters once; nothing is allocated.

    Raises:
        ConfigError: if a size is out of range.
    """
    model = _build(
        "meta",
        0,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=sequence_length,
        tie_word_embeddings=tie_embeddings,
    )
    return table_of(model)


_NAMES = {
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "sequence_length",
}


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{_NAMES.get(name, name)}={value}: must be at least 1; use a positive number")
    hidden_size, num_heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if hidden_size % (2 * num_heads):
        nearest = max(1, round(hidden_size / (2 * num_heads))) * 2 * num_heads
        raise ConfigError(
            f"hidden_size={hidden_size}: must be a multiple of 2 * num_heads = {2 * num_heads}, so that each "
            f"head has an even width; use {nearest} or another num_heads"
        )


def _build(device: str, seed: int, *, tie_word_embeddings: bool, **sizes: int) -> LlamaForCausalLM:
    _check_sizes(**sizes)
    from transformers import LlamaConfig, LlamaForCausalLM

    # Not among the declared fields of the config. On CPUs, torch's fused attention is slower for short windows than
    # the plain products, whose T x T scores only count for long ones.
    is_short = sizes["max_position_embeddings"] <= 256
    attention: Any = {"attn_implementation": "eager" if is_short else "sdpa"}
    config = LlamaConfig(
        **sizes,
        **attention,
        num_key_value_heads=sizes["num_attention_heads"],
        tie_word_embeddings=tie_word_embeddings,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    with seeded(seed), torch.device(device):
        return LlamaForCausalLM(config)
