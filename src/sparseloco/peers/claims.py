"""Manifests whose word on the shared state is taken: for finding anchors, and for fetching ahead of a replay.

Signature, place, order and limits are checked here as anywhere. What a manifest says of the shared state can only be
checked by somebody who has that state; whoever uses a claim does so later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from sparseloco.errors import StoreError, TooLarge, WireError
from sparseloco.peers import anchors, canonical, paths
from sparseloco.peers.manifest import History, Manifest, is_signed, judge, manifest_limit
from sparseloco.peers.run_file import AMENDMENT_LIMIT, Amendment, RunFile, read_amendment
from sparseloco.peers.store import Store, get_steady
from sparseloco.types import Key

MAX_ATTEMPTS = 64
Reader = Callable[[str, int], bytes | None]
"""Bytes of an object of at most so many bytes; None if it cannot be had."""


def reader_of(store: Store) -> Reader:
    """Read from a store; whatever goes wrong means that nothing was had, and what is too large is nothing of ours."""

    def read(path: str, limit: int) -> bytes | None:
        is_right = is_signed if isinstance(paths.parse(path), paths.Manifest) else bool
        try:
            return get_steady(store, path, is_right, limit=limit)
        except TooLarge:
            return b""
        except StoreError:
            return None

    return read


def next_claim(read: Reader, chain: History) -> Manifest | None:
    """The first attempt of the chain's next round that is in order but for its shared state."""
    for place, data, told in _attempts(read, chain):
        if manifest := _judge(data, place, replace(chain, digest=told.digest, state_sha256=told.state_sha256)):
            return manifest
    return None


def _judge(data: bytes, place: paths.Manifest, history: History) -> Manifest | None:
    """The manifest if it is in order; one that lacks the hash that is due is not, whatever the reader's state."""
    if history.wants_state_hash != bool(history.state_sha256):
        return None
    verdict = judge(data, place, history)
    return verdict if isinstance(verdict, Manifest) else None


def claim_at(read: Reader, run: RunFile, fragment: int, round: int) -> tuple[Manifest, History] | None:
    """A manifest in the middle of a chain, and the history before it, as it tells it.

    Where several attempts are in order, it is the one that the next round's manifests name.
    """
    found = _claims(read, run, fragment, round)
    if len(found) > 1:
        named = {manifest.previous for manifest, _ in _claims(read, run, fragment, round + 1)}
        found = [pair for pair in found if pair[0].sha256 in named] or found
    return found[0] if found else None


def anchored_after(store: Store, run: RunFile, key: Key) -> bool:
    """Whether a fragment has an anchor of a later round that a manifest vouches for."""
    with contextlib.suppress(StoreError):
        there = anchors.listed(store)
        for round in sorted({place.round for place in there if place.round > key.round}, reverse=True):
            found = claim_at(reader_of(store), run, key.fragment, round)
            if found and found[0].state_sha256 and anchors.path_of(found[0]) in map(str, there):
                return True
    return False


def _claims(read: Reader, run: RunFile, fragment: int, round: int) -> list[tuple[Manifest, History]]:
    found: list[tuple[Manifest, History]] = []
    for place, data, told in _attempts(read, History(run=run, round=round, fragment=fragment, digest="")):
        amendments = amendments_until(read, run, told.amendments - len(told.amended))
        if amendments is None:
            continue
        history = History(
            run=run,
            round=round,
            fragment=fragment,
            digest=told.digest,
            previous=told.previous,
            amendments=amendments,
            state_sha256=told.state_sha256,
        )
        if manifest := _judge(data, place, history):
            found.append((manifest, replace(history, digest="", state_sha256="")))
    return found


def amendments_until(read: Reader, run: RunFile, count: int) -> tuple[Amendment, ...] | None:
    """The first ``count`` amendments; None if one cannot be had."""
    found: list[Amendment] = []
    for n in range(count):
        amendment = amendment_of(read, run, n)
        if amendment is None:
            return None
        found.append(amendment)
    return tuple(found)


def known_amendments(read: Reader, run: RunFile, before: Sequence[Amendment] = ()) -> list[Amendment]:
    """All amendments that can be read, from those that are known already on."""
    found = [*before]
    while (amendment := amendment_of(read, run, len(found))) is not None:
        found.append(amendment)
    return found


def amendment_of(read: Reader, run: RunFile, n: int) -> Amendment | None:
    """The n-th amendment, if it is there and the owner's."""
    data = read(str(paths.Amend(n)), AMENDMENT_LIMIT)
    try:
        return None if data is None else read_amendment(data, run, n)
    except WireError:
        return None


def _attempts(read: Reader, chain: History) -> Iterator[tuple[paths.Manifest, bytes, Manifest]]:
    """Whatever looks like a manifest, attempt by attempt, until there is none."""
    limit = manifest_limit(chain.policy)
    for attempt in range(MAX_ATTEMPTS):
        place = paths.Manifest(chain.round, chain.fragment, attempt)
        data = read(str(place), limit)
        if data is None:
            return
        try:
            yield place, data, canonical.decode(data, Manifest, what="manifest", limit=limit)
        except WireError:
            continue
