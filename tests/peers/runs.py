"""Runs and keys for tests."""

from __future__ import annotations

from functools import cache
from typing import Any

from sparseloco.peers.identity import Identity
from sparseloco.peers.policy import Policy
from sparseloco.peers.run_file import RunFile, run_id

OWNER = 99


@cache
def identity(index: int) -> Identity:
    return Identity(bytes([index]) * 32)


def make_run(**policy: Any) -> RunFile:
    """A small run, owned and signed by ``identity(OWNER)``."""
    name, nonce, owner = "test", "0123456789abcdef" * 2, identity(OWNER)
    return RunFile(
        run=run_id(name, nonce, owner.public),
        name=name,
        nonce=nonce,
        owner=owner.public,
        algorithm={"preset": "sparseloco", "inner_steps": 30, "outer_lr": 1.0},
        model={"hidden_size": 64, "num_layers": 2},
        data={"path": "stdlib"},
        train={"steps": 600, "batch_size": 8},
        tensors="1" * 64,
        fingerprint="2" * 16,
        tokenizer="3" * 64,
        policy=Policy(**policy),
    ).signed(owner)
