"""Stores of every kind do the same, and a probe refuses those that do not."""

from __future__ import annotations

import os
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparseloco.errors import (
    AlreadyExists,
    ConfigError,
    NotFound,
    StoreError,
    TooLarge,
)
from sparseloco.peers import bucket
from sparseloco.peers.store import Listed, Page, Store, check_path, open_store, past, probe
from tests.peers.race import winners


def test_create_never_overwrites(store: Store) -> None:
    store.create("rounds/1/manifest-0.json", b"first")
    with pytest.raises(AlreadyExists) as refused:
        store.create("rounds/1/manifest-0.json", b"second")
    assert str(refused.value) == (
        "create rounds/1/manifest-0.json: the object is there already; read it and follow what it says"
    )
    assert store.get("rounds/1/manifest-0.json", limit=100) == b"first"


@pytest.mark.parametrize("store", ["memory", "directory"], indirect=True)
def test_of_many_that_create_at_once_one_wins(store: Store) -> None:
    """What the whole protocol rests on. (moto does not promise it; SeaweedFS is tried in test_permissions.py.)"""
    for number in range(10):
        (winner,) = winners(store, f"race/{number}")
        assert store.get(f"race/{number}", limit=9) == str(winner).encode()


def test_put_overwrites_and_get_has_a_limit(store: Store) -> None:
    for data in (b"one", b"", b"three"):
        store.put("a/b", data)
        assert store.get("a/b", limit=5) == data
        assert store.size("a/b") == len(data)
    with pytest.raises(TooLarge) as large:
        store.get("a/b", limit=4)
    assert str(large.value) == "get a/b: 5 bytes are more than the 4 accepted; leave it or raise the limit"
    for read in (lambda: store.get("a/c", limit=4), lambda: store.size("a/c"), lambda: store.get_range("a/c", 0, 4)):
        with pytest.raises(NotFound, match=r"a/c: there is no such object; check the path and the store's URL$"):
            read()


def test_ranges_end_where_the_object_ends(store: Store) -> None:
    store.put("a", b"0123456789")
    store.put("empty", b"")
    asked = [(0, 4), (6, 4), (8, 4), (10, 4), (50, 4), (3, 0)]
    assert [store.get_range("a", *part) for part in asked] == [b"0123", b"6789", b"89", b"", b"", b""]
    assert store.get_range("empty", 0, 4) == b""


def test_lists_whole_folders_in_order(store: Store) -> None:
    for path in ("p/1/z", "p/10", "p/1-a", "p/9", "pq", "z"):
        store.put(path, path.encode())
    listed = store.list("p")
    assert [entry.path for entry in listed] == ["p/1-a", "p/1/z", "p/10", "p/9"]
    assert [entry.size for entry in listed] == [5, 5, 4, 3]
    assert len({entry.etag for entry in listed} - {""}) == 4
    assert [entry.path for entry in store.list("p/1")] == ["p/1/z"]
    assert [entry.path for entry in store.list("p/", after="p/1/z")] == ["p/10", "p/9"]
    assert [entry.path for entry in store.list("", after="p/9")] == ["pq", "z"]
    assert store.list("nothing") == []


def test_an_etag_changes_with_the_content(store: Store) -> None:
    """A lease is seen to change by its etag."""
    store.put("lease", b"1")
    before = store.list("")[0].etag
    store.put("lease", b"2")
    assert store.list("")[0].etag != before


def test_delete_may_be_repeated(store: Store) -> None:
    store.put("a/b", b"1")
    store.delete("a/b")
    store.delete("a/b")
    assert store.list("") == []


BAD_PATHS = ["", "/a", "a/", "a//b", "..", "a/../b", "./a", "a\n", "a\\b", "a b", "a%2Fb", "é", "a\x1b[31m", "a" * 901]


