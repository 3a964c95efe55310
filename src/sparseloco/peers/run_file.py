"""``run.json`` and the owner's amendments: all that a stranger needs to take part, and nothing that can hurt one.

Values are plain. What would make a reader run code, open one of its files or call an address is refused with the
reason.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from sparseloco.errors import ConfigError, WireError
from sparseloco.peers import paths
from sparseloco.peers.canonical import Hex16, Hex32, Hex64, Hex128, Line, decode, encode, sha256
from sparseloco.peers.identity import Domain, Identity, verify
from sparseloco.peers.policy import Policy

RUN_LIMIT = 2**20
AMENDMENT_LIMIT = 2**14
_NO_SIGNATURE = "0" * 128
_SECTIONS = ("algorithm", "model", "data", "train")
_RUNS_CODE = ("trust_remote_code", "auto_map", "custom_code", "code_revision")
_LOCAL = re.compile(r"[/\\~]|[A-Za-z]:|.*(?:^|[/\\])\.\.(?:[/\\]|$)", re.S)
_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*://|\s*(?:file|data|javascript):", re.I)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_RATE = "algorithm.outer_lr"
VOID = "void"
_AT_START = ("policy.lease_s", "policy.slots", "policy.rejoin_warmup_steps")
MAX_RATE = 1000.0
NEXT_ROUND = ("policy.anchor_every", "policy.max_peers")
"""What a reader of a manifest must know before it has read it: these hold from the round after at the earliest."""


class Void(NamedTuple):
    """A round that the owner has closed anew: manifests count there only if they acknowledge amendment ``n``.

    Attributes:
        round: The round.
        fragment: The fragment.
        n: Number of the amendment that says so.
    """

    round: int
    fragment: int
    n: int


class RunFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all peers of a run have in common.

    Attributes:
        format: Of this file.
        run: 16 hex digits made of name, nonce and owner.
        name: For people.
        nonce: Random, so that two runs of one name differ.
        owner: Public key of who may amend the run.
        algorithm: ``preset`` and its settings.
        model: Numbers, or ``shape``: what ``[model.shape]`` holds.
        data: Recipe of the text: "stdlib", or datasets by their name on the hub.
        train: Inner optimizer, batch, steps and the like.
        tensors: SHA-256 of the tensor table.
        fingerprint: Of algorithm and tensor table, as in every frame.
        tokenizer: SHA-256 of ``tokenizer.json``.
        policy: Who may take part, and when a round closes.
        signature: Of the owner over all of the above.
    """

    format: Literal[1] = 1
    run: Hex16
    name: Line
    nonce: Hex32
    owner: Hex64
    algorithm: dict[str, Any]
    model: dict[str, Any]
    data: dict[str, Any]
    train: dict[str, Any]
    tensors: Hex64
    fingerprint: Hex16
    tokenizer: Hex64
    policy: Policy
    signature: Hex128 = _NO_SIGNATURE

    def __post_init__(self) -> None:
        for section in _SECTIONS:
            _check_plain(section, getattr(self, section))
        if not isinstance(self.algorithm.get("preset"), str):
            raise ConfigError(f"algorithm.preset={self.algorithm.get('preset')!r}: must name a preset; add it")
        _check_model(self.model)
        _check_data(self.data)
        if self.run != run_id(self.name, self.nonce, self.owner):
            raise ConfigError(f"run={self.run!r}: must follow from name, nonce and owner; take run_id()")

    def signed(self, owner: Identity) -> RunFile:
        """The same with the owner's signature.

        Raises:
            ConfigError: if ``owner`` is not its owner.
        """
        if owner.public != self.owner:
            raise ConfigError(f"owner={owner.peer_id}: must have the key that run.json names; load the owner's key")
        bare = msgspec.structs.replace(self, signature=_NO_SIGNATURE)
        return msgspec.structs.replace(bare, signature=owner.sign(Domain.RUN, self.run, body=encode(bare)).hex())


