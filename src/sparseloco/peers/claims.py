"""Manifests whose word on the shared state is taken: for finding anchors, and for fetching ahead of a replay.

Signature, place, order and limits are checked here as anywhere. What a manifest says of the shared state can only be
checked by somebody who has that state; whoever uses a claim does so later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial

from sparseloco.errors import StoreError, TooLarge, WireError
from sparseloco.peers import anchors, canonical, paths
from sparseloco.peers.manifest import History, Manifest, is_signed, judge_claim, manifest_limit
from sparseloco.peers.policy import MAX_PEERS, Policy
from sparseloco.peers.run_file import AMENDMENT_LIMIT, Amendment, RunFile, read_amendment
from sparseloco.peers.store import Store, get_steady

ROOM = 2**26
"""Bytes of a round's attempts that are looked at, whoever laid them; peers in an open round look at all of them."""
_BATCH = 16
"""Manifests that are fetched at the same time."""
_LARGEST = manifest_limit(Policy(max_peers=MAX_PEERS))
"""For a manifest whose policy follows from the amendments that it names itself; its verdict has the limit of that."""
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
    for place, data, told in _told(read, chain, manifest_limit(chain.policy)):
        verdict = judge_claim(data, place, chain, told)
        if isinstance(verdict, Manifest):
            return verdict
    return None


def closed_since(read: Reader, pool: Executor, chain: History) -> list[Manifest]:
    """Manifests of the closed rounds from the chain's next one on, fetched side by side."""
    found: list[Manifest] = []
    size = 1
    while True:
        batch = [replace(chain, round=chain.round + i) for i in range(size)]
        for first in list(pool.map(partial(_first_attempt, read), batch)):
            manifest = next_claim(_after(first, read), chain)
            if manifest is None:
                return found
            found.append(manifest)
            chain = chain.after(manifest, "")
        size = _BATCH


def _first_attempt(read: Reader, chain: History) -> tuple[str, bytes | None]:
    path = str(paths.Manifest(chain.round, chain.fragment, 0))
    return path, read(path, manifest_limit(chain.policy))


def _after(first: tuple[str, bytes | None], read: Reader) -> Reader:
    """A reader that has one object already."""
    return lambda path, limit: first[1] if path == first[0] else read(path, limit)


def claim_at(read: Reader, start: History, round: int, room: float = ROOM) -> tuple[Manifest, History] | None:
    """A manifest in the middle of the chain that begins with ``start``, and the history before it, as it tells it.

    Where several of the attempts in the first ``room`` bytes are in order, it is the one that the next round's
    manifests name.
    """
    found = _claims(read, start, round, room)
    if len(found) > 1:
        named = {manifest.previous for manifest, _ in _claims(read, start, round + 1)}
        found = [pair for pair in found if pair[0].sha256 in named] or found
    return found[0] if found else None


def claim_named(read: Reader, start: History, round: int, sha256: str) -> Manifest | None:
    """The manifest of a round that one of the next round names; None if it cannot be had now."""
    return next((manifest for manifest, _ in _claims(read, start, round) if manifest.sha256 == sha256), None)


def anchored_after(store: Store, start: History, round: int) -> bool:
    """Whether a chain has an anchor of a later round that a manifest vouches for."""
    with contextlib.suppress(StoreError):
        return bool(anchored(store, start, 1, after=round))
    return False


def anchored(store: Store, start: History, most: int = anchors.KEPT, *, after: int = -1) -> list[int]:
    """The newest rounds of a chain that have an anchor for which a manifest vouches, the newest first.

    Args:
        store: Where they are.
        start: Where the chain begins.
        most: How many are looked for.
        after: Only rounds after this one.

    Raises:
        StoreError: if they cannot be listed.
    """
    there, found = anchors.listed(store), list[int]()
    for number in sorted({place.round for place in there if place.round > after}, reverse=True):
        claim = claim_at(reader_of(store), start, number) if len(found) < most else None
        if claim and claim[0].state_sha256 and anchors.path_of(claim[0]) in map(str, there):
            found.append(number)
    return found


def _claims(read: Reader, start: History, round: int, room: float = ROOM) -> list[tuple[Manifest, History]]:
    found: list[tuple[Manifest, History]] = []
    for place, data, told in _told(read, replace(start, round=round), _LARGEST, room):
        amendments = amendments_until(read, start.run, told.amendments - len(told.amended))
        if amendments is None:
            continue
        history = replace(
            start,
            round=round,
            previous=told.previous,
            amendments=amendments,
        )
        verdict = judge_claim(data, place, history, told)
        if isinstance(verdict, Manifest):
            found.append((verdict, history))
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


def attempts(read: Reader, chain: History, limit: int, room: float = ROOM) -> Iterator[tuple[paths.Manifest, bytes]]:
    """What lies at each attempt of the chain's next round, until there is none or ``room`` bytes are read."""
    for attempt in range(paths.MAX_ATTEMPT + 1):
        place = paths.Manifest(chain.round, chain.fragment, attempt)
        data = read(str(place), limit) if room >= 0 else None
        if data is None:
            return
        room -= len(data)
        yield place, data


def _told(
    read: Reader, chain: History, limit: int, room: float = ROOM
) -> Iterator[tuple[paths.Manifest, bytes, Manifest]]:
    """Whatever looks like a manifest, attempt by attempt."""
    for place, data in attempts(read, chain, limit, room):
        with contextlib.suppress(WireError):
            yield place, data, canonical.decode(data, Manifest, what="manifest", limit=limit)
