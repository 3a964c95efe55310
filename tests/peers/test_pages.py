"""Folders that somebody fills: what others look at, and ask for, stays bounded, and they find what they need."""

from __future__ import annotations

import errno
import os
import random
import tracemalloc
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from sparseloco.errors import Denied, StoreError, TooLarge
from sparseloco.peers import anchors, bucket, canonical, leases, pages, paths
from sparseloco.peers.identity import Identity
from sparseloco.peers.leases import Heart, Lease
from sparseloco.peers.listing import PER_PEER, list_round
from sparseloco.peers.membership import Leases
from sparseloco.peers.operations import List, Listing
from sparseloco.peers.pages import MAX_PAGES
from sparseloco.peers.store import PAGE, Listed, Page, Store, open_store, past
from tests import toy
from tests.driver import ROWS
from tests.peers.access_log import in_front_of
from tests.peers.crowd import Clock, Peer, identities, identity, loopback, make_run, train_all

RUN = "0123456789abcdef"
EPOCH = datetime.fromtimestamp(0, UTC)
FULL = "0" * 32
"""A peer id that sorts before all others."""


class Counting:
    """A store that counts the objects and pages which it gave out."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.pages = self.looked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def list(self, prefix: str, *, after: str = "") -> list[Listed]:
        raise AssertionError(f"list {prefix}: others may fill any folder, so all are read in pages")

    def page(self, prefix: str, *, after: str = "", limit: int = PAGE) -> Page:
        found = self.store.page(prefix, after=after, limit=limit)
        self.pages += 1
        self.looked += len(found.entries)
        return found


def seen(path: str) -> Listed:
    return Listed(path, 1, "")


def drive(store: Store, known: tuple[str, ...] = ()) -> list[str]:
    """Frames, wants and so on that a look at round 0 finds."""
    steps = list_round(0, 0, known)
    try:
        operation = next(steps)
        while True:
            assert isinstance(operation, List)
            page = store.page(operation.prefix, after=operation.after)
            operation = steps.send(Listing(tuple((entry.path, entry.size) for entry in page.entries), page.rest))
    except StopIteration as ended:
        return [str(named) for named, _ in ended.value]


def fill(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"want-{number:064x}").touch()


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_a_crowded_folder_delays_nobody(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One peer that fills its folder of the round costs the others one page, however full it is."""
    monkeypatch.setattr(bucket, "MAX_LISTED", 2000)
    store = open_store("memory://" if kind == "memory" else str(tmp_path / "store"))
    if kind == "directory":
        fill(tmp_path / "store" / "rounds" / "00000000" / "0000" / FULL, 5000)
    else:
        for number in range(5000):
            store.put(str(paths.Want(0, 0, FULL, f"{number:064x}")), b"")
    counting = Counting(store)
    run = make_run(ROWS["sparseloco"](), toy.net())
    peers = [Peer(run, ROWS["sparseloco"](), counting, me, tmp_path / f"{n}", n) for n, me in enumerate(identities(2))]
    with pytest.raises(TooLarge):
        store.list("rounds")
    try:
        train_all(peers, 9)
    finally:
        for peer in peers:
            peer.transport.leave()
    assert {peer.replica.digest() for peer in peers} == {loopback(ROWS["sparseloco"](), 2, 9).replicas[0].digest()}
    counting.pages = counting.looked = 0
    found = drive(counting)
    assert (counting.pages, len([path for path in found if FULL in path])) == (2, PER_PEER)
    assert counting.looked <= PAGE + 10
    assert len([path for path in found if path.endswith(".frame")]) == 2


def test_a_crowded_folder_in_a_bucket_costs_one_request_more(moto_url: str, open_moto: Callable[[str], Store]) -> None:
    filled = open_moto("s3://bucket/crowded")
    names = [str(paths.Want(0, 0, FULL, f"{number:064x}")) for number in range(PAGE + 200)]
    mine = str(paths.Frame(0, 0, "f" * 32, 0, "ab" * 32))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda path: filled.put(path, b""), [*names, mine]))
    with in_front_of(moto_url) as log:
        options = {"endpoint": log.url, "region": "us-east-1", "allow_http": "true", "skip_signature": "true"}
        found = drive(open_store("s3://bucket/crowded", options=options))
    assert found == [*names[:PER_PEER], mine]
    assert [line.listing for line in log.lines] == [True, True]


