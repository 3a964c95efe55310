"""The loss that a peer says of itself in its lease: from its training to the tables, and what cannot be one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from sparseloco.cli.peers_screen import renderable
from sparseloco.cli.seeing import as_line
from sparseloco.peers import canonical, facts, paths
from sparseloco.peers.identity import Domain
from sparseloco.peers.leases import LEASE_LIMIT, MAX_LOSS, Lease, read_lease
from sparseloco.peers.status import Status
from sparseloco.peers.store import open_store
from sparseloco.report import peers as words
from sparseloco.report.peers_page import peers_page
from tests import toy
from tests.driver import ROWS
from tests.peers.crowd import Peer, identities, make_run
from tests.peers.stage import IDS, ME, Stage
from tests.peers.test_status import look, viewer

NEVER = (
    b"1e999", b"-1e999", b"1e400", b"1000000.1", b"-1e7", b"null", b"true", b'"3.5"', b'"\\u001b[2J"', b"[]",
    b'{"a":[1,{}]}', b"[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]", b"9" * 400, b'"<script>alert(1)</script>"',
)  # fmt: skip


def shown(status: Status) -> tuple[str, str, str]:
    """Tables, page and JSON of one look."""
    console = Console(width=300, markup=True)
    with console.capture() as capture:
        console.print(renderable(status))
    return capture.get(), peers_page(status, every_s=5), as_line(status)


def test_what_peers_say_is_shown_as_their_word() -> None:
    stage = Stage()
    stage.lease(0, loss=b"3.25")
    stage.lease(1, loss=b"-12")
    stage.lease(2)
    seen = look(stage)
    assert [one.loss for one in seen.peers] == [3.25, -12.0, None]
    assert [row["Says loss"] for row in words.peers(seen)] == ["3.250", "-12.000", ""]
    table, page, line = shown(seen)
    assert "Says loss" in table
    assert "by the peer's own word, which nothing checks" in " ".join(page.split())
    assert '<td data-name="Says loss" class="wide">3.250</td>' in page
    assert [one["loss"] for one in json.loads(line)["peers"]] == [3.25, -12.0, None]


def test_nobody_says_a_loss_and_there_is_no_column() -> None:
    stage = Stage()
    stage.lease(0)
    assert "Says loss" not in words.peers(look(stage))[0]


@pytest.mark.parametrize("said", NEVER)
def test_what_cannot_be_a_loss_is_none_and_its_peer_lives(said: bytes) -> None:
    """A hostile or broken figure reaches neither table, page nor JSON, and does not make its peer look dead."""
    stage = Stage()
    stage.lease(0, loss=said)
    stage.lease(1, loss=b"2.5")
    seen = look(stage)
    assert [(one.state, one.loss) for one in seen.peers] == [("live", None), ("live", 2.5)]
    assert seen.problems == ()
    for text in shown(seen):
        assert not any(bad in text for bad in ("<script>alert", "NaN", "Infinity", "nan", "\x1b", "1e9", "999999"))


def test_rubbish_in_place_of_json_is_no_lease() -> None:
    """What is not JSON cannot be signed as the bytes that peers read."""
    lease = Lease(run="0" * 16, peer=IDS[0], counter=1, session="0" * 16, round=0, public=ME[0].public)
    data = canonical.encode(lease.signed(ME[0]))
    for bad in (b"NaN", b"-Infinity", b"1 ]", b"\xff"):
        with pytest.raises(Exception, match=r"^lease"):
            read_lease(data.replace(b'"peer"', b'"loss":' + bad + b',"peer"'), "0" * 16, IDS[0])


def test_leases_of_an_earlier_version_read_and_others_stay_within_the_limit() -> None:
    """Their bytes, and so what was signed, are the same as before there was a loss."""
    fields = {
        "counter": 3, "format": 1, "left": False, "peer": IDS[0], "public": ME[0].public, "round": 2,
        "run": "a" * 16, "session": "b" * 16, "signature": "0" * 128,
    }  # fmt: skip
    bare = json.dumps(fields, separators=(",", ":")).encode()
    signature = ME[0].sign(Domain.LEASE, "a" * 16, IDS[0], body=bare).hex()
    old = read_lease(bare.replace(b"0" * 128, signature.encode()), "a" * 16, IDS[0])
    assert (old.counter, old.said_loss) == (3, None)
    longest = msgspec.structs.replace(old, loss=msgspec.Raw(canonical.encode(-math.pi * 1e-300)))
    assert len(canonical.encode(longest)) < LEASE_LIMIT


def test_a_course_holds_what_was_said_while_one_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "MAX_LOSSES", 3)
    stage = Stage()
    one = viewer(stage)
    seen = []
    for counter, loss in enumerate((b"9", b"9", b"4", b"1e999", b"3", b"2")):
        stage.lease(0, counter=counter, loss=loss)
        one.look()
        seen.append(one.look().peers[0].losses)
    assert seen == [(9,), (9, 9), (9, 9, 4), (9, 9, 4), (9, 4, 3), (4, 3, 2)]
    assert words.peers(one.look())[0]["Says loss"] == "2.000 \u2588\u2585\u2581"
    stage.store.delete(str(paths.Lease(IDS[0])))
    stage.close(0, 1)
    assert one.look().peers[0].losses == (), "nothing is kept of who is gone"


def test_a_loop_of_ones_own_reports_and_leaves_with_its_last_loss(tmp_path: Path) -> None:
    store = open_store("memory://")
    run = make_run(ROWS["sparseloco"](), toy.net(), min_peers=1)
    (me,) = identities(1)
    peer = Peer(run, ROWS["sparseloco"](), store, me, tmp_path, 0)

    def said() -> float | None:
        return read_lease(store.get(str(paths.Lease(me.peer_id)), limit=LEASE_LIMIT), run.run, me.peer_id).said_loss

    peer.arrive()
    assert said() is None
    for loss, found in (
        (2.5, 2.5), (MAX_LOSS, MAX_LOSS), (math.nan, None), (7, 7.0), (math.inf, None),
        (-2 * MAX_LOSS, None), (0.1, 0.1), (None, None), (1.5, 1.5),
    ):  # fmt: skip
        peer.transport.report(loss=loss)
        peer.transport._heart.put()
        assert said() == found
    peer.transport.leave()
    assert said() == 1.5
