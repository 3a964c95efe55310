"""The short form of benchmarks/chaos, and what its verdict rests on. No figure here depends on speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import join_late
from benchmarks.chaos import task
from benchmarks.chaos.__main__ import LIMITS, complaints
from benchmarks.chaos.ledger import Ledger, close, decoded, delta_of, flat
from sparseloco.peers.frames import Frames
from sparseloco.peers.store import Store, get_steady, open_store
from sparseloco.replica import Replica
from sparseloco.transport.faults import Fault, FaultyStore, Script
from sparseloco.types import Key
from tests import toy
from tests.driver import ROWS
from tests.peers.crowd import Peer, identities, loopback, make_run, together, train_all

ROOT = Path(__file__).parents[2]


@pytest.mark.mp
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc, as Linux has it")
def test_eight_rounds_of_chaos_lose_nothing() -> None:
    """C-35, C-49, C-69: faults of every kind, deaths by -9 and a hostile peer; all agree, all adds up."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", "--seed", "3", "--rounds", "8", "--kills", "2", "--json"],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ended.stdout, ended.stderr
    found = json.loads(ended.stdout)
    # Eight rounds are too few to speak of the last percent of the loss, or of memory that grows.
    assert [line for line in found["complaints"] if not line.startswith(("loss_excess", "peak_rss"))] == []
    assert found["rounds"] == 8
    assert found["loss_ratio"] * found["loss_without_faults"] < found["loss_at_the_start"] / 2
    faults, kills = found["runs"]["faults"], found["runs"]["kills"]
    assert faults["accepted"] > 0
    assert faults["digests_compared"] > 20
    assert len(faults["befell"]) > 4
    assert any(kind.startswith("killed") for kind in kills["befell"])


def test_what_is_not_as_it_must_be_is_named() -> None:
    good: dict[str, Any] = dict.fromkeys(LIMITS, 0.0) | {"loss_ratio": 0.99}
    assert complaints(good) == []
    for name in LIMITS:
        bad = good | ({"loss_ratio": 0.97} if name == "loss_excess" else {name: 0.2})
        assert [line.partition(":")[0] for line in complaints(bad)] == [name]
    assert complaints(good | {"ledger_error": float("nan")})


class Booked:
    """A replica whose posts are written into a ledger, as the peers of the benchmark do it."""

    def __init__(self, folder: Path) -> None:
        self.model = task.net()
        self.replica = Replica(self.model, task.algorithm())
        self.ledger = Ledger(folder)
        self.ledger.begin(None)

    def post(self, hash_: str) -> None:
        """A round of its own; the frame is listed if its hash says so."""
        (lane,) = self.replica.lanes
        for _ in range(task.INNER_STEPS):
            task.loss_of(self.model, self.replica.step + 1, 0).backward()
            self.replica.local_step()
        delta, residual = delta_of(self.replica), flat(lane.state.residual)
        (envelope,) = self.replica.outbox()
        sent = decoded(self.replica, envelope.payload)
        self.ledger.write(envelope.key.round, hash_, delta=delta, residual=residual, sent=sent)
        self.ledger.say("closed", envelope.key.round, self.replica.digest())
        self.replica.apply(envelope.key, [envelope] if hash_.startswith("listed") else [])

    def end(self) -> None:
        self.ledger.end(flat(self.replica.lanes[0].state.residual), self.replica.digest(), 0.0)


def test_a_ledger_closes_only_with_what_was_listed(tmp_path: Path) -> None:
    """One payload too many or too few, and it does not."""
    booked = Booked(tmp_path)
    for hash_ in ("listed-0", "kept", "listed-2", "listed-3"):
        booked.post(hash_)
    booked.end()
    assert booked.ledger.has_ended
    listed = {0: "listed-0", 2: "listed-2", 3: "listed-3"}
    booked.ledger.begin((3, "listed-3"))  # it may die and come back after its end, too
    balance = close(tmp_path, listed)
    assert balance.error < 1e-14, "float64 sums of a few hundred numbers below one"
    assert (balance.posts, balance.accepted, balance.strangers) == (4, 3, 0)
    assert sorted(balance.digests) == [0, 1, 2, 3]
    for wrong in ({0: "listed-0", 3: "listed-3"}, {**listed, 1: "kept"}):
        assert close(tmp_path, wrong).error > 1e-3
    assert close(tmp_path, {**listed, 1: "of nobody"}).strangers == 1


def test_what_never_left_a_peer_is_no_entry(tmp_path: Path) -> None:
    """Killed between ledger and journal: nothing of that round is anywhere."""
    booked = Booked(tmp_path)
    for hash_ in ("listed-0", "listed-1", "listed-2"):
        booked.post(hash_)
    booked.ledger.begin((2, "listed-2"))
    assert len(list(tmp_path.glob("*.npy"))) == 3
    booked.ledger.begin((1, "listed-1"))
    assert [path.stem[-8:] for path in sorted(tmp_path.glob("*.npy"))] == ["listed-0", "listed-1"]
    booked.ledger.begin((1, "another"))
    assert len(list(tmp_path.glob("*.npy"))) == 1


