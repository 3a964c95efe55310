"""One round of a model of each family as a rank of a gloo group; rank 0 writes the model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseloco import ProcessGroup, advance, settle
from sparseloco.data.tokens import END_TOKEN, train_tokenizer
from sparseloco.evaluation import anchored
from sparseloco.model import causal_model, next_token_loss, save_model
from sparseloco.replica import Replica
from sparseloco.simulate import replica_rng_state
from tests.unit import test_model_families as families


def round_on_a_rank(rank: int, config: str, folder: str) -> tuple[str, dict[str, Tensor], Tensor | None]:
    """Digest, anchor, and at rank 0 the logits of the model that it wrote."""
    model: Any = causal_model(config=config, sequence_length=families.LENGTH, seed=1)
    replica, transport = Replica(model, families.ALGORITHM, peer=rank), ProcessGroup()
    transport.connect(replica)
    torch.set_rng_state(replica_rng_state(0, rank))  # dropout of GPT-2
    for step in range(families.STEPS):
        next_token_loss(model, families.batch_of(step, rank)).backward()
        advance(replica, transport)
        settle(replica, transport)
    logits = None
    if rank == 0:
        with anchored(model, replica), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of tokenizers that AutoTokenizer reads by rules of its own
            logits = model(input_ids=families.PROMPT).logits
            save_model(model, train_tokenizer([families.TEXT], families.VOCAB), END_TOKEN, Path(folder))
    return replica.digest(), replica.anchor(), logits
