"""Manifests: which frames make up a round, and whether one counts, as a pure function of bytes and history.

All that a verdict may depend on is in ``History``, and peers that went through the same manifests have the same
history. So all of them come to the same verdict, whatever they saw of the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple

import msgspec

from sparseloco.errors import WireError
from sparseloco.peers import canonical, paths
from sparseloco.peers.canonical import Hash, Hex16, Hex32, Hex64, Hex128, Line
from sparseloco.peers.identity import Domain, Identity, verify
from sparseloco.peers.policy import Policy
from sparseloco.peers.run_file import AMENDMENT_LIMIT, Amendment, RunFile, Void, run_at, voids_of

NO_HASH = "0" * 64
"""``previous`` of the first manifest of a fragment."""
MAX_AMENDED = 16
"""Amendments that one manifest acknowledges at most; further ones cannot help a round that is stuck."""
_NO_SIGNATURE = "0" * 128
_ENTRY_BYTES, _LEFT_OUT_BYTES, _HEAD_BYTES = 256, 512, 4096
Number = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One frame of a round.

    Attributes:
        peer: Who posted it.
        part: 0 in this format: a peer sends one frame for a fragment.
        size: Bytes of the object.
        hash: SHA-256 of the object.
        weight: Tokens, as in the frame's header.
    """

    peer: Hex32
    part: Literal[0] = 0
    size: Number
    hash: Hex64
    weight: Number


class LeftOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A peer whose frame is not in the round, and why; for people."""

    peer: Hex32
    reason: Line


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all peers apply in a round of a fragment.

    Attributes:
        format: Of this object.
        run: The run.
        round: The round, as in the path.
        fragment: The fragment, as in the path.
        attempt: The attempt, as in the path.
        previous: SHA-256 of the manifest of the round before; 64 zeros in the first round.
        digest: Of the fragment's shared state before this round.
        amendments: How many amendments are acknowledged with this manifest.
        amended: Those of them that the manifest before did not acknowledge, whole, so that a reader needs nothing else.
        entries: The frames in the order in which they are reduced; none means that nothing is applied.
        left_out: Who else was expected or posted.
        state_sha256: In rounds that are multiples of ``policy.anchor_every``: SHA-256 of the fragment's serialized
            shared state before this round; else empty.
        writer: Public key.
        signature: Of the writer over all of the above.
    """

    format: Literal[1] = 1
    run: Hex16
    round: Number
    fragment: Number
    attempt: Number
    previous: Hex64
    digest: Hex32
    amendments: Number
    amended: tuple[Amendment, ...] = ()
    entries: tuple[Entry, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    state_sha256: Hash = ""
    writer: Hex64
    signature: Hex128 = _NO_SIGNATURE

    @property
    def sha256(self) -> str:
        """Hash of its bytes, which the next manifest names."""
        return canonical.sha256(canonical.encode(self))

    def entry_of(self, peer: str) -> Entry | None:
        """What it lists of a peer."""
        return next((entry for entry in self.entries if entry.peer == peer), None)


@dataclass(frozen=True, kw_only=True)
class History:
    """All that the verdict on a manifest depends on besides its bytes and path.

    Attributes:
        run: ``run.json`` as it was created.
        round: The round that is to be closed.
        fragment: Whose chain this is.
        previous: SHA-256 of the manifest accepted for the round before.
        digest: Of the fragment's shared state before this round, 32 hex digits.
        amendments: Acknowledged so far, by number.
        state_sha256: Hash of the own serialized shared state in rounds in which one is due, else empty.
        replayed: The state was just made again from an anchor, so that a digest that differs is the manifest's fault.
        voids: What the owner has voided, as far as the reader knows. All readers come to know it, and until then their
            chains differ.
    """

    run: RunFile
    round: int
    fragment: int
    digest: str
    previous: str = NO_HASH
    amendments: tuple[Amendment, ...] = ()
    state_sha256: str = ""
    replayed: bool = False
    voids: tuple[Void, ...] = ()

    @cached_property
    def policy(self) -> Policy:
        """The policy of this round as far as the manifests before decide it."""
        return run_at(self.run, self.amendments, self.round).policy

    @property
    def voided(self) -> Void | None:
        """What the owner has voided of the rounds before this one, so that nothing that follows on them counts.

        A chain that goes on after a voided round never acknowledges that amendment, see ``judge``.
        """
        known = len(self.amendments)
        mine = (void for void in self.voids if void.fragment == self.fragment)
        return next((void for void in mine if void.round < self.round and void.n >= known), None)

    def unacknowledged(self, known: Sequence[Amendment]) -> tuple[Amendment, ...]:
        """What a writer that knows these amendments acknowledges in the manifest of this round."""
        first = len(self.amendments)
        return tuple(known[first : first + MAX_AMENDED])

    def run_under(self, amended: Sequence[Amendment]) -> RunFile:
        """The run in this round if its manifest acknowledges these: what it is judged by, and then applied by."""
        return run_at(self.run, self.amendments, self.round, amended)

    @property
    def wants_state_hash(self) -> bool:
        """Whether the manifest of this round carries a hash of the state."""
        return self.round % self.policy.anchor_every == 0

    def after(self, manifest: Manifest, digest: str, state_sha256: str = "") -> History:
        """The history of the next round, once the manifest has been applied.

        Whether that round wants a hash of the state is known only then: ask ``wants_state_hash`` of the result, and
        replace ``state_sha256`` if it says so.
        """
        return replace(
            self,
            round=self.round + 1,
            previous=manifest.sha256,
            digest=digest,
            amendments=(*self.amendments, *manifest.amended),
            state_sha256=state_sha256,
            replayed=False,
        )


class Refusal(NamedTuple):
    """Not a manifest for anybody: everyone skips it and looks at the next attempt."""

    reason: str


class Drifted(NamedTuple):
    """A manifest in order but for what it says of the shared state: the reader may be the one that is wrong."""

    reason: str


def manifest_limit(policy: Policy) -> int:
    """Most bytes that the manifest of a round can have, by the policy of the rounds before; more are not downloaded."""
    per_peer = _ENTRY_BYTES + _LEFT_OUT_BYTES
    return _HEAD_BYTES + MAX_AMENDED * AMENDMENT_LIMIT + policy.max_peers * per_peer


def seal(manifest: Manifest, writer: Identity) -> bytes:
    """Canonical bytes with the writer's signature."""
    bare = msgspec.structs.replace(manifest, writer=writer.public, signature=_NO_SIGNATURE)
    signature = writer.sign(Domain.MANIFEST, *_place_fields(bare), body=canonical.encode(bare))
    return canonical.encode(msgspec.structs.replace(bare, signature=signature.hex()))


def is_signed(data: bytes) -> bool:
    """Whether these are the bytes of a manifest, signed by the writer that it names, whoever that is."""
    try:
        manifest = canonical.decode(data, Manifest, what="manifest", limit=len(data))
    except WireError:
        return False
    return _is_by_its_writer(manifest)


def judge(data: bytes, place: paths.Manifest, history: History) -> Manifest | Refusal | Drifted:
    """The verdict on the bytes at a manifest's path: a pure function, equal for all peers of equal history.

    Args:
        data: The object, at most ``manifest_limit`` bytes and one.
        place: Where it lies.
        history: What the reader knows of this fragment's chain.

    Returns:
        The manifest; or why it counts for nobody; or why it contradicts the reader's own state.
    """
    assert bool(history.state_sha256) == history.wants_state_hash, "hash the state where it is due"
    try:
        manifest = canonical.decode(data, Manifest, what="manifest", limit=manifest_limit(history.policy))
    except WireError as error:
        return Refusal(str(error))
    reason = _misplaced(manifest, place, history) or _voided(manifest, history) or _amended(manifest, history)
    if not reason:  # only what the owner signed may change the policy that decides the rest
        policy = history.run_under(manifest.amended).policy
        reason = _unsigned(manifest, policy) or _entries(manifest, policy) or _left_out(manifest, policy)
    if reason:
        return Refusal(f"manifest: {reason}; refuse it")
    drift = _drift(manifest, history)
    if drift and history.replayed:
        return Refusal(f"manifest: {drift}, also after a replay from an anchor; refuse it")
    return Drifted(drift) if drift else manifest


def judge_claim(data: bytes, place: paths.Manifest, history: History, told: Manifest) -> Manifest | Refusal | Drifted:
    """The verdict of a reader without the shared state, which takes the manifest's own word on that.

    Args:
        data: As for :func:`judge`.
        place: Where it lies.
        history: What the reader knows; its ``digest`` and ``state_sha256`` do not matter.
        told: The same manifest, decoded.
    """
    word = (told.state_sha256 or NO_HASH) if history.wants_state_hash else ""
    return judge(data, place, replace(history, digest=told.digest, state_sha256=word))


def _place_fields(manifest: Manifest) -> tuple[str, int, int, int]:
    return manifest.run, manifest.round, manifest.fragment, manifest.attempt


def _misplaced(manifest: Manifest, place: paths.Manifest, history: History) -> str:
    assert (place.round, place.fragment) == (history.round, history.fragment)
    said = _place_fields(manifest)
    if said != (history.run.run, place.round, place.fragment, place.attempt):
        return "run={}, round={}, fragment={}, attempt={} is not where it lies".format(*said)
    if manifest.previous != history.previous:
        return f"previous={manifest.previous[:16]} must be {history.previous[:16]}, the manifest of the round before"
    if bool(manifest.state_sha256) != history.wants_state_hash:  # no state of a reader makes that right
        return f"state_sha256={manifest.state_sha256[:16]!r} must be there in rounds with an anchor, and in no others"
    return ""


def void_of(manifest: Manifest, voids: Sequence[Void]) -> Void | None:
    """What voids a manifest: a round that it closes without acknowledging that the owner wants it closed anew."""
    mine = (void for void in voids if (void.round, void.fragment) == (manifest.round, manifest.fragment))
    return next((void for void in mine if manifest.amendments <= void.n), None)


def _voided(manifest: Manifest, history: History) -> str:
    if void := history.voided:
        return f"it follows on round {void.round}, which amendment {void.n} voids"
    if void := void_of(manifest, history.voids):
        return f"amendments={manifest.amendments} must be above {void.n}, the amendment that voids this round"
    return ""


def _unsigned(manifest: Manifest, policy: Policy) -> str:
    if not policy.may_write(manifest.writer):
        return f"writer={manifest.writer} is not among those who may write manifests"
    return "" if _is_by_its_writer(manifest) else f"the signature is not that of writer={manifest.writer}"


def _is_by_its_writer(manifest: Manifest) -> bool:
    bare = canonical.encode(msgspec.structs.replace(manifest, signature=_NO_SIGNATURE))
    signature = bytes.fromhex(manifest.signature)
    return verify(manifest.writer, signature, Domain.MANIFEST, *_place_fields(manifest), body=bare)


def _amended(manifest: Manifest, history: History) -> str:
    known, new = len(history.amendments), manifest.amended
    if len(new) > MAX_AMENDED:
        return f"amended={len(new)} must be at most {MAX_AMENDED}"
    if manifest.amendments != known + len(new):
        return f"amendments={manifest.amendments} must be the {known} known ones and the {len(new)} new ones"
    for n, amendment in enumerate(new, start=known):
        if (amendment.run, amendment.n) != (history.run.run, n) or not amendment.is_by(history.run.owner):
            return f"amendment {amendment.n} must be number {n} of this run, signed by its owner"
    for void in voids_of(new):
        if void.fragment == history.fragment and void.round < history.round:
            return f"amendment {void.n} voids round {void.round}, which this chain is made of"
    return ""


def _entries(manifest: Manifest, policy: Policy) -> str:
    entries = manifest.entries
    if any(one.peer >= other.peer for one, other in pairwise(entries)):
        return "entries must be sorted by peer and name each once"
    if entries and not policy.min_peers <= len(entries) <= policy.max_peers:
        return f"entries={len(entries)} must be from min_peers={policy.min_peers} to max_peers={policy.max_peers}"
    ids = policy.member_ids
    for entry in entries:
        if ids is not None and entry.peer not in ids:
            return f"peer {entry.peer} is not a member"
        if not 1 <= entry.size <= policy.max_frame_bytes:
            return f"peer {entry.peer}: size={entry.size} must be from 1 to {policy.max_frame_bytes}"
        if not 1 <= entry.weight <= policy.max_tokens_per_round:
            return f"peer {entry.peer}: weight={entry.weight} must be from 1 to {policy.max_tokens_per_round}"
    return ""


def _left_out(manifest: Manifest, policy: Policy) -> str:
    names = [one.peer for one in manifest.left_out]
    if names != sorted(set(names)) or len(names) > policy.max_peers:
        return f"left_out must be sorted, name each peer once, and name at most {policy.max_peers}"
    if both := set(names) & {entry.peer for entry in manifest.entries}:
        return f"peer {min(both)} is both listed and left out"
    return ""


def _drift(manifest: Manifest, history: History) -> str:
    if manifest.digest != history.digest:
        return f"digest={manifest.digest} is not the reader's {history.digest}"
    if manifest.state_sha256 != history.state_sha256:
        return f"state_sha256={manifest.state_sha256[:16]!r} is not the reader's {history.state_sha256[:16]!r}"
    return ""
