"""The owner changes a run while its peers train: rules that help a round that is stuck, and the outer learning rate."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from sparseloco.peers import canonical, paths
from sparseloco.peers.claims import claim_at, reader_of
from sparseloco.peers.manifest import Entry, History, manifest_limit
from sparseloco.peers.run_file import AMENDMENT_LIMIT, Amendment, RunFile
from sparseloco.peers.store import Store, open_store
from sparseloco.simulate import Cohort
from tests import toy
from tests.cli import Call
from tests.driver import ROWS
from tests.peers.crowd import OWNER, Peer, identities, make_run, together, train_all
from tests.peers.stage import Stage

STEPS = 26
RATE, FROM = 0.25, 3


def wait_until(done: Callable[[], bool]) -> None:
    while not done():
        time.sleep(0.01)


def come(run: RunFile, row: str, store: Store, folder: Path, number: int) -> Peer:
    return Peer(run, ROWS[row](), store, identities(3)[number], folder / f"peer-{number}", number)


def test_a_round_that_is_stuck_closes_once_the_owner_lowers_the_quorum(tmp_path: Path, cli: Call) -> None:
    """C-33: over a directory, by the command line, while both wait."""
    OWNER.save(tmp_path / "owner.key")
    run = make_run(ROWS["sparseloco"](), toy.net(), min_peers=3, deadline_s=1.0)
    store = open_store(str(tmp_path / "run"))
    store.create(str(paths.Run()), canonical.encode(run))
    peers = [come(run, "sparseloco", store, tmp_path, number) for number in range(2)]

    def amend() -> None:
        wait_until(lambda: all("no-quorum" in peer.kinds() for peer in peers))
        ended = cli("run", "amend", str(tmp_path / "run"), "--key", str(tmp_path / "owner.key"), "policy.min_peers=2")
        assert ended.code == 0, ended.err
        said = f"amendment 0 of run {run.run}: policy.min_peers=2, from the first round whose manifest acknowledges it"
        assert ended.out == f"{said}, which may be one that is open now\n"

    try:
        together(*[lambda peer=peer: peer.train(9) for peer in peers], amend)
    finally:
        for peer in peers:
            peer.transport.leave()
    assert len({peer.replica.digest() for peer in peers}) == 1
    for peer in peers:
        text = next(tell.text for tell in peer.said if tell.kind == "no-quorum")
        assert text.endswith("or let the owner amend policy.min_peers, which helps this very round")
    first = json.loads(store.get(str(paths.Manifest(0, 0, 0)), limit=2**20))
    assert (len(first["entries"]), first["amendments"], first["amended"][0]["n"]) == (2, 1, 0)


def amended_run(row: str, **policy: object) -> RunFile:
    """A run whose preset has an outer rate."""
    algorithm = ROWS[row]()
    run = make_run(algorithm, toy.net(), **policy)
    return msgspec.structs.replace(run, algorithm={"preset": row, "outer_lr": algorithm.outer.lr}).signed(OWNER)


def sign(run: RunFile, store: Store, n: int, round: int, **changes: object) -> None:
    one = Amendment(run=run.run, n=n, round=round, changes={k.replace("__", "."): v for k, v in changes.items()})
    store.create(str(paths.Amend(n)), canonical.encode(one.signed(OWNER)))


def in_one_process(row: str, steps: int, *, first: int = FROM) -> Cohort:
    """The same training, with another rate from round ``first`` of each fragment on."""
    algorithm = ROWS[row]()
    cohort = Cohort(toy.net(), algorithm, 2)
    for step in range(1, steps + 1):
        for peer in range(2):
            with cohort.turn(peer):
                toy.loss_of(cohort.model, toy.batch(step, peer)).backward()
                cohort.advance(peer)
        for replica in cohort.replicas:
            for fragment, lane in enumerate(replica.lanes):
                if algorithm.schedule.num_collected(step, fragment) > first:
                    lane.outer = replace(algorithm.outer, lr=RATE)
        cohort.settle()
    return cohort


def assert_equal(peer: Peer, cohort: Cohort) -> None:
    assert peer.replica.digest() == cohort.replicas[0].digest()
    theirs = cohort.replicas[0].anchor()
    assert all(torch.equal(value, theirs[name]) for name, value in peer.replica.anchor().items())


@pytest.mark.parametrize("row", ["sparseloco", "diloco", "streaming_diloco", "sparseloco_delayed"])
def test_an_amended_outer_rate_is_that_of_one_process(row: str, tmp_path: Path) -> None:
    """With and without momentum, with fragments, with a delay; then a late joiner, and one that was killed."""
    store = open_store("memory://")
    run = amended_run(row, anchor_every=1000)
    sign(run, store, 0, FROM, algorithm__outer_lr=RATE)
    peers = [come(run, row, store, tmp_path, number) for number in range(2)]
    late = come(run, row, store, tmp_path, 2)
    try:
        train_all(peers, STEPS)
        cohort = in_one_process(row, STEPS)
        for peer in peers:
            assert_equal(peer, cohort)
            assert peer.replica.fingerprint == run.fingerprint == ROWS[row]().fingerprint(peer.replica.table)
        unchanged = in_one_process(row, STEPS, first=STEPS)
        assert cohort.replicas[0].digest() != unchanged.replicas[0].digest()
        late.transport.connect(late.replica)
        assert_equal(late, in_one_process(row, late.replica.step))
    finally:
        for peer in [*peers, late]:
            peer.transport.leave()
    again = come(run, row, store, tmp_path, 1)
    again.transport.connect(again.replica)
    assert_equal(again, in_one_process(row, again.replica.step))
    again.transport.leave()


def test_a_replay_from_an_anchor_after_the_change_goes_on_with_it(tmp_path: Path) -> None:
    """The rate is no part of the shared state: it follows from the amendments of the chain, and back again."""
    store = open_store("memory://")
    run = amended_run("diloco", anchor_every=2)
    sign(run, store, 0, 1, algorithm__outer_lr=RATE)
    sign(run, store, 1, 4, algorithm__outer_lr=0.7)
    peers = [come(run, "diloco", store, tmp_path, number) for number in range(2)]
    late = come(run, "diloco", store, tmp_path, 2)
    try:
        train_all(peers, 22)
        assert {peer.replica.lanes[0].outer for peer in peers} == {peers[0].algorithm.outer}
        late.transport.connect(late.replica)
        assert late.replica.step == 20
        assert late.replica.digest() == peers[0].digests[20]
    finally:
        for peer in [*peers, late]:
            peer.transport.leave()


def test_a_rate_that_cannot_be_is_left_out_by_all(tmp_path: Path) -> None:
    """Here the preset has none; no command line would make such an amendment."""
    store = open_store("memory://")
    run = make_run(ROWS["sparseloco"](), toy.net())
    sign(run, store, 0, 0, algorithm__outer_lr=RATE)
    peers = [come(run, "sparseloco", store, tmp_path, number) for number in range(2)]
    try:
        train_all(peers, 9)
    finally:
        for peer in peers:
            peer.transport.leave()
    assert {peer.replica.lanes[0].outer for peer in peers} == {ROWS["sparseloco"]().outer}
    assert len({peer.replica.digest() for peer in peers}) == 1


def test_a_manifest_of_more_peers_than_run_json_allows_is_found_in_the_middle_of_a_chain() -> None:
    """Who joins late knows the amendments only from the manifest that it looks at."""
    stage = Stage(max_peers=2)
    more = stage.amendment(0, 0, **{"policy.max_peers": 4096})
    stage.close(0, 1, amended=(more,))
    names = [f"{number:032x}" for number in range(2000)]
    entries = [Entry(peer=name, size=1, hash="f" * 64, weight=1) for name in names]
    made = stage.put(stage.manifest(stage.histories[0], entries))
    assert len(canonical.encode(made)) > manifest_limit(stage.run.policy)
    start = History(run=stage.run, round=0, fragment=0, digest="")
    found = claim_at(reader_of(stage.store), start, 1)
    assert found is not None
    assert found[0] == made


def test_an_amendment_that_nobody_would_read_is_not_written(tmp_path: Path, cli: Call) -> None:
    """It would keep its number, so that the owner could never amend or void anything again."""
    OWNER.save(tmp_path / "owner.key")
    run, url = make_run(ROWS["sparseloco"](), toy.net()), str(tmp_path / "run")
    store = open_store(url)
    store.create(str(paths.Run()), canonical.encode(run))

    def amended(*changes: str) -> str:
        ended = cli("run", "amend", url, "--key", str(tmp_path / "owner.key"), *changes)
        return ended.err if ended.code else ""

    keys = [f"{number:064x}" for number in range(260)]
    text = f"must have at most {AMENDMENT_LIMIT} with their signature; name fewer keys"
    assert text in amended('policy.admission="allow-list"', f"policy.members={json.dumps(keys)}")
    assert not store.list("amend")
    assert not amended(f"policy.writers={json.dumps(keys[:230])}")
    store.create(str(paths.Amend(1)), b"a stranger's")
    assert "amend/00000001.json: must be free, but what is there is no amendment" in amended("policy.min_peers=1")


@pytest.mark.parametrize("verb", ["amend", "void"])
def test_an_owner_who_mistypes_a_directory_makes_none(verb: str, tmp_path: Path, cli: Call) -> None:
    OWNER.save(tmp_path / "owner.key")
    words = ["policy.min_peers=2"] if verb == "amend" else ["--round", "0"]
    ended = cli("run", verb, str(tmp_path / "rnu"), "--key", str(tmp_path / "owner.key"), *words)
    assert (ended.code, (tmp_path / "rnu").exists()) == (2, False)
    assert "must be the address of a run, or a directory that exists; check the spelling" in ended.err
