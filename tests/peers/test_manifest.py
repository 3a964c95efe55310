"""A manifest counts, or not, by its bytes and the history alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseloco.peers import paths
from sparseloco.peers.canonical import encode
from sparseloco.peers.manifest import (
    MAX_AMENDED,
    NO_HASH,
    Drifted,
    Entry,
    History,
    LeftOut,
    Manifest,
    Refusal,
    judge,
    manifest_limit,
    seal,
)
from sparseloco.peers.policy import Policy
from sparseloco.peers.run_file import Amendment, Void, voids_of
from tests.peers.runs import OWNER, identity, make_run

RUN = make_run(max_peers=3, max_tokens_per_round=1000, max_frame_bytes=4096)
HISTORY = History(run=RUN, round=5, fragment=1, digest="a" * 32, previous="b" * 64)
PLACE = paths.Manifest(5, 1, 0)
PEERS = sorted(identity(i).peer_id for i in range(5))


def entries(*peers: int, **changes: Any) -> tuple[Entry, ...]:
    return tuple(Entry(**{"peer": PEERS[i], "size": 100, "hash": "c" * 64, "weight": 7, **changes}) for i in peers)


def manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "run": RUN.run, "round": 5, "fragment": 1, "attempt": 0, "previous": "b" * 64, "digest": "a" * 32,
        "amendments": 0, "entries": entries(0, 1), "left_out": (LeftOut(peer=PEERS[2], reason="had not posted"),),
        "writer": identity(0).public,
    }  # fmt: skip
    return Manifest(**{**fields, **changes})


def verdict(history: History = HISTORY, place: paths.Manifest = PLACE, writer: int = 0, **changes: Any) -> Any:
    return judge(seal(manifest(**changes), identity(writer)), place, history)


def amendment(n: int, signer: int = OWNER, **changes: Any) -> Amendment:
    return Amendment(run=RUN.run, n=n, round=0, changes=changes or {"policy.min_peers": 1}).signed(identity(signer))


def test_a_valid_manifest_comes_back() -> None:
    found = verdict()
    assert isinstance(found, Manifest)
    assert found.entries == manifest().entries
    assert found.entry_of(PEERS[1]) == found.entries[1]
    assert found.entry_of(PEERS[4]) is None
    assert seal(found, identity(0)) == encode(found)


def test_the_bytes_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "peers-protocol.md").read_text("utf-8")
    shown = page.partition("```json\n")[2].partition("```")[0]
    assert shown.replace("\n", "").encode() == SEALED


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run": "0" * 16}, "run=0000000000000000, round=5, fragment=1, attempt=0 is not where it lies"),
        ({"round": 4}, "round=4, fragment=1, attempt=0 is not where it lies"),
        ({"fragment": 0}, "fragment=0, attempt=0 is not where it lies"),
        ({"attempt": 1}, "attempt=1 is not where it lies"),
        ({"previous": NO_HASH}, "previous=0000000000000000 must be bbbbbbbbbbbbbbbb, the manifest of the round before"),
        ({"amendments": 1}, "amendments=1 must be the 0 known ones and the 0 new ones"),
        ({"amendments": 17, "amended": tuple(amendment(n) for n in range(17))}, "amended=17 must be at most 16"),
        ({"amendments": 1, "amended": (amendment(1),)}, "amendment 1 must be number 0 of this run, signed by"),
        ({"amendments": 1, "amended": (amendment(0, signer=1),)}, "amendment 0 must be number 0 of this run,"),
        ({"entries": entries(1, 0)}, "entries must be sorted by peer and name each once"),
        ({"entries": entries(0, 0)}, "entries must be sorted by peer and name each once"),
        ({"entries": entries(0)}, "entries=1 must be from min_peers=2 to max_peers=3"),
        ({"entries": entries(0, 1, 2, 3), "left_out": ()}, "entries=4 must be from min_peers=2 to max_peers=3"),
        ({"entries": entries(0, 1, size=0)}, "size=0 must be from 1 to 4096"),
        ({"entries": entries(0, 1, size=4097)}, "size=4097 must be from 1 to 4096"),
        ({"entries": entries(0, 1, weight=0)}, "weight=0 must be from 1 to 1000"),
        ({"entries": entries(0, 1, weight=1001)}, "weight=1001 must be from 1 to 1000"),
        ({"left_out": (LeftOut(peer=PEERS[0], reason="x"),)}, "is both listed and left out"),
        ({"left_out": tuple(LeftOut(peer=PEERS[i], reason="x") for i in (3, 2))}, "left_out must be sorted"),
        ({"left_out": tuple(LeftOut(peer=f"{i:032x}", reason="x") for i in range(4))}, "and name at most 3"),
    ],
)  # fmt: skip
def test_each_rule_has_its_reason(changes: dict[str, Any], reason: str) -> None:
    """Also C-12: one order of peers, so that all add up in it."""
    found = verdict(**changes)
    assert isinstance(found, Refusal)
    assert reason in found.reason
    assert found.reason.startswith("manifest: ")
    assert found.reason.endswith("; refuse it")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"entries": entries(0, 1, part=1)}, "Invalid enum value 1 - at `$.entries[0].part`"),
        ({"entries": entries(0, 1, hash="C" * 64)}, "Expected `str` matching regex"),
        ({"entries": entries(0, 1, peer="../" + "0" * 29)}, "Expected `str` matching regex"),
        ({"left_out": (LeftOut(peer=PEERS[2], reason="a\x1b[2Jb"),)}, "Expected `str` matching regex"),
        ({"left_out": (LeftOut(peer=PEERS[2], reason="x" * 201),)}, "Expected `str` matching regex"),
        ({"entries": entries(0, 1, weight=-1)}, "Expected `int` >= 0"),
        ({"format": 2}, "Invalid enum value 2"),
        ({"state_sha256": "x"}, "Expected `str` matching regex"),
    ],
)
def test_values_of_another_form_are_refused(changes: dict[str, Any], reason: str) -> None:
    found = verdict(**changes)
    assert isinstance(found, Refusal)
    assert reason in found.reason
    assert found.reason.isprintable()


def test_a_stranger_may_not_write() -> None:
    """C-70. Refused: a manifest by a stranger, one that lists a stranger, and one that its writer did not sign."""
    run = make_run(admission="allow-list", members=tuple(sorted(identity(i).public for i in range(2))))
    history = replace(HISTORY, run=run)
    assert isinstance(verdict(history, run=run.run, left_out=()), Manifest)
    stranger = verdict(history, run=run.run, left_out=(), writer=4)
    assert isinstance(stranger, Refusal)
    assert "is not among those who may write manifests" in stranger.reason
    member = verdict(history, run=run.run, left_out=(), entries=entries(0, 1, 2, 3, 4)[2:4])
    assert isinstance(member, Refusal)
    data = seal(manifest(), identity(0))
    forged = judge(data.replace(identity(0).public.encode(), identity(1).public.encode()), PLACE, HISTORY)
    assert isinstance(forged, Refusal)
    assert "the signature is not that of writer=" in forged.reason


def test_an_empty_manifest_is_valid() -> None:
    """No quorum: everybody credits, so nothing is lost and nothing is applied twice."""
    assert isinstance(verdict(entries=()), Manifest)


def test_a_quorum_of_one_needs_a_policy_that_says_so() -> None:
    """C-09."""
    assert isinstance(verdict(entries=entries(0)), Refusal)
    alone = make_run(min_peers=1)
    assert isinstance(verdict(replace(HISTORY, run=alone), run=alone.run, entries=entries(0)), Manifest)


def test_state_that_differs_is_neither_valid_nor_refused_at_once() -> None:
    """The reader may be the one that drifted; after a replay it knows that it is not."""
    drift = verdict(digest="d" * 32)
    assert drift == Drifted(f"digest={'d' * 32} is not the reader's {'a' * 32}")
    refused = verdict(replace(HISTORY, replayed=True), digest="d" * 32)
    assert isinstance(refused, Refusal)
    assert "also after a replay from an anchor" in refused.reason
    assert isinstance(verdict(digest="d" * 32, entries=entries(0)), Refusal)


def test_rounds_with_an_anchor_carry_the_hash_of_the_state() -> None:
    """C-10, C-41: an anchor is checked against the chain, not taken from whoever offers it."""
    due = replace(HISTORY, round=16, state_sha256="e" * 64)
    place = paths.Manifest(16, 1, 0)
    assert due.wants_state_hash
    assert not HISTORY.wants_state_hash
    assert isinstance(verdict(due, place, round=16, state_sha256="e" * 64), Manifest)
    assert isinstance(verdict(due, place, round=16, state_sha256="f" * 64), Drifted)
    for refused in (verdict(due, place, round=16, state_sha256=""), verdict(state_sha256="e" * 64)):
        assert isinstance(refused, Refusal), "no state that a reader could have makes it right"
        assert "must be there in rounds with an anchor, and in no others" in refused.reason


def test_amendments_travel_in_the_manifest_and_hold_in_its_round() -> None:
    """A round that is stuck below min_peers closes with a manifest that acknowledges another min_peers."""
    assert isinstance(verdict(entries=entries(0)), Refusal)
    first = verdict(amendments=1, amended=(amendment(0),), entries=entries(0))
    assert isinstance(first, Manifest)
    following = HISTORY.after(first, "f" * 32)
    assert (following.round, following.previous, following.digest) == (6, first.sha256, "f" * 32)
    assert (HISTORY.policy.min_peers, following.policy.min_peers) == (2, 1)
    place = paths.Manifest(6, 1, 0)
    fields = {"round": 6, "previous": first.sha256, "digest": "f" * 32}
    assert isinstance(verdict(following, place, **fields, entries=entries(0)), Refusal)  # forgets the amendments
    assert isinstance(verdict(following, place, **fields, entries=entries(0), amendments=1), Manifest)


def acknowledging(history: History = HISTORY, round: int = 0, writer: int = 0, **more: Any) -> Any:
    """The verdict on a manifest that acknowledges one amendment."""
    changes = {f"policy.{name}": more.pop(name) for name in list(more) if name in Policy.__struct_fields__}
    one = Amendment(run=RUN.run, n=0, round=round, changes=changes).signed(identity(OWNER))
    return verdict(history, writer=writer, amendments=1, amended=(one,), **more)


def test_an_amendment_that_names_a_later_round_does_not_hold_yet() -> None:
    assert isinstance(acknowledging(round=5, min_peers=1, entries=entries(0)), Manifest)
    refused = acknowledging(round=6, min_peers=1, entries=entries(0))
    assert isinstance(refused, Refusal)
    assert "entries=1 must be from min_peers=2 to max_peers=3" in refused.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"min_peers": 3}, "entries=2 must be from min_peers=3"),
        ({"max_frame_bytes": 256, "entries": entries(0, 1, size=257)}, "size=257 must be from 1 to 256"),
        ({"max_tokens_per_round": 6}, "weight=7 must be from 1 to 6"),
        ({"writers": (identity(1).public,)}, "is not among those who may write manifests"),
        (
            {"admission": "allow-list", "members": tuple(sorted(identity(i).public for i in (0, 3)))},
            "is not a member",
        ),
    ],
)
def test_what_is_posted_or_written_already_is_judged_by_the_new_rule(changes: dict[str, Any], reason: str) -> None:
    """Also a writer that an amendment removes cannot be the one that acknowledges it."""
    found = acknowledging(**changes)
    assert isinstance(found, Refusal)
    assert reason in found.reason


def test_a_writer_that_an_amendment_adds_may_acknowledge_it() -> None:
    run = make_run(writers=(identity(1).public,), max_peers=3)
    history = replace(HISTORY, run=run)
    assert isinstance(verdict(history), Refusal)
    assert isinstance(acknowledging(history, writers=(identity(0).public,)), Manifest)


def test_what_a_reader_must_know_before_it_reads_holds_from_the_next_round() -> None:
    """max_peers bounds the bytes of a manifest, and anchor_every says which carries a hash of the state."""
    one = amendment(0, **{"policy.max_peers": 1, "policy.min_peers": 1, "policy.anchor_every": 5})
    found = verdict(amendments=1, amended=(one,))
    assert isinstance(found, Manifest)
    assert HISTORY.run_under((one,)).policy.max_peers == 3
    following = HISTORY.after(found, "f" * 32)
    assert (following.policy.max_peers, following.policy.anchor_every) == (1, 5)
    assert manifest_limit(following.policy) < manifest_limit(HISTORY.policy)
    both = amendment(0, **{"policy.max_peers": 9, "policy.min_peers": 8})
    assert HISTORY.run_under((both,)).policy == HISTORY.policy, "8 of at most 3 is no rule, so nothing of it holds yet"
    assert HISTORY.after(verdict(amendments=1, amended=(both,)), "f" * 32).policy.min_peers == 8


def test_where_a_round_is_voided_only_what_acknowledges_it_counts() -> None:
    """It depends on what the reader knows of the owner's voids, and on nothing else that it has seen."""
    void = Amendment(run=RUN.run, n=0, round=5, changes={"void": 1}).signed(identity(OWNER))
    knows = replace(HISTORY, voids=voids_of([void]))
    assert knows.voids == (Void(5, 1, 0),)
    assert isinstance(verdict(), Manifest)
    refused = verdict(knows)
    assert isinstance(refused, Refusal)
    assert "amendments=0 must be above 0, the amendment that voids this round" in refused.reason
    assert isinstance(verdict(knows, amendments=1, amended=(void,)), Manifest)
    for other in (Void(4, 0, 0), Void(6, 1, 0), Void(5, 0, 0)):  # another fragment, a later round
        assert isinstance(verdict(replace(HISTORY, voids=(other,))), Manifest)


