"""A frame as it lies in the store: the bytes of ``wire``, then who posted it and a signature.

The public key comes along, since a peer could take its ``key.json`` away after its frame was listed: the signature must
be checkable by all alike, also by those who join much later.
"""

from __future__ import annotations

from sparseloco.errors import WireError
from sparseloco.peers import paths
from sparseloco.peers.canonical import sha256
from sparseloco.peers.identity import PUBLIC_BYTES, SIGNATURE_BYTES, Domain, Identity, peer_id_of, verify

TRAILER_BYTES = PUBLIC_BYTES + SIGNATURE_BYTES


def seal_frame(frame: bytes, me: Identity, run: str, round: int, fragment: int) -> tuple[paths.Frame, bytes]:
    """The object of a frame, and where it belongs.

    Args:
        frame: Bytes of ``wire.encode``.
        me: Who posts it.
        run: Id of the run, 16 hex digits.
        round: The round.
        fragment: The fragment.
    """
    data = frame + bytes.fromhex(me.public) + me.sign(Domain.FRAME, run, round, fragment, 0, body=frame)
    return paths.Frame(round, fragment, me.peer_id, 0, sha256(data)), data


def open_frame(data: bytes | memoryview, place: paths.Frame, run: str) -> memoryview:
    """The bytes of ``wire`` in an object whose hash is that of its place.

    Returns:
        A view; ``wire.decode`` has checked nothing of it yet.

    Raises:
        WireError: if the peer of that path did not sign it for that place.
    """
    view = memoryview(data).cast("B")
    where = f"peer {place.peer}, round {place.round}"
    if view.nbytes <= TRAILER_BYTES:
        raise WireError(f"{where}: frame={view.nbytes} bytes: must be more than {TRAILER_BYTES}; refuse it")
    frame, trailer = view[:-TRAILER_BYTES], bytes(view[-TRAILER_BYTES:])
    public, signature = trailer[:PUBLIC_BYTES].hex(), trailer[PUBLIC_BYTES:]
    if peer_id_of(public) != place.peer:
        raise WireError(f"{where}: the key in the frame is another peer's; refuse it")
    if not verify(public, signature, Domain.FRAME, run, place.round, place.fragment, place.part, body=frame):
        raise WireError(f"{where}: the signature is not for this run, round, fragment and content; refuse it")
    return frame
