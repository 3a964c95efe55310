"""What a peer owes is decided by manifests that it has read, and never by a store that does not answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparseloco.errors import Interrupted, QuorumError, Unavailable
from sparseloco.peers import paths
from sparseloco.peers.fates import Fate, fate_since
from sparseloco.peers.manifest import Entry, Manifest
from sparseloco.peers.store import Store, open_store
from tests import toy
from tests.driver import ROWS
from tests.peers.crowd import Peer, identities, make_run, together, train_all
from tests.peers.runs import identity
from tests.peers.test_amending import wait_until

ROW = "sparseloco"
SENT = 1
"""The last round in which the peer that goes away has posted."""


class Deaf:
    """A store that does not give, or damages, the manifest of one round, as long as a test says so."""

    def __init__(self, store: Store) -> None:
        self.store, self.how = store, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def get(self, path: str, *, limit: int) -> bytes:
        data = self.store.get(path, limit=limit)
        if self.how and path == str(paths.Manifest(SENT, 0, 0)):
            if self.how == "no answer":
                raise Unavailable(f"get {path}: no answer")
            return data[:-1] + b"?"
        return data


def away(tmp_path: Path, store: Deaf) -> tuple[list[Peer], list[torch.Tensor], Peer]:
    """Peers that have gone on without one, what that one owes, and itself as it comes back."""
    run = make_run(ROWS[ROW](), toy.net())

    def come(number: int) -> Peer:
        me, folder = identities(3)[number], tmp_path / f"{number}"
        return Peer(run, ROWS[ROW](), store, me, folder, number)  # type: ignore[arg-type]

    peers = [come(number) for number in range(3)]
    train_all(peers, 9)
    gone = peers.pop()
    gone.transport.leave()
    residual = [block.clone() for block in gone.replica.lanes[0].state.residual]
    train_all(peers, 25)
    wait_until(lambda: any("anchors/00000004" in entry.path for entry in store.list("anchors")))
    return peers, residual, come(2)


@pytest.mark.parametrize("how", ["no answer", "damaged"])
def test_a_manifest_that_cannot_be_read_is_waited_for(how: str, tmp_path: Path) -> None:
    """Rule 5: the residual is dropped for what a manifest says, and is kept over what none says."""
    store = Deaf(open_store("memory://"))
    peers, residual, back = away(tmp_path, store)
    store.how = how

    def mend() -> None:
        wait_until(lambda: "waiting" in back.kinds())
        store.how = ""

    try:
        together(lambda: back.transport.connect(back.replica), mend)
        assert "residual-dropped" not in back.kinds()
        assert back.replica.digest() == peers[0].replica.digest()
        assert all(torch.equal(a, b) for a, b in zip(back.replica.lanes[0].state.residual, residual, strict=True))
    finally:
        for peer in [*peers, back]:
            peer.transport.leave()


def test_giving_up_leaves_what_is_written_down(tmp_path: Path) -> None:
    store = Deaf(open_store("memory://"))
    peers, _, back = away(tmp_path, store)
    back.transport._desk.give_up_s = 0.0
    store.how = "no answer"
    journal = {path: path.read_bytes() for path in (tmp_path / "2").rglob("fragment-*.state")}
    assert journal
    try:
        text = f"^round {SENT}, fragment 0: the manifests since cannot be read, which say whether .* look at the store"
        with pytest.raises(QuorumError, match=text):
            back.transport.connect(back.replica)
    finally:
        for peer in [*peers, back]:
            peer.transport.leave()
    assert {path: path.read_bytes() for path in journal} == journal


def test_who_waits_for_a_manifest_can_be_stopped(tmp_path: Path) -> None:
    store = Deaf(open_store("memory://"))
    peers, _, back = away(tmp_path, store)
    store.how = "no answer"
    back.transport._stop = lambda: "waiting" in back.kinds()
    try:
        with pytest.raises(Interrupted, match=r"^left while it was catching up; nothing is lost$"):
            back.transport.connect(back.replica)
    finally:
        for peer in [*peers, back]:
            peer.transport.leave()


def test_only_the_manifests_that_the_later_ones_name_decide() -> None:
    """Each names the one before, and where one is missing, nothing is known."""
    me, mine, later = identity(0).peer_id, "c" * 64, "d" * 64
    chain: list[Manifest] = []

    def close(*hashes: str) -> None:
        entries = tuple(Entry(peer=me, size=1, hash=hash, weight=1) for hash in hashes)
        previous = chain[-1].sha256 if chain else "0" * 64
        place = {"run": "0" * 16, "round": len(chain), "fragment": 0, "attempt": 0, "previous": previous}
        chain.append(Manifest(**place, digest="0" * 32, amendments=0, writer="0" * 64, entries=entries))

    def named(round: int, sha256: str) -> Manifest | None:
        return next((one for one in chain if (one.round, one.sha256) == (round, sha256)), None)

    for hashes in ([], [mine], [], [], []):
        close(*hashes)
    assert fate_since(1, mine, me, chain[4], named) == Fate.ACCEPTED
    assert fate_since(2, mine, me, chain[4], named) == Fate.CREDITED
    assert fate_since(0, mine, me, chain[4], named) == Fate.STALE, "a later frame of mine was taken"
    assert fate_since(1, later, me, chain[4], named) == Fate.STALE
    del chain[2]
    assert fate_since(1, mine, me, chain[-1], named) is None
