"""Google's and Azure's stores by stand-ins on 127.0.0.1: requests, errors, probe and a run; never the services."""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import itertools
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from sparseloco.errors import AlreadyExists, Denied, NotFound, StoreError, Unavailable
from sparseloco.peers.store import Store, open_store, past, probe
from tests import toy
from tests.driver import ROWS
from tests.peers import blobs, raw, seaweed, test_store
from tests.peers.access_log import in_front_of
from tests.peers.crowd import Peer, identities, loopback, make_run, train_all

AZURITE = shutil.which("azurite-blob")
KEY = base64.b64encode(b"SECRETPLANTED").decode()
_runs = itertools.count()

Opener = Callable[[str], Store]


def google_options(url: str) -> dict[str, str]:
    account = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    return {"service_account_key": json.dumps(account), "allow_http": "true"}


def azure_options(url: str, account: str = blobs.ACCOUNT, key: str = KEY) -> dict[str, str]:
    return {"account_name": account, "account_key": key, "endpoint": url, "allow_http": "true"}


_CONDITION = "x-goog-if-generation-match"


def unconditional(headers: dict[str, str]) -> dict[str, str]:
    """Google's XML interface is S3's, but for keys, which that server takes unseen, and for the condition of a put."""
    kept = {name: value for name, value in headers.items() if name not in (_CONDITION, "authorization")}
    scope = "Credential=any/20261130/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
    return {**kept, "authorization": f"AWS4-HMAC-SHA256 {scope}"}


def as_s3(headers: dict[str, str]) -> dict[str, str]:
    """The same with the condition as S3 has it; nothing has one here but creation."""
    assert headers.get(_CONDITION, "0") == "0"
    return {**unconditional(headers), **({"If-None-Match": "*"} if _CONDITION in headers else {})}


@contextmanager
def azurite(folder: Path) -> Iterator[Opener]:
    """The emulator of the service, by its own account, with a container."""
    assert AZURITE is not None
    (port,) = seaweed.free_ports(1)
    account, key = "devstoreaccount1", KEY
    place = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--skipApiVersionCheck"]
    environment = {"AZURITE_ACCOUNTS": f"{account}:{key}", "PATH": str(Path(AZURITE).parent) + ":/usr/bin:/bin"}
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([AZURITE, *place], stdout=log, stderr=log, env=environment)
    try:
        assert seaweed.is_listening(server, port, 60, folder / "log")
        url = f"http://127.0.0.1:{port}/{account}"
        make_container(url, account, key)
        yield lambda run: open_store(f"az://{blobs.CONTAINER}/{run}", options=azure_options(url, account, key))
    finally:
        server.kill()
        server.wait()


def make_container(url: str, account: str, key: str) -> None:
    """One signed request, since obstore makes no containers."""
    date = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    version = "2023-11-03"
    named = f"/{account}/{account}/{blobs.CONTAINER}\nrestype:container"
    signed = "PUT" + 12 * "\n" + f"x-ms-date:{date}\nx-ms-version:{version}\n{named}"
    digest = hmac.new(base64.b64decode(key), signed.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date, "x-ms-version": version, "Content-Length": "0",
        "Authorization": f"SharedKey {account}:{base64.b64encode(digest).decode()}",
    }  # fmt: skip
    request = urllib.request.Request(f"{url}/{blobs.CONTAINER}?restype=container", headers=headers, method="PUT")
    with urllib.request.urlopen(request, timeout=60):
        pass


@pytest.fixture(scope="module", params=["google", "azure", pytest.param("azurite", marks=pytest.mark.slow)])
def opener(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opener]:
    """Opens an empty run of that name."""
    with ExitStack() as stack:
        if request.param == "google":
            log = stack.enter_context(in_front_of(request.getfixturevalue("moto_url"), as_s3))
            yield lambda run: open_store(f"gs://bucket/google/{run}", options=google_options(log.url))
        elif request.param == "azure":
            url, _ = stack.enter_context(blobs.serving_blobs())
            yield lambda run: open_store(f"az://{blobs.CONTAINER}/{run}", options=azure_options(url))
        elif AZURITE is None:
            pytest.skip("azurite-blob is not installed; run npm install -g azurite")
        else:
            yield stack.enter_context(azurite(tmp_path_factory.mktemp("azurite")))


@pytest.fixture
def store(opener: Opener) -> Store:
    return opener(f"run-{next(_runs)}")


def test_all_verbs(store: Store) -> None:
    facts = probe(store)
    assert set(facts.latency_s) == {"create", "put", "get", "get_range", "size", "list", "delete"}
    assert store.list("") == []
    for test in (
        test_store.test_create_never_overwrites,
        test_store.test_put_overwrites_and_get_has_a_limit,
        test_store.test_ranges_end_where_the_object_ends,
    ):
        test(store)
    for entry in store.list(""):
        store.delete(entry.path)
    test_store.test_delete_may_be_repeated(store)
    test_store.test_an_etag_changes_with_the_content(store)


