"""One model of each family trains a round in two processes, goes out to a folder and comes back with the same logits.

The same round in one process, and all else about families, is in tests/unit/test_model_families.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparseloco.model import causal_model
from tests.mp import Group
from tests.one_path.families import round_on_a_rank
from tests.unit.test_model_families import LENGTH, PROMPT, TIED, config_file, one_round

pytestmark = [pytest.mark.mp, pytest.mark.xdist_group("mp")]

FAMILIES = ["llama", "qwen3", "qwen2_moe", "gemma", "gpt2", "mixtral", "mamba"]
"""Dense and with experts, tied and not, transposed weights (GPT-2's Conv1D), and one without attention."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_round_under_gloo_comes_back_from_its_folder_c25(family: str, pair: Group, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = config_file(family, tmp_path)
    start = {name: value.clone() for name, value in _model(config).named_parameters()}
    (digest, anchor, logits), (other, _, _) = pair.run(round_on_a_rank, config, str(tmp_path / "model"), limit=100)
    assert digest == other == one_round(_model(config)).replicas[0].digest()
    assert anchor.keys() == start.keys()
    assert sum(not torch.equal(anchor[name], value) for name, value in start.items()) > 5
    found: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert all(torch.equal(value, anchor[name]) for name, value in found.named_parameters())
    with torch.no_grad():
        assert torch.equal(found(input_ids=PROMPT).logits, logits)
    assert (found.get_output_embeddings().weight is found.get_input_embeddings().weight) == (family in TIED)


def _model(config: str) -> Any:
    return causal_model(config=config, sequence_length=LENGTH, seed=1)
