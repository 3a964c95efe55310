"""What a store says when something is wrong: always verb, path and what to do, never a secret; and how it is opened."""

from __future__ import annotations

import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from sparseloco.errors import (
    ConfigError,
    Denied,
    NotFound,
    StoreError,
    TooLarge,
    Unavailable,
)
from sparseloco.peers import bucket
from sparseloco.peers.store import open_store
from tests.peers.raw import Answer, body, hang_up, serving, status

BROKEN = "the store did not answer, or broke off; try again"
REFUSED = "check credentials and permissions"
NETWORK: dict[str, tuple[Answer, type[StoreError], str]] = {
    "503": (status(503, "SlowDown"), Unavailable, "the store answered 503 SlowDown; try again"),
    "500": (status(500, "InternalError"), Unavailable, "the store answered 500 InternalError; try again"),
    "429": (status(429, "Odd"), Unavailable, "the store answered 429 Odd; try again"),
    "408": (status(408, "RequestTimeout"), Unavailable, "the store answered 408 RequestTimeout; try again"),
    "401": (status(401, "Odd"), Denied, f"the store refused it (401 Odd); {REFUSED}"),
    "403": (status(403, "AccessDenied"), Denied, f"the store refused it (403 AccessDenied); {REFUSED}"),
    "404": (status(404, "NoSuchBucket"), NotFound, "there is no such bucket; check the path and the store's URL"),
    "409": (
        status(409, "ConditionalRequestConflict"),
        Unavailable,
        "the store answered 409 ConditionalRequestConflict; try again",
    ),
    "400": (
        status(400, "BadDigest"),
        StoreError,
        "the store failed (400 BadDigest); check that it does conditional puts, ranges and lists",
    ),
    "gone": (hang_up, Unavailable, BROKEN),
}


@pytest.mark.parametrize("case", NETWORK)
def test_errors_tell_verb_path_and_kind_and_no_secret(case: str) -> None:
    """C-69 in spirit: a server that echoes all it was sent makes no log hold a key, a token or a signature."""
    answer, kind, text = NETWORK[case]
    with serving(answer) as store:
        calls: list[tuple[str, Callable[[], object]]] = [
            ("create a/b", lambda: store.create("a/b", b"1")),
            ("put a/b", lambda: store.put("a/b", b"1")),
            ("get a/b", lambda: store.get("a/b", limit=10)),
            ("get_range a/b", lambda: store.get_range("a/b", 0, 1)),
            ("list a", lambda: store.list("a")),
        ]
        for request, call in calls:
            with pytest.raises(kind) as raised:
                call()
            assert type(raised.value) is kind
            assert str(raised.value) == f"{request}: {text}"
            assert raised.value.__context__ is None
            said = "".join(traceback.format_exception(raised.value)) + repr(raised.value)
            for secret in ("PLANTED", "Signature", "X-Amz", "x-amz", "127.0.0.1"):
                assert secret not in said


@pytest.mark.parametrize(("code", "kind"), [("SlowDown", Unavailable), ("AccessDenied", Denied), ("Odd", StoreError)])
def test_a_delete_that_fails_inside_of_a_good_answer(code: str, kind: type[StoreError]) -> None:
    """S3 answers 200 to a delete, with the failure in the body."""
    failed = (
        f"<DeleteResult><Error><Key>run/a</Key><Code>{code}</Code><Message>PLANTED</Message></Error></DeleteResult>"
    )
    with (
        serving(body(len(failed), [failed.encode()])) as store,
        pytest.raises(kind, match=rf"^delete a: .*{code}") as raised,
    ):
        store.delete("a")
    assert type(raised.value) is kind
    assert "PLANTED" not in str(raised.value)


