"""What became of the own payload of a round: rules 2 and 5 of docs/peers-protocol.md, as a function of its manifest."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from sparseloco.peers.manifest import Manifest


class Fate(Enum):
    """What became of the own payload of a round (rules 2 and 5)."""

    ACCEPTED = "accepted"
    CREDITED = "credited"
    """Not in the manifest: it goes back into the residual, whole."""
    STALE = "stale"
    """The manifest lists a frame that this private state knows nothing of: the residual is dropped, said aloud."""
    NONE = "none"
    """There was none."""


def own_fate(manifest: Manifest, peer: str, in_flight: str | None, failed: Collection[str] = ()) -> Fate:
    """What a peer does with its payload once it has the manifest.

    Args:
        manifest: The accepted one; an empty one credits everybody.
        peer: Oneself.
        in_flight: Hash of the frame that the private state holds for this round; None if it holds none.
        failed: Hashes of listed frames that failed a check and so weighed nothing for all, for example because a writer
            gave another weight than the frame's.
    """
    entry = manifest.entry_of(peer)
    if entry is not None and entry.hash in failed:
        entry = None
    if entry is not None and entry.hash != in_flight:
        return Fate.STALE
    if in_flight is None:
        return Fate.NONE
    return Fate.CREDITED if entry is None else Fate.ACCEPTED
