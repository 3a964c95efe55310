"""The model: the same weights from the same seed, the table without the memory, the loss in one pass."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from sparseloco.errors import ConfigError
from sparseloco.model import build_model, next_token_loss, parameter_specs

SMALL = {
    "vocab_size": 300,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "intermediate_size": 24,
    "sequence_length": 12,
}


def build(**changes: int) -> nn.Module:
    return build_model(**{**SMALL, **changes})


def test_weights_follow_from_the_seed_alone(seed: int) -> None:
    one = build()
    torch.rand(100)
    two, other = build(), build(seed=1)
    for (name, a), b, c in zip(one.named_parameters(), two.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c) or "norm" in name


def test_caller_keeps_its_random_state(seed: int) -> None:
    before = torch.get_rng_state()
    build(seed=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_model_is_as_asked() -> None:
    model = build_model(**SMALL, tie_embeddings=False)
    config = model.config
    assert (config._attn_implementation, config.use_cache) == ("eager", False)
    assert config.max_position_embeddings == SMALL["sequence_length"]
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    tied = build_model(**SMALL)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


@pytest.mark.parametrize("tie", [True, False])
def test_table_equals_the_model(tie: bool) -> None:
    model = build_model(**SMALL, tie_embeddings=tie)
    table = parameter_specs(**SMALL, tie_embeddings=tie)
    assert [tuple(row) for row in table] == [
        (name, tuple(value.shape), value.dtype) for name, value in model.named_parameters()
    ]


def test_table_of_a_large_model_needs_no_memory() -> None:
    table = parameter_specs(vocab_size=128_000, hidden_size=8192, num_layers=2, num_heads=64, intermediate_size=28_672)
    assert sum(row.numel for row in table) > 2_000_000_000


def test_loss_is_the_one_of_transformers(seed: int) -> None:
    model = build()
    batch = torch.randint(300, (3, 13))
    expected = model(input_ids=batch, labels=batch).loss
    torch.testing.assert_close(next_token_loss(model, batch), expected)
    random_guess = torch.tensor(300.0).log()
    torch.testing.assert_close(expected, random_guess, atol=0.1, rtol=0)


def test_loss_is_wide_under_autocast(seed: int) -> None:
    model = build()
    batch = torch.randint(300, (3, 13))
    with torch.autocast("cpu", torch.bfloat16):
        loss = next_token_loss(model, batch)
    assert loss.dtype == torch.float32
    # bfloat16 has 8 bits; the loss is a mean near ln 300 = 5.7.
    torch.testing.assert_close(loss, next_token_loss(model, batch), atol=0.02, rtol=0)


def test_loss_keeps_float64() -> None:
    class Bigram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.eye(5, dtype=torch.float64))

        def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
            return SimpleNamespace(logits=self.table[input_ids])

    loss = next_token_loss(Bigram(), torch.tensor([[0, 0, 1], [2, 2, 2]]))
    kept, changed = torch.tensor([1.0, 0.0], dtype=torch.float64).unbind()
    wide = torch.log(torch.e + torch.tensor(4.0, dtype=torch.float64))
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, wide - (3 * kept + changed) / 4)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_layers": 0}, "num_layers=0: must be at least 1; use a positive number"),
        ({"num_heads": -1}, "num_heads=-1: must be at least 1; use a positive number"),
        ({"vocab_size": 0}, "vocab_size=0: must be at least 1; use a positive number"),
        ({"sequence_length": 0}, "sequence_length=0: must be at least 1; use a positive number"),
        (
            {"hidden_size": 18},
            "hidden_size=18: must be a multiple of 2 * num_heads = 4, so that each head has an even width; "
            "use 16 or another num_heads",
        ),
        ({"seed": -1}, "seed=-1: must be in 0..2**63 - 1; use 0"),
    ],
)
def test_sizes_out_of_range(changes: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(**changes)
    assert str(error.value) == text