def test_nothing_that_follows_on_a_voided_round_counts() -> None:
    """And no such chain can hide it by acknowledging the amendment later, not even where nobody knows of it yet."""
    void = Amendment(run=RUN.run, n=0, round=4, changes={"void": 1}).signed(identity(OWNER))
    knows = replace(HISTORY, voids=voids_of([void]))
    assert knows.voided == Void(4, 1, 0)
    for history in (knows, HISTORY):
        found = verdict(history, amendments=1, amended=(void,))
        assert isinstance(found, Refusal)
    assert "amendment 0 voids round 4, which this chain is made of" in found.reason
    found = verdict(knows)
    assert isinstance(found, Refusal)
    assert "it follows on round 4, which amendment 0 voids" in found.reason
    anew = replace(knows, amendments=(void,))
    assert anew.voided is None
    assert isinstance(verdict(anew, amendments=1), Manifest)


def test_a_writer_that_the_void_bars_cannot_take_the_place() -> None:
    """Policy and void are in one amendment, which the manifest that takes the place has to acknowledge."""
    changes = {"void": 1, "policy.writers": (identity(1).public,)}
    void = Amendment(run=RUN.run, n=0, round=5, changes=changes).signed(identity(OWNER))
    knows = replace(HISTORY, voids=voids_of([void]))
    assert isinstance(verdict(knows, entries=()), Refusal)
    barred = verdict(knows, amendments=1, amended=(void,))
    assert isinstance(barred, Refusal)
    assert "is not among those who may write manifests" in barred.reason
    assert isinstance(verdict(knows, writer=1, amendments=1, amended=(void,)), Manifest)


