"""What the protocol asks of the world, what the world may answer, and what is said aloud on the way.

The protocol is made of generators that yield an operation and are sent its outcome. A driver over a real store and a
checker that tries all outcomes are the same to them. Every write may have any outcome, and ``Unavailable`` says
nothing: it may have been done, not done, or may still be done later.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

from sparseloco.errors import DivergenceError

T = TypeVar("T")


class DriftError(DivergenceError):
    """This peer's shared state contradicts the round's manifest; the caller replays from the newest anchor."""


class VoidedError(DivergenceError):
    """The owner has voided a round that this peer has applied; the caller starts over from anchors."""


@dataclass(frozen=True, slots=True)
class List:
    """A page of objects below a folder, with paths greater than ``after``. Outcomes: ``Listing``, ``Unavailable``."""

    prefix: str
    after: str = ""


@dataclass(frozen=True, slots=True)
class Get:
    """Read an object. Outcomes: ``Found``, ``Missing``, ``TooLarge``, ``Refused``, ``Unavailable``."""

    path: str
    limit: int


@dataclass(frozen=True, slots=True)
class Create:
    """Write if absent. Outcomes: ``Done``, ``Exists``, ``Refused``, ``Unavailable``."""

    path: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Put:
    """Write. Outcomes: ``Done``, ``Refused``, ``Unavailable``."""

    path: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove an own object. Outcomes: ``Done``, ``Refused``, ``Unavailable``."""

    path: str


@dataclass(frozen=True, slots=True)
class Upload:
    """Write the bytes with that hash, which the driver holds, as in ``Put``. Outcomes as there."""

    path: str
    hash: str


@dataclass(frozen=True, slots=True)
class Object:
    """A frame that is looked for: its bytes count only if size and hash are these."""

    path: str
    size: int
    hash: str


@dataclass(frozen=True, slots=True)
class Inspect:
    """Fetch frames, keep their bytes, and apply the deterministic checks of a listed frame. Outcome: ``Inspected``.

    The driver may work in parallel and answers before long: what is not done is ``Unavailable``, and is asked again.

    Attributes:
        frames: What to fetch.
        digest: Of the shared state before the round; a frame that says another is bad (rule 4).
    """

    frames: tuple[Object, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get hold of the bytes of listed frames; several objects may be tried for one hash. Outcome: ``Fetched``."""

    objects: tuple[Object, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Do something else for a while. Outcome: ``Done``."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Tell:
    """Something to log and to show. Outcome: ``Done``.

    Attributes:
        kind: A word for machines: "skipped", "deadline", "no-quorum", "cannot-write", "waiting", "closed", "clipped"
            (this peer's), "clipped-other", "norms", "voided".
        round: The round.
        fragment: The fragment.
        text: One sentence; names from peers in it are hex digits or escaped.
    """

    kind: str
    round: int
    fragment: int
    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """It was done."""


@dataclass(frozen=True, slots=True)
class Exists:
    """There was an object already, maybe of an earlier try of one's own."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The store said no: credentials or permissions."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unavailable:
    """No answer, or one that says to come again."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """The object."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Missing:
    """There is no such object."""


@dataclass(frozen=True, slots=True)
class TooLarge:
    """The object has more than ``limit`` bytes, and was not downloaded."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Paths and sizes in the order of the paths; ``rest``: after which path there may be more, empty for none."""

    items: tuple[tuple[str, int], ...]
    rest: str = ""


@dataclass(frozen=True, slots=True)
class Good:
    """A frame that passes every check; ``weight`` is what its header says."""

    weight: int


@dataclass(frozen=True, slots=True)
class Bad:
    """A frame whose bytes are there and fail a check."""

    reason: str


@dataclass(frozen=True, slots=True)
class Inspected:
    """A verdict for every frame, in order; also ``Bad`` for bytes that do not match the hash in their own path."""

    verdicts: tuple[Good | Bad | Unavailable, ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    """Hashes whose bytes are held now and match."""

    hashes: frozenset[str]


Operation = List | Get | Create | Put | Delete | Upload | Inspect | Fetch | Wait | Tell
Outcome = (
    Done | Exists | Refused | Unavailable | Found | Missing | TooLarge | Listing | Inspected | Fetched
)  # fmt: skip
Steps = Generator[Operation, Outcome, T]
