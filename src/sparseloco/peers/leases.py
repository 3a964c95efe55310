"""Signs of life in the store: one's own lease, put again and again, and those of the others."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, KeysView
from typing import Literal

import msgspec

from sparseloco.errors import StoreError, WireError
from sparseloco.peers import canonical, paths
from sparseloco.peers.canonical import Hex16, Hex32, Hex64, Hex128
from sparseloco.peers.identity import Domain, Identity, peer_id_of, verify
from sparseloco.peers.membership import Leases, Sighting
from sparseloco.peers.pages import listed
from sparseloco.peers.store import Store

LEASE_LIMIT = 1024
MAX_LOSS = 1e6
"""Largest size of a loss that is told or believed: what is not below it is no figure of a training."""
_NO_SIGNATURE = "0" * 128
_BEATS_PER_LEASE = 4
_FOLDER = "peers/"
PER_ID = 8
"""Objects in the folder of a peer that are looked at: a lease and a key, and what else there may be some day."""
MAX_NEW = 256
"""Leases of peers not known yet that one look reads, however many ids somebody makes."""


class Lease(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What lies at ``peers/<peer>/lease.json``.

    Attributes:
        format: Of this object.
        run: The run.
        peer: Whose it is.
        counter: Grows with every lease of one process.
        session: Random, so that a process that starts again does not repeat a lease.
        round: Round that the peer is in, for people.
        left: It leaves, and need not be waited for.
        loss: What it says of its training, for people: see :attr:`said_loss`. Whatever stands here, the lease counts; a
            peer that says none leaves it out, as those of an earlier version do.
        public: Its key.
        signature: Over all of the above.
    """

    format: Literal[1] = 1
    run: Hex16
    peer: Hex32
    counter: int
    session: Hex16
    round: int
    left: bool = False
    loss: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    public: Hex64
    signature: Hex128 = _NO_SIGNATURE

    @property
    def said_loss(self) -> float | None:
        """The loss of the peer's last inner step by its own word; None if it says none, or what cannot be one."""
        if isinstance(self.loss, msgspec.UnsetType):
            return None
        with contextlib.suppress(msgspec.MsgspecError, ValueError):
            return believable(msgspec.json.decode(self.loss, type=float))
        return None

    def signed(self, me: Identity) -> Lease:
        """The same with the peer's signature."""
        bare = msgspec.structs.replace(self, signature=_NO_SIGNATURE)
        signature = me.sign(Domain.LEASE, self.run, self.peer, body=canonical.encode(bare))
        return msgspec.structs.replace(bare, signature=signature.hex())


def believable(loss: float | None) -> float | None:
    """The loss if it is finite and not beyond ``MAX_LOSS``; else None, also for None."""
    return loss if loss is not None and math.isfinite(loss) and abs(loss) <= MAX_LOSS else None


def read_lease(data: bytes, run: str, peer: str) -> Lease:
    """Check the bytes of a lease.

    Raises:
        WireError: if it is not that peer's, of this run.
    """
    lease = canonical.decode(data, Lease, what="lease", limit=LEASE_LIMIT)
    bare = canonical.encode(msgspec.structs.replace(lease, signature=_NO_SIGNATURE))
    signature = bytes.fromhex(lease.signature)
    named = (lease.run, lease.peer, peer_id_of(lease.public)) == (run, peer, peer)
    if not named or not verify(lease.public, signature, Domain.LEASE, run, peer, body=bare):
        raise WireError(f"lease of peer {peer}: must be signed by it, for this run; ignore it")
    return lease


class Heart:
    """Keeps the own lease fresh and watches those of the others, each in a thread of its own.

    However long it takes to look at what others have put, the own lease does not run out meanwhile.

    Args:
        store: Where leases are.
        run: Run id, 16 hex digits.
        me: This peer.
        session: 16 hex digits that no earlier process of this peer used.
        leases: Is told what is seen; guarded by this class.
        beat: Called after each look, for what else has to be looked at now and then.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        me: Identity,
        *,
        session: str,
        leases: Leases,
        beat: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.round = 0
        self.loss: float | None = None
        self._store, self._run, self._me, self._session = store, run, me, session
        self._leases, self._clock = leases, clock
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._counter = self._looks = 0
        self._etags: dict[str, tuple[str, Sighting]] = {}
        self._threads = [
            threading.Thread(target=self._run_on, args=duties, name=f"sparseloco-{name}", daemon=True)
            for name, duties in {"lease": (self.put,), "look": (self.look, beat)}.items()
        ]

    def start(self) -> None:
        """Put the first lease and look once, then go on in the background.

        Raises:
            StoreError: if the store does not take it.
        """
        self.put()
        self.look()
        for thread in self._threads:
            thread.start()

    def live(self) -> KeysView[str]:
        """Peers whose lease holds now, those first that are known longest."""
        with self._lock:
            return self._leases.live(self._clock())

    def last_seen(self) -> dict[str, float]:
        """Seconds since each peer's lease changed."""
        with self._lock:
            return self._leases.last_seen(self._clock())

    def put(self, *, left: bool = False) -> None:
        """Put the own lease anew.

        Raises:
            StoreError: if the store does not take it.
        """
        self._counter += 1
        loss = believable(self.loss)
        lease = Lease(
            run=self._run,
            peer=self._me.peer_id,
            counter=self._counter,
            session=self._session,
            round=self.round,
            left=left,
            loss=msgspec.UNSET if loss is None else msgspec.Raw(canonical.encode(loss)),
            public=self._me.public,
        )
        self._store.put(str(paths.Lease(self._me.peer_id)), canonical.encode(lease.signed(self._me)))

    def look(self) -> None:
        """Read the leases that changed; of peers that are new, some at a time.

        Raises:
            StoreError: if the store cannot be listed.
        """
        known = set(self.last_seen())
        found: dict[str, tuple[paths.Lease, str]] = {}
        for entry in listed(self._store, _FOLDER, share=PER_ID, known=known):
            with contextlib.suppress(WireError):
                place = paths.parse(entry.path)
                if isinstance(place, paths.Lease) and place.peer != self._me.peer_id:
                    found[place.peer] = place, entry.etag
        fresh: dict[str, tuple[str, Sighting]] = {}
        for peer in [*sorted(found.keys() & known), *self._some(sorted(found.keys() - known))]:
            with contextlib.suppress(WireError, StoreError):
                place, etag = found[peer]
                fresh[peer] = etag, self._sighting(place, etag)
        self._etags = fresh
        with self._lock:
            self._leases.saw([sighting for _, sighting in fresh.values()], self._clock())

    def _some(self, new: list[str]) -> list[str]:
        """Of many ids that are new, other ones at every look, so that a flood of them delays none for ever."""
        self._looks += 1
        start = self._looks * MAX_NEW % max(1, len(new))
        return [*new[start:], *new[:start]][:MAX_NEW]

    def stop(self) -> None:
        """End the threads; the lease runs out, or is released by :meth:`put`."""
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _sighting(self, place: paths.Lease, etag: str) -> Sighting:
        known = self._etags.get(place.peer)
        if known is not None and etag and known[0] == etag:
            return known[1]
        lease = read_lease(self._store.get(str(place), limit=LEASE_LIMIT), self._run, place.peer)
        return Sighting(place.peer, f"{lease.session}{lease.counter}", lease.left)

    def _run_on(self, *duties: Callable[[], None]) -> None:
        while not self._stop.wait(self._leases.lease_s / _BEATS_PER_LEASE):
            for duty in duties:
                with contextlib.suppress(StoreError):  # the next beat tries again; a lease is for that
                    duty()
