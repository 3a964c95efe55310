"""One model of each family: a round of SparseLoCo, then out to a folder and back with the same logits (C-25)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparseloco import adamw, presets
from sparseloco.data.tokens import END_TOKEN, train_tokenizer
from sparseloco.errors import ConfigError
from sparseloco.evaluation import anchored
from sparseloco.model import (
    causal_model,
    causal_specs,
    find_model,
    generate,
    load_model,
    load_tokenizer,
    next_token_loss,
    save_model,
)
from sparseloco.simulate import Cohort

TEXT = "".join(f"Line {number} says that {number * 7919 % 1000} is not {number % 13}.\n" for number in range(300))
VOCAB = 280
LENGTH = 16

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
GROUPED = {**SIZES, "num_key_value_heads": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen2": {**GROUPED, "tie_word_embeddings": True},
    "qwen3": {**GROUPED, "head_dim": 8},
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "qwen2_moe": {
        **GROUPED,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    },
    "gpt2": {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "gemma": {**GROUPED, "head_dim": 8},
    "mamba": {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
    "rwkv": {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "context_length": 32},
}
OWN_WORDS = {"qwen2"}
"""Families for which AutoTokenizer has rules of its own."""
TIED = {"qwen2", "gpt2", "gemma", "mamba"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([TEXT], VOCAB)


def config_file(family: str, folder: Path) -> str:
    from transformers import AutoConfig

    AutoConfig.for_model(family, **FAMILIES[family]).save_pretrained(folder)
    return str(folder / "config.json")


def warned(family: str) -> AbstractContextManager[Any]:
    if family not in OWN_WORDS:
        return nullcontext()
    return pytest.warns(
        UserWarning,
        match=f"^model/: AutoTokenizer of transformers reads every tokenizer of {family} models with rules of its own; "
        "load this one with PreTrainedTokenizerFast$",
    )


STEPS = 2
ALGORITHM = presets.sparseloco(inner_steps=STEPS, tile=8, k=8, inner=adamw(lr=1e-2))
PROMPT = torch.arange(2 * LENGTH).reshape(2, LENGTH)


def batch_of(step: int, peer: int) -> torch.Tensor:
    return torch.randint(VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(2 * step + peer))


def one_round(model: nn.Module) -> Cohort:
    cohort = Cohort(model, ALGORITHM, num_replicas=2)
    for step in range(STEPS):
        for peer in range(2):
            with cohort.turn(peer):
                next_token_loss(model, batch_of(step, peer)).backward()
                cohort.advance(peer)
        cohort.settle()
    return cohort


@pytest.mark.parametrize("family", FAMILIES)
def test_trains_a_round_and_comes_back_from_its_folder(family: str, tmp_path: Path, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    model: Any = causal_model(config=config_file(family, tmp_path), sequence_length=LENGTH, seed=1)
    start = {name: value.clone() for name, value in model.named_parameters()}
    cohort = one_round(model)
    assert cohort.replicas[0].digest() == cohort.replicas[1].digest()
    assert sum(not torch.equal(cohort.replicas[0].anchor()[name], value) for name, value in start.items()) > 5
    with cohort.turn(0) as replica, anchored(model, replica), torch.no_grad():
        expected = model(input_ids=PROMPT).logits
        with warned(family):
            save_model(model, tokenizer, END_TOKEN, tmp_path / "model")

    found: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        assert torch.equal(found(input_ids=PROMPT).logits, expected)
    assert (found.get_output_embeddings().weight is found.get_input_embeddings().weight) == (family in TIED)
    for kind in (PreTrainedTokenizerFast, *([AutoTokenizer] if family not in OWN_WORDS else [])):
        words = kind.from_pretrained(tmp_path / "model")
        assert words(TEXT[:40]).input_ids == tokenizer.encode(TEXT[:40]).ids
        assert words.decode(tokenizer.encode(TEXT[:40]).ids) == TEXT[:40]
        assert words.eos_token == END_TOKEN


@pytest.mark.parametrize("family", FAMILIES)
def test_table_needs_no_memory(family: str, tmp_path: Path) -> None:
    place = config_file(family, tmp_path)
    model = causal_model(config=place, sequence_length=LENGTH)
    assert [tuple(row) for row in causal_specs(config=place, sequence_length=LENGTH)] == [
        (name, tuple(value.shape), value.dtype) for name, value in model.named_parameters()
    ]


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba", "rwkv"])
def test_writes_the_same_text_for_the_same_seed(family: str, tmp_path: Path, tokenizer: Any) -> None:
    model = causal_model(config=config_file(family, tmp_path), sequence_length=LENGTH)
    save_model(model, tokenizer, END_TOKEN, tmp_path / "model")
    first, again, other = (generate(tmp_path / "model", "Line", max_tokens=12, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert 1 <= first.tokens <= 12


def test_weights_follow_from_the_seed_alone(tmp_path: Path) -> None:
    place = config_file("qwen2", tmp_path)
    before = torch.get_rng_state()
    one, two, other = (causal_model(config=place, sequence_length=LENGTH, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_full_disk_leaves_the_earlier_folder(tmp_path: Path, tokenizer: Any) -> None:
    resource = pytest.importorskip("resource", reason="no limits on the size of files here")
    model = causal_model(config=config_file("gpt2", tmp_path / "shape"), sequence_length=LENGTH)
    save_model(model, tokenizer, END_TOKEN, tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    with torch.no_grad():
        next(model.parameters()).add_(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        with pytest.raises(
            ConfigError, match=r"model': must be a folder that can be written \(.*too large.*\); make room "
        ):
            save_model(model, tokenizer, END_TOKEN, tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "shape"]


def test_goes_on_from_weights(tmp_path: Path, tokenizer: Any) -> None:
    model = causal_model(config=config_file("mixtral", tmp_path), sequence_length=LENGTH, seed=5)
    save_model(model, tokenizer, END_TOKEN, tmp_path / "model")
    found = causal_model(pretrained=str(tmp_path / "model"), sequence_length=LENGTH)
    for (name, a), (other, b) in zip(model.named_parameters(), found.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(a, b)
    assert found.training
    assert not load_model(tmp_path / "model").training
    assert load_tokenizer(tmp_path / "model").get_vocab() == tokenizer.get_vocab()
    assert find_model(tmp_path) == tmp_path / "model" == find_model(tmp_path / "model")
