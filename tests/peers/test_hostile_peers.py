"""A peer that sends rubbish is left out with the reason in the manifest; it cannot crash, stall or bend the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparseloco.peers import paths
from sparseloco.peers.canonical import sha256
from sparseloco.peers.frames import Expected, seal_envelope
from sparseloco.peers.identity import Domain, Identity
from sparseloco.peers.manifest import Manifest, seal
from sparseloco.peers.store import PAGE, Page, Store, open_store
from sparseloco.replica import Replica
from sparseloco.types import Envelope, Key
from tests import toy
from tests.driver import ROWS
from tests.peers.crowd import Peer, identities, identity, loopback, make_run, together, train_all

ROW = "sparseloco"
STEPS = 9
HOSTILE = identity("hostile")
TEN_GB = 10 * 2**30


def first_envelope(**changes: Any) -> Envelope:
    """What an honest peer would post in round 0, with changes."""
    replica = Replica(toy.net(), ROWS[ROW](), peer=9)
    for step in range(1, 5):
        toy.loss_of(toy.net(), toy.batch(step, 9))
        replica.stepped()
    (envelope,) = replica.outbox()
    return replace(envelope, **changes)


def put_frame(store: Store, data: bytes, peer: Identity = HOSTILE, number: int = 0) -> None:
    store.put(str(paths.Frame(number, 0, peer.peer_id, 0, sha256(data))), data)


def forged(store: Store, run: str) -> None:
    """In the name of another: the key is not the one that the folder is named after."""
    put_frame(store, seal_envelope(first_envelope(), run, identity("somebody else")))


def tampered(store: Store, run: str) -> None:
    data = bytearray(seal_envelope(first_envelope(), run, HOSTILE))
    data[100] ^= 1
    put_frame(store, bytes(data))


def replayed(store: Store, run: str) -> None:
    """A frame of another round, honestly signed for that one."""
    put_frame(store, seal_envelope(first_envelope(key=Key(1, 0)), run, HOSTILE))


def for_another_run(store: Store, run: str) -> None:
    put_frame(store, seal_envelope(first_envelope(), "f" * 16, HOSTILE))


def too_heavy(store: Store, run: str) -> None:
    put_frame(store, seal_envelope(first_envelope(weight=2**20), run, HOSTILE))


def of_another_state(store: Store, run: str) -> None:
    put_frame(store, seal_envelope(first_envelope(digest="0" * 32), run, HOSTILE))


def of_another_algorithm(store: Store, run: str) -> None:
    put_frame(store, seal_envelope(first_envelope(fingerprint="0" * 16), run, HOSTILE))


def rubbish(store: Store, run: str) -> None:
    put_frame(store, os.urandom(200))


def bomb(store: Store, run: str) -> None:
    """Signed, and all that it could be blown up to is known beforehand from the table of the round."""
    frame = b"SLCO" + bytes(100)
    public = bytes.fromhex(HOSTILE.public)
    put_frame(store, frame + public + HOSTILE.sign(Domain.FRAME, run, 0, 0, 0, body=frame))


def of_other_bytes(store: Store, run: str) -> None:
    """Its path promises another hash."""
    store.put(str(paths.Frame(0, 0, HOSTILE.peer_id, 0, "ab" * 32)), b"x" * 200)


RUBBISH: dict[str, tuple[Callable[[Store, str], None], str]] = {
    "forged": (forged, "the key in the frame is another peer's"),
    "tampered": (tampered, "the signature is not for this run, round, fragment and content"),
    "replayed": (replayed, "the signature is not for this run, round, fragment and content"),
    "another run": (for_another_run, "the signature is not for this run, round, fragment and content"),
    "weight": (too_heavy, "weight=1048576: must be from 1 to 1000"),
    "state": (of_another_state, "digest=00000000000000000000000000000000: must be"),
    "algorithm": (of_another_algorithm, "frame says algorithm 0000000000000000"),
    "rubbish": (rubbish, "the key in the frame is another peer's"),
    "bomb": (bomb, "frame="),
    "hash": (of_other_bytes, "its bytes do not match the hash in its path"),
}


def honest(tmp_path: Path, store: Store, **policy: Any) -> list[Peer]:
    run = make_run(ROWS[ROW](), toy.net(), max_tokens_per_round=1000, **policy)
    return [Peer(run, ROWS[ROW](), store, me, tmp_path / f"{n}", n) for n, me in enumerate(identities(2))]


def manifest_of(store: Store, number: int, attempt: int = 0) -> Manifest:
    return msgspec.json.decode(store.get(str(paths.Manifest(number, 0, attempt)), limit=2**20), type=Manifest)


@pytest.mark.parametrize("case", list(RUBBISH))
def test_rubbish_is_left_out_with_its_reason(case: str, tmp_path: Path) -> None:
    """C-69, C-70: nothing is taken on trust; what the others apply is what they would apply without it."""
    store = open_store("memory://")
    peers = honest(tmp_path, store)
    put, reason = RUBBISH[case]
    put(store, peers[0].run.run)
    try:
        train_all(peers, STEPS)
    finally:
        for peer in peers:
            peer.transport.leave()
    left_out = {one.peer: one.reason for one in manifest_of(store, 0).left_out}
    assert reason in left_out[HOSTILE.peer_id]
    assert {peer.replica.digest() for peer in peers} == {loopback(ROWS[ROW](), 2, STEPS).replicas[0].digest()}


def test_ten_gigabytes_are_refused_before_they_are_read(tmp_path: Path) -> None:
    """Sparse files where a frame, a manifest, a lease and an anchor belong; what memory it takes: see refusals.py."""
    folder = tmp_path / "store"
    store = open_store(str(folder))
    peers = honest(tmp_path, store)
    frame = paths.Frame(0, 0, HOSTILE.peer_id, 0, "cd" * 32)
    anchor = paths.Anchor(10**7, "0" * 32, "large")
    for place in (frame, paths.Manifest(0, 0, 0), paths.Lease(HOSTILE.peer_id), anchor):
        (folder / str(place)).parent.mkdir(parents=True, exist_ok=True)
        with (folder / str(place)).open("wb") as file:
            file.truncate(TEN_GB)
    try:
        train_all(peers, STEPS)
    finally:
        for peer in peers:
            peer.transport.leave()
    (left_out,) = manifest_of(store, 0, attempt=1).left_out
    assert left_out.reason.startswith(f"size={TEN_GB}: must be ")
    skipped = [tell.text for tell in peers[0].said if tell.kind == "skipped"]
    assert "attempt 0 counts for nobody: manifest: more than " in skipped[0]
    assert sum(peer.transport.meter.total().received_bytes for peer in peers) < 10**6


class Lying:
    """A store that says less than an object has, so that the size is no use as a limit."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def page(self, prefix: str, *, after: str = "", limit: int = PAGE) -> Page:
        found = self.store.page(prefix, after=after, limit=limit)
        return Page([entry._replace(size=min(entry.size, 300)) for entry in found.entries], found.rest)


