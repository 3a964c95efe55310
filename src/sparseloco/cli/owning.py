"""What an owner does to a run while peers train: amend its rules, and have a round closed anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sparseloco.cli.peer_runs import read_run_of
from sparseloco.cli.reach import reach
from sparseloco.config.file import parse_table
from sparseloco.errors import AlreadyExists, ConfigError
from sparseloco.peers import canonical, paths
from sparseloco.peers.anchors import KEPT
from sparseloco.peers.claims import anchored, claim_at, known_amendments, next_claim, reader_of
from sparseloco.peers.identity import Identity
from sparseloco.peers.manifest import MAX_AMENDED, History, Manifest
from sparseloco.peers.patience import Patient
from sparseloco.peers.run_file import (
    AMENDMENT_LIMIT,
    NEXT_ROUND,
    VOID,
    Amendment,
    RunFile,
    apply_amendment,
    run_at,
    voids_of,
)
from sparseloco.peers.store import open_store
from sparseloco.types import Key

_WRITERS = "policy.writers"


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
    found = claim_at(read, start, key.round, room=float("inf"))  # also behind a heap of rubbish
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
