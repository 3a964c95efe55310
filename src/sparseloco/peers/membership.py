"""Who is alive, by leases, on the reader's own clock.

No clock of another machine enters: what counts is how long ago this reader saw a lease change (rule 6).
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView
from dataclasses import dataclass, field
from typing import NamedTuple

_FORGET_LEASES = 20
"""A peer whose lease is in no listing for so many lease times is forgotten; sooner would revive the dead ones when a
stale listing leaves them out for a while."""


class Sighting(NamedTuple):
    """A lease as it lies in the store.

    Attributes:
        peer: Whose it is.
        mark: Anything that changes when the lease is put again: its etag, or the counter in it.
        left: The peer said that it leaves.
    """

    peer: str
    mark: str
    left: bool = False


@dataclass(slots=True)
class _Known:
    mark: str
    left: bool
    changed: float
    seen: float


@dataclass(slots=True)
class Leases:
    """Peers by their leases, as one reader saw them.

    Attributes:
        lease_s: Seconds without a change until a peer counts as gone.
        max_peers: Peers that are kept track of at most; later ones are ignored until others are forgotten.
    """

    lease_s: float
    max_peers: int = 4096
    _known: dict[str, _Known] = field(default_factory=dict)

    def saw(self, sightings: Iterable[Sighting], now: float) -> None:
        """Take in a listing of leases, whole or in part; ``now`` is monotonic seconds."""
        for sighting in sightings:
            known = self._known.get(sighting.peer)
            if known is None:
                if len(self._known) < self.max_peers:
                    self._known[sighting.peer] = _Known(sighting.mark, sighting.left, now, now)
                continue
            known.seen = now
            if (known.mark, known.left) != (sighting.mark, sighting.left):
                known.mark, known.left, known.changed = sighting.mark, sighting.left, now
        too_old = now - _FORGET_LEASES * self.lease_s
        for peer in [peer for peer, known in self._known.items() if known.seen < too_old]:
            del self._known[peer]  # ids of peers long gone do not pile up (C-48)

    def live(self, now: float) -> KeysView[str]:
        """Peers whose lease changed within ``lease_s`` and that did not leave, those first that are known longest."""
        return {
            peer: None for peer, known in self._known.items() if not known.left and now - known.changed <= self.lease_s
        }.keys()

    def last_seen(self, now: float) -> dict[str, float]:
        """Seconds since each known peer's lease last changed, the longest first."""
        ages = {peer: now - known.changed for peer, known in self._known.items()}
        return dict(sorted(ages.items(), key=lambda pair: (-pair[1], pair[0])))
