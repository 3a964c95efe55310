"""What a reader without a key sees of a run, whoever has put what into the store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparseloco.errors import ConfigError, NotFound, TooLarge, Unavailable, WireError
from sparseloco.peers import paths
from sparseloco.peers.canonical import encode
from sparseloco.peers.listing import PER_PEER
from sparseloco.peers.looking import Viewer
from sparseloco.peers.status import Status, waiting_for
from sparseloco.peers.store import Store, open_store
from tests import toy
from tests.driver import ROWS
from tests.peers.crowd import OWNER, Peer, identities, make_run, train_all
from tests.peers.stage import IDS, ME, NOW, Stage


def viewer(stage: Stage, **more: Any) -> Viewer:
    return Viewer(stage.store, wall_clock=lambda: NOW, **{"clock": lambda: 0.0, **more})


def look(stage: Stage, **more: Any) -> Status:
    return viewer(stage, **more).look()


def rounds(status: Status, fragment: int = 0) -> dict[int, Any]:
    return {one.round: one for one in status.rounds if one.fragment == fragment}


def real_run(row: str, store: Store, folder: Path, steps: int = 13) -> list[Peer]:
    run = make_run(ROWS[row](), toy.net(), min_peers=3)
    store.create("run.json", encode(run))
    peers = [Peer(run, ROWS[row](), store, me, folder / f"{n}", n) for n, me in enumerate(identities(3))]
    try:
        train_all(peers, steps)
    finally:
        for peer in peers:
            peer.transport.leave()
    return peers


def test_a_real_run_is_seen_and_not_touched(store: Store, tmp_path: Path) -> None:
    peers = real_run("sparseloco", store, tmp_path / "peers")
    before = store.list("")
    seen = Viewer(store, owner=OWNER.public).look()
    assert store.list("") == before
    assert json.loads(json.dumps(seen.to_json()))["run"] == peers[0].run.run
    assert (seen.closed, seen.problems, seen.agree) == ({0: 3}, (), True)
    assert [one.state for one in seen.peers] == ["left"] * 3
    assert [one.rounds for one in seen.peers] == [3] * 3
    closed = rounds(seen)[2]
    assert [one.peer for one in closed.sent] == [peer.me.peer_id for peer in peers]
    assert min(one.late_s for one in closed.sent) == 0.0
    assert closed.took_s >= max(one.late_s for one in closed.sent) - 1.0  # S3 tells whole seconds
    assert closed.digest == peers[0].digests[8], "the state before round 2, of step 8"
    assert seen.agreement[0].same == tuple(sorted(peer.me.peer_id for peer in peers))
    assert seen.bytes is not None
    assert seen.bytes.total == sum(entry.size for entry in before)
    assert seen.bytes.objects == len(before)
    assert [one.round for one in seen.anchors if one.vouched] == [2, 0]


def test_fragments_are_told_apart(tmp_path: Path) -> None:
    store = open_store("memory://")
    real_run("streaming_diloco", store, tmp_path)
    seen = Viewer(store).look()
    assert len(seen.closed) > 1
    assert min(seen.closed.values()) >= 2
    assert {one.fragment for one in seen.agreement} == set(seen.closed)
    assert seen.problems == ()


def test_who_is_missing_and_since_when() -> None:
    """C-33: an open round names who has not posted, and when each was last seen."""
    stage = Stage(lease_s=120.0)
    stage.at(400).close(0, 1, 2)
    stage.at(310).lease(2, round=1)
    stage.at(3).lease(0, round=1)
    stage.lease(1, round=1)
    stage.at(5000).lease(3)
    stage.at(30).frame(0, 1)
    stage.at(25).frame(1, 1)
    seen = look(stage)
    one = rounds(seen)[1]
    assert [(sent.peer, sent.late_s, sent.tokens) for sent in one.sent] == [(IDS[0], 0.0, None), (IDS[1], 5.0, None)]
    assert one.took_s == 30.0
    assert waiting_for(one, 2) == f"2 frames, at least 2 needed; missing: {IDS[2][:8]} (lease put 310 s ago)"
    assert {peer.peer: peer.state for peer in seen.peers} == dict(
        zip(IDS[:4], ["live", "live", "silent", "silent"], strict=True)
    )
    stage.frame(2, 1)
    assert waiting_for(rounds(look(stage))[1], 2) == "3 frames, at least 2 needed; nobody with a lease is missing"


def test_before_the_first_frame_nobody_is_missing() -> None:
    stage = Stage()
    stage.lease(0)
    assert rounds(look(stage))[0].missing == ()


def test_left_out_peers_and_their_reasons_are_counted() -> None:
    """C-33."""
    stage = Stage()
    stage.close(0, 1, left_out={2: "had not posted"})
    stage.close(0, 1, 3, left_out={2: "size=9999: must be at most 4096"})
    seen = look(stage)
    assert rounds(seen)[0].left_out == ((IDS[2], "had not posted"),)
    peer = next(one for one in seen.peers if one.peer == IDS[2])
    assert (peer.state, peer.rounds, peer.left_out, peer.last_round) == ("no lease", 0, 2, None)
    assert peer.reason == "round 1: size=9999: must be at most 4096"
    three = next(one for one in seen.peers if one.peer == IDS[3])
    assert (three.rounds, three.tokens, three.last_round) == (1, 7, 1)


def test_what_counts_for_peers_is_told_too() -> None:
    """Leases are judged by the reader's own clock once it has looked for a while; store and wall clock agree here."""
    stage, now = Stage(lease_s=60.0), [0.0]
    for peer in range(3):
        stage.at(0).lease(peer)
    one = viewer(stage, clock=lambda: now[0])
    assert [peer.state for peer in one.look().peers] == ["live"] * 3
    now[0] = 61.0
    stage.lease(1, counter=2)
    stage.lease(2, counter=2, left=True)
    seen = {peer.peer: peer for peer in one.look().peers}
    assert [seen[peer].state for peer in IDS[:3]] == ["silent", "live", "left"]
    assert [seen[peer].unchanged_s for peer in IDS[:3]] == [61.0, 0.0, 0.0]
    stage.frame(1, 0)
    (missing,) = rounds(one.look())[0].missing
    assert waiting_for(rounds(one.look())[0], 2).endswith(f"{IDS[0][:8]} (lease put 0 s ago, unchanged for 61 s)")
    assert missing.unchanged_s == 61.0


