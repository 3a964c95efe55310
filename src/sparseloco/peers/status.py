"""What can be seen of a run from its store: plain values, for a terminal, a page, or as JSON.

Every text in them is printable ASCII: peers wrote it, so it was checked or escaped before it came here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A frame of a round.

    Attributes:
        peer: Who sent it.
        hash: Of the object, as in its path.
        nbytes: Size of the object.
        tokens: Its weight as the manifest lists it; None in an open round, where nobody has said it was checked.
        late_s: Seconds after the round's first frame, by the store's times; None if its object is gone or has no time.
    """

    peer: str
    hash: str
    nbytes: int
    tokens: int | None
    late_s: float | None


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A peer that an open round has no frame of (C-33).

    Attributes:
        peer: Who.
        age_s: Seconds since its lease was put, by the store's time and this machine's clock; None if unknown.
        unchanged_s: Seconds that this reader has seen the lease unchanged; what counts for peers.
    """

    peer: str
    age_s: float | None
    unchanged_s: float


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round of one fragment.

    Attributes:
        round: Its number.
        fragment: Which.
        closed: Whether a manifest counts.
        attempt: Of that manifest; None if open.
        writer: Peer id of who wrote it; "" if open.
        digest: Of the shared state before the round, as the manifest says; "" if open.
        sent: Frames that count, in the order in which they are reduced; in an open round those that are there.
        left_out: Peer and reason, as the manifest says.
        missing: In an open round, who has a lease and no frame.
        listed_bytes: Sum of the sizes of the frames in ``sent``.
        stored_bytes: Of all objects in the folder of the round now, relays and manifests included; None if unknown.
        took_s: Seconds from the first frame to the manifest, or until now, by the store's times; None if unknown.
        skipped: Attempts that do not count, with the reason.
    """

    round: int
    fragment: int
    closed: bool
    attempt: int | None = None
    writer: str = ""
    digest: str = ""
    sent: tuple[Sent, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    missing: tuple[Missing, ...] = ()
    listed_bytes: int = 0
    stored_bytes: int | None = None
    took_s: float | None = None
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A peer by its lease and by what manifests say of it.

    Attributes:
        peer: Its id.
        state: "live"; "silent": its lease is older than ``lease_s``; "left"; "no lease".
        round: Where it says it is; None without a lease.
        age_s: Seconds since its lease was put, by the store's time and this machine's clock; None if unknown.
        unchanged_s: Seconds that this reader has seen the lease unchanged; None without a lease.
        writes: Whether its manifests count; None if its key is not known.
        rounds: Rounds that list a frame of it, over all fragments.
        tokens: Sum of their weights.
        nbytes: Sum of their sizes.
        last_round: The newest of them.
        left_out: Rounds that left it out.
        reason: Of the last time.
        loss: Of its last inner step, by its own word in its lease, which nothing checks; None if it says none.
        losses: Those that it has said while this reader looked, the last one at the end.
    """

    peer: str
    state: str
    round: int | None
    age_s: float | None
    unchanged_s: float | None
    writes: bool | None
    rounds: int = 0
    tokens: int = 0
    nbytes: int = 0
    last_round: int | None = None
    left_out: int = 0
    reason: str = ""
    loss: float | None = None
    losses: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """From which shared state the frames of a round were made, by what their headers say; signatures are not checked.

    Attributes:
        round: The round.
        fragment: Which.
        digest: What the manifest says; in an open round what most frames say.
        same: Peers whose frame says so too.
        other: Peer and digest of those whose frame says another.
    """

    round: int
    fragment: int
    digest: str
    same: tuple[str, ...]
    other: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Amended:
    """A change by the owner.

    Attributes:
        n: Its number.
        round: First round that it names.
        state: "in force", "acknowledged" for a later round, or "not acknowledged" by any manifest yet.
        changes: As JSON.
    """

    n: int
    round: int
    state: str
    changes: str


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """Shared state in the store.

    Attributes:
        round: Before this round.
        digest: As its path says.
        nbytes: Size of the object; its content is not looked at.
        vouched: Whether one of the newest manifests that count names just this object.
        age_s: Seconds since it was put; None if unknown.
    """

    round: int
    digest: str
    nbytes: int
    vouched: bool
    age_s: float | None


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Sizes of objects, as the store lists them; nothing is computed from settings (C-66).

    Attributes:
        listed: Frames in all manifests that count, also of those that are removed by now.
        frames: Frames that lie in the store.
        relays: Frames that were put again for others.
        manifests: Manifests.
        anchors: Anchors.
        other: All else below the run.
        total: All of the store.
        objects: How many they are.
    """

    listed: int
    frames: int
    relays: int
    manifests: int
    anchors: int
    other: int
    total: int
    objects: int


@dataclass(frozen=True, kw_only=True)
class Status:
    """A run as its store shows it.

    Attributes:
        run: Run id.
        name: For people.
        owner: The owner's public key.
        preset: The method.
        steps: Inner steps after which the run is done; None if it does not say.
        inner_steps: Of them to a round; None if it does not say.
        policy: The policy in force in the newest open round.
        seconds: When it was looked at: seconds since 1970 by this machine's clock.
        closed: Rounds that are closed, by fragment.
        rounds: The newest rounds of all fragments, the open ones included; the newest first.
        peers: All that have a lease or were named by a manifest; the live ones first.
        agreement: For the newest closed and the open round of each fragment.
        amendments: By number.
        anchors: The newest first.
        bytes: Sums; None where the store holds too many objects to list at once.
        problems: What could not be read, or is not in order; each a line.
    """

    run: str
    name: str
    owner: str
    preset: str
    steps: int | None
    inner_steps: int | None
    policy: dict[str, Any]
    seconds: float
    closed: dict[int, int]
    rounds: tuple[Round, ...]
    peers: tuple[Peer, ...]
    agreement: tuple[Agreement, ...]
    amendments: tuple[Amended, ...]
    anchors: tuple[Anchor, ...]
    bytes: Bytes | None
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)

    @property
    def agree(self) -> bool | None:
        """Whether all frames that were looked at were made from the state that their manifest says; None: no frame."""
        if not self.agreement:
            return None
        return not any(one.other for one in self.agreement)


def waiting_for(round: Round, min_peers: int) -> str:
    """What an open round has and lacks, who is missing and since when, in one line (C-33)."""
    here = f"{len(round.sent)} {'frame' if len(round.sent) == 1 else 'frames'}, at least {min_peers} needed"
    if not round.missing:
        return f"{here}; nobody with a lease is missing"
    who = [f"{one.peer[:8]} ({_since(one)})" for one in round.missing]
    more = f" and {len(who) - 16} more" if len(who) > 16 else ""
    return f"{here}; missing: {', '.join(who[:16])}{more}"


def _since(one: Missing) -> str:
    seen = "lease of unknown age" if one.age_s is None else f"lease put {one.age_s:.0f} s ago"
    return f"{seen}, unchanged for {one.unchanged_s:.0f} s" if one.unchanged_s >= 1 else seen