def test_who_makes_more_folders_than_a_look_reads_hides_no_peer_that_is_known() -> None:
    """Ids are free in an open run. Pages run out then, and those whose lease holds are looked at one by one."""
    asked: list[tuple[str, str]] = []
    known, unknown = "f" * 32, "f" * 31 + "e"
    theirs = {peer: str(paths.Frame(0, 0, peer, 0, "ab" * 32)) for peer in (known, unknown)}

    class Flooded:
        """A folder for every number, none of which ends."""

        def page(self, prefix: str, *, after: str = "") -> Page:
            asked.append((prefix, after))
            if prefix.endswith(f"{known}/"):
                return Page([seen(theirs[known])])
            number = len(asked)
            names = [str(paths.Want(0, 0, f"{number:032x}", f"{n:064x}")) for n in range(PAGE)]
            return Page([seen(name) for name in names], names[-1])

    found = drive(Flooded(), (known, FULL))  # pyright: ignore[reportArgumentType]
    assert len(asked) == MAX_PAGES + 1, "the folder of the id that sorts first was read with the others"
    assert theirs[known] in found
    assert len(found) == MAX_PAGES * PER_PEER + 1


def test_more_ids_than_a_look_reads_do_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages end among ids that sort first; the own frame, and those of whoever has a lease, are found all the same."""
    monkeypatch.setattr(pages, "MAX_PAGES", 1)
    store, clock = open_store("memory://"), Clock()
    for number in range(PAGE + 100):
        store.put(str(paths.Want(0, 0, f"{number:032x}", "0" * 64)), b"")
    run = make_run(ROWS["sparseloco"](), toy.net())
    peers = [
        Peer(run, ROWS["sparseloco"](), store, me, tmp_path / f"{n}", n, clock=clock)
        for n, me in enumerate(identities(2))
    ]
    try:
        train_all(peers, 5)
    finally:
        for peer in peers:
            peer.transport.leave()
    assert {peer.replica.digest() for peer in peers} == {loopback(ROWS["sparseloco"](), 2, 5).replicas[0].digest()}


def lease_of(me: Identity, run: str, counter: int = 1) -> bytes:
    lease = Lease(run=run, peer=me.peer_id, counter=counter, session="0" * 16, round=0, public=me.public)
    return canonical.encode(lease.signed(me))


def heart_of(store: Store, clock: Clock) -> Heart:
    me = identity("me")
    return Heart(store, RUN, me, session="0" * 16, leases=Leases(60.0), beat=lambda: None, clock=clock)


def test_leases_are_found_behind_a_full_folder() -> None:
    store, other = open_store("memory://"), identity("other")
    for number in range(2 * PAGE):
        store.put(f"peers/{FULL}/{number:08}", b"")
    store.put(str(paths.Lease(other.peer_id)), lease_of(other, RUN))
    counting = Counting(store)
    heart = heart_of(counting, Clock())
    heart.look()
    assert heart.live() == {other.peer_id}
    assert (counting.pages, counting.looked <= PAGE + 1) == (2, True)


def test_a_flood_of_ids_neither_buries_a_known_lease_nor_keeps_a_new_one_out_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What one look reads is bounded; who is known is looked at in any case, and others come in turn."""
    monkeypatch.setattr(leases, "MAX_NEW", 4)
    store, clock = open_store("memory://"), Clock()
    known, new = identity("known"), identity("new")
    heart = heart_of(store, clock)
    store.put(str(paths.Lease(known.peer_id)), lease_of(known, RUN))
    heart.look()
    for number in range(50):
        store.put(str(paths.Lease(f"{number:032x}")), b"no lease of anybody")
    store.put(str(paths.Lease(new.peer_id)), lease_of(new, RUN))
    for look in range(2, 20):
        clock.now += 30.0
        store.put(str(paths.Lease(known.peer_id)), lease_of(known, RUN, look))
        heart.look()
        assert known.peer_id in heart.live()
    assert new.peer_id in heart.last_seen()
    monkeypatch.setattr(pages, "MAX_PAGES", 0)
    store.put(str(paths.Lease(known.peer_id)), lease_of(known, RUN, 20))
    clock.now += 60.0
    heart.look()
    assert heart.live() == {known.peer_id}, "found by name, where the pages end before it"