def test_the_limit_holds_the_largest_valid_manifest() -> None:
    """Sizes are checked before a download."""
    run = make_run(max_peers=4, max_frame_bytes=2**40, max_tokens_per_round=2**29 - 1)
    names = [f"{i:032x}" for i in range(8)]
    full = tuple(Entry(peer=name, size=2**40, hash="c" * 64, weight=2**29 - 1) for name in names[:4])
    left = tuple(LeftOut(peer=name, reason='"' * 200) for name in names[4:])
    text = "x" * 1000
    new = tuple(amendment(n, **{f"policy.{'k' * 90}{i}": text for i in range(14)}) for n in range(MAX_AMENDED))
    history = replace(HISTORY, run=run)
    data = seal(manifest(run=run.run, entries=full, left_out=left, amendments=MAX_AMENDED, amended=new), identity(0))
    assert all(14_000 < len(encode(one)) < 2**14 for one in new)
    assert isinstance(judge(data, PLACE, history), Manifest)
    too_large = judge(b" " * (manifest_limit(run.policy) + 1), PLACE, history)
    assert isinstance(too_large, Refusal)
    assert f"must be at most {manifest_limit(run.policy)}" in too_large.reason


SEALED = seal(manifest(), identity(0))


@settings(max_examples=300)
@given(st.integers(0, len(SEALED) - 1), st.integers(1, 255))
def test_every_changed_byte_is_refused(where: int, flip: int) -> None:
    changed = SEALED[:where] + bytes([SEALED[where] ^ flip]) + SEALED[where + 1 :]
    assert isinstance(judge(changed, PLACE, HISTORY), Refusal)