def test_a_read_that_was_damaged_on_its_way_is_read_again() -> None:
    store = open_store("memory://")
    store.put("a", b"what lies there")
    for kind in ("corrupt", "truncate"):
        faulty = FaultyStore(store, Script(seed=1, at=((0, Fault(kind)), (1, Fault(kind)))))
        assert get_steady(faulty, "a", lambda data: data == b"what lies there", limit=99) == b"what lies there"
        assert len(faulty.events) == 2


def test_bytes_that_come_twice_are_those_that_lie_there() -> None:
    """What is wrong is not read for ever; nor is what somebody changes again and again."""
    store = open_store("memory://")
    store.put("a", b"wrong")
    counting = FaultyStore(store, Script())
    assert get_steady(counting, "a", lambda _: False, limit=99) == b"wrong"
    changing = _Changing(store)
    get_steady(changing, "a", lambda _: False, limit=99)
    assert changing.reads == 5


class _Changing:
    def __init__(self, store: Store) -> None:
        self.store, self.reads = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def get(self, path: str, *, limit: int) -> bytes:
        self.reads += 1
        return b"%d" % self.reads


class _Damaging:
    """A way to the store on which the first read of every manifest and frame loses a bit."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def get(self, path: str, *, limit: int) -> bytes:
        data = self.store.get(path, limit=limit)
        if path in self.read or not path.startswith("rounds/"):
            return data
        self.read.add(path)
        return data[:50] + bytes([data[50] ^ 1]) + data[51:]


def test_a_manifest_that_was_damaged_on_its_way_is_not_skipped(tmp_path: Path) -> None:
    """Rule 1: one verdict for all, on what lies there and not on what arrived; no frame is left out for it either."""
    row, store = "sparseloco", open_store("memory://")
    run = make_run(ROWS[row](), toy.net(), min_peers=3)
    keys = identities(3)
    ways = [store, _Damaging(store), _Damaging(store)]
    peers = [Peer(run, ROWS[row](), ways[n], keys[n], tmp_path / f"{n}", n) for n in range(3)]
    try:
        train_all(peers, 9)
    finally:
        for peer in peers:
            peer.transport.leave()
    assert all("skipped" not in peer.kinds() for peer in peers)
    assert {peer.replica.digest() for peer in peers} == {loopback(ROWS[row](), 3, 9).replicas[0].digest()}


def test_frames_that_were_kept_outlive_the_process(tmp_path: Path) -> None:
    """By hash, so that a file that is damaged counts for nothing; older rounds leave memory and disk."""
    frames = Frames(tmp_path / "frames")
    first, second = (frames.put(Key(number, 0), data) for number, data in ((3, b"one"), (4, b"two")))
    frames.keep(Key(3, 0), [first])
    frames.keep(Key(4, 0), [second, "0" * 64])
    frames.forget_before(Key(4, 0))
    assert frames.get(first) == b"one", "from the disk"
    again = Frames(tmp_path / "frames")
    assert again.hashes() == {first, second}
    (tmp_path / "frames" / f"00000004-0000-{second}").write_bytes(b"twO")
    assert (again.get(first), again.get(second)) == (b"one", None)
    again.remove_before(Key(4, 1))
    assert again.hashes() == {first, second}, "another fragment"
    again.remove_before(Key(4, 0))
    assert again.hashes() == {second}
    assert len(list((tmp_path / "frames").iterdir())) == 1
    assert Frames().hashes() == set()


def test_a_listed_frame_that_only_killed_peers_had_is_not_lost(tmp_path: Path) -> None:
    """Rule 3: taken away from the store, and all who had it in memory are gone; it comes from their disks."""
    row, store = "sparseloco", open_store("memory://")
    run, keys = make_run(ROWS[row](), toy.net()), identities(3)
    peers = [Peer(run, ROWS[row](), store, keys[n], tmp_path / f"{n}", n) for n in range(2)]
    try:
        train_all(peers, 9)
    finally:
        for peer in peers:
            peer.transport.leave()
    for entry in [*store.list("rounds"), *store.list("anchors")]:
        if "manifest" not in entry.path:
            store.delete(entry.path)
    again = [Peer(run, ROWS[row](), store, keys[n], tmp_path / f"{n}", n) for n in range(2)]
    try:
        train_all(again, 9)
        assert {peer.replica.digest() for peer in again} == {peers[0].replica.digest()}
        joiner = Peer(run, ROWS[row](), store, keys[2], tmp_path / "2", 2)

        def serve() -> None:
            while joiner.replica.digest() != peers[0].replica.digest():
                for peer in again:
                    peer.transport._beat()

        together(lambda: joiner.transport.connect(joiner.replica), serve)
        again.append(joiner)
    finally:
        for peer in again:
            peer.transport.leave()


def test_a_late_joiner_replays_for_less_than_six_thousandths_of_dense(tmp_path: Path) -> None:
    """C-08, C-10, C-30: the short form of benchmarks/join_late.py, over two rounds."""
    threads = torch.get_num_threads()
    found = join_late.measure(2, tmp_path)
    assert torch.get_num_threads() == threads
    assert found["replayed_rounds"] == 2
    assert found["bit_identical"]
    assert found["contributes_in_the_next_round"]
    assert found["bit_identical_after_it"]
    assert 0.0045 < found["fraction_of_dense_per_peer_and_round"] < join_late.MOST_FRACTION