class Amendment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change that holds from ``round`` on, or from the first round whose manifest acknowledges it, if that is later.

    Attributes:
        format: Of this object.
        run: Which run it is for.
        n: Its number, from 0 on without gaps.
        round: First round that it may hold in.
        changes: New values by dotted name: any key of ``policy``, and ``algorithm.outer_lr``, which every peer applies
            for itself and which is in no frame. ``void`` has the number of a fragment: its manifest of ``round`` counts
            only if it acknowledges this amendment.
        signature: Of the owner over all of the above.
    """

    format: Literal[1] = 1
    run: Hex16
    n: int
    round: int
    changes: dict[str, Any]
    signature: Hex128 = _NO_SIGNATURE

    def __post_init__(self) -> None:
        for name in ("n", "round"):
            if not 0 <= getattr(self, name) < 10**8:
                raise ConfigError(f"amendment.{name}={getattr(self, name)}: must be from 0 to 99999999; mend it")
        _check_plain("changes", self.changes)
        for name in self.changes:
            section, _, key = name.partition(".")
            if name not in (_RATE, VOID) and (section != "policy" or not key or "." in key):
                raise ConfigError(
                    f"changes: {name!r} cannot be amended; name a key of policy or {_RATE}, or start another run"
                )
        fragment = self.changes.get(VOID, 0)
        if type(fragment) is not int or not 0 <= fragment <= paths.MAX_FRAGMENT:
            raise ConfigError(f"{VOID}={fragment!r}: must be a fragment, from 0 to {paths.MAX_FRAGMENT}; name one")

    def signed(self, owner: Identity) -> Amendment:
        """The same with the owner's signature."""
        bare = msgspec.structs.replace(self, signature=_NO_SIGNATURE)
        signature = owner.sign(Domain.AMENDMENT, self.run, self.n, body=encode(bare))
        return msgspec.structs.replace(bare, signature=signature.hex())

    def is_by(self, owner: str) -> bool:
        """Whether the owner of that public key signed it."""
        bare = encode(msgspec.structs.replace(self, signature=_NO_SIGNATURE))
        return verify(owner, bytes.fromhex(self.signature), Domain.AMENDMENT, self.run, self.n, body=bare)


def run_id(name: str, nonce: str, owner: str) -> str:
    """The 16 hex digits that tell this run from all others."""
    return sha256(b"sparseloco run id\0" + encode([name, nonce, owner]))[:16]


def read_run(data: bytes, owner: str | None = None) -> RunFile:
    """Check the bytes of a ``run.json``.

    Args:
        data: At most ``RUN_LIMIT`` bytes.
        owner: Public key that the reader was told; None trusts the file's own word, which must be said aloud.

    Raises:
        WireError: with the reason.
    """
    run = decode(data, RunFile, what="run.json", limit=RUN_LIMIT)
    if owner is not None and run.owner != owner:
        raise WireError(f"run.json: owner={run.owner} is not --owner {owner[:80]!r}; ask for the right address or key")
    bare = encode(msgspec.structs.replace(run, signature=_NO_SIGNATURE))
    if not verify(run.owner, bytes.fromhex(run.signature), Domain.RUN, run.run, body=bare):
        raise WireError("run.json: the signature is not its owner's; somebody changed the file, so do not join")
    return run


def read_amendment(data: bytes, run: RunFile, n: int) -> Amendment:
    """Check the bytes of ``amend/<n>.json``.

    Raises:
        WireError: with the reason.
    """
    amendment = decode(data, Amendment, what=f"amendment {n}", limit=AMENDMENT_LIMIT)
    if (amendment.run, amendment.n) != (run.run, n):
        raise WireError(f"amendment {n}: says run {amendment.run} and number {amendment.n}; refuse it")
    if not amendment.is_by(run.owner):
        raise WireError(f"amendment {n}: the signature is not the owner's; refuse it")
    return amendment


def run_at(run: RunFile, before: Sequence[Amendment], round: int, amended: Sequence[Amendment] = ()) -> RunFile:
    """The run as it is in a round: a pure function of the file and of what manifests acknowledged up to that round.

    Args:
        run: The file.
        before: Amendments that the manifests of the rounds before acknowledged, by number.
        round: The round in question.
        amended: Those that its own manifest acknowledges. They hold in this very round, but for ``NEXT_ROUND``.

    Returns:
        The run with all changes that hold; an amendment that breaks a rule is left out, by everybody alike.
    """
    for number, amendment in enumerate((*before, *amended)):
        if amendment.round <= round:
            with contextlib.suppress(ConfigError):
                run = apply_amendment(run, amendment, put_off=NEXT_ROUND if number >= len(before) else ())
    return run


