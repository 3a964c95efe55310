"""What every model of the main job needs: its loss, its table of tensors, and weights that follow from a seed.

Shape letters: B windows in a batch, T tokens in a window, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparseloco.errors import ConfigError
from sparseloco.types import TensorSpec


def next_token_loss(model: nn.Module, batch_BT: Tensor) -> Tensor:
    """Mean cross entropy of each next token, in nats: float32, or float64 from float64 logits.

    Half-precision logits (autocast) are widened once, here; the model's own loss would shift and widen them
    again.

    Args:
        model: Maps ``input_ids`` to an object with ``logits`` ``[B, T - 1, V]``, as transformers' models do.
        batch_BT: Windows of tokens; the last one of each is only predicted.
    """
    logits = model(input_ids=batch_BT[:, :-1], use_cache=False).logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(wide.flatten(0, 1), batch_BT[:, 1:].flatten())


def vocabulary_of(model: nn.Module) -> int:
    """Size of the vocabulary of a transformers model."""
    config: Any = model.config
    return int(config.vocab_size)


def table_of(model: nn.Module) -> tuple[TensorSpec, ...]:
    """Tensor table of the parameters that are trained, tied ones once."""
    return tuple(
        TensorSpec(name, tuple(value.shape), value.dtype)
        for name, value in model.named_parameters()
        if value.requires_grad
    )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers follow from ``seed`` inside this block; the global random state is left as it was.

    Raises:
        ConfigError: if the seed is out of range.
    """
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed={seed}: must be in 0..2**63 - 1; use 0")
    # The CPU generator alone is seeded: torch.manual_seed would also change the accelerators' generators.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
