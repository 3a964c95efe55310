"""Signs of life among thousands of ids that somebody makes: nobody who is in the run is lost among them."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable

import pytest

from sparseloco.peers import pages, paths
from sparseloco.peers.leases import Heart
from sparseloco.peers.membership import Leases, Sighting
from sparseloco.peers.operations import List, Listing
from sparseloco.peers.rounds import STRANGERS
from sparseloco.peers.store import PAGE, Page, Store, open_store
from tests.peers.crowd import identity
from tests.peers.desk import PEERS, Desk, a_round
from tests.peers.test_pages import RUN, Counting, drive


def test_the_own_lease_is_kept_while_a_look_takes_long() -> None:
    """Thousands of leases that somebody puts again and again take minutes to read; nobody looks gone for that."""
    store, looking, go_on = open_store("memory://"), threading.Event(), threading.Event()

    class Slow(Counting):
        def page(self, prefix: str, *, after: str = "", limit: int = PAGE) -> Page:
            if threading.current_thread() is not threading.main_thread():
                looking.set()
                assert go_on.wait(60)
            return super().page(prefix, after=after, limit=limit)

    me = identity("me")
    heart = Heart(Slow(store), RUN, me, session="0" * 16, leases=Leases(0.04), beat=lambda: None)  # pyright: ignore
    heart.start()
    try:
        assert looking.wait(60)
        seen = heart._counter
        while heart._counter < seen + 3:
            assert not go_on.wait(0.01)
    finally:
        go_on.set()
        heart.stop()


def test_those_who_are_in_it_are_looked_at_before_ids_that_sort_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pages end, folders of known peers are looked into up to a number, and keys that sort first are cheap."""
    monkeypatch.setattr(pages, "MAX_PAGES", 0)
    leases = Leases(60.0)
    leases.saw([Sighting(PEERS[1], "a"), Sighting(PEERS[2], "a")], 0.0)
    flood = [f"{number:032x}" for number in range(5000)]
    leases.saw([Sighting(peer, "a") for peer in [*flood, *PEERS[1:3]]], 1.0)
    assert list(leases.live(1.0))[:3] == [*PEERS[1:3], flood[0]]
    steps = a_round(Desk({}))
    steps.live = lambda: leases.live(1.0)
    looked: list[str] = []
    asking = steps.look()
    try:
        operation = next(asking)
        while isinstance(operation, List):
            looked.append(operation.prefix.rstrip("/").rpartition("/")[2])
            operation = asking.send(Listing((), ""))
    except StopIteration:
        pass
    assert set(PEERS[:3]) <= set(looked)
    assert len(looked) == 1 + STRANGERS * steps.policy.max_peers


def test_a_name_in_the_folder_of_a_round_that_is_no_path_does_not_hide_who_is_known(
    moto_url: str, open_moto: Callable[[str], Store]
) -> None:
    """Whoever may write manifests may lay one there, in any round to come."""
    store, mine = open_moto("s3://bucket/hidden"), str(paths.Frame(0, 0, PEERS[1], 0, "ab" * 32))
    store.put(mine, b"x")
    place = f"{moto_url}/bucket/hidden/rounds/00000000/0000/manifest-%01"
    with urllib.request.urlopen(urllib.request.Request(place, data=b"x", method="PUT"), timeout=60):
        pass
    assert drive(store) == []
    assert drive(store, (PEERS[1], PEERS[2])) == [mine]