@pytest.mark.parametrize("path", BAD_PATHS, ids=ascii)
def test_paths_that_stores_read_differently_are_refused(path: str, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    verbs: list[tuple[str, Callable[[], object]]] = [
        ("create", lambda: store.create(path, b"")),
        ("put", lambda: store.put(path, b"")),
        ("get", lambda: store.get(path, limit=1)),
        ("get_range", lambda: store.get_range(path, 0, 1)),
        ("size", lambda: store.size(path)),
        ("delete", lambda: store.delete(path)),
    ]
    for verb, call in verbs:
        with pytest.raises(ConfigError, match=rf"must be relative, .* to {verb} it") as refused:
            call()
        assert str(refused.value).isprintable()
    if path not in ("", "a/"):
        with pytest.raises(ConfigError, match="to list it"):
            store.list(path)
    assert os.listdir(tmp_path / "run") == []


def test_a_path_says_what_is_wrong_with_it() -> None:
    assert check_path("rounds/00000001/0000/aZ09._=@+-.frame") == "rounds/00000001/0000/aZ09._=@+-.frame"
    with pytest.raises(ConfigError) as refused:
        check_path("peers/\x1b[2J", "get")
    assert str(refused.value) == (
        "path='peers/\\x1b[2J': must be relative, of letters, digits and ._=@+- between single slashes, and have at "
        "most 900 bytes to get it; take paths as `list` gives them"
    )


def test_names_that_are_no_paths_are_left_out(moto_url: str, open_moto: Callable[[str], Store]) -> None:
    """One hostile peer that writes odd names in its own folder hides nobody else's objects."""
    store = open_moto("s3://bucket/hostile")
    for path in ("r/good/a", "r/bad/fine/b", "r/z/c"):
        store.put(path, b"x")
    for name in ("bad/a//b", "bad/..//x", "bad/%01x", "odd%20name"):
        url = f"{moto_url}/bucket/hostile/r/{name}"
        with urllib.request.urlopen(urllib.request.Request(url, data=b"x", method="PUT"), timeout=60):
            pass
    listed = [entry.path for entry in store.list("r")]
    assert listed == ["r/good/a", "r/z/c"]
    assert [entry.path for entry in store.list("", after="r/good/a")] == ["r/z/c"]
    assert [entry.path for entry in store.list("r/bad/fine")] == ["r/bad/fine/b"]
    assert store.list("r/bad") == []
    assert paged(store, "r", limit=1) == listed, "page by page as well"


def paged(store: Store, prefix: str, *, limit: int, after: str = "") -> list[str]:
    """All paths, by pages; how many pages there are is bounded by what lies there."""
    found: list[str] = []
    for _ in range(100):
        page = store.page(prefix, after=after, limit=limit)
        found += [entry.path for entry in page.entries]
        if not page.rest:
            return found
        assert page.rest > after, "pages go on"
        after = page.rest
    raise AssertionError(f"no end after {after}")


def test_pages_are_the_listing_in_parts(store: Store) -> None:
    for path in ("p/1/z", "p/1/y/x", "p/10", "p/1-a", "p/9", "pq", "z"):
        store.put(path, path.encode())
    for limit in (1, 2, 3, 4, 1000):
        assert paged(store, "", limit=limit) == [entry.path for entry in store.list("")]
        assert paged(store, "p", limit=limit, after="p/1-a") == ["p/1/y/x", "p/1/z", "p/10", "p/9"]
    first = store.page("p", limit=2)
    assert [entry[:2] for entry in first.entries] == [entry[:2] for entry in store.list("p")[: len(first.entries)]]
    assert store.page("p", after=past("p/1")).entries == store.list("p", after="p/10"), "no run has the name p/10"
    assert store.page("nothing") == Page([])
    with pytest.raises(ConfigError, match="limit=0: must be at least 1; leave it out for 1000"):
        store.page("p", limit=0)


def test_a_listing_of_more_than_one_page(open_moto: Callable[[str], Store]) -> None:
    store = open_moto("s3://bucket/pages")
    names = [f"many/{number:04}" for number in range(1001)]
    threads = [
        threading.Thread(target=lambda part=part: [store.put(n, b"x") for n in part])
        for part in (names[::2], names[1::2])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [entry.path for entry in store.list("many")] == names
    assert [entry.path for entry in store.list("many", after=names[-2])] == names[-1:]


def test_a_listing_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "MAX_LISTED", 3)
    store = open_store("memory://")
    for number in range(4):
        store.put(f"a/{number}", b"")
    with pytest.raises(TooLarge) as large:
        store.list("a")
    assert str(large.value) == "list a: more than 3 objects; list a folder further down, or start later"


def test_long_objects_go_up_in_parts(open_moto: Callable[[str], Store]) -> None:
    store = open_moto("s3://bucket/long")
    data = bytes(range(256)) * 25_000
    assert len(data) > bucket.UPLOAD_PART_BYTES
    store.put("a", data)
    assert store.get("a", limit=len(data)) == data
    assert store.list("")[0].etag.endswith('-2"'), "S3 marks an object of two parts so"


def test_probe_passes_and_leaves_nothing(store: Store) -> None:
    facts = probe(store)
    assert set(facts.latency_s) == {"create", "put", "get", "get_range", "size", "list", "delete"}
    assert all(seconds > 0 for seconds in facts.latency_s.values())
    assert facts.clock_skew_s is not None
    assert store.list("") == []


def test_probe_tells_the_skew_of_the_stores_clock() -> None:
    """For information: nothing decides by it."""
    hour_ago = time.time() - 3600
    facts = probe(open_store("memory://"), wall_clock=lambda: hour_ago)
    assert facts.clock_skew_s == pytest.approx(3600, abs=1800), "memory keeps the time of this machine"

    def timeless_page(store: Store, *place: Any, **options: Any) -> Page:
        page = store.page(*place, **options)
        return Page([Listed(*entry[:3]) for entry in page.entries], page.rest)

    timeless = Liar(page=timeless_page)
    assert probe(timeless).clock_skew_s is None


class Liar:
    """A store in memory, one verb of which does something else."""

    def __init__(self, **verbs: Callable[..., Any]) -> None:
        self.truth: Any = open_store("memory://")
        self._verbs = verbs

    def __getattr__(self, name: str) -> Any:
        if name in self._verbs:
            return lambda *args, **options: self._verbs[name](self.truth, *args, **options)
        return getattr(self.truth, name)


def swallow_second_create(store: Store, path: str, data: bytes) -> None:
    if data != b"second":
        store.create(path, data)


LIARS: dict[str, tuple[dict[str, Callable[..., Any]], str]] = {
    "overwrites": (
        {"create": lambda store, path, data: store.put(path, data)},
        r"create probe/x-create: the store wrote over an object that was there, so two peers could write different "
        r"manifests of one round; use a store that honours conditional puts \(If-None-Match\)$",
    ),
    "says yes": ({"create": swallow_second_create}, "create probe/x-create: the store said that a second create had"),
    "alters": ({"create": lambda store, path, data: store.create(path, data + b"!")}, "than those just created"),
    "forgets": ({"put": lambda store, path, data: store.put(path, data[:1] and b"0123456789")}, "than those just put"),
    "no range": ({"get_range": lambda store, path, start, length: store.get(path, limit=99)}, "than those asked for"),
    "no size": ({"size": lambda store, path: 0}, "another size than that of the object"),
    "no limit": ({"get": lambda store, path, limit: store.get(path, limit=99)}, "gave more bytes than the limit"),
    "stale list": ({"page": lambda store, prefix, after="": Page([])}, "lacks an object that was just written"),
    "no start": (
        {"page": lambda store, prefix, after="", limit=9: store.page(prefix, limit=limit)},
        "ignored where to start",
    ),
    "no pages": (
        {"page": lambda store, prefix, after="", limit=9: store.page(prefix, after=after)},
        "gave more than was asked for",
    ),
    "keeps": ({"delete": lambda store, path: None}, "gave an object that was just deleted"),
}


@pytest.mark.parametrize("fault", LIARS)
def test_probe_refuses_with_the_reason(fault: str) -> None:
    """Some servers ignore If-None-Match and overwrite; a run on such a store would split."""
    verbs, reason = LIARS[fault]
    liar = Liar(**verbs)
    with pytest.raises(StoreError, match=reason):
        probe(liar, name="x")
    assert "delete" in verbs or liar.truth.list("") == []