SAID = [
    (
        "Unable to open file /run/a: x (os error 13) kind: PermissionDenied",
        Denied,
        "put a: the store refused it (OSError)",
    ),
    (
        "Unable to copy data to file: x (os error 28)",
        StoreError,
        "put a: the store failed (No space left on device); mend that and try again",
    ),
    (
        "PUT http://169.254.169.254/latest/api/token - HttpError {",
        Denied,
        "put a: no credentials were found; set those",
    ),
    (
        "GET http://169.254.169.254/computeMetadata/v1 - HttpError {",
        Denied,
        "put a: no credentials were found; set those",
    ),
    (
        "GET http://169.254.169.254/metadata/identity - HttpError {",
        Denied,
        "put a: no credentials were found; set those",
    ),
]


@pytest.mark.parametrize(("said", "kind", "text"), SAID)
def test_what_obstore_says_of_this_machine(said: str, kind: type[StoreError], text: str) -> None:
    """Texts of obstore 0.12 for what a test cannot bring about: a full disk, another user's file, no credentials."""

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            def refuse(*args: object, **options: object) -> None:
                raise OSError(said)

            return refuse

    store = bucket.Bucket(None)
    store._obstore = Refusing()
    with pytest.raises(kind) as raised:
        store.put("a", b"1")
    assert type(raised.value) is kind
    assert str(raised.value).startswith(text)
    assert "169" not in str(raised.value)


def test_without_tls_the_endpoint_must_be_allowed(monkeypatch: pytest.MonkeyPatch, moto_url: str) -> None:
    """Settings come from the environment, as other tools of S3 read it."""
    environment = {"ENDPOINT_URL": moto_url, "REGION": "us-east-1", "ACCESS_KEY_ID": "AKIDPLANTED"}
    for key, value in {**environment, "SECRET_ACCESS_KEY": "SECRETPLANTED"}.items():
        monkeypatch.setenv(f"AWS_{key}", value)
    with pytest.raises(Denied) as refused:
        open_store("s3://bucket/environment").put("a", b"1")
    assert str(refused.value) == "put a: the endpoint has no TLS; use https, or set AWS_ALLOW_HTTP=true"
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    store = open_store("s3://bucket/environment")
    store.put("a", b"1")
    assert store.get("a", limit=1) == b"1"
    with pytest.raises(NotFound, match="list: there is no such bucket"):
        open_store("s3://nowhere/x").list("")


def test_requests_are_signed_unless_asked_otherwise() -> None:
    seen: list[str | None] = []

    def answer(handler: Any) -> None:
        seen.append(handler.headers.get("Authorization"))
        status(404)(handler)

    for options in ({}, {"skip_signature": "true"}):
        with serving(answer, **options) as store, pytest.raises(NotFound):
            store.get("a", limit=1)
    assert seen[0] is not None
    assert seen[1] is None


def test_a_body_of_another_length_than_announced_is_refused() -> None:
    with serving(body(10, [b"12345"])) as store, pytest.raises(Unavailable, match="get a: the store did not answer"):
        store.get("a", limit=10)
    with pytest.raises(TooLarge, match="get a: more than the announced 4 bytes arrived; use another store"):
        bucket._read(iter([b"123", b"45"]), 4, "a")
    with pytest.raises(Unavailable, match="get a: 3 of 4 bytes arrived; try again"):
        bucket._read(iter([b"123"]), 4, "a")


