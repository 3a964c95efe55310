"""The thread that keeps the own lease fresh has nothing else to do."""

from __future__ import annotations

import threading

from sparseloco.peers.leases import Heart
from sparseloco.peers.membership import Leases
from sparseloco.peers.store import PAGE, Page, open_store
from tests.peers.crowd import identity
from tests.peers.test_pages import RUN, Counting


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
