"""Whatever lies in the store, the view holds, and says what it left aside."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from sparseloco.errors import NotFound, TooLarge, Unavailable
from sparseloco.peers import canonical, chains, paths
from sparseloco.peers.facts import printable
from sparseloco.peers.manifest import LeftOut, seal
from sparseloco.peers.status import Status
from sparseloco.report import peers as words
from tests.peers.runs import OWNER, identity
from tests.peers.stage import IDS, ME, Stage
from tests.peers.test_status import look, rounds, viewer


def only_printable(status: Status) -> bool:
    def texts(value: object) -> list[str]:
        if isinstance(value, dict):
            return [text for key, inner in value.items() for text in [*texts(key), *texts(inner)]]
        if isinstance(value, list | tuple):
            return [text for inner in value for text in texts(inner)]
        return [value] if isinstance(value, str) else []

    return all(text.isascii() and text.isprintable() for text in texts(status.to_json()))


def test_rubbish_where_a_manifest_belongs_is_named_and_skipped() -> None:
    stage = Stage()
    stage.store.put("rounds/00000000/0000/manifest-0000.json", b"\x1b[31m{]")
    stage.close(0, 1, attempt=1)
    one = rounds(look(stage))[0]
    assert (one.closed, one.attempt) == (True, 1)
    assert one.skipped[0].startswith("attempt 0: manifest: ")


@pytest.mark.parametrize("kind", ["stranger", "forged", "elsewhere", "too heavy", "nested", "hash not due"])
def test_a_manifest_that_does_not_count_closes_nothing(kind: str) -> None:
    stage = Stage(writers=[ME[0].public], max_tokens_per_round=1000)
    stage.close(0, 1)
    history = stage.histories[0]
    entries = (stage.frame(0, 1), stage.frame(1, 1))
    good = stage.manifest(history, entries)
    bad = {
        "stranger": lambda: seal(good, ME[3]),
        "forged": lambda: seal(good, ME[0]).replace(b'"weight":7', b'"weight":8'),
        "elsewhere": lambda: seal(msgspec.structs.replace(good, previous="d" * 64), ME[0]),
        "too heavy": lambda: seal(
            stage.manifest(history, tuple(msgspec.structs.replace(one, weight=1001) for one in entries)), ME[0]
        ),
        "nested": lambda: b"[" * 5000,
        "hash not due": lambda: seal(msgspec.structs.replace(good, state_sha256="e" * 64), ME[0]),
    }[kind]()
    stage.store.put("rounds/00000001/0000/manifest-0000.json", bad)
    seen = look(stage)
    assert seen.closed == {0: 1}
    (problem,) = seen.problems
    assert problem.startswith("round 1, fragment 0: attempt 0: ")
    assert rounds(seen)[1].skipped == (problem.partition(": ")[2],)
    assert only_printable(seen)


def test_a_manifest_that_is_too_large_is_not_downloaded() -> None:
    stage = Stage(max_peers=2)
    stage.store.put("rounds/00000000/0000/manifest-0000.json", bytes(2 << 20))
    seen = look(stage)
    assert seen.problems[0].startswith("round 0, fragment 0: attempt 0: manifest: ")
    assert seen.closed == {0: 0}


def test_of_two_manifests_that_lie_about_the_state_the_named_one_counts() -> None:
    """A reader without shared state cannot tell which is right; the next round can, since it names one."""
    stage = Stage()
    history = stage.close(0, 1, attempt=1) and stage.histories[0]
    first = replace(history, round=0, previous="0" * 64)
    stage.put(stage.manifest(first, (), digest="b" * 32))
    seen = look(stage)
    assert seen.closed == {0: 0}
    assert seen.problems == (
        "round 0, fragment 0: 2 manifests are in order but for the shared state, and only peers know that; the next "
        "round will name one",
    )
    stage.close(0, 1)
    seen = look(stage)
    assert (seen.closed, rounds(seen)[0].attempt, seen.problems) == ({0: 2}, 1, ())
    assert rounds(seen)[0].skipped == (
        "attempt 0: in order but for the shared state; attempt 1 is one that the next round names",
    )


def test_foreign_names_are_counted_and_left_alone() -> None:
    stage = Stage()
    stage.close(0, 1)
    for path in ("rounds/x", "peers/BOB/lease.json", "a/b"):
        stage.store.put(path, bytes(1000))
    seen = look(stage)
    assert seen.closed == {0: 1}
    assert seen.bytes is not None
    assert seen.bytes.other >= 3000
    assert seen.problems == ("3 objects have names that no peer makes, such as 'a/b'; they are left alone",)


def test_leases_that_are_not_their_peers() -> None:
    stage = Stage()
    stage.lease(0)
    stage.lease(1, signer=2)
    stage.store.put(str(paths.Lease(IDS[3])), bytes(1 << 20))
    stage.lease(4, round=-(10**300))
    stage.store.put(str(paths.Lease(IDS[5])), b"{}")
    path = str(paths.Lease(IDS[6]))
    stage.lease(6)
    stage.store.fails[path] = NotFound(f"get {path}: there is no such object")
    seen = look(stage)
    assert [(one.peer, one.round) for one in seen.peers] == [(IDS[0], 0), (IDS[4], None)]
    assert any(one.startswith(f"lease of peer {IDS[1]}: must be signed by it") for one in seen.problems)
    assert len(seen.problems) == 4
    assert only_printable(seen)


def test_anchors_that_no_manifest_names_come_last() -> None:
    stage = Stage(anchor_every=1)
    manifest = stage.close(0, 1)
    stage.store.put(f"anchors/00000000/{manifest.digest}/{'e' * 64}.safetensors", bytes(10))
    for number in range(70):
        stage.store.put(f"anchors/99999999/{'c' * 32}/{number:064x}.safetensors", bytes(10))
    seen = look(stage)
    assert [one.vouched for one in seen.anchors] == [True] + [False] * 63
    assert seen.anchors[0].round == 0


def test_frames_of_peers_that_are_not_admitted_are_not_shown() -> None:
    members = tuple(sorted(one.public for one in ME[:2]))
    stage = Stage(admission="allow-list", members=members)
    stage.frame(0, 0)
    stage.frame(5, 0)
    stage.lease(6)
    one = rounds(look(stage))[0]
    assert [sent.peer for sent in one.sent] == [IDS[0]]
    assert one.missing == ()


def test_fragments_that_no_manifest_ever_closed_are_not_believed() -> None:
    stage = Stage()
    stage.close(0, 1)
    for fragment in range(1, 9):
        stage.frame(2, 0, fragment=fragment)
    assert look(stage).closed == {0: 1, 1: 0}


def test_reasons_of_a_writer_stay_a_line() -> None:
    """`left_out` is for people: strict decoding lets printable ASCII through, and nothing that moves a cursor."""
    stage = Stage()
    stage.close(0, 1, left_out={2: "<script>alert(1)</script> [bold]"})
    seen = look(stage)
    assert rounds(seen)[0].left_out == ((IDS[2], "<script>alert(1)</script> [bold]"),)
    history = stage.histories[0]
    evil = stage.manifest(history, (stage.frame(0, 1), stage.frame(1, 1)))
    evil = msgspec.structs.replace(evil, left_out=(LeftOut(peer=IDS[2], reason="\x1b[2J"),))
    stage.store.put("rounds/00000001/0000/manifest-0000.json", seal(evil, ME[0]))
    seen = look(stage)
    assert seen.closed == {0: 1}
    assert only_printable(seen)


def test_problems_are_not_without_end() -> None:
    stage = Stage()
    for number in range(64):
        stage.store.put(str(paths.Manifest(0, 0, number)), b"x")
        stage.store.put(str(paths.Lease(f"{number:032x}")), b"x")
    problems = look(stage).problems
    assert len(problems) == 50
    assert problems[16] == "round 0, fragment 0: and 48 more attempts"


def test_printable_escapes_and_cuts() -> None:
    assert printable("a\x1b[31m\u202eb\n") == "a\\x1b[31m\\u202eb\\n"
    assert printable("x" * 10**6) == "x" * 300
    assert len(printable("\U0001f600" * 300)) == 303


def test_a_dead_store_is_one_error() -> None:
    stage = Stage()
    one = viewer(stage)
    stage.store.fails[""] = Unavailable("list: the store did not answer, or broke off; try again")
    with pytest.raises(Unavailable, match=r"^list: the store did not answer"):
        one.look()


def test_what_is_not_in_order_is_said_in_words() -> None:
    """C-33: a drifted peer is among the alerts, with what it says; so are sums that cannot be had."""
    stage = Stage()
    stage.close(0, 1)
    for peer, digest in ((0, "a" * 32), (1, "a" * 32), (2, "b" * 32)):
        stage.frame(peer, 1, digest)
    seen = look(stage)
    assert words.headline(seen) == "1 round closed, 0 of 2 peers live, frames disagree"
    said = f"round 1, fragment 0: made from another state than aaaaaaaa: {IDS[2][:8]} says bbbbbbbb"
    assert next(words.alerts(seen)) == said
    stage.store.fails[""] = TooLarge("list: more than 100000 objects; list a folder further down, or start later")
    assert words.sums(look(stage)) == ["bytes: the store holds too many objects to add them up"]


def test_headers_that_cannot_be_had_are_no_disagreement(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    stage.close(0, 1)

    def lost(path: str, start: int, length: int) -> bytes:
        raise Unavailable(f"get_range {path}: the store did not answer, or broke off; try again")

    one = viewer(stage)
    monkeypatch.setattr(stage.store, "get_range", lost, raising=False)
    seen = one.look()
    assert (seen.agree, seen.agreement) == (None, ())
    assert words.headline(seen).endswith("no frame to compare yet")
    monkeypatch.undo()
    assert one.look().agree is True


def test_amendments_that_break_a_rule_or_cannot_be_read() -> None:
    stage = Stage()
    broken = stage.amendment(0, 0, **{"policy.min_peers": 0})
    stage.close(0, 1, amended=(broken,))
    assert [one.state for one in look(stage).amendments] == ["breaks a rule, so it changes nothing"]
    stage.amendment(1, 5, **{"policy.min_peers": 1})
    path = str(paths.Amend(1))
    stage.store.fails[path] = Unavailable(f"get {path}: the store answered 503; try again")
    seen = look(stage)
    assert seen.amendments == ()
    assert seen.problems == (f"amendments: get {path}: the store answered 503; try again",)


def test_ids_without_end_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an open run keys are free: sums are kept of so many peers and no more."""
    monkeypatch.setattr(chains, "MAX_TALLIED", 3)
    stage = Stage()
    stage.close(0, 1)
    stage.close(2, 3, 4, left_out={5: "had not posted"})
    seen = look(stage)
    assert sorted(one.peer for one in seen.peers) == IDS[:3]
    assert len(rounds(seen)[1].sent) == 3