def test_a_size_that_is_a_lie_is_no_way_around_the_limit(tmp_path: Path) -> None:
    store = open_store("memory://")
    peers = honest(tmp_path, Lying(store), min_peers=1, deadline_s=1.0)
    expected = Expected("0" * 16, Key(0, 0), "0" * 16, "0" * 32, ())
    put_frame(store, bytes(expected.largest + 10**6))
    for peer in peers[1:]:
        peer.transport.leave()
    peers[0].train(3)
    peers[0].transport.leave()
    assert peers[0].transport.meter.total().received_bytes < 10**5


def test_manifest_of_a_stranger_counts_for_nobody(tmp_path: Path) -> None:
    """Rule 1: the first valid attempt counts; an invalid one is skipped by all alike."""
    store = open_store("memory://")
    keys = identities(2)
    writers = tuple(sorted(key.public for key in keys))
    peers = honest(tmp_path, store, admission="allow-list", members=writers)
    stranger = Manifest(
        run=peers[0].run.run,
        round=0,
        fragment=0,
        attempt=0,
        previous="0" * 64,
        digest=Replica(toy.net(), ROWS[ROW]()).digest(),
        amendments=0,
        state_sha256="0" * 64,
        writer=HOSTILE.public,
    )
    store.create(str(paths.Manifest(0, 0, 0)), seal(stranger, HOSTILE))
    store.create(str(paths.Manifest(0, 0, 1)), b"\x00" * 100)
    try:
        train_all(peers, STEPS)
    finally:
        for peer in peers:
            peer.transport.leave()
    for peer in peers:
        skipped = [tell.text for tell in peer.said if tell.kind == "skipped"]
        assert "is not among those who may write manifests" in skipped[0]
    assert manifest_of(store, 0, 2).entries
    assert {peer.replica.digest() for peer in peers} == {loopback(ROWS[ROW](), 2, STEPS).replicas[0].digest()}


def test_a_listed_frame_that_is_taken_away_is_relayed(tmp_path: Path) -> None:
    """Rule 3: who holds the bytes puts them again, and nobody goes on without them."""
    store = open_store("memory://")
    peers = honest(tmp_path, store)
    peers[0].transport.connect(peers[0].replica)
    late = peers[1]
    try:
        train_all(peers, 5)
        frames = [entry.path for entry in store.list("rounds/00000000") if entry.path.endswith(".frame")]
        joiner = Peer(late.run, ROWS[ROW](), store, identity("joiner"), tmp_path / "j", 5)
        for path in frames:
            store.delete(path)
        for entry in store.list("anchors"):
            store.delete(entry.path)

        def serve() -> None:
            while not any("relay-" in entry.path for entry in store.list("rounds/00000000")):
                for peer in peers:
                    peer.transport._beat()

        together(lambda: joiner.transport.connect(joiner.replica), serve)
        assert joiner.replica.digest() == peers[0].replica.digest()
        assert "waiting" in joiner.kinds()
        joiner.transport.leave()
    finally:
        for peer in peers:
            peer.transport.leave()


def test_names_that_no_peer_makes_are_looked_over(tmp_path: Path) -> None:
    """Path tricks and control characters in a directory that anybody can write to."""
    folder = tmp_path / "store"
    store = open_store(str(folder))
    peers = honest(tmp_path, store)
    place = folder / "rounds" / "00000000" / "0000" / HOSTILE.peer_id
    place.mkdir(parents=True)
    for name in ("x\x1b[31m\n.frame", "..%2f..%2fetc", "a" * 200, "manifest-9999.json.json"):
        (place / name).write_bytes(b"boo")
    (folder / "peers" / "\x07bell").mkdir(parents=True)
    (folder / "peers" / "\x07bell" / "lease.json").write_bytes(b"{}")
    try:
        train_all(peers, STEPS)
    finally:
        for peer in peers:
            peer.transport.leave()
    assert {peer.replica.digest() for peer in peers} == {loopback(ROWS[ROW](), 2, STEPS).replicas[0].digest()}
    assert not any(not tell.text.isprintable() for peer in peers for tell in peer.said)
