"""A run in a store from a configuration file, and the settings of a peer from a run: there and back."""

from __future__ import annotations

import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
from sparseloco.peers.anchors import KEPT
from sparseloco.peers.claims import anchored, claim_at, known_amendments, next_claim, reader_of
from sparseloco.peers.identity import Identity
from sparseloco.peers.manifest import MAX_AMENDED, History, Manifest
from sparseloco.peers.member import tensor_table
from sparseloco.peers.patience import Patient
from sparseloco.peers.policy import Policy
from sparseloco.peers.run_file import (
    AMENDMENT_LIMIT,
    NEXT_ROUND,
    RUN_LIMIT,
    VOID,
    Amendment,
    RunFile,
    apply_amendment,
    read_run,
    run_at,
    run_id,
    voids_of,
)
from sparseloco.peers.store import open_store, probe
from sparseloco.replica import Replica
from sparseloco.settings import RunConfig, to_table
from sparseloco.types import Key

_TOKENIZER_LIMIT = 2**26
_WRITERS = "policy.writers"
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


def amend_run(url: str, owner: Identity, round_: int, changes: Sequence[str]) -> Amendment:
    """Write the owner's next amendment.

    Raises:
        ConfigError: if a change cannot be amended, breaks a rule, or the key is not the owner's.
    """
    reach(url)
    store = Patient(open_store(url))
    return put_amendment(store, read_run_of(store, url), owner, round_, changes_of(changes))


def changes_of(words: Sequence[str]) -> dict[str, Any]:
    """Values by dotted name, from ``section.key=value``.

    Raises:
        ConfigError: naming what is not of that form.
    """
    for word in words:
        name, equals, _ = word.partition("=")
        if not equals or "." not in name.strip("."):
            raise ConfigError(
                f"{word!r}: must be KEY=VALUE with a key of the rules; write, for example, policy.min_peers=2"
            )
    table = parse_table("", words)
    return {f"{section}.{key}": value for section, keys in table.items() for key, value in keys.items()}


def put_amendment(store: Patient, run: RunFile, owner: Identity, round_: int, changes: Mapping[str, Any]) -> Amendment:
    """Sign the next amendment of a run, and put it.

    Raises:
        ConfigError: if a change cannot be amended, breaks a rule, is too long, or the key is not the owner's.
    """
    if owner.public != run.owner:
        raise ConfigError(f"--key: is that of {owner.public}, but run {run.run} is owned by {run.owner}; name its key")
    known = known_amendments(reader_of(store), run)
    amendment = Amendment(run=run.run, n=len(known), round=round_, changes=dict(changes))
    apply_amendment(run_at(run, known, paths.MAX_ROUND), amendment)
    amendment = amendment.signed(owner)
    data, place = canonical.encode(amendment), str(paths.Amend(amendment.n))
    if len(data) > AMENDMENT_LIMIT:  # nobody would read it, nor any after it
        raise ConfigError(
            f"changes={len(data)} bytes: must have at most {AMENDMENT_LIMIT} with their signature; name fewer keys, or "
            "start another run"
        )
    try:
        store.create(place, data)
    except AlreadyExists:
        raise ConfigError(
            f"{place}: must be free, but what is there is no amendment by this run's owner, or one that came this "
            "moment; look at it, remove it if a stranger wrote it, and try again"
        ) from None
    return amendment


class Voided(NamedTuple):
    """A round that was voided: what says so, and the manifest that counts no more."""

    amendment: Amendment
    manifest: Manifest


def void_round(
    url: str, owner: Identity, key: Key, changes: Sequence[str], *, bar_writer: bool, force: bool = False
) -> Voided:
    """Write an amendment after which the manifest of a round counts only if it acknowledges that amendment.

    Args:
        url: Of the run.
        owner: Its owner.
        key: Round and fragment.
        changes: Further changes, which hold for the manifest that takes the place of the one that is voided.
        bar_writer: Whoever wrote that one may write none any more, also if ``changes`` name it.
        force: Also where peers that have applied it have nothing to start over from.

    Raises:
        ConfigError: if there is no such manifest, it is too old, nobody else is named as a writer, or as in
            ``amend_run``.
    """
    for name, value, most in (("round", key.round, paths.MAX_ROUND), ("fragment", key.fragment, paths.MAX_FRAGMENT)):
        if not 0 <= value <= most:
            raise ConfigError(f"--{name} {value}: must be from 0 to {most}; look with `sparseloco status`")
    reach(url)
    store = Patient(open_store(url))
    run = read_run_of(store, url)
    read = reader_of(store)
    known = known_amendments(read, run)
    start = History(run=run, round=0, fragment=key.fragment, digest="", voids=voids_of(known))
    found = claim_at(read, start, key.round, attempts=paths.MAX_ATTEMPT + 1)  # also behind a heap of rubbish
    if found is None:
        raise ConfigError(
            f"--round {key.round} --fragment {key.fragment}: must have a manifest that counts, and there is none; look "
            "with `sparseloco status`"
        )
    manifest, history = found
    if not force and next_claim(read, history.after(manifest, "")) is not None:
        _check_not_too_old(anchored(store, start), key)
    pending = len(known) - len(history.amendments)
    if pending >= MAX_AMENDED:
        raise ConfigError(
            f"--round {key.round}: has {pending} amendments that are not acknowledged, and a manifest acknowledges at "
            f"most {MAX_AMENDED}, so it would never close again; start another run"
        )
    values: dict[str, Any] = {VOID: key.fragment, **changes_of(changes)}
    if bar_writer:
        policy = run_at(run, known, paths.MAX_ROUND).policy
        named = values.get(_WRITERS, policy.writers or policy.members)
        values[_WRITERS] = _without(named, manifest.writer) if isinstance(named, list | tuple) else named
    return Voided(put_amendment(store, run, owner, key.round, values), manifest)


def _check_not_too_old(rounds: Sequence[int], key: Key) -> None:
    """Refuse a round before the older of the two newest anchors, since which peers keep what is needed to replay."""
    if len(rounds) == KEPT and key.round < min(rounds):
        raise ConfigError(
            f"--round {key.round}: must be {min(rounds)} or later, since peers that have applied it start over from an "
            f"anchor, and keep those of rounds {min(rounds)} and {max(rounds)}; look with `sparseloco status` for the "
            "round that is meant, or pass --force, after which only a new run may help"
        )


def _without(keys: Sequence[str], writer: str) -> list[str]:
    """Those who may write manifests but for one."""
    others = [key for key in keys if key != writer]
    if not others:
        raise ConfigError(
            f"--bar-writer: must leave a writer, but nobody besides {writer} is named as one; name those who may write "
            "in the same command, with policy.writers='[\"KEY\", ...]'"
        )
    return others


def told(amendment: Amendment) -> str:
    """What an amendment changes and from when on, in words."""
    changes = ", ".join(f"{name}={value}" for name, value in amendment.changes.items())
    start = "the first round whose manifest acknowledges it, which may be one that is open now"
    if amendment.round:
        start = f"round {amendment.round} on, or from the first round whose manifest acknowledges it, if that is later"
    later = [name for name in NEXT_ROUND if name in amendment.changes]
    and_then = f"; {' and '.join(later)} from the round after that" if later else ""
    return f"amendment {amendment.n} of run {amendment.run}: {changes}, from {start}{and_then}"


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
