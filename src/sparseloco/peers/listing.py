"""What lies in the folder of a round, whoever put it there."""

from __future__ import annotations

from sparseloco.errors import WireError
from sparseloco.peers import paths
from sparseloco.peers.operations import List, Listing, Steps

_MAX_PAGES = 64
_PER_PEER = 256
"""Objects of one peer in a round that are looked at; a round needs a frame, and some wants and relays."""

Seen = tuple[paths.RunPath, int]


def list_round(round: int, fragment: int) -> Steps[list[Seen] | None]:
    """Objects of a round with their sizes, in the order of their paths; names that no peer of ours makes are left out.

    A peer that fills its folder hides nobody: the rest of that folder is jumped over.

    Returns:
        What is there, or None if the store did not answer.
    """
    prefix = paths.round_prefix(round, fragment)
    taken: list[Seen] = []
    per_peer: dict[str, int] = {}
    after = ""
    for _ in range(_MAX_PAGES):
        outcome = yield List(prefix, after)
        if not isinstance(outcome, Listing):
            return None
        for path, size in outcome.items:
            named = _parse(path, prefix)
            peer = getattr(named, "peer", "")
            per_peer[peer] = per_peer.get(peer, 0) + 1
            if named is not None and per_peer[peer] <= _PER_PEER:
                taken.append((named, size))
        if not outcome.more or not outcome.items:
            return taken
        after = _next(outcome.items[-1][0], prefix, per_peer)
    return taken


def _parse(path: str, prefix: str) -> paths.RunPath | None:
    try:
        return paths.parse(path) if path.startswith(prefix) else None
    except WireError:
        return None


def _next(last: str, prefix: str, per_peer: dict[str, int]) -> str:
    """Where the next page starts: after the last path, or after the whole folder of a peer that has had its share."""
    folder, slash, _ = last.removeprefix(prefix).partition("/")
    crowded = slash and (per_peer.get(folder, 0) >= _PER_PEER or folder not in per_peer)
    return f"{prefix}{folder}0" if crowded else last  # "0" is the character after "/"
