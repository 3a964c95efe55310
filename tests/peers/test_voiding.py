"""The owner lets a round be closed anew: a manifest that lists what is nowhere stops nobody for ever."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from sparseloco.errors import Interrupted
from sparseloco.peers import anchors, canonical, paths
from sparseloco.peers.manifest import Entry, Manifest, seal
from sparseloco.peers.run_file import RunFile
from sparseloco.peers.store import Store, open_store
from sparseloco.rejoin import fragment_digest
from sparseloco.types import Key
from tests import toy
from tests.cli import Call
from tests.driver import ROWS
from tests.peers.crowd import OWNER, Peer, identities, identity, loopback, make_run, together, train_all
from tests.peers.test_amending import wait_until

HOSTILE = identity("hostile")
GHOST = "9" * 64


class Scene:
    """A run in a directory, whose owner has a key file."""

    def __init__(self, folder: Path, cli: Call, row: str = "sparseloco", **policy: object) -> None:
        self.folder, self.cli, self.row = folder, cli, row
        OWNER.save(folder / "owner.key")
        self.run: RunFile = make_run(ROWS[row](), toy.net(), **policy)
        self.store: Store = open_store(str(folder / "run"))
        self.store.create(str(paths.Run()), canonical.encode(self.run))

    def comes(self, number: int) -> Peer:
        me = identities(3)[number]
        return Peer(self.run, ROWS[self.row](), self.store, me, self.folder / f"peer-{number}", number)

    def manifest(self, round: int, attempt: int, fragment: int = 0) -> Manifest:
        data = self.store.get(str(paths.Manifest(round, fragment, attempt)), limit=2**20)
        return canonical.decode(data, Manifest, what="manifest", limit=2**20)

    def hostile(self, peer: Peer, key: Key, *, attempt: int = 0, entries: tuple[Entry, ...] = ()) -> Manifest:
        """A manifest of a member, after the state that ``peer`` has."""
        round, fragment = key
        made = Manifest(
            run=self.run.run, round=round, fragment=fragment, attempt=attempt, amendments=0, entries=entries,
            previous=self.manifest(round - 1, 0, fragment).sha256, digest=fragment_digest(peer.replica, fragment),
            writer=HOSTILE.public,
            state_sha256=anchors.state_hash(peer.replica, self.run.run, key) if round % 2 == 0 else "",
        )  # fmt: skip
        self.store.create(str(paths.Manifest(round, fragment, attempt)), seal(made, HOSTILE))
        return self.manifest(round, attempt, fragment)

    def void(self, round: int, *more: str) -> str:
        url, key = str(self.folder / "run"), str(self.folder / "owner.key")
        ended = self.cli("run", "void", url, "--round", str(round), "--key", key, *more)
        assert ended.code == 0, ended.err
        return ended.out


def ghosts() -> tuple[Entry, ...]:
    peers = sorted([HOSTILE.peer_id, identity("other").peer_id])
    return tuple(Entry(peer=peer, size=300, hash=GHOST, weight=1) for peer in peers)


def test_peers_that_wait_for_a_frame_that_is_nowhere_go_on_once_it_is_voided(tmp_path: Path, cli: Call) -> None:
    """Bit for bit as if it had never been there, also with attempts that the hostile writer has laid in advance."""
    scene = Scene(tmp_path, cli)
    peers = [scene.comes(0), scene.comes(1)]
    keys = ",".join(f'"{key}"' for key in sorted(peer.me.public for peer in peers))
    try:
        train_all(peers, 9)
        gone = scene.hostile(peers[0], Key(2, 0), entries=ghosts())
        for attempt in (1, 2):
            scene.hostile(peers[0], Key(2, 0), attempt=attempt, entries=ghosts())

        def help() -> None:
            wait_until(lambda: all(f"{GHOST[:8]}" in tell.text for peer in peers for tell in peer.said[-1:]))
            out = scene.void(2, f"policy.writers=[{keys}]")
            assert f"amendment 0 of run {scene.run.run} voids round 2, fragment 0: attempt 0\nwritten by " in out
            assert f"{gone.writer}, peer {HOSTILE.peer_id}; it lists:\n" in out
            assert f"  {HOSTILE.peer_id}  {GHOST}  300 bytes\n" in out
            assert "those that have applied it start over from an anchor\nwriters from then on: " in out

        together(*[lambda peer=peer: peer.train(17) for peer in peers], help)
    finally:
        for peer in peers:
            peer.transport.leave()
    assert {peer.replica.digest() for peer in peers} == {loopback(ROWS["sparseloco"](), 2, 17).replicas[0].digest()}
    taken = scene.manifest(2, 3)
    assert (len(taken.entries), taken.amendments) == (2, 1)
    for peer in peers:
        skipped = [tell.text for tell in peer.said if tell.kind == "skipped"]
        assert (
            "attempt 0 counts for nobody: manifest: amendments=0 must be above 0, the amendment that voids"
            in skipped[0]
        )
        assert "voided" not in peer.kinds()
    assert not [entry for entry in scene.store.list("rounds/00000002") if "want-" in entry.path]


@pytest.mark.parametrize("row", ["sparseloco", "streaming_diloco"])
def test_a_peer_that_catches_up_is_there_when_the_round_is_closed_anew(row: str, tmp_path: Path, cli: Call) -> None:
    """It has not posted in the voided round, which needs it: so it takes part, and does not wait for the others."""
    scene = Scene(tmp_path, cli, row)
    first, second = scene.comes(0), scene.comes(1)
    try:
        train_all([first, second], 9)
        second.transport.leave()
        scene.hostile(first, Key(2, 0), entries=ghosts())
        second = scene.comes(1)

        def help() -> None:
            wait_until(lambda: all(any(GHOST[:8] in one.text for one in peer.said) for peer in (first, second)))
            keys = ",".join(f'"{key}"' for key in sorted([first.me.public, second.me.public]))
            scene.void(2, f"policy.writers=[{keys}]")

        together(lambda: first.train(17), lambda: second.train(17), help)
    finally:
        first.transport.leave()
        second.transport.leave()
    assert first.replica.digest() == second.replica.digest()
    assert len(scene.manifest(2, 1).entries) == 2


@pytest.mark.parametrize("how", ["lives", "comes again", "comes again from a checkpoint"])
def test_a_peer_that_has_applied_it_starts_over_from_an_anchor(how: str, tmp_path: Path, cli: Call) -> None:
    """Its chain counts for nobody, and neither do the anchors of it: one that joins later takes the other."""
    scene = Scene(tmp_path, cli, min_peers=1, deadline_s=1.0)
    peer = scene.comes(0)
    peer.train(9)
    gone = scene.hostile(peer, Key(2, 0))
    peer.train(21)
    assert scene.manifest(3, 0).previous == gone.sha256
    wait_until(lambda: {0, 4} <= {place.round for place in anchors.listed(scene.store)})
    out = scene.void(2)
    assert "; it lists:\npeers that wait close the round anew; those that have applied it start over" in out
    assert "its writer may write others; to shut it out, name those who may: sparseloco run amend " in out
    if how != "lives":
        before, peer = peer, scene.comes(0)
        before.transport.leave()
        if how == "comes again from a checkpoint":
            peer.replica.load_shared_state(before.replica.shared_state())
    else:
        peer.transport._beat()
    peer.train(25)
    joiner = scene.comes(1)
    try:
        joiner.transport.connect(joiner.replica)
        assert joiner.replica.digest() == peer.replica.digest()
    finally:
        joiner.transport.leave()
        peer.transport.leave()
    assert ("voided" in peer.kinds()) == (how != "comes again")
    chain = [scene.manifest(number, attempt) for number, attempt in enumerate((0, 0, 1, 1, 1, 0))]
    assert [manifest.amendments for manifest in chain] == [0, 0, 1, 1, 1, 1]
    assert all(after.previous == one.sha256 for one, after in pairwise(chain))
    assert "voided" not in joiner.kinds()


def test_all_fragments_start_over_together(tmp_path: Path, cli: Call) -> None:
    """Their steps are counted together, so none can stay where it was; with messages in flight, too."""
    scene = Scene(tmp_path, cli, "streaming_diloco", min_peers=1, deadline_s=1.0)
    peer = scene.comes(0)
    peer.train(8)
    scene.hostile(peer, Key(2, 1))
    peer.train(21)
    wait_until(lambda: {0, 2, 4} <= {place.round for place in anchors.listed(scene.store)})
    scene.void(2, "--fragment", "1")
    peer.transport._beat()
    peer.train(33)
    joiner = scene.comes(1)
    try:
        joiner.transport.connect(joiner.replica)
        assert joiner.replica.digest() == peer.digests[joiner.replica.step]
    finally:
        joiner.transport.leave()
        peer.transport.leave()
    assert [tell.fragment for tell in peer.said if tell.kind == "voided"] == [1]
    assert [scene.manifest(number, 1, 1).amendments for number in (2, 3, 4)] == [1, 1, 1]


def test_a_peer_that_catches_up_and_cannot_go_on_heeds_a_signal(tmp_path: Path, cli: Call) -> None:
    """C-49: also while it waits for a frame that is nowhere, at the first signal."""
    scene = Scene(tmp_path, cli, min_peers=1, deadline_s=1.0)
    peer = scene.comes(0)
    peer.train(9)
    scene.hostile(peer, Key(2, 0), entries=ghosts())
    joiner = scene.comes(1)
    joiner.transport._stop = lambda: True
    try:
        with pytest.raises(Interrupted, match=r"^left while it was catching up; nothing is lost$"):
            joiner.train(13)
    finally:
        peer.transport.leave()
        joiner.transport.leave()


def test_a_round_before_the_anchors_is_not_voided_by_mistake(tmp_path: Path, cli: Call) -> None:
    """Nobody could start over: frames and anchors of that time are removed."""
    scene = Scene(tmp_path, cli, min_peers=1, deadline_s=1.0)
    url, key = str(tmp_path / "run"), str(tmp_path / "owner.key")
    peer = scene.comes(0)
    peer.train(29)
    wait_until(lambda: {4, 6} <= {place.round for place in anchors.listed(scene.store)})
    peer.transport.leave()
    for number in (0, 3):
        ended = cli("run", "void", url, "--key", key, "--round", str(number))
        assert ended.code == 2
        assert f"--round {number}: must be 4 or later, since peers that have applied it start over from an" in ended.err
    assert not scene.store.list("amend")
    scene.void(4)
    scene.void(3, "--force")


def test_what_can_be_voided(tmp_path: Path, cli: Call) -> None:
    scene = Scene(tmp_path, cli, min_peers=1, deadline_s=1.0)
    url, key = str(tmp_path / "run"), str(tmp_path / "owner.key")
    peer = scene.comes(0)
    peer.train(5)
    peer.transport.leave()

    def refused(*words: str, key: str = key) -> str:
        ended = cli("run", "void", url, "--key", key, *words)
        assert ended.code == 2, ended
        return ended.err

    text = "--round 1 --fragment 0: must have a manifest that counts, and there is none; look with `sparseloco status`"
    assert text in refused("--round", "1")
    assert "--round 0 --fragment 3: must have a manifest that counts" in refused("--round", "0", "--fragment", "3")
    barred = refused("--round", "0", "--bar-writer")
    assert f"--bar-writer: must leave a writer, but nobody besides {peer.me.public} is named as one; name" in barred
    itself = f"policy.writers={json.dumps([peer.me.public])}"
    assert refused("--round", "0", "--bar-writer", itself) == barred
    assert "--round -1: must be from 0 to 99999999; look with `sparseloco status`" in refused("--round=-1")
    assert "--fragment 10000: must be from 0 to 9999; look" in refused("--round", "0", "--fragment", "10000")
    assert "'policy.min_peers': must be KEY=VALUE with a key of" in refused("--round", "0", "policy.min_peers")
    peer.me.save(tmp_path / "a.key")
    assert "--key: is that of" in refused("--round", "0", key=str(tmp_path / "a.key"))
    assert not scene.store.list("amend")
    for attempt in range(80):
        scene.store.create(str(paths.Manifest(1, 0, attempt)), b"rubbish, as a writer may lay before its manifest")
    scene.hostile(peer, Key(1, 0), attempt=80)
    assert json.loads(scene.void(1, "--json"))["manifest"]["attempt"] == 80
    scene.store.delete(str(paths.Amend(0)))
    keys = sorted([peer.me.public, HOSTILE.public])
    cli("run", "amend", url, "--key", key, f"policy.writers={json.dumps(keys)}")
    made = json.loads(scene.void(0, "--bar-writer", "--json"))
    assert made["changes"] == {"void": 0, "policy.writers": [HOSTILE.public]}
    assert made["manifest"]["writer"] == peer.me.public
    assert made["manifest"]["entries"][0]["peer"] == peer.me.peer_id
    for n in range(2, 18):
        assert cli("run", "amend", url, "--key", key, f"policy.deadline_s={n}").code == 0
    assert "must have a manifest that counts" in refused("--round", "0"), "it is void already"


def test_the_command_that_bars_a_writer_may_name_the_others(tmp_path: Path, cli: Call) -> None:
    """Where the run names no writers; the one that is barred is not among them, whoever names it."""
    scene = Scene(tmp_path, cli, min_peers=1, deadline_s=1.0)
    peer = scene.comes(0)
    peer.train(5)
    peer.transport.leave()
    keys = json.dumps(sorted([peer.me.public, HOSTILE.public]))
    made = json.loads(scene.void(0, "--bar-writer", f"policy.writers={keys}", "--json"))
    assert made["changes"] == {"void": 0, "policy.writers": [HOSTILE.public]}


def test_what_is_given_up_when_a_peer_starts_over(tmp_path: Path, cli: Call) -> None:
    """What it has not sent, and which rounds it may remove: both may follow from what is void."""
    peer = Scene(tmp_path, cli, min_peers=1, deadline_s=1.0).comes(0)
    peer.train(21)
    peer.transport.leave()  # after what is written in the background
    member = peer.transport._member
    assert member is not None
    assert member.retention.oldest_kept(0) > 0
    assert peer.replica.residual_norm() > 0
    member.forget()
    assert member.retention.oldest_kept(0) == 0
    assert peer.replica.residual_norm() == 0
    assert (peer.replica.step, peer.replica.in_flight()) == (0, [])
