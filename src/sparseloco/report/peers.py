"""A run over a store in words: the same rows for a terminal and for the page."""

from __future__ import annotations

import time
from collections.abc import Iterator

from sparseloco.peers.status import Peer, Round, Status, waiting_for
from sparseloco.report import units

Row = dict[str, str]
_SHORT = 8
_MOST_NAMES = 16
_COURSE = 16
"""Blocks of the course of a loss."""


def headline(status: Status) -> str:
    """How far the run is, who is there, and whether they agree."""
    counts = status.closed.values()
    rounds = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else f"{max(counts)}"
    live = sum(one.state == "live" for one in status.peers)
    agree = {None: "no frame to compare yet", True: "all frames agree", False: "frames disagree"}[status.agree]
    word = "round" if rounds == "1" else "rounds"
    there = f"{live} of {len(status.peers)} peers live" if status.peers else "no peer yet"
    return f"{rounds} {word} closed, {there}, {agree}"


def facts(status: Status) -> list[str]:
    """What the run is, and when this was seen."""
    seen = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(status.seconds))
    fragments = f"{len(status.closed)} fragments" if len(status.closed) > 1 else "1 fragment"
    plan = [] if status.steps is None else [f"done after {status.steps} steps"]
    if plan and status.inner_steps is not None:
        plan = [f"{plan[0]}, {status.inner_steps} to a round"]
    return [f"run {status.run}", status.preset, *plan, fragments, f"owner {status.owner[:16]}", f"seen {seen}"]


def alerts(status: Status) -> Iterator[str]:
    """What needs a look, the worst first."""
    for one in status.agreement:
        if one.other:
            who = _names([f"{peer[:_SHORT]} says {said[:_SHORT]}" for peer, said in one.other])
            place = f"round {one.round}, fragment {one.fragment}"
            yield f"{place}: made from another state than {one.digest[:_SHORT]}: {who}"
    for one in status.rounds:
        if not one.closed and one.missing:
            yield f"round {one.round}, fragment {one.fragment}: {waiting_for(one, status.policy['min_peers'])}"
    yield from status.problems


def peers(status: Status) -> list[Row]:
    """A row for each peer."""
    return _filled(
        [
            {
                "Peer": one.peer[:_SHORT],
                "State": one.state,
                "Lease put": _ago(one.age_s),
                "At round": units.MISSING if one.round is None else str(one.round),
                "Last in": units.MISSING if one.last_round is None else f"round {one.last_round}",
                "Rounds": str(one.rounds),
                "Tokens": units.count(one.tokens),
                "Sent": units.num_bytes(one.nbytes),
                "Says loss": _loss(one),
                "Writes": {None: units.MISSING, True: "yes", False: "no"}[one.writes],
                "Left out": f"{one.left_out} ({one.reason})" if one.left_out else "",
            }
            for one in status.peers
        ]
    )


def rounds(status: Status) -> list[Row]:
    """A row for each of the newest rounds; the fragment is named where there are several."""
    several = len(status.closed) > 1
    return _filled(
        [
            {
                "Round": f"{one.round}.{one.fragment}" if several else str(one.round),
                "State": _state(one),
                "Frames": str(len(one.sent)),
                "Tokens": units.count(sum(sent.tokens or 0 for sent in one.sent)) if one.closed else units.MISSING,
                "Frame bytes": units.num_bytes(one.listed_bytes),
                "In store": units.MISSING if one.stored_bytes is None else units.num_bytes(one.stored_bytes),
                "Arrivals": _arrivals(one),
                "Took": units.MISSING if one.took_s is None or not one.closed else units.duration(one.took_s),
                "Not in it": _absent(one),
            }
            for one in status.rounds
        ]
    )


def amendments(status: Status) -> list[Row]:
    """A row for each change by the owner."""
    return [
        {"Amendment": str(one.n), "From round": str(one.round), "State": one.state, "Changes": one.changes}
        for one in status.amendments
    ]


def anchors(status: Status) -> list[Row]:
    """A row for each anchor in the store."""
    return [
        {
            "Anchor": f"round {one.round}",
            "Digest": one.digest[:_SHORT],
            "Bytes": units.num_bytes(one.nbytes),
            "Put": _ago(one.age_s),
            "Named by a manifest": "yes" if one.vouched else "no",
        }
        for one in status.anchors
    ]


def agreement(status: Status) -> list[str]:
    """What the frames of the newest rounds say of the state that they were made from."""
    return [
        f"round {one.round}, fragment {one.fragment}: {len(one.same)} of {len(one.same) + len(one.other)} frames say "
        f"digest {one.digest}"
        for one in status.agreement
    ]


def sums(status: Status) -> list[str]:
    """Bytes, as the store lists them."""
    if status.bytes is None:
        return ["bytes: the store holds too many objects to add them up"]
    one = status.bytes
    kinds = ", ".join(
        f"{kind} {units.num_bytes(value)}"
        for kind, value in [
            ("frames", one.frames),
            ("relays", one.relays),
            ("manifests", one.manifests),
            ("anchors", one.anchors),
            ("other", one.other),
        ]
        if value
    )
    return [
        f"frames of all rounds: {units.num_bytes(one.listed)}",
        f"in the store now: {units.num_bytes(one.total)} in {one.objects} objects: {kinds}",
    ]


def _filled(rows: list[Row]) -> list[Row]:
    """Without columns that hold nothing."""
    names = [name for name in (rows[0] if rows else {}) if any(row[name] for row in rows)]
    return [{name: row[name] for name in names} for row in rows]


def _state(one: Round) -> str:
    if one.closed:
        late = f" at attempt {one.attempt}" if one.attempt else ""
        return f"closed{late}" if one.sent else f"closed empty{late}"
    if not one.sent:
        return "open"
    return "open" if one.took_s is None else f"open for {units.duration(one.took_s)}"


def _arrivals(one: Round) -> str:
    """Who came when, in that order."""
    known = [(sent.late_s, sent.peer) for sent in one.sent if sent.late_s is not None]
    return _names([f"{peer[:_SHORT]} +{late_s:.1f} s" for late_s, peer in sorted(known)]) or units.MISSING


def _absent(one: Round) -> str:
    if not one.closed:
        return _names([f"{missing.peer[:_SHORT]}: lease put {_ago(missing.age_s)}" for missing in one.missing])
    return _names([f"{peer[:_SHORT]}: {reason}" for peer, reason in one.left_out])


def _loss(one: Peer) -> str:
    """The last loss that a peer has said, and the course of those that were seen."""
    if one.loss is None:
        return ""
    course = units.sparkline(one.losses, _COURSE) if len(one.losses) > 1 else ""
    return f"{units.loss(one.loss)} {course}".rstrip()


def _names(texts: list[str]) -> str:
    more = [f"and {len(texts) - _MOST_NAMES} more"] if len(texts) > _MOST_NAMES else []
    return ", ".join(texts[:_MOST_NAMES] + more)


def _ago(age_s: float | None) -> str:
    return units.MISSING if age_s is None else f"{units.duration(age_s)} ago"
