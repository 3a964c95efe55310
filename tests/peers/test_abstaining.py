"""A peer whose numbers are not finite, among peers that meet in a store: nobody waits for what it does not have."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from sparseloco.inbox import Absence
from sparseloco.peers.rounds import ABSTAINED
from sparseloco.peers.store import open_store
from sparseloco.types import Key
from tests import toy
from tests.driver import ROWS
from tests.peers.crowd import Peer, identities, make_run, together

EVERY, ROUNDS, BAD = 4, 3, 1
"""Inner steps of a round, rounds, and the one whose numbers are bad."""

pytestmark = pytest.mark.filterwarnings("ignore:.*contributes nothing:UserWarning")


def train(folder: Path, count: int, odd: Collection[int], **policy: Any) -> tuple[list[Peer], list[list[Absence]]]:
    """Peers that train together; those in ``odd`` abstain once; what each noted."""
    run = make_run(
        ROWS["sparseloco"](), toy.net(), **{"min_peers": count, "deadline_s": 600.0, "lease_s": 600.0} | policy
    )
    store = open_store("memory://")
    peers = [
        Peer(run, ROWS["sparseloco"](), store, me, folder / str(number), number)
        for number, me in enumerate(identities(count))
    ]
    for peer in peers:
        assert peer.algorithm.schedule.every == EVERY
        peer.arrive()
    for peer in peers:  # each waits for all, also for those who came after it, however slow they are
        peer.transport._heart.look()

    def one(peer: Peer) -> None:
        while peer.replica.step < EVERY * ROUNDS:
            if peer.number in odd and peer.replica.step == EVERY * BAD:
                peer.replica.abstain("train_loss")
            peer.step()
            noted[peer.number] += peer.replica.absent
            peer.arrive()

    noted: list[list[Absence]] = [[] for _ in peers]
    together(*(lambda peer=peer: one(peer) for peer in peers))
    for peer in peers:
        peer.transport.leave()
    return peers, noted


@pytest.mark.parametrize(("count", "odd"), [(1, {0}), (2, {1}), (2, {0, 1})])
def test_too_few_that_contribute_close_an_empty_round_at_once(tmp_path: Path, count: int, odd: set[int]) -> None:
    """``no_quorum = "wait"`` waits for others; who abstained has posted already, so waiting would never end."""
    peers, _ = train(tmp_path, count, odd)
    assert [peer.replica.rounds for peer in peers] == [ROUNDS] * count
    assert len({peer.replica.digest() for peer in peers}) == 1
    assert peers[0].digests[EVERY * BAD] == peers[0].digests[EVERY * (BAD + 1)]
    assert peers[0].digests[EVERY * (BAD + 1)] != peers[0].replica.digest()
    told = [tell.text for peer in peers for tell in peer.said if tell.kind == "no-quorum"]
    assert told
    assert all(
        text.startswith(f"round {BAD}, fragment 0: only {count - len(odd)} of at least {count}") for text in told
    )
    assert all(
        text.endswith("; an empty round: all keep their payloads; lower the learning rate or clip gradients")
        for text in told
    )


def test_an_abstention_is_named_noted_and_not_owed(tmp_path: Path) -> None:
    peers, noted = train(tmp_path, 3, {1}, min_peers=2)
    assert len({peer.replica.digest() for peer in peers}) == 1
    closed = [tell.text for tell in peers[0].said if tell.kind == "closed" and tell.round == BAD]
    assert closed[0].endswith(f"; {peers[1].me.peer_id[:8]} left out: {ABSTAINED}")
    assert noted[1] == [Absence(1, Key(BAD, 0), "train_loss")]
    assert not [tell for tell in peers[1].said if tell.kind == "credited" and tell.round == BAD]
