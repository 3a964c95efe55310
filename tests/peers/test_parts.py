"""The small parts below the transport: files, seals, leases, claims, and what they refuse."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from sparseloco import ConfigError, presets
from sparseloco.errors import CheckpointError, Interrupted, WireError
from sparseloco.peers import canonical, paths
from sparseloco.peers.anchors import Retention
from sparseloco.peers.frames import Expected, Frames, check_weight_within
from sparseloco.peers.journal import Journal, Posted
from sparseloco.peers.leases import Heart, Lease, read_lease
from sparseloco.peers.membership import Leases
from sparseloco.peers.store import open_store
from sparseloco.peers.tensors import pack, sha256_of, unpack
from sparseloco.replica import Replica
from sparseloco.transport.object_store import ObjectStore
from sparseloco.types import Key
from tests import toy
from tests.driver import ROWS
from tests.peers.crowd import Clock, Peer, identities, identity, make_run

RUN = "0123456789abcdef"


def state() -> dict[str, object]:
    return {
        "anchor/b/0": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
        "anchor/a/0": torch.tensor(1.5, dtype=torch.float64),
        "codec/a/0/side": torch.tensor(1),
        "outer/a/0/step": 7,
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
    }


def test_packed_state_is_one_string_of_bytes_whatever_the_order_and_layout() -> None:
    """The hash that a manifest signs must be the same at all peers."""
    data = pack(state(), {"round": 3})
    shuffled = dict(reversed(list(state().items())))
    assert pack(shuffled, {"round": 3}) == data
    assert canonical.sha256(data) == sha256_of(state(), {"round": 3})
    found, facts = unpack(data)
    assert facts == {"round": 3}
    assert set(found) == set(state())
    assert found["outer/a/0/step"] == 7
    for path, value in state().items():
        if isinstance(value, torch.Tensor):
            assert found[path].dtype == value.dtype
            assert torch.equal(found[path], value)


def test_what_cannot_be_packed_or_unpacked_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"x=object: must be a tensor or a plain value to be stored; convert it"):
        pack({"x": object()}, {})
    for data in (b"", b"\xff" * 64, pack({}, {})[:-3], (2).to_bytes(8, "little") + b"{}"):
        with pytest.raises(CheckpointError, match=r"bytes: must be a safetensors file of this library; get it anew"):
            unpack(data)


def test_journal_gives_back_what_was_written_and_refuses_what_was_damaged(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "new" / "folder", RUN)
    assert journal.read(3) is None
    posted = Posted(Key(7, 3), b"frame", 5, [torch.ones(2, 2), torch.zeros(3, 1)])
    journal.write(posted)
    found = journal.read(3)
    assert found is not None
    assert (found.key, found.frame, found.weight, found.hash) == (posted.key, b"frame", 5, posted.hash)
    assert all(torch.equal(a, b) for a, b in zip(found.residual, posted.residual, strict=True))
    with pytest.raises(CheckpointError, match=f"is of run {RUN}, this is {'f' * 16}; use one folder per run"):
        Journal(tmp_path / "new" / "folder", "f" * 16).read(3)
    (path,) = (tmp_path / "new" / "folder").iterdir()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="content does not match its hash; remove it, which costs its residual"):
        journal.read(3)


def test_frames_of_old_rounds_are_forgotten() -> None:
    """C-47: what a peer holds does not grow with the rounds."""
    frames = Frames()
    hashes = [frames.put(Key(number, 0), bytes([number])) for number in range(5)]
    other = frames.put(Key(0, 1), b"other fragment")
    frames.forget_before(Key(3, 0))
    assert frames.hashes() == {*hashes[3:], other}
    assert frames.get(hashes[0]) is None


def test_memory_is_flat_over_rounds(tmp_path: Path) -> None:
    """C-47: after many rounds a peer holds the frames of the last two, and on its disk those since two anchors ago."""
    run = make_run(ROWS["ddp"](), toy.net(), min_peers=1)
    peer = Peer(run, ROWS["ddp"](), open_store("memory://"), identities(1)[0], tmp_path, 0)
    peer.train(30)
    peer.transport.leave()
    frames = peer.transport._desk.frames
    assert len(frames._held) <= 2
    assert len(frames.hashes()) <= 2 * run.policy.anchor_every + 1
    assert not peer.transport._open
    assert len(peer.transport._member.posted) == 0  # pyright: ignore[reportOptionalMemberAccess]


def test_frames_that_cannot_be_of_the_round_are_refused() -> None:
    expected = Expected(RUN, Key(0, 0), "0" * 16, "0" * 32, ())
    with pytest.raises(WireError, match=rf"size={expected.largest + 1}: must be at most {expected.largest}, the"):
        expected.open(bytes(expected.largest + 1), "0" * 32)
    with pytest.raises(WireError, match="must be more than 96; refuse it"):
        expected.open(b"short", "0" * 32)


def test_weight_above_policy_is_refused_before_it_is_posted() -> None:
    check_weight_within(10, 10)
    with pytest.raises(ConfigError, match=r"weight=11: must be at most policy.max_tokens_per_round=10, or nobody"):
        check_weight_within(11, 10)


def test_leases_are_signed_for_one_peer_and_one_run() -> None:
    """C-70: nobody can keep another one alive, or make it leave."""
    me, other = identity("me"), identity("other")
    lease = Lease(run=RUN, peer=me.peer_id, counter=1, session="0" * 16, round=4, public=me.public)
    data = canonical.encode(lease.signed(me))
    assert read_lease(data, RUN, me.peer_id).round == 4
    forged = canonical.encode(lease.signed(other))
    for bytes_, run, peer in ((forged, RUN, me.peer_id), (data, "f" * 16, me.peer_id), (data, RUN, other.peer_id)):
        with pytest.raises(WireError, match="must be signed by it, for this run; ignore it"):
            read_lease(bytes_, run, peer)


def test_hearts_see_each_other_and_a_release_at_once() -> None:
    store, clock = open_store("memory://"), Clock()
    hearts = [
        Heart(store, RUN, me, session=f"{n:016}", leases=Leases(60.0), beat=lambda: None, clock=clock)
        for n, me in enumerate(identities(2))
    ]
    for heart in hearts:
        heart.start()
    hearts[0].look()
    assert hearts[0].live() == {identities(2)[1].peer_id}
    store.put(str(paths.Lease(identity("odd").peer_id)), b"{}")
    clock.now = 50.0
    hearts[1].put()
    clock.now = 100.0
    hearts[0].look()
    assert hearts[0].last_seen()[identities(2)[1].peer_id] == 0.0, "a change counts when the reader sees it"
    hearts[1].put(left=True)
    hearts[0].look()
    assert hearts[0].live() == frozenset()
    for heart in hearts:
        heart.stop()


def test_retention_needs_two_anchors_that_were_read() -> None:
    store = open_store("memory://")
    me, other = identity("me").peer_id, identity("other").peer_id
    for number in range(6):
        for peer in (me, other):
            store.put(str(paths.Frame(number, 0, peer, 0, "ab" * 32)), b"x")
    retention = Retention(store, me)
    retention.found_whole(Key(4, 0), "anchors/a", written=True)
    retention.clean(0)
    assert len(store.list("rounds")) == 12
    retention.found_whole(Key(2, 0), "anchors/b", written=False)
    retention.clean(0)
    left = [entry.path.split("/")[1:4:2] for entry in store.list("rounds")]
    assert [int(number) for number, peer in left if peer == me] == [2, 3, 4, 5]
    assert len([peer for _, peer in left if peer == other]) == 6, "what others own is theirs"


def test_a_replica_of_another_run_is_refused(tmp_path: Path) -> None:
    store = open_store("memory://")
    run = make_run(ROWS["sparseloco"](), toy.net())
    me = identities(1)[0]
    transport = ObjectStore(store, me, tmp_path, run=run)
    with pytest.raises(ConfigError, match=r"must be .*, as in run .*; use the .algorithm. of run.json"):
        transport.connect(Replica(toy.net(), presets.diloco(inner_steps=2)))
    with pytest.raises(ConfigError, match=r"the tensor table of run .*; build the model that run.json describes"):
        transport.connect(Replica(torch.nn.Linear(3, 3), ROWS["sparseloco"]()))
    with pytest.raises(ConfigError, match="transport=not connected: must know its replica; call connect first"):
        transport.collect(Key(0, 0))
    transport.leave()


def test_the_transport_is_a_name_of_the_package_that_loads_nothing_by_itself() -> None:
    import sparseloco

    assert sparseloco.ObjectStore is ObjectStore
    assert "ObjectStore" not in sparseloco.__all__


def test_one_store_holds_one_run(tmp_path: Path) -> None:
    """C-40: peers that were given another run do not start a second swarm beside the first."""
    store = open_store("memory://")
    run = make_run(ROWS["sparseloco"](), toy.net())
    store.create(str(paths.Run()), canonical.encode(run))
    me = identities(1)[0]
    found = ObjectStore(store, me, tmp_path, owner=run.owner)
    assert found.run == run
    found.leave()
    other = make_run(ROWS["sparseloco"](), toy.net(), name="another")
    with pytest.raises(ConfigError, match=f"run={other.run}: must be {run.run}, the run that this store holds"):
        ObjectStore(store, me, tmp_path, run=other)
    with pytest.raises(WireError, match="ask for the right address or key"):
        ObjectStore(store, me, tmp_path, owner="0" * 64)


def test_who_is_no_member_or_has_left_is_told_so(tmp_path: Path) -> None:
    store = open_store("memory://")
    keys = identities(3)
    members = tuple(sorted(key.public for key in keys[:2]))
    run = make_run(ROWS["sparseloco"](), toy.net(), admission="allow-list", members=members)
    stranger = ObjectStore(store, keys[2], tmp_path / "2", run=run)
    with pytest.raises(ConfigError, match=r"must be a member of run .*; ask its owner"):
        stranger.connect(Replica(toy.net(), ROWS["sparseloco"]()))
    stranger.leave()
    member = Peer(run, ROWS["sparseloco"](), store, keys[0], tmp_path / "0", 0)
    member.train(3)
    with pytest.raises(ConfigError, match="must be the replica that is connected; use one transport for each"):
        member.transport.connect(Replica(toy.net(), ROWS["sparseloco"]()))
    member.transport.leave()
    member.transport.leave()
    with pytest.raises(Interrupted, match="round 0: cannot be closed any more, since this peer has left"):
        member.step()


def test_frames_beyond_the_room_go_to_the_disk(tmp_path: Path) -> None:
    """In an open run many may post long frames; what a round did not list is gone once it is closed."""
    frames, key = Frames(tmp_path, room=100), Key(3, 0)
    objects = [bytes([number]) * 40 for number in range(5)]
    hashes = [frames.put(key, data) for data in objects]
    assert sum(map(len, frames._held.values())) == 80
    assert [frames.get(one) for one in hashes] == objects
    assert len(list(tmp_path.iterdir())) == 3
    frames.put(Key(4, 0), b"of a round that is open" * 5)
    frames.keep(key, [hashes[0], hashes[4]])
    assert [frames.get(one) for one in hashes] == [objects[0], objects[1], None, None, objects[4]]
    again = Frames(tmp_path, room=100)
    assert {hashes[0], hashes[4]} < again.hashes()
    assert len(again.hashes()) == len(list(tmp_path.iterdir())) == 3
    frames.remove_before(Key(5, 0))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", [None, "a file"])
def test_frames_stay_in_memory_where_there_is_no_disk(folder: str | None, tmp_path: Path) -> None:
    (tmp_path / "a file").write_bytes(b"")
    frames = Frames(tmp_path / folder if folder else None, room=0)
    assert frames.get(frames.put(Key(0, 0), b"frame")) == b"frame"


def test_a_peer_that_loses_its_folder_says_so(tmp_path: Path) -> None:
    run, store, me = make_run(ROWS["sparseloco"](), toy.net(), min_peers=1), open_store("memory://"), identity("me")
    peer = Peer(run, ROWS["sparseloco"](), store, me, tmp_path, 0)
    frames = peer.transport._desk.frames
    frames._room = 0
    frames.keep = lambda *_: shutil.rmtree(frames._folder or "")  # type: ignore[method-assign]
    try:
        with pytest.raises(CheckpointError, match="must stay in this peer's folder while it runs; look at the disk"):
            peer.train(5)
    finally:
        peer.transport.leave()