def voids_of(amendments: Sequence[Amendment]) -> tuple[Void, ...]:
    """Rounds that these amendments void."""
    return tuple(Void(one.round, one.changes[VOID], one.n) for one in amendments if VOID in one.changes)


def apply_amendment(run: RunFile, amendment: Amendment, put_off: Collection[str] = ()) -> RunFile:
    """The run with these changes, but for those that are put off.

    Raises:
        ConfigError: if a value breaks a rule or a key is unknown.
    """
    table = msgspec.to_builtins(run)
    for name, value in amendment.changes.items():
        section, _, key = name.partition(".")
        if section == "policy" and key not in Policy.__struct_fields__:
            raise ConfigError(f"changes: unknown key {name!r}; see the policy in run.json")
        if name in _AT_START:
            raise ConfigError(f"changes: {name!r} is read from run.json when a peer starts; start another run")
        if name == _RATE:
            _check_rate(run, value)
        if name not in (*put_off, VOID):
            table[section] = {**table[section], key: value}
    try:
        return msgspec.convert(table, RunFile, strict=True)
    except msgspec.ValidationError as error:
        why = error.__cause__ if isinstance(error.__cause__, ConfigError) else f"{error}; mend the changes"
        raise ConfigError(f"amendment {amendment.n}: {why}") from None


def _check_rate(run: RunFile, value: object) -> None:
    if "outer_lr" not in run.algorithm:
        raise ConfigError(
            f"{_RATE}: must be a setting of the preset, and {run.algorithm['preset']!r} has none; start another run"
        )
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_RATE:
        raise ConfigError(f"{_RATE}={value!r}: must be above 0 and at most {MAX_RATE:g}; use 0.7")


def _check_plain(name: str, value: object) -> None:
    """Refuse what is not a plain value, or what names code, a local path or an address."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_key(name, key)
            _check_plain(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            _check_plain(f"{name}.{number}", inner)
    elif isinstance(value, str):
        _check_text(name, value)
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise ConfigError(f"{name}: must fit 64 bits; use a smaller number")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}={value!r}: must be finite; use a number")
    elif value is not None and not isinstance(value, int | float):
        raise ConfigError(f"{name}: must be a plain value, not a {type(value).__name__}; use numbers, texts and lists")


def _check_key(name: str, key: object) -> None:
    if not isinstance(key, str) or not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", key, re.ASCII):
        raise ConfigError(f"{name}: the key {ascii(key)[:80]} must be a plain name; leave it out")
    if key in _RUNS_CODE:
        raise ConfigError(f"{name}.{key}: must not stand in a run, which makes no peer run code; leave it out")


def _check_text(name: str, value: str) -> None:
    shown = ascii(value[:80])
    if len(value) > 1000 or not value.isprintable():
        raise ConfigError(f"{name}={shown}: must be at most 1000 characters without control characters; shorten it")
    if _URL.match(value):
        raise ConfigError(f"{name}={shown}: must not be an address, since a run tells no peer whom to call; cut it")
    if _LOCAL.match(value):
        raise ConfigError(f"{name}={shown}: must not be a path on a peer's machine; put the content into the run")


def _check_model(model: dict[str, Any]) -> None:
    for key in ("config", "pretrained"):
        if model.get(key):
            raise ConfigError(
                f"model.{key}={ascii(model[key])[:80]}: must not stand in a run, since it could be a peer's folder; "
                "write the model as numbers or as [model.shape]"
            )


def _check_data(data: dict[str, Any]) -> None:
    if data.get("tokenizer"):
        raise ConfigError("data.tokenizer: must not stand in a run; the run's own tokenizer.json is the one")
    sources = data.get("sources") or []
    if not isinstance(sources, list | tuple) or not all(isinstance(source, dict) for source in sources):
        raise ConfigError("data.sources: must be a list of tables; write one for each source")
    for source in [data, *sources]:
        path = source.get("path", "stdlib")
        if path == "stdlib" or (source.get("format") == "hf" and isinstance(path, str) and _HUB_NAME.fullmatch(path)):
            continue
        raise ConfigError(
            f"data.path={ascii(path)[:80]}: must be 'stdlib', or owner/name of a dataset on the hub with format='hf', "
            "so that it names nothing on a peer's machine; publish the text"
        )