@pytest.mark.parametrize(("bad_moments", "passes"), [(1, True), (bucket.UPLOAD_RETRIES + 1, False)])
def test_a_part_that_fails_is_sent_again_alone(bad_moments: int, passes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """C-34: a bad moment costs one part of an upload, not the whole; a bad day ends it."""
    monkeypatch.setattr(bucket, "UPLOAD_BACKOFF_S", 0.001)
    sent: Counter[str] = Counter()

    def answer(handler: Any) -> None:
        asked = dict(parse_qsl(urlsplit(handler.path).query, keep_blank_values=True))
        part = asked.get("partNumber", "")
        sent[part] += 1
        if part == "2" and sent[part] <= bad_moments:
            status(503)(handler)
        elif "uploads" in asked or not part:
            said = b"<R><UploadId>1</UploadId><ETag>e</ETag></R>"
            body(len(said), [said])(handler)
        else:
            handler.rfile.read(int(handler.headers["Content-Length"]))
            body(0, [])(handler)

    with serving(answer) as store:
        long = bytes(2 * bucket.UPLOAD_PART_BYTES + 1)
        if passes:
            store.put("a", long)
            assert [sent[part] for part in "123"] == [1, 2, 1]
        else:
            with pytest.raises(Unavailable, match="put a: the store answered 503 Odd; try again"):
                store.put("a", long)
            assert sent["2"] == bucket.UPLOAD_RETRIES + 1


def test_an_announced_10_gb_is_refused_before_its_bytes() -> None:
    """Size limits hold before the download."""
    sent: list[int] = []
    answer = body(10 << 30, [b"x" * (1 << 16)] * 400, wait=lambda: sent.append(1))
    with serving(answer) as store, pytest.raises(TooLarge, match="get a: 10737418240 bytes are more than the 1000 acc"):
        store.get("a", limit=1000)
    assert len(sent) < 400, "the connection was closed"


def test_silence_ends_a_request_and_bytes_do_not() -> None:
    """C-34, C-31: the limit is on the time without a byte, and it is the caller's."""
    silent = threading.Event()
    try:
        answer = body(3, [b"abc"], wait=lambda: silent.wait(60))
        with serving(answer, stall_s=0.2) as store:
            with pytest.raises(Unavailable, match="get a: the store did not answer, or broke off; try again"):
                store.get("a", limit=10)
            silent.set()
    finally:
        silent.set()


@pytest.mark.slow  # waits for a slow link
def test_a_slow_transfer_is_not_a_lost_one() -> None:
    """C-34: five seconds of dripping bytes pass a limit of two seconds, which one silent request does not."""
    pause = threading.Event()
    with serving(body(10, [b"x"] * 10, wait=lambda: pause.wait(0.5)), stall_s=2.0) as store:
        assert store.get("a", limit=10) == b"x" * 10


URLS = [
    ("s3://AKID:SECRETPLANTED@bucket/x", "url='s3://...': must hold no password, query or control character; "),
    ("az://container/x?sig=SECRETPLANTED", "url='az://...': must hold no password, query or control character; "),
    ("s3://bucket/x#SECRETPLANTED", "url='s3://...': must hold no password, query or control character; "),
    ("s3://bucket/\x1b[2J", "url='s3://...': must hold no password, query or control character; "),
    ("ftp://host/x", "url scheme='ftp': must be one of s3, gs, az, file, memory; "),
    ("file://host/x", "url='file://host/x': must name a directory of this machine; "),
    ("", "url='': must name a store; "),
    ("az://container/x", "url='az://container/x': needs the account of the container; "),
    ("s3://", "url='s3://': must be scheme://bucket/folder with complete settings; "),
]  # fmt: skip


@pytest.mark.parametrize(("url", "text"), URLS, ids=[ascii(url) for url, _ in URLS])
def test_urls_that_name_no_store_are_refused(url: str, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_store(url)
    assert str(refused.value).startswith(text)
    assert "PLANTED" not in "".join(traceback.format_exception(refused.value))


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        open_store("s3://bucket/x", options={"regoin": "SECRETPLANTED"})
    assert str(refused.value) == (
        "url='s3://bucket/x': has an option 'regoin' that its store does not know; "
        "see the names in obstore's documentation"
    )
    with pytest.raises(ConfigError, match=r"stall_s=0: must be above 0; give the seconds of silence that mean failure"):
        open_store("memory://", stall_s=0)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="must be a directory, or one that can be made"):
        open_store(str(tmp_path / "file"))


def test_a_directory_by_url_and_by_path_is_the_same(tmp_path: Path) -> None:
    open_store((tmp_path / "a run").as_uri()).put("x/y", b"1")
    assert open_store(str(tmp_path / "a run")).get("x/y", limit=1) == b"1"
    assert (tmp_path / "a run" / "x" / "y").read_bytes() == b"1"


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError) as refused:
        open_store("memory://")
    assert str(refused.value) == 'obstore: is not installed; run pip install "sparseloco[peers]"'
