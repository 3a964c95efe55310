"""What a replica makes of the messages of a round before it applies them: who differs, and who contributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sparseloco.errors import AllAbstainedError, DivergenceError
from sparseloco.types import Envelope, Key, name_of

POLICIES = ("abstain", "stop")
"""What numbers that are not finite do to their replica."""


class Absence(NamedTuple):
    """A peer that contributed nothing to a round.

    Attributes:
        peer: Its number.
        key: Round and fragment.
        cause: What was not finite; empty where that happened in another replica.
    """

    peer: int
    key: Key
    cause: str = ""


def check_same(inbox: Sequence[Envelope], fingerprint: str, digest: str) -> None:
    """Refuse messages of another algorithm or another shared state, also those without a contribution.

    Raises:
        DivergenceError: naming peer and round.
    """
    for envelope in inbox:
        where = f"peer {name_of(envelope.peer)}, round {envelope.key.round}"
        if envelope.fingerprint != fingerprint:
            raise DivergenceError(
                f"{where}: says algorithm {envelope.fingerprint}, this run is {fingerprint}; "
                "all peers need the same [algorithm] and model"
            )
        if envelope.digest != digest:
            raise DivergenceError(
                f"{where}: says shared state {envelope.digest}, here it is {digest}; "
                "restart the peer that differs from the shared state of another"
            )


def contributions(inbox: Sequence[Envelope], key: Key) -> tuple[list[Envelope], list[Absence]]:
    """Messages that count, and the peers of those that do not.

    Raises:
        AllAbstainedError: if there are messages and none counts.
    """
    giving = [envelope for envelope in inbox if envelope.weight]
    if inbox and not giving:
        raise AllAbstainedError(
            f"round {key.round}, fragment {key.fragment}=no contribution: must have one, and at all {len(inbox)} peers "
            "numbers were not finite; lower the learning rate, lengthen its warm-up or clip gradients"
        )
    return giving, [Absence(envelope.peer, key) for envelope in inbox if not envelope.weight]