@pytest.mark.parametrize("test", ["test_lists_whole_folders_in_order", "test_pages_are_the_listing_in_parts"])
def test_listings_and_pages(store: Store, test: str) -> None:
    getattr(test_store, test)(store)


def test_long_objects_go_up_in_parts(store: Store) -> None:
    data = bytes(range(256)) * 45_000
    store.put("long", data)
    assert store.get("long", limit=len(data)) == data
    assert store.get_range("long", 11_000_000, 100) == data[11_000_000:11_000_100]


def test_a_run_of_two_peers_is_that_of_one_process(store: Store, tmp_path: Path) -> None:
    """Four rounds with frames, manifests, leases and anchors."""
    run = make_run(ROWS["sparseloco"](), toy.net())
    peers = [Peer(run, ROWS["sparseloco"](), store, me, tmp_path / f"{n}", n) for n, me in enumerate(identities(2))]
    try:
        train_all(peers, 17)
    finally:
        for peer in peers:
            peer.transport.leave()
    assert {peer.replica.digest() for peer in peers} == {loopback(ROWS["sparseloco"](), 2, 17).replicas[0].digest()}
    assert len([entry for entry in store.list("rounds") if "manifest-0000" in entry.path]) == 4


def test_a_folder_of_many_is_jumped_over_in_azure() -> None:
    """A service that begins where it is asked to gives the next folder at once."""
    with blobs.serving_blobs() as (url, held):
        store = open_store(f"az://{blobs.CONTAINER}/run", options=azure_options(url))
        for number in range(100):
            held.put(f"run/a/{number:03}", b"")
        held.put("run/b/x", b"")
        assert [entry.path for entry in store.page("", after=past("a")).entries] == ["b/x"]
        assert held.listings == 1
        held.starts = False
        assert [entry.path for entry in store.page("", after=past("a")).entries] == ["b/x"]
        held.starts = True
        held.listings = 1
        assert len(store.page("", limit=10).entries) == 10
        assert held.listings == 3, "no more answers than the page needs, of 5 names each"


def test_a_store_that_ignores_the_condition_is_refused(moto_url: str) -> None:
    """As some stand-ins for Google's store do."""
    with in_front_of(moto_url, unconditional) as log:
        store = open_store("gs://bucket/unconditional", options=google_options(log.url))
        with pytest.raises(StoreError, match="the store wrote over an object that was there"):
            probe(store)


ERRORS: dict[str, tuple[int, str, type[StoreError], str]] = {
    "unknown key": (401, "InvalidAuthenticationInfo", Denied, "check credentials and permissions"),
    "not allowed": (403, "AuthorizationPermissionMismatch", Denied, "check credentials and permissions"),
    "too fast": (429, "SlowDown", Unavailable, "try again"),
    "busy": (503, "ServerBusy", Unavailable, "try again"),
    "timed out": (500, "OperationTimedOut", Unavailable, "try again"),
    "nothing there": (404, "NoSuchKey", NotFound, "check the path and the store's URL"),
}
SERVICES: dict[str, tuple[str, Callable[[str], dict[str, str]]]] = {
    "google": ("gs://bucket/run", google_options),
    "azure": (f"az://{blobs.CONTAINER}/run", lambda url: azure_options(f"{url}/{blobs.ACCOUNT}")),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("service", SERVICES)
def test_answers_become_our_errors(service: str, error: str) -> None:
    """What is said is the same for all services, and holds nothing of what was sent."""
    number, code, kind, remedy = ERRORS[error]
    url, options = SERVICES[service]
    with raw.answering(raw.status(number, code)) as server:
        store = open_store(url, options=options(server))
        calls: dict[str, Callable[[], object]] = {
            "create a": lambda: store.create("a", b"x"),
            "put a": lambda: store.put("a", b"x"),
            "get a": lambda: store.get("a", limit=9),
            "get_range a": lambda: store.get_range("a", 0, 9),
        }
        for request, call in calls.items():
            with pytest.raises(kind) as refused:
                call()
            said = str(refused.value)
            assert said.startswith(f"{request}: ")
            assert said.endswith(remedy)
            assert not [secret for secret in (KEY, "PLANTED", "127.0.0.1", "Signature") if secret in said]


@pytest.mark.parametrize(
    ("service", "number", "code"),
    [("google", 412, "PreconditionFailed"), ("azure", 409, "BlobAlreadyExists"), ("azure", 412, "ConditionNotMet")],
)
def test_a_condition_that_failed_means_that_the_object_is_there(service: str, number: int, code: str) -> None:
    url, options = SERVICES[service]
    with raw.answering(raw.status(number, code)) as server:
        store = open_store(url, options=options(server))
        with pytest.raises(AlreadyExists, match=r"^create a: the object is there already; read it and follow what it"):
            store.create("a", b"x")
