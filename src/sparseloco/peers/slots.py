"""Data slots: which peer reads which part of the text, settled by creating an object.

Slots only keep peers from reading the same text at the same time, so no peer ever waits for one: where none can be had,
two peers share one.
"""

from __future__ import annotations

from typing import NamedTuple

from sparseloco.errors import StoreError
from sparseloco.peers import canonical, paths
from sparseloco.peers.patience import Patient

_MOST_TRIES = 64


class Claim(NamedTuple):
    """A data slot.

    Attributes:
        slot: Its number.
        shared: Why others may read the same text; empty if the slot is this peer's alone.
    """

    slot: int
    shared: str = ""


def claim_slot(store: Patient, peer: str, num_slots: int) -> Claim:
    """Claim a data slot, or find again the one that this peer has claimed before.

    The search begins at a place that follows from the peer's name, so a peer that comes back finds its slot without a
    list.

    Args:
        store: Of the run.
        peer: Name of the peer, 32 hex digits.
        num_slots: Slots of the run.

    Returns:
        The slot, from 0 to ``num_slots - 1``.
    """
    first = int(peer, 16) % num_slots
    mine = canonical.encode({"peer": peer})
    tries = min(num_slots, _MOST_TRIES)
    for number in range(tries):
        slot = (first + number) % num_slots
        try:
            if store.create_or_same(str(paths.Slot(slot)), mine):
                return Claim(slot)
        except StoreError as error:
            return Claim(first, str(error))
    return Claim(first, f"the {tries} that it may take are others'")