@pytest.mark.parametrize("steps", [True, 0, -5, 2**53, "600", 1e3, None])
def test_a_plan_that_is_no_number_of_steps_is_left_out(steps: object) -> None:
    stage = Stage()
    changed = {"train": {"steps": steps}, "algorithm": {**stage.run.algorithm, "inner_steps": steps}}
    run = msgspec.structs.replace(stage.run, **changed).signed(identity(OWNER))
    stage.store.put("run.json", canonical.encode(run))
    seen = look(stage)
    assert (seen.steps, seen.inner_steps) == (None, None)
    assert not any("steps" in fact for fact in words.facts(seen))
    assert words.headline(seen) == "0 rounds closed, no peer yet, no frame to compare yet"


def test_a_voided_round_is_told_and_its_chain_is_left() -> None:
    """The rounds that followed on it are as if they had never been."""
    stage = Stage()
    stage.close(0, 1)
    before = stage.histories[0]
    for _ in range(2):
        stage.close(0, 1)
    one = viewer(stage)
    assert one.look().closed == {0: 3}
    void = stage.amendment(0, 1, void=0)
    seen = one.look()
    assert seen.closed == {0: 1}
    assert "attempt 0: manifest: amendments=0 must be above 0, the amendment that voids this round; refuse it" in (
        seen.rounds[0].skipped
    )
    assert [one.state for one in seen.amendments] == ["not acknowledged"]
    stage.histories[0] = before
    stage.close(0, 2, attempt=1, amended=(void,))
    for looked in (one.look(), look(stage)):
        assert looked.closed == {0: 2}
        assert [(one.state, one.changes) for one in looked.amendments] == [("in force", '{"void": 0}')]
