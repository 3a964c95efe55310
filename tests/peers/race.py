"""Many peers that create one object at the same moment."""

from __future__ import annotations

import threading

from sparseloco.errors import AlreadyExists
from sparseloco.peers.store import Store


def winners(store: Store, path: str, num_peers: int = 8) -> list[int]:
    """Peers whose ``create`` of ``path`` succeeded; each writes its own number."""
    won: list[int] = []
    together = threading.Barrier(num_peers)

    def peer(number: int) -> None:
        together.wait(60)
        try:
            store.create(path, str(number).encode())
        except AlreadyExists:
            return
        won.append(number)

    threads = [threading.Thread(target=peer, args=(number,)) for number in range(num_peers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won
