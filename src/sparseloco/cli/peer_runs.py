"""A run in a store from a configuration file, and the settings of a peer from a run: there and back."""

from __future__ import annotations

import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sparseloco.cli.reach import no_run, reach
from sparseloco.config import build_algorithm
from sparseloco.config.file import parse_table, read_table, resolve, resolve_run
from sparseloco.config.sections import policy_of
from sparseloco.data import vocabulary_size
from sparseloco.errors import AlreadyExists, ConfigError, NotFound, WireError
from sparseloco.joined import tokens_per_round
from sparseloco.model import build_run_model
from sparseloco.peers import canonical, paths
from sparseloco.peers.identity import Identity
from sparseloco.peers.member import tensor_table
from sparseloco.peers.patience import Patient
from sparseloco.peers.policy import Policy
from sparseloco.peers.run_file import (
    RUN_LIMIT,
    RunFile,
    read_run,
    run_id,
)
from sparseloco.peers.store import open_store, probe
from sparseloco.replica import Replica
from sparseloco.settings import RunConfig, to_table

_TOKENIZER_LIMIT = 2**26
_ONE = ("workers", "shards", "processes")
"""Keys of ``[train]`` that say how many: a peer is one process with one whole model."""
_PEERS_OWN = {
    "train": ("accumulation", "autocast", "nonfinite", "evaluate_every", "evaluation_tokens", "log_every"),
    "checkpoint": ("every", "keep", "asynchronous"),
    "logging": ("to", "project"),
}
"""Settings that a peer may choose for itself when it joins."""


def create_run(url: str, config: Path, overrides: Sequence[str], owner: Identity, read_tokenizer: Any) -> RunFile:
    """Write a run into a store: its tokenizer, then ``run.json``.

    Args:
        url: A store or a folder of it that holds no run.
        config: Settings, with ``[policy]`` if need be.
        overrides: Settings to replace.
        owner: Who may amend the run.
        read_tokenizer: Gives tokenizer and end token for ``[data]``.

    Raises:
        ConfigError: if the settings cannot stand in a run, or the store holds one already.
        StoreError: if the store cannot carry a run.
    """
    table = read_table(config, overrides)
    policy = policy_of(table.pop("policy", {}))
    settings = resolve_run(table)
    draft = draft_run(settings, policy, config.stem, owner, explicit=table.get("train", {}))  # refused before any work
    check_not_here(draft.data)
    reach(url, may_make=True)
    store = Patient(open_store(url))
    check_free(store, url)
    probe(store)
    tokenizer, end_token = read_tokenizer(settings.data)
    data = tokenizer.to_str().encode()
    run = msgspec.structs.replace(draft, data={**draft.data, "end_token": end_token}, tokenizer=canonical.sha256(data))
    run = completed(run, data).signed(owner)
    if not store.create_or_same(str(paths.Tokenizer()), data):
        raise ConfigError(f"URL={url!r}: holds the tokenizer of another run; use an empty folder of the store")
    try:
        store.create(str(paths.Run()), canonical.encode(run))
    except AlreadyExists:
        check_free(store, url)
        raise
    return run


def draft_run(config: RunConfig, policy: Policy, name: str, owner: Identity, *, explicit: Mapping[str, Any]) -> RunFile:
    """``run.json`` but for the tokenizer and what follows from it: every value that may not stand there is refused.

    Args:
        config: Resolved settings.
        policy: Of the run.
        name: For people.
        owner: Whose run it is.
        explicit: ``[train]`` as it stood in the file, for what has another default on each machine.
    """
    table = to_table(config)
    train = {key: value for key, value in table["train"].items() if key not in (*_ONE, "autocast")}
    if explicit.get("autocast", "auto") != "auto":
        train["autocast"] = config.train.autocast
    given = table["data"].pop("tokenizer")
    if not given:
        table["data"].pop("end_token")
    name, nonce = _printable(name) or "run", secrets.token_hex(16)
    weight = tokens_per_round(build_algorithm(config), config.train)
    if weight > policy.max_tokens_per_round:
        raise ConfigError(
            f"policy.max_tokens_per_round={policy.max_tokens_per_round}: must be at least the {weight} tokens that a "
            "peer sees in a round; raise it"
        )
    return RunFile(
        run=run_id(name, nonce, owner.public),
        name=name,
        nonce=nonce,
        owner=owner.public,
        algorithm=table["algorithm"],
        model={key: value for key, value in table["model"].items() if value != ""},
        data={key: value for key, value in table["data"].items() if value not in ("", [])},
        train={**train, "optimizer": table["optimizer"]},
        tensors="0" * 64,
        fingerprint="0" * 16,
        tokenizer="0" * 64,
        policy=policy,
    )


