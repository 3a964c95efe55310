"""What lies in the folder of a round, whoever put it there."""

from __future__ import annotations

from collections.abc import Collection

from sparseloco.errors import WireError
from sparseloco.peers import paths
from sparseloco.peers.operations import List, Listing, Steps
from sparseloco.peers.pages import Walk

PER_PEER = 256
"""Objects of one peer in a round that are looked at; a round needs a frame, and some wants and relays."""

Seen = tuple[paths.RunPath, int]


def list_round(round: int, fragment: int, known: Collection[str] = ()) -> Steps[list[Seen] | None]:
    """Objects of a round with their sizes, in the order of their paths; names that no peer of ours makes are left out.

    A peer that fills its folder hides nobody: the rest of that folder is jumped over.

    Args:
        round: The round.
        fragment: The fragment.
        known: Peers whose folders are looked into even if there are more folders than one look reads.

    Returns:
        What is there, or None if the store did not answer.
    """
    prefix = paths.round_prefix(round, fragment)
    taken: list[Seen] = []
    walk = Walk(prefix, PER_PEER, known)
    for folder, after in walk:
        outcome = yield List(folder, after)
        if not isinstance(outcome, Listing):
            return None
        for path, size in outcome.items:
            if walk.takes(path) and (named := _parse(path, prefix)) is not None:
                taken.append((named, size))
        walk.goes_on(outcome.rest)
    return taken


def _parse(path: str, prefix: str) -> paths.RunPath | None:
    try:
        return paths.parse(path) if path.startswith(prefix) else None
    except WireError:
        return None