def test_anchors_are_found_in_a_folder_that_somebody_floods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every member may write there. Rounds that are not closed have no anchors, and the newest that are count."""
    monkeypatch.setattr(anchors, "MAX_ROUNDS", 8)
    store = open_store("memory://")
    for number in range(21):
        store.put(str(paths.Manifest(number, 0, 0)), b"{}")
    real = paths.Anchor(16, "a" * 32, f"{'b' * 64}.safetensors")
    store.put(str(real), b"state")
    assert anchors.listed(store) == [real]
    for number in (*range(16), *range(21, 40)):
        store.put(str(paths.Anchor(number, "0" * 32, "rubbish")), b"")
    found = anchors.listed(store)
    assert real in found
    assert [place.round for place in found] == [16, 15, 14, 13]
    monkeypatch.setattr(pages, "MAX_PAGES", 0)
    assert [place.round for place in anchors.listed(store)] == [16, 15, 14, 13], "by name, where the pages end"
    assert list(anchors._newest_rounds(open_store("memory://"))) == []


@pytest.mark.parametrize("closed", range(12))
def test_the_newest_closed_round_is_found_by_halving(closed: int) -> None:
    store = open_store("memory://")
    for number in range(closed):
        store.put(str(paths.Manifest(number, 0, 0)), b"{}")
    assert list(anchors._newest_rounds(store)) == [f"{number:08}" for number in range(closed)]


def test_a_page_of_a_directory_keeps_no_more_names_than_it_gives(tmp_path: Path) -> None:
    fill(tmp_path / "full", 10_000)
    store = open_store(str(tmp_path))
    store.page("full", limit=10)
    tracemalloc.start()
    try:
        page = store.page("full", limit=10)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [entry.path for entry in page.entries] == [f"full/want-{number:064x}" for number in range(10)]
    assert most < 200 << 10, "10,000 names are 1.3 MB"


def test_a_directory_is_listed_as_its_paths_sort_and_no_link_is_followed(tmp_path: Path) -> None:
    """The same as sorting all paths; odd names, links and empty folders are not in it."""
    chance = random.Random(1)
    store = open_store(str(tmp_path / "store"))
    names = {"/".join(chance.choices("ab-.0z+", k=chance.randint(1, 4))).replace(".", "x.") for _ in range(200)}
    for name in sorted(names, key=len, reverse=True):
        if not any(other.startswith(f"{name}/") for other in names):
            store.put(name, b"x")
    (tmp_path / "store" / "empty" / "also").mkdir(parents=True)
    (tmp_path / "store" / "odd name").touch()
    (tmp_path / "outside").write_bytes(b"secret")
    (tmp_path / "store" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "store" / "loop").symlink_to(tmp_path / "store")
    root = tmp_path / "store"
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink() and path.name != "odd name"]
    expected = sorted(path.relative_to(root).as_posix() for path in files)
    assert len(expected) > 40
    assert [entry.path for entry in store.list("")] == expected
    for limit in (1, 2, 7):
        found, after = [], ""
        while True:
            page = store.page("", after=after, limit=limit)
            found += [entry.path for entry in page.entries]
            if not page.rest:
                break
            after = page.rest
        assert found == expected
    for after in expected[::7]:
        assert [entry.path for entry in store.list("", after=after)] == [path for path in expected if path > after]
        assert [entry.path for entry in store.list("", after=past(after))] == [
            path for path in expected if path > past(after)
        ]


def test_a_directory_that_may_not_be_read_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int) -> Callable[[Any], Any]:
        def scandir(folder: Any) -> Any:
            raise OSError(number, os.strerror(number), str(folder))

        return scandir

    store = open_store(str(tmp_path))
    for number, kind, text in (
        (errno.EACCES, Denied, "list a: the store refused it (PermissionError); check credentials and permissions"),
        (errno.EIO, StoreError, "list a: the store failed (Input/output error); mend that and try again"),
    ):
        monkeypatch.setattr(os, "scandir", fail(number))
        with pytest.raises(kind) as refused:
            store.page("a")
        assert str(refused.value) == text


class OutOfOrder:
    """What obstore gives for a server that does not sort."""

    def list(self, *_: Any, **__: Any) -> Any:
        return iter([[{"path": "b", "size": 1, "e_tag": "", "last_modified": EPOCH}, {"path": "a"}]])


def test_a_store_that_lists_out_of_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is jumped over would be lost without a word."""
    store = open_store("memory://")
    monkeypatch.setattr(store, "_obstore", OutOfOrder())
    with pytest.raises(StoreError) as refused:
        store.page("x")
    assert str(refused.value) == "list x: the store lists out of order; use one that sorts by name, as S3 does"