def test_every_lowest_bit_and_every_length_is_refused() -> None:
    for where in range(len(SEALED)):
        changed = SEALED[:where] + bytes([SEALED[where] ^ 1]) + SEALED[where + 1 :]
        assert isinstance(judge(changed, PLACE, HISTORY), Refusal)
        assert isinstance(judge(SEALED[:where], PLACE, HISTORY), Refusal)


@given(st.randoms(use_true_random=False), st.sampled_from(["order", "space", "double", "unknown", "escape"]))
def test_other_ways_to_write_the_same_are_refused(draw: Any, how: str) -> None:
    table = msgspec.json.decode(SEALED)
    keys = list(table)
    draw.shuffle(keys)
    if how == "order":
        other = msgspec.json.encode({key: table[key] for key in keys})
        if keys == sorted(keys):
            return
    elif how == "space":
        other = SEALED.replace(b",", b", ", draw.randint(1, 5))
    elif how == "double":
        other = SEALED[:-1] + b"," + msgspec.json.encode({keys[0]: table[keys[0]]})[1:]
    elif how == "unknown":
        other = encode({**table, draw.choice(["zz", "a", "Writer"]): 0})
    else:
        other = SEALED.replace(b"had", b"\\u0068ad")
    assert other != SEALED
    assert isinstance(judge(other, PLACE, HISTORY), Refusal)


@given(st.binary(max_size=300) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(msgspec.json.encode))
def test_rubbish_is_refused_and_never_raises(data: bytes) -> None:
    """C-69."""
    assert isinstance(judge(data, PLACE, HISTORY), Refusal)


def test_a_verdict_depends_on_nothing_else() -> None:
    """Two readers of equal history: equal verdicts, also on what is refused, in any order of calls."""
    twin = History(run=make_run(max_peers=3, max_tokens_per_round=1000, max_frame_bytes=4096), round=5, fragment=1,
                   digest="a" * 32, previous="b" * 64)  # fmt: skip
    samples = [
        SEALED,
        SEALED[:-1],
        seal(manifest(entries=()), identity(1)),
        seal(manifest(digest="d" * 32), identity(2)),
    ]
    there = [judge(data, PLACE, HISTORY) for data in samples]
    back = [judge(data, PLACE, twin) for data in reversed(samples)]
    assert there == back[::-1]
