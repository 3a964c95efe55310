"""One peer's steps through a round: what it asks for, what it writes, and what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparseloco.errors import DivergenceError, QuorumError
from sparseloco.peers import paths
from sparseloco.peers.fates import Fate, own_fate
from sparseloco.peers.manifest import Entry, Manifest, judge, manifest_limit, seal
from sparseloco.peers.operations import (
    Bad,
    Create,
    Done,
    DriftError,
    Exists,
    Get,
    Good,
    Inspect,
    List,
    Operation,
    Outcome,
    Refused,
    Tell,
    Unavailable,
    Upload,
    VoidedError,
    Wait,
)
from sparseloco.peers.rounds import MAX_TRIES
from sparseloco.peers.run_file import Amendment
from tests.peers.desk import PEERS, Desk, a_round, frame, history
from tests.peers.runs import OWNER, identity, make_run


def test_a_round_closes_when_all_live_peers_have_posted() -> None:
    """C-30: no wait longer than needed when all present peers have finished."""
    desk = Desk(dict([frame(1), frame(2)]))
    manifest = desk.drive(a_round(desk).run())
    assert [entry.peer for entry in manifest.entries] == sorted(PEERS[:3])
    assert desk.time == 0.0
    assert manifest.left_out == ()
    assert isinstance(desk.asked[-1], Tell)
    assert desk.said("closed")[0].startswith("round 0, fragment 0: closed with 3 frames, attempt 0, by ")


def test_a_round_closes_at_the_deadline_without_the_late() -> None:
    """C-35: with the peers that are there, if they are enough; the late one is named."""
    desk = Desk(dict([frame(1)]))
    manifest = desk.drive(a_round(desk, policy={"deadline_s": 70.0}).run())
    assert [entry.peer for entry in manifest.entries] == sorted(PEERS[:2])
    assert desk.time == 70.0
    assert [(one.peer, one.reason) for one in manifest.left_out] == [(PEERS[2], "had not posted")]
    assert desk.said("deadline") == ["round 0, fragment 0: deadline fixed: 70 s"]


def test_every_setting_of_time_changes_something() -> None:
    """C-31: on a fake clock, each is what counts."""
    for deadline_s in (10.0, 300.0):
        desk = Desk(dict([frame(1)]))
        desk.drive(a_round(desk, policy={"deadline_s": deadline_s}).run())
        assert desk.time == deadline_s
    for poll_s in (1.0, 5.0):
        desk = Desk(dict([frame(1)]))
        desk.drive(a_round(desk, policy={"deadline_s": 10.0}, poll_s=poll_s).run())
        assert len(desk.of(Wait)) == 10 / poll_s
    desk = Desk(dict([frame(1)]))
    desk.drive(a_round(desk, policy={"deadline_s": 600.0, "deadline": "adaptive"}, arrivals=[100.0] * 9).run())
    assert desk.time == 100.0


def test_no_quorum_waits_and_says_so() -> None:
    """C-33: who is missing, since when, and what to do."""
    desk = Desk()
    ages = {PEERS[2]: 90.0, PEERS[1]: 12.34}
    with pytest.raises(QuorumError) as ended:
        desk.drive(a_round(desk, policy={"deadline_s": 70.0}, last_seen=lambda: ages, give_up_s=100.0).run())
    text = (
        f"only 1 of at least 2 peers arrived within {{}} s (missing: {PEERS[2][:8]} last seen 90.0 s ago, "
        f"{PEERS[1][:8]} last seen 12.3 s ago); {{}}start another peer, or let the owner amend policy.min_peers, "
        "which helps this very round"
    )
    assert desk.said("no-quorum") == ["round 0, fragment 0: " + text.format("70.0", "waiting goes on; ")]
    assert str(ended.value) == "round 0, fragment 0: " + text.format("100.0", "")
    assert not desk.of(Create)


def test_no_quorum_may_go_on_with_an_empty_round() -> None:
    """By policy, and said aloud; own_fate credits then."""
    desk = Desk()
    manifest = desk.drive(a_round(desk, policy={"deadline_s": 70.0, "no_quorum": "train"}).run())
    assert manifest.entries == ()
    assert desk.time == 70.0
    assert "an empty round: all keep their payloads" in desk.said("no-quorum")[0]
    assert {one.reason for one in manifest.left_out} == {"no quorum", "had not posted"}
    assert own_fate(manifest, PEERS[0], "0" * 64) == Fate.CREDITED


def test_a_peer_alone_does_not_close_early() -> None:
    """C-09: that all live peers have posted means nothing if there is but one."""
    desk = Desk()
    desk.drive(a_round(desk, live=(0,), policy={"deadline_s": 70.0, "no_quorum": "train"}).run())
    assert desk.time == 70.0
    asked = Desk()
    manifest = asked.drive(a_round(asked, live=(0,), policy={"min_peers": 1}).run())
    assert asked.time == 0.0
    assert len(manifest.entries) == 1


def test_bad_frames_are_left_out_with_the_reason() -> None:
    """A peer whose digest differs is named as refused (rule 4); too large ones are not downloaded."""
    verdicts = {
        PEERS[1]: Bad("digest=00 is not aa; rejoin from an anchor"),
        PEERS[3]: Good(2**29),
        PEERS[4]: Bad("\x1b[2J"),
    }
    big = frame(5, size=2**41)
    desk = Desk(dict([frame(1), frame(2), frame(3), frame(4), big]), verdicts)
    manifest = desk.drive(a_round(desk).run())
    assert {entry.peer for entry in manifest.entries} == {PEERS[0], PEERS[2]}
    assert {one.peer: one.reason for one in manifest.left_out} == {
        PEERS[1]: "digest=00 is not aa; rejoin from an anchor",
        PEERS[3]: "weight=536870912: must be from 1 to 16777216",
        PEERS[4]: "\\x1b[2J",
        PEERS[5]: f"size={2**41}: must be from 1 to {2**30}",
    }
    assert big[0] not in {one.path for inspect in desk.of(Inspect) for one in inspect.frames}
    assert all(inspect.digest == "a" * 32 for inspect in desk.of(Inspect))


def test_a_frame_that_cannot_be_fetched_yet_is_not_listed() -> None:
    """A writer lists only what it has checked itself."""
    desk = Desk(dict([frame(1), frame(2)]), {PEERS[2]: Unavailable()})
    manifest = desk.drive(a_round(desk, policy={"deadline_s": 70.0}).run())
    assert {entry.peer for entry in manifest.entries} == {PEERS[0], PEERS[1]}
    assert manifest.left_out[0].reason == "could not be fetched in time"
    assert desk.time == 70.0


def test_a_peer_may_try_again_after_a_refused_frame_but_not_for_ever() -> None:
    hashes = [f"{n:064x}" for n in range(50, 60)]
    desk = Desk(dict([frame(1), *(frame(2, hash=one) for one in hashes)]), {PEERS[2]: Bad("rubbish")})
    desk.drive(a_round(desk).run())
    tried = [one for inspect in desk.of(Inspect) for one in inspect.frames if PEERS[2] in one.path]
    assert len(tried) <= MAX_TRIES
    late = Desk(dict([frame(1), frame(2, hash=hashes[0])]), {PEERS[2]: Bad("rubbish")})
    steps = a_round(late, live=(0, 1, 2, 3), policy={"deadline_s": 5.0})

    def mend() -> None:
        late.objects.update([frame(2, hash=hashes[1])])
        late.verdicts.clear()

    late.on_wait = mend
    assert PEERS[2] in {entry.peer for entry in late.drive(steps.run()).entries}


def test_a_flood_of_ids_costs_a_bounded_number_of_downloads() -> None:
    flood = {str(paths.Frame(0, 0, f"{n:032x}", 0, f"{n:064x}")): 100 for n in range(500)}
    desk = Desk({**flood, **dict([frame(1), frame(2)])})
    desk.drive(a_round(desk, policy={"max_peers": 3}).run())
    asked = [one.path for inspect in desk.of(Inspect) for one in inspect.frames]
    assert len(asked) <= 4 * 3 + 3
    assert {frame(1)[0], frame(2)[0]} <= set(asked)


def test_strangers_are_not_listed() -> None:
    keys = tuple(sorted(identity(i).public for i in range(2)))
    desk = Desk(dict([frame(1), frame(2)]))
    manifest = desk.drive(a_round(desk, policy={"admission": "allow-list", "members": keys}).run())
    assert {entry.peer for entry in manifest.entries} == {PEERS[0], PEERS[1]}
    assert manifest.left_out == ()
    assert not any(PEERS[2] in one.path for inspect in desk.of(Inspect) for one in inspect.frames)


def test_a_full_round_leaves_out_another_peer_each_time() -> None:
    left: set[str] = set()
    for number in range(32):
        desk = Desk(dict(frame(i, round=number) for i in (1, 2, 3)))
        manifest = desk.drive(a_round(desk, live=(0, 1, 2, 3), history=history(number, max_peers=3)).run())
        assert len(manifest.entries) == 3
        assert manifest.left_out[0].reason == "the round was full"
        left.add(manifest.left_out[0].peer)
    assert left == set(PEERS[:4])


@pytest.mark.parametrize("outcome", [Done(), Exists(), Refused("no"), Unavailable("timeout")])
def test_after_any_outcome_of_a_put_there_is_a_get(outcome: Outcome) -> None:
    """Rule 1, and what is there then is followed, whoever wrote it."""
    desk = Desk(dict([frame(1), frame(2)]))
    other = Manifest(
        run=make_run().run, round=0, fragment=0, attempt=0, previous="0" * 64, digest="a" * 32, amendments=0,
        state_sha256="e" * 64, writer=identity(5).public,
    )  # fmt: skip

    def write(operation: Operation) -> Outcome:
        if isinstance(operation, Create):
            desk.data[operation.path] = seal(other, identity(5))
            return outcome if not isinstance(outcome, Done) else Exists()
        return Done()

    desk.on_write = write
    manifest = desk.drive(a_round(desk).run())
    assert manifest.writer == identity(5).public
    create = next(i for i, one in enumerate(desk.asked) if isinstance(one, Create))
    follows = [one for one in desk.asked[create + 1 :] if not isinstance(one, Tell)]
    assert isinstance(follows[0], Get)
    assert bool(desk.said("cannot-write")) == isinstance(outcome, Refused)


def test_a_store_that_does_not_answer_is_waited_for() -> None:
    """An object that cannot be read is neither missing nor invalid; what is said is said once."""
    desk = Desk(dict([frame(1), frame(2)]))

    class Deaf(Desk):
        def answer(self, operation: Operation) -> Outcome:
            deaf = desk.time < 5 and isinstance(operation, Get | List | Inspect)
            return Unavailable("503 \x1b") if deaf else desk.answer(operation)

    manifest = Deaf().drive(a_round(desk).run())
    assert len(manifest.entries) == 3
    assert desk.time == 5
    assert desk.said("waiting") == ["round 0, fragment 0: waiting for the store to answer: 503 \\x1b"]


def test_a_frame_in_parts_is_left_out() -> None:
    part = str(paths.Frame(0, 0, PEERS[2], 1, "c" * 64))
    desk = Desk({**dict([frame(1)]), part: 100})
    assert desk.drive(a_round(desk).run()).left_out[0].reason == "part=1: must be 0"


def test_invalid_attempts_are_skipped() -> None:
    """Rule 1: rubbish, and an object that is too large to look at."""
    desk = Desk(dict([frame(1), frame(2)]))
    desk.data[str(paths.Manifest(0, 0, 0))] = b"garbage"
    desk.data[str(paths.Manifest(0, 0, 1))] = b" " * (manifest_limit(make_run().policy) + 1)
    manifest = desk.drive(a_round(desk).run())
    assert manifest.attempt == 2
    skipped = desk.said("skipped")
    assert len(skipped) == 2
    assert "attempt 0 counts for nobody: manifest: JSON is malformed" in skipped[0]
    assert "attempt 1 counts for nobody: manifest: more than" in skipped[1]


def test_a_store_full_of_rubbish_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "MAX_ATTEMPT", 5)
    desk = Desk()
    desk.data.update((str(paths.Manifest(0, 0, n)), b"x") for n in range(6))
    with pytest.raises(DivergenceError, match="none of 6 manifests is valid; take away write permission from whoever"):
        desk.drive(a_round(desk).run())


def test_drift_is_raised_and_not_skipped() -> None:
    desk = Desk()
    other = Manifest(
        run=make_run().run, round=1, fragment=0, attempt=0, previous="0" * 64, digest="d" * 32, amendments=0,
        writer=identity(5).public,
    )  # fmt: skip
    desk.data[str(paths.Manifest(1, 0, 0))] = seal(other, identity(5))
    with pytest.raises(DriftError, match=r"^round 1, fragment 0: manifest says digest=d+ is not .* replay from"):
        desk.drive(a_round(desk, history=history(1)).run())


def test_the_own_frame_is_put_until_it_is_there() -> None:
    answers: list[Outcome] = [Unavailable(), Refused("no"), Done()]
    desk = Desk(dict([frame(1), frame(2)]))
    desk.on_write = lambda operation: answers.pop(0) if isinstance(operation, Upload) else Done()
    manifest = desk.drive(a_round(desk).run())
    assert len(desk.of(Upload)) == 3
    assert len({one.path for one in desk.of(Upload)}) == 1
    assert manifest.entry_of(PEERS[0]) is not None


def test_who_may_not_write_follows() -> None:
    desk = Desk(dict([frame(1), frame(2)]))
    policy = {"writers": tuple(sorted(identity(i).public for i in (1, 5))), "deadline_s": 20.0}
    steps = a_round(desk, policy=policy, give_up_s=50.0, last_seen=lambda: {PEERS[5]: 77.0})
    with pytest.raises(QuorumError) as ended:
        desk.drive(steps.run())
    assert not desk.of(Create)
    names = {f"{PEERS[5][:8]} last seen 77.0 s ago", f"{PEERS[1][:8]} never"}
    head, _, rest = str(ended.value).partition(" (writers: ")
    assert head == "round 0, fragment 0: 3 peers arrived, but no manifest within 50.0 s"
    assert set(rest.partition(");")[0].split(", ")) == names
    assert rest.endswith("); start a writer, or let the owner name others")
    assert len(desk.said("waiting")) == 1


def test_known_amendments_are_acknowledged() -> None:
    run = make_run()
    known = [
        Amendment(run=run.run, n=n, round=3, changes={"policy.deadline_s": 2 + n}).signed(identity(OWNER))
        for n in range(18)
    ]
    before = replace(history(1), amendments=tuple(known[:1]))
    desk = Desk(dict([frame(1, round=1), frame(2, round=1)]))
    manifest = desk.drive(a_round(desk, history=before, amendments=known).run())
    assert (manifest.amendments, [one.n for one in manifest.amended]) == (17, [*range(1, 17)])
    assert before.after(manifest, "b" * 32).amendments == tuple(known[:17])


def signed(n: int, **changes: object) -> Amendment:
    named = {f"policy.{name}": value for name, value in changes.items()}
    return Amendment(run=make_run().run, n=n, round=0, changes=named).signed(identity(OWNER))


def test_what_the_owner_signs_while_a_round_is_open_holds_in_it() -> None:
    """C-31: a shorter deadline at once; a longer one, too."""
    for new, end in ((30.0, 30.0), (5.0, 20.0), (90.0, 90.0)):
        desk, known = Desk(dict([frame(1)])), []
        desk.on_wait = lambda desk=desk, known=known, new=new: (
            known.append(signed(0, deadline_s=new)) if desk.time == 20 else None
        )
        manifest = desk.drive(a_round(desk, amendments=known, policy={"deadline_s": 70.0}).run())
        assert desk.time == end
        assert manifest.amended == tuple(known)
        assert desk.said("deadline")[-1] == f"round 0, fragment 0: deadline fixed: {new:g} s"


def test_frames_that_were_seen_are_judged_by_the_new_policy() -> None:
    """Caps that rise and fall, and members that are shut out or let in, while the round is open."""
    heavy = {PEERS[2]: Good(2**25)}
    keys = tuple(sorted(identity(i).public for i in (0, 1, 3)))
    for changes, listed in (
        ({"max_tokens_per_round": 2**26}, {0, 1, 2, 3}),
        ({"max_frame_bytes": 2**31}, {0, 1, 3, 4}),
        ({"max_frame_bytes": 256}, {0, 1}),
        ({"admission": "allow-list", "members": keys}, {0, 1, 3}),
    ):
        frames = [frame(1), frame(2), frame(3, size=300), frame(4, size=2**30 + 1)]
        desk, known = Desk(dict(frames), heavy), []
        desk.on_wait = lambda desk=desk, known=known, changes=changes: (
            known.append(signed(0, **changes)) if desk.time == 20 else None
        )
        manifest = desk.drive(
            a_round(desk, amendments=known, live=(0, 1, 2, 3, 4, 5), policy={"deadline_s": 50.0}).run()
        )
        assert {PEERS.index(entry.peer) for entry in manifest.entries} == listed, changes
        others = {PEERS.index(one.peer) for one in manifest.left_out}
        assert others == (set() if "members" in changes else set(range(6)) - listed)


def test_a_writer_acts_by_what_it_would_acknowledge() -> None:
    """One that the owner has removed writes no more, and one that was added may write at once."""
    mine, others = (identity(0).public,), (identity(5).public,)
    desk = Desk(dict([frame(1), frame(2)]))
    removed = a_round(desk, amendments=[signed(0, writers=others)], policy={"writers": mine}, give_up_s=5.0)
    with pytest.raises(QuorumError, match="3 peers arrived, but no manifest within"):
        desk.drive(removed.run())
    desk = Desk(dict([frame(1), frame(2)]))
    added = a_round(desk, amendments=[signed(0, writers=mine)], policy={"writers": others})
    assert desk.drive(added.run()).amendments == 1


def test_a_round_after_a_voided_one_ends_in_an_error() -> None:
    void = Amendment(run=make_run().run, n=0, round=0, changes={"void": 0}).signed(identity(OWNER))
    desk, known = Desk(dict([frame(1, round=1)])), []
    desk.on_wait = lambda: known.append(void) if desk.time == 20 else None
    text = "^round 1, fragment 0: the owner has voided round 0, which this peer has applied; start over from an anchor$"
    with pytest.raises(VoidedError, match=text):
        desk.drive(a_round(desk, amendments=known, history=history(1)).run())
    assert desk.time == 20


def test_fates() -> None:
    entry = Entry(peer=PEERS[0], size=1, hash="c" * 64, weight=1)
    manifest = Manifest(
        run="0" * 16, round=0, fragment=0, attempt=0, previous="0" * 64, digest="0" * 32, amendments=0,
        entries=(entry,), writer="0" * 64,
    )  # fmt: skip
    assert own_fate(manifest, PEERS[0], "c" * 64) == Fate.ACCEPTED
    assert own_fate(manifest, PEERS[1], "d" * 64) == Fate.CREDITED
    assert own_fate(manifest, PEERS[0], "d" * 64) == Fate.STALE
    assert own_fate(manifest, PEERS[0], None) == Fate.STALE
    assert own_fate(manifest, PEERS[1], None) == Fate.NONE
    for in_flight, fate in (("c" * 64, Fate.CREDITED), ("d" * 64, Fate.CREDITED), (None, Fate.NONE)):
        assert own_fate(manifest, PEERS[0], in_flight, failed={"c" * 64}) == fate  # nobody applied it


def test_what_a_round_writes_passes_the_judgement_of_others() -> None:
    desk = Desk(dict([frame(1), frame(2)]), {PEERS[2]: Bad("x" * 500)})
    steps = a_round(desk)
    manifest = desk.drive(steps.run())
    data = desk.data[str(paths.Manifest(0, 0, 0))]
    assert judge(data, paths.Manifest(0, 0, 0), steps.history) == manifest
    assert len(manifest.left_out[0].reason) == 200
