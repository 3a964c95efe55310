"""Join, leave and come back, be late, drift: always the state of those who were there all the time."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sparseloco import DivergenceError, rejoin
from sparseloco.errors import CheckpointError
from sparseloco.peers import canonical, paths
from sparseloco.peers.looking import Viewer
from sparseloco.peers.store import Store, open_store
from sparseloco.types import Key
from tests import toy
from tests.driver import ROWS
from tests.peers.crowd import Clock, Peer, identities, make_run, miss, together, train_all

ALL = ["sparseloco", "diloco", "streaming_diloco", "sparseloco_delayed", "powersgd"]


class Crowd:
    """Peers of one run that come and go."""

    def __init__(self, row: str, folder: Path, store: Store | None = None, **policy: object) -> None:
        self.row, self.folder = row, folder
        self.store = store or open_store("memory://")
        self.run = make_run(ROWS[row](), toy.net(), **policy)
        self.keys = identities(6)
        self.here: list[Peer] = []
        self.clock: Callable[[], float] = time.monotonic

    def comes(self, number: int) -> Peer:
        folder = self.folder / f"{number}"
        peer = Peer(self.run, ROWS[self.row](), self.store, self.keys[number], folder, number, clock=self.clock)
        self.here.append(peer)
        return peer

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self.here:
            peer.transport.leave()


def assert_agree(*peers: Peer) -> None:
    """At every step that several of them went through, they had the same shared state."""
    for step in set().union(*(peer.digests for peer in peers)):
        assert len({peer.digests[step] for peer in peers if step in peer.digests}) == 1, step
    common = set.intersection(*(set(peer.digests) for peer in peers))
    assert max(common) > max(peer.replica.step for peer in peers) - 6, "they went through the last steps together"


@pytest.mark.parametrize("row", ALL)
def test_a_joiner_has_all_that_the_others_have_and_takes_part_in_the_next_round(row: str, tmp_path: Path) -> None:
    """C-08, C-10, C-42: from the newest anchor by replay, verified by hash and by the digest of every round."""
    with Crowd(row, tmp_path) as crowd:
        first, second = crowd.comes(0), crowd.comes(1)
        train_all([first, second], 26)
        joiner = crowd.comes(2)
        with torch.no_grad():
            joiner.model[0].weight.add_(1.0)
        joiner = Peer(crowd.run, ROWS[row](), crowd.store, joiner.me, crowd.folder / "2", 2, joiner.model)
        crowd.here.append(joiner)
        joiner.transport.connect(joiner.replica)
        assert joiner.replica.step >= max(step for step in first.digests if ends_a_round(joiner, step))
        assert joiner.replica.residual_norm() == 0.0
        for peer in (first, second):
            peer.transport._heart.look()
        together(*[lambda peer=peer: peer.train(35) for peer in (first, second, joiner)])
        assert_agree(first, second, joiner)
        accepted = [tell.text for tell in first.said if tell.kind == "closed"][-2:]
        assert all("3 frames" in text for text in accepted)


def round_of(path: str) -> int:
    return int(path.split("/")[1])


def ends_a_round(peer: Peer, step: int) -> bool:
    schedule = peer.replica.algorithm.schedule
    return any(schedule.collects(step, f) and schedule.num_collected(step, f) for f in range(len(peer.replica.lanes)))


def test_replay_without_any_anchor_starts_at_the_first_round(tmp_path: Path) -> None:
    """C-42: no checkpoint is there yet, and the joiner still ends where the others are."""
    with Crowd("sparseloco", tmp_path, anchor_every=10**6) as crowd:
        first, second = crowd.comes(0), crowd.comes(1)
        train_all([first, second], 13)
        joiner = crowd.comes(2)
        joiner.transport.connect(joiner.replica)
        assert joiner.replica.digest() == first.replica.digest()
        assert rejoin.num_applied(joiner.replica, 0) == 3


def test_a_peer_that_leaves_is_not_waited_for_and_comes_back_with_what_it_owed(tmp_path: Path) -> None:
    """A released lease ends the waiting at once; private state survives the absence."""
    with Crowd("sparseloco", tmp_path) as crowd:
        peers = [crowd.comes(number) for number in range(3)]
        train_all(peers, 9)
        gone = peers.pop()
        gone.transport.leave()
        residual = [block.clone() for block in gone.replica.lanes[0].state.residual]
        train_all(peers, 25)
        assert all("no longer" not in tell.text for peer in peers for tell in peer.said)
        back = crowd.comes(2)
        back.transport.connect(back.replica)
        assert back.replica.digest() == peers[0].replica.digest()
        found = back.replica.lanes[0].state.residual
        assert all(torch.equal(a, b) for a, b in zip(found, residual, strict=True))
        train_all([*peers, back], 33)
        assert_agree(*peers, back)


@pytest.mark.parametrize("row", ALL)
def test_a_late_payload_goes_into_the_residual(row: str, tmp_path: Path) -> None:
    """C-35: the round closes without it, and the late peer catches up and sends it again."""
    with Crowd(row, tmp_path) as crowd:
        clock = crowd.clock = Clock()
        peers = [crowd.comes(number) for number in range(3)]
        train_all(peers, 9)
        slow = peers.pop()
        slow.transport._heart.stop()
        together(lambda: train_all(peers, 25), lambda: miss(peers, 25, clock))
        slow.said.clear()
        while not slow.kinds() & {"credited", "behind"}:
            slow.transport._may_lag = False  # it is busy with its own steps, and posts what is late
            slow.step()
        slow.arrive()
        assert slow.replica.step > 20, "rounds that were missed are not trained again"
        train_all([*peers, slow], 33)
        assert_agree(*peers, slow)


def test_a_peer_too_late_for_the_frames_leaps_to_a_newer_anchor(tmp_path: Path) -> None:
    """What retention has removed is not waited for; the residual, with what was owed, comes along."""
    with Crowd("sparseloco", tmp_path) as crowd:
        clock = crowd.clock = Clock()
        peers = [crowd.comes(number) for number in range(3)]
        train_all(peers, 9)
        slow = peers.pop()
        slow.transport._heart.stop()
        together(lambda: train_all(peers, 41), lambda: miss(peers, 41, clock))
        fragments = len(slow.replica.lanes)
        while sum(round_of(entry.path) >= 6 for entry in crowd.store.list("anchors")) < fragments:
            time.sleep(0.01)  # anchors are written beside the training
        for entry in crowd.store.list("rounds"):
            if entry.path.endswith(".frame") and round_of(entry.path) < 6:
                crowd.store.delete(entry.path)
        slow.said.clear()
        while not slow.kinds() & {"behind"}:
            slow.transport._may_lag = False
            slow.step()
        assert slow.replica.step > 30
        assert slow.replica.residual_norm() > 0
        slow.arrive()
        train_all([*peers, slow], 49)
        assert_agree(*peers, slow)


def test_a_peer_that_drifted_replays_and_goes_on(tmp_path: Path) -> None:
    """Rule 4: its frame is refused and named, its state is made again, and its payload is credited."""
    with Crowd("sparseloco", tmp_path) as crowd:
        peers = [crowd.comes(number) for number in range(3)]
        train_all(peers, 13)
        for peer in peers:
            peer.transport._heart.look()  # so that nobody is left out for not being known
        with torch.no_grad():
            peers[1].replica.lanes[0].state.anchor[0][0, 0] += 1.0
        train_all(peers, 21)
        assert_agree(*peers[::2])
        assert peers[1].replica.digest() == peers[0].replica.digest()
        assert "drifted" in peers[1].kinds()
        refused = [
            t.text for t in peers[0].said if "left out" in t.text and "must be" in t.text and "digest=" in t.text
        ]
        assert refused


def test_starting_from_other_values_is_mended_by_the_first_anchor_or_refused(tmp_path: Path) -> None:
    with Crowd("sparseloco", tmp_path, anchor_every=10**6) as crowd:
        peers = [crowd.comes(number) for number in range(2)]
        train_all(peers, 5)
        shutil.rmtree(tmp_path / "1")
        for entry in crowd.store.list("anchors"):
            crowd.store.delete(entry.path)
        odd = crowd.comes(2)
        with torch.no_grad():
            odd.replica.lanes[0].state.anchor[0] += 1.0
        with pytest.raises(DivergenceError, match=r"there is no anchor to start from \(none in the store\); start all"):
            odd.transport.connect(odd.replica)


def test_a_store_that_was_set_back_is_refused(tmp_path: Path) -> None:
    """C-09: state of a lower round than one has seen is never accepted."""
    with Crowd("sparseloco", tmp_path) as crowd:
        peers = [crowd.comes(number) for number in range(2)]
        train_all(peers, 13)
        for peer in peers:
            peer.transport.leave()
        for folder in ("rounds/00000001", "rounds/00000002", "anchors/00000002"):
            for entry in crowd.store.list(folder):
                crowd.store.delete(entry.path)
        back = crowd.comes(0)
        with pytest.raises(
            CheckpointError,
            match=r"round 1, fragment 0: is the first open one in the store, but this peer has posted in round 2; the "
            "store was set back",
        ):
            back.transport.connect(back.replica)


def test_an_anchor_that_does_not_match_is_refused_and_an_older_one_taken(tmp_path: Path) -> None:
    """C-10, C-41: the manifest says what the anchor must hash to; bytes that differ are never loaded."""
    with Crowd("sparseloco", tmp_path) as crowd:
        peers = [crowd.comes(number) for number in range(2)]
        train_all(peers, 21)
        for peer in peers:
            peer.transport.leave()
        anchors = [entry.path for entry in crowd.store.list("anchors")]
        data = bytearray(crowd.store.get(anchors[-1], limit=10**6))
        data[-3] ^= 1
        crowd.store.put(anchors[-1], bytes(data))
        joiner = crowd.comes(2)
        joiner.transport.connect(joiner.replica)
        assert joiner.replica.digest() == peers[0].replica.digest()
        refused = [tell.text for tell in joiner.said if tell.kind == "anchor-refused"]
        assert refused
        assert "content does not match the hash in the manifest of round 4; take an older anchor" in refused[0]


def test_anchors_are_written_in_turn_and_old_rounds_are_removed(tmp_path: Path) -> None:
    """Retention keeps the two newest anchors that were read back and every round since; a joiner still gets in."""
    with Crowd("sparseloco", tmp_path, anchor_every=1) as crowd:
        peers = [crowd.comes(number) for number in range(2)]
        train_all(peers, 41)
        for peer in peers:
            peer.transport.leave()
        rounds = sorted({int(entry.path.split("/")[1]) for entry in crowd.store.list("anchors")})
        assert rounds[-1] == 9
        frames = {
            int(entry.path.split("/")[1]) for entry in crowd.store.list("rounds") if entry.path.endswith(".frame")
        }
        assert 0 not in frames
        assert set(range(7, 10)) <= frames
        joiner = crowd.comes(2)
        joiner.transport.connect(joiner.replica)
        assert joiner.replica.digest() == peers[0].replica.digest()


def test_same_key_with_lost_folder_drops_what_it_cannot_know(tmp_path: Path) -> None:
    """Rule 5: private state that is older than the last accepted frame is dropped, said aloud."""
    with Crowd("sparseloco", tmp_path) as crowd:
        peers = [crowd.comes(number) for number in range(2)]
        train_all(peers, 5)
        peers[0].transport.leave()
        shutil.copytree(tmp_path / "0", tmp_path / "old")
        again = crowd.comes(0)
        train_all([again, peers[1]], 21)
        again.transport.leave()
        shutil.rmtree(tmp_path / "0")
        shutil.copytree(tmp_path / "old", tmp_path / "0")
        back = crowd.comes(0)
        back.transport.connect(back.replica)
        assert back.replica.residual_norm() == 0.0
        assert "residual-dropped" in back.kinds()
        assert back.replica.digest() == peers[1].replica.digest()


def test_keys_of_a_round_that_closed_are_not_collected_twice(tmp_path: Path) -> None:
    """An inbox that was collected early for a checkpoint is given once more, and nothing is replayed meanwhile."""
    with Crowd("sparseloco_delayed", tmp_path) as crowd:
        peers = [crowd.comes(number) for number in range(2)]
        train_all(peers, 5)
        inboxes = {}

        def early(peer: Peer) -> None:
            inboxes[peer.number] = peer.transport.collect(Key(0, 0))
            peer.transport.put_back(Key(0, 0), inboxes[peer.number])

        together(*[lambda peer=peer: early(peer) for peer in peers])
        assert [len(inbox) for inbox in inboxes.values()] == [2, 2]
        train_all(peers, 14)
        assert_agree(*peers)


def test_a_heap_of_attempts_that_count_for_nobody_is_looked_through(tmp_path: Path) -> None:
    """Peers in the open round looked at all of them, so whoever comes later, or only looks, has to as well."""
    with Crowd("sparseloco", tmp_path) as crowd:
        for attempt in range(100):
            crowd.store.create(str(paths.Manifest(1, 0, attempt)), b"rubbish that a writer has laid in advance")
        first, second = crowd.comes(0), crowd.comes(1)
        train_all([first, second], 14)
        second.transport.leave()
        again, joiner = crowd.comes(1), crowd.comes(2)
        for peer in (again, joiner):
            peer.arrive()
            assert peer.digests[peer.replica.step] == first.digests[peer.replica.step]
        crowd.store.create("run.json", canonical.encode(crowd.run))
        seen = Viewer(crowd.store).look()
        assert seen.closed == {0: 3}
        skipped = next(one.skipped for one in seen.rounds if one.round == 1)
        assert (len(skipped), skipped[-1]) == (17, "and 84 more attempts")