@pytest.mark.parametrize("letter", ["~", "{", "\u00e9", "\U0010ffff"])
def test_names_behind_all_letters_of_ours_are_jumped_over_as_well(letter: str) -> None:
    """Any store takes them, and listings sort them behind whatever a path of ours may hold."""
    store = open_store("memory://")
    mine = str(paths.Frame(0, 0, "f" * 32, 0, "ab" * 32))
    store.put(mine, b"x")
    for number in range(2 * PAGE):
        store._store.put(f"rounds/00000000/0000/{FULL}/{letter}{number:05}", b"")  # type: ignore[attr-defined]  # pyright: ignore
    counting = Counting(store)
    assert drive(counting) == [mine]
    assert counting.pages == 3


def test_names_behind_all_letters_of_ours_break_no_listing_that_goes_folder_by_folder(
    moto_url: str, open_moto: Callable[[str], Store]
) -> None:
    """Two ids, one with a name that is no path: the listing of the round was refused for everybody, for ever."""
    store = open_moto("s3://bucket/behind")
    mine = str(paths.Frame(0, 0, "f" * 32, 0, "ab" * 32))
    store.put(mine, b"x")
    for name in (f"{FULL}/%7Ea", f"{FULL}/%C3%A9", f"{'1' * 32}//b", f"{'1' * 32}0"):
        place = f"{moto_url}/bucket/behind/rounds/00000000/0000/{name}"
        with urllib.request.urlopen(urllib.request.Request(place, data=b"x", method="PUT"), timeout=60):
            pass
    assert drive(store) == [mine]
    assert [entry.path for entry in store.list("")] == [f"rounds/00000000/0000/{'1' * 32}0", mine]


def test_who_shuts_a_folder_of_a_directory_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, scandir = open_store(str(tmp_path)), os.scandir
    mine = str(paths.Frame(0, 0, "f" * 32, 0, "ab" * 32))
    for path in (mine, str(paths.Want(0, 0, FULL, "0" * 64))):
        store.put(path, b"x")

    def shut(folder: Any) -> Any:
        if str(folder).endswith(FULL):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", shut)
    assert drive(store) == [mine]


def test_who_writes_names_that_are_no_paths_costs_a_bounded_number_of_requests(
    moto_url: str, open_moto: Callable[[str], Store]
) -> None:
    """Such names hide the folder that they lie in, and nobody else's, page by page as well."""
    store = open_moto("s3://bucket/odd")
    mine = str(paths.Frame(0, 0, "f" * 32, 0, "ab" * 32))
    store.put(mine, b"x")
    for number in range(30):
        name = f"odd/rounds/00000000/0000/{FULL}/{number:02}/a//b"
        with urllib.request.urlopen(
            urllib.request.Request(f"{moto_url}/bucket/{name}", data=b"x", method="PUT"), timeout=60
        ):
            pass
    with in_front_of(moto_url) as log:
        options = {"endpoint": log.url, "region": "us-east-1", "allow_http": "true", "skip_signature": "true"}
        assert drive(open_store("s3://bucket/odd", options=options)) == [mine]
    assert len(log.lines) == 4, "the folder of the round, its folders, and both of those"
