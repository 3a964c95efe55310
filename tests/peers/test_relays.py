"""Getting hold of listed frames, and what lies in the folder of a round."""

from __future__ import annotations

from typing import Any

from sparseloco.peers import paths
from sparseloco.peers.listing import list_round
from sparseloco.peers.manifest import Entry, Manifest
from sparseloco.peers.operations import (
    Delete,
    Listing,
    Outcome,
    Put,
    Upload,
)
from sparseloco.peers.relays import MAX_RELAYS, Fetching
from tests.peers.desk import PEERS, Desk, frame


def test_a_crowded_folder_hides_nobody() -> None:
    """A peer that fills its folder of the round with objects costs the others one page, not the round."""
    crowd = [str(paths.Want(0, 0, PEERS[1], f"{n:064x}")) for n in range(5000)]
    everything = sorted([*crowd, frame(2)[0], "rounds/00000000/0000/zzz", str(paths.Manifest(0, 0, 0))])
    pages: list[str] = []

    def answer(operation: Any) -> Outcome:
        pages.append(operation.after)
        rest = [path for path in everything if path > operation.after][:1000]
        return Listing(tuple((path, 1) for path in rest), rest="" if rest[-1:] == everything[-1:] else rest[-1])

    steps = list_round(0, 0)
    operation = next(steps)
    try:
        while True:
            operation = steps.send(answer(operation))
    except StopIteration as ended:
        there = {str(named) for named, _ in ended.value}
    assert frame(2)[0] in there
    assert len(there) < 300
    assert len(pages) <= 3


def test_a_listed_frame_that_is_gone_is_asked_for_and_relayed() -> None:
    """Rule 3: never skipped; the want is taken away when it was answered."""
    entries = tuple(Entry(peer=PEERS[i], size=100, hash=f"{i:064x}", weight=7) for i in (1, 2))
    manifest = Manifest(
        run="0" * 16, round=0, fragment=0, attempt=0, previous="0" * 64, digest="0" * 32, amendments=0, entries=entries,
        writer="0" * 64,
    )  # fmt: skip
    desk = Desk(dict([frame(1)]))
    relay = str(paths.Relay(0, 0, PEERS[9], entries[1].hash))

    def wait() -> None:
        if desk.time == 3:
            desk.objects[relay] = 99  # of another size: not even tried
        if desk.time == 6:
            desk.objects[relay] = 100

    desk.on_wait = wait
    fetching = Fetching(manifest=manifest, me=PEERS[0], held=set())
    desk.drive(fetching.run())
    assert desk.time == 6
    want = str(paths.Want(0, 0, PEERS[0], entries[1].hash))
    assert [one.path for one in desk.of(Put)] == [want]
    assert [one.path for one in desk.of(Delete)] == [want]
    assert want not in desk.objects
    assert desk.said("waiting") == [
        f"round 0, fragment 0: cannot fetch {PEERS[2][:8]}'s 00000000; asked the others for it, and waiting goes on"
    ]

    helper, held = Desk(dict([frame(1), (want, 0)])), {entries[0].hash, entries[1].hash}
    for _ in range(2):
        helper.drive(Fetching(manifest=manifest, me=PEERS[3], held=set(held)).serve())
    assert [one.path for one in helper.of(Upload)] == [str(paths.Relay(0, 0, PEERS[3], entries[1].hash))]


def test_wants_cost_a_bounded_number_of_relays() -> None:
    """A hostile peer that wants everything cannot make the others upload for ever, nor crowd out an honest want."""
    entries = tuple(Entry(peer=PEERS[i], size=100, hash=f"{i:064x}", weight=7) for i in range(20))
    manifest = Manifest(
        run="0" * 16, round=0, fragment=0, attempt=0, previous="0" * 64, digest="0" * 32, amendments=0, entries=entries,
        writer="0" * 64,
    )  # fmt: skip
    wants = {str(paths.Want(0, 0, PEERS[30], entry.hash)): 0 for entry in entries}
    strange = {str(paths.Want(0, 0, PEERS[30], "f" * 64)): 0}
    gone = {str(paths.Want(0, 0, PEERS[31], entries[19].hash)): 0}
    desk = Desk({**dict(frame(i) for i in range(19)), **wants, **strange, **gone})
    desk.drive(Fetching(manifest=manifest, me=PEERS[3], held={entry.hash for entry in entries}).serve())
    uploads = [one.hash for one in desk.of(Upload)]
    assert len(uploads) == MAX_RELAYS
    assert uploads[0] == entries[19].hash
