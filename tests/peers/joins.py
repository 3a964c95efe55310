"""Runs in a directory that the command line creates and joins, small enough for tests."""

from __future__ import annotations

from pathlib import Path

from sparseloco.data import open_dataset
from sparseloco.peers.identity import Identity
from sparseloco.settings import DataConfig
from tests.cli import run_file, text

DATA = """
[data]
tokenizer = "tokenizer.json"
end_token = "<|end|>"
"""
POLICY = """
[policy]
deadline_s = 60
lease_s = 20
anchor_every = 2
max_tokens_per_round = 1000
"""


def prepare(folder: Path, *keys: str) -> None:
    """Files for a run in ``folder``: text, tokenizer, settings, and keys of this name."""
    (folder / "text.txt").write_text(text())
    dataset = open_dataset(DataConfig(path=str(folder / "text.txt"), vocab_size=300), cache_dir=folder / "cache")
    dataset.tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "run.toml").write_text(run_file(DATA, POLICY))
    for key in keys:
        Identity.generate().save(folder / key)


def secrets_in(folder: Path) -> list[bytes]:
    """Secret halves of all keys that lie in ``folder`` and its ``config``."""
    files = [*folder.glob("*.key"), *folder.glob("config/*.key")]
    return [file.read_bytes().split()[-1] for file in files]