def completed(run: RunFile, tokenizer: bytes) -> RunFile:
    """The run with its tensor table and fingerprint, from a model made as every peer makes it.

    Raises:
        ConfigError: if a frame of it is larger than the policy allows.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "tokenizer.json"
        place.write_bytes(tokenizer)
        config = config_of(run, place)
        algorithm = build_algorithm(config)
        replica = Replica(build_run_model(config, vocabulary_size(config.data)), algorithm)
    frame = algorithm.describe(replica.specs).payload_bytes_per_round // len(replica.lanes)
    if frame > run.policy.max_frame_bytes:
        raise ConfigError(
            f"policy.max_frame_bytes={run.policy.max_frame_bytes}: must be at least the {frame} bytes of a frame; "
            "raise it, or send less"
        )
    return msgspec.structs.replace(run, tensors=tensor_table(replica.specs), fingerprint=replica.fingerprint)


def config_of(run: RunFile, tokenizer: Path, *, data: str | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """Settings of one peer of a run.

    Args:
        run: ``run.json``, which is checked here as any file is.
        tokenizer: The run's tokenizer on this disk.
        data: Text of this peer instead of the run's.
        overrides: What this peer chooses for itself.

    Raises:
        ConfigError: if a setting cannot be used here, or is not a peer's to choose.
    """
    own = parse_table("", overrides)
    for section, values in own.items():
        for key in values:
            if key not in _PEERS_OWN.get(section, ()):
                known = ", ".join(f"{name}.{key}" for name, keys in _PEERS_OWN.items() for key in keys)
                raise ConfigError(f"--set {section}.{key}: must be the same for all peers; a peer may choose {known}")
    train = {key: value for key, value in run.train.items() if key not in ("optimizer", *_ONE)}
    if data is None:
        check_not_here(run.data)
    text = run.data if data is None else {**_plain_recipe(run.data), "path": data}
    table = {
        "algorithm": run.algorithm,
        "model": run.model,
        "data": {**text, "tokenizer": str(tokenizer)},
        "train": {**train, "workers": 1, **own.get("train", {})},
        "optimizer": run.train.get("optimizer", {}),
        "checkpoint": own.get("checkpoint", {}),
        "logging": own.get("logging", {}),
    }
    return resolve(table)


def check_not_here(data: Mapping[str, Any]) -> None:
    """Refuse a dataset of the hub whose name is also that of something here, which would be read in its place.

    Raises:
        ConfigError: naming it.
    """
    for source in [data, *(data.get("sources") or [])]:
        if source.get("format") == "hf" and Path(source.get("path", "")).expanduser().exists():
            raise ConfigError(
                f"data.path={source['path']!r}: must be read from the hub in a run, but here lies a file or folder of "
                "that name; start from another folder, or pass text of your own to join with --data"
            )


def read_run_of(store: Patient, url: str, owner: str | None = None) -> RunFile:
    """``run.json`` of a store, checked.

    Raises:
        ConfigError: if there is none.
        WireError: if it is not what its owner signed, or names what a run must not name.
    """
    try:
        return read_run(store.get(str(paths.Run()), limit=RUN_LIMIT), owner)
    except NotFound:
        raise no_run(url) from None


def read_tokenizer_of(store: Patient, run: RunFile) -> bytes:
    """The run's tokenizer.

    Raises:
        WireError: if it is not the one whose hash the owner signed.
    """
    data = store.get(str(paths.Tokenizer()), limit=_TOKENIZER_LIMIT)
    if canonical.sha256(data) != run.tokenizer:
        raise WireError(
            f"tokenizer.json: must have the hash {run.tokenizer[:16]} that run.json names, but has "
            f"{canonical.sha256(data)[:16]}; somebody changed it, so do not join"
        )
    return data


def check_free(store: Patient, url: str) -> None:
    """Refuse a store that holds a run.

    Raises:
        ConfigError: naming the run if it can be read.
    """
    try:
        data = store.get(str(paths.Run()), limit=RUN_LIMIT)
    except NotFound:
        return
    try:
        name = read_run(data).run
    except WireError:
        name = "one that cannot be read"
    raise ConfigError(f"URL={url!r}: holds a run already ({name}); use another folder of the store")


def _plain_recipe(data: Mapping[str, Any]) -> dict[str, Any]:
    """What of a recipe holds for any text."""
    return {key: data[key] for key in ("end_token", "validation_fraction", "test_fraction") if key in data}


def _printable(text: str) -> str:
    return re.sub(r"[^ -~]", "", text)[:100]
