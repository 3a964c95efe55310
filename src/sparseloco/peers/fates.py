"""What became of the own payload of a round: rules 2 and 5 of docs/peers-protocol.md, as a function of its manifest."""

from __future__ import annotations

from collections.abc import Callable, Collection
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


def fate_since(
    round: int, hash: str, peer: str, later: Manifest, named: Callable[[int, str], Manifest | None]
) -> Fate | None:
    """What became of a message, by the manifests from its round on, each of which is named by the one after it.

    Args:
        round: Of the message.
        hash: Of its frame.
        peer: Oneself.
        later: An accepted manifest of a later round.
        named: Gives the manifest of a round with that hash, or None if it cannot be had now.

    Returns:
        Stale if a later frame is listed too, since what is left over is then older than what was sent. None if a
        manifest is missing, which proves nothing.
    """
    fate = Fate.NONE
    while later.round > round and fate != Fate.STALE:
        before = named(later.round - 1, later.previous)
        if before is None:
            return None
        later = before
        fate = own_fate(later, peer, hash if later.round == round else None)
    return fate