def test_a_drifted_peer_is_seen_before_its_round_is_closed() -> None:
    """Frames say what they were made from; the one that differs is named."""
    stage = Stage()
    stage.close(0, 1)
    for peer, digest in ((0, "a" * 32), (1, "a" * 32), (2, "b" * 32)):
        stage.frame(peer, 1, digest)
    stage.store.put(str(paths.Frame(1, 0, IDS[3], 0, "f" * 64)), b"rubbish")
    seen = look(stage)
    assert seen.agree is False
    agreement = next(one for one in seen.agreement if one.round == 1)
    assert agreement.same == (IDS[0], IDS[1])
    assert agreement.other == ((IDS[2], "b" * 32), (IDS[3], "not a frame of this round"))


def test_amendments_are_in_force_acknowledged_or_not() -> None:
    stage = Stage()
    first = stage.amendment(0, 0, **{"policy.deadline_s": 77.0})
    second = stage.amendment(1, 50, **{"policy.min_peers": 3})
    stage.close(0, 1, amended=(first, second))
    stage.amendment(2, 60, **{"policy.note": "\u00e9<b>"})
    stage.store.put("amend/00000003.json", b"{}")
    seen = look(stage)
    assert [(one.n, one.round, one.state) for one in seen.amendments] == [
        (0, 0, "in force"), (1, 50, "acknowledged"), (2, 60, "not acknowledged"),
    ]  # fmt: skip
    assert seen.amendments[2].changes == '{"policy.note": "\\u00e9<b>"}'
    assert (seen.policy["deadline_s"], seen.policy["min_peers"]) == (77.0, 2)


def test_a_second_look_reads_only_what_is_new() -> None:
    stage = Stage()
    for _ in range(5):
        stage.close(0, 1)
    stage.lease(0)
    one = viewer(stage)
    one.look()
    assert sum("manifest" in path for path in stage.store.got) == 5
    stage.store.got.clear()
    stage.close(0, 1)
    assert one.look().closed == {0: 6}
    assert stage.store.got == ["rounds/00000005/0000/manifest-0000.json"]


def test_only_the_newest_rounds_are_kept_whole() -> None:
    stage = Stage()
    for _ in range(5):
        stage.close(0, 1)
    seen = look(stage, keep=2)
    assert sorted(rounds(seen)) == [3, 4, 5]
    assert seen.peers[0].rounds == 5
    assert seen.bytes is not None
    assert seen.bytes.listed == seen.bytes.frames == 5 * rounds(seen)[3].listed_bytes
    with pytest.raises(ConfigError, match=r"^rounds=0: must be from 1 to 1000; use 16$"):
        look(stage, keep=0)


def test_times_of_a_round_whose_frames_are_removed_are_unknown() -> None:
    stage = Stage()
    manifest = stage.close(0, 1)
    stage.store.delete(str(paths.Frame(0, 0, IDS[0], 0, manifest.entries[0].hash)))
    one = rounds(look(stage))[0]
    assert [sent.late_s for sent in one.sent] == [None, None]
    assert one.took_s is None
    assert one.stored_bytes < one.listed_bytes + 2000


def test_a_run_that_is_not_there_or_not_its_owners() -> None:
    with pytest.raises(NotFound, match=r"^get run\.json: there is no such object"):
        Viewer(open_store("memory://"))
    stage = Stage()
    with pytest.raises(WireError, match=r"^run\.json: owner=.* is not --owner "):
        look(stage, owner=ME[0].public)
    stage.store.put("run.json", b'{"run":1}')
    with pytest.raises(WireError, match=r"^run\.json: "):
        look(stage)


def test_a_store_that_does_not_answer_hides_nothing_that_is_known() -> None:
    stage = Stage()
    stage.close(0, 1)
    one = viewer(stage)
    one.look()
    stage.close(0, 1)
    path = "rounds/00000001/0000/manifest-0000.json"
    stage.store.fails[path] = Unavailable(f"get {path}: the store answered 503; try again")
    seen = one.look()
    assert seen.closed == {0: 1}
    assert seen.problems == (f"fragment 0: what is shown may be old (get {path}: the store answered 503; try again)",)
    stage.store.fails.clear()
    assert one.look().closed == {0: 2}


def test_more_objects_than_can_be_listed() -> None:
    stage = Stage()
    for _ in range(3):
        stage.close(0, 1)
    stage.lease(0)
    stage.store.fails[""] = TooLarge("list: more than 100000 objects; list a folder further down, or start later")
    seen = look(stage)
    assert (seen.closed, seen.bytes) == ({0: 3}, None)
    assert [one.stored_bytes is not None for one in seen.rounds] == [True] * 4
    assert [one.state for one in seen.peers] == ["live", "no lease"]
    assert "the store holds too many objects to list at once, so sums of bytes are left out" in seen.problems
    for number in range(PER_PEER + 1):
        stage.store.put(str(paths.Want(2, 0, "0" * 32, f"{number:064x}")), b"")
    flooded = rounds(look(stage))[2]
    assert (flooded.stored_bytes, flooded.closed, len(flooded.sent)) == (None, True, 2)
    assert flooded.sent[0].late_s is not None
