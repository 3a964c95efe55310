"""run.json, policy and amendments: strict, canonical, signed, and harmless to whoever reads them."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from sparseloco.errors import ConfigError, WireError
from sparseloco.peers.canonical import encode
from sparseloco.peers.identity import peer_id_of
from sparseloco.peers.policy import Policy
from sparseloco.peers.run_file import (
    AMENDMENT_LIMIT,
    RUN_LIMIT,
    Amendment,
    RunFile,
    Void,
    apply_amendment,
    read_amendment,
    read_run,
    run_at,
    run_id,
    voids_of,
)
from tests.peers.runs import OWNER, identity, make_run

RUN = make_run()


def amendment(n: int, round: int = 0, **changes: Any) -> Amendment:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return Amendment(run=RUN.run, n=n, round=round, changes=named).signed(identity(OWNER))


def test_a_run_comes_back_from_its_bytes() -> None:
    assert read_run(encode(RUN)) == RUN
    assert read_run(encode(RUN), owner=identity(OWNER).public) == RUN
    assert len(RUN.run) == 16
    assert run_id("test", "0" * 32, RUN.owner) != RUN.run


def test_another_owner_is_refused() -> None:
    with pytest.raises(WireError, match=r"is not --owner '[0-9a-f]+'; ask for the right address or key"):
        read_run(encode(RUN), owner=identity(1).public)
    with pytest.raises(ConfigError, match=r"must have the key that run.json names; load the owner's key"):
        RUN.signed(identity(1))


def test_every_changed_byte_is_refused() -> None:
    data = encode(RUN)
    for where in range(0, len(data), 3):
        with pytest.raises(WireError):
            read_run(data[:where] + bytes([data[where] ^ 1]) + data[where + 1 :])
    for cut in (0, 1, len(data) // 2, len(data) - 1):
        with pytest.raises(WireError):
            read_run(data[:cut])


def test_forms_that_are_not_canonical_are_refused() -> None:
    """C-69: two ways to write the same would have two hashes."""
    data = encode(RUN)
    for other in (b" " + data, data + b"\n", data.replace(b":", b": ", 1), data.replace(b"test", b"t\\u0065st", 1)):
        with pytest.raises(WireError, match=r"run\.json"):
            read_run(other)
    with pytest.raises(WireError, match="Object contains unknown field `x`"):
        read_run(data[:-1] + b',"x":1}')
    with pytest.raises(WireError, match=rf"^run.json={RUN_LIMIT + 1} bytes: must be at most {RUN_LIMIT}; refuse it$"):
        read_run(b" " * (RUN_LIMIT + 1))
    with pytest.raises(WireError, match="must not be nested deeper than 40; refuse it"):
        read_run(b"[" * 100_000)


@pytest.mark.parametrize(
    ("section", "value", "reason"),
    [
        ("model", {"trust_remote_code": True}, "model.trust_remote_code: must not stand in a run, which makes no"),
        ("model", {"shape": {"auto_map": {"AutoModel": "x.Y"}}}, "model.shape.auto_map: must not stand in a run"),
        ("model", {"pretrained": "someone/model"}, "model.pretrained='someone/model': must not stand in a run"),
        ("model", {"config": "folder"}, "model.config='folder': must not stand in a run"),
        ("data", {"path": "/etc/passwd"}, "data.path='/etc/passwd': must not be a path on a peer's machine"),
        ("data", {"path": "~/text"}, "must not be a path on a peer's machine"),
        ("data", {"path": "a/../../b", "format": "hf"}, "must not be a path on a peer's machine"),
        ("data", {"path": "C:\\text"}, "must not be a path on a peer's machine"),
        ("data", {"path": "folder/text"}, "data.path='folder/text': must be 'stdlib', or owner/name of a dataset"),
        ("data", {"sources": [{"path": "text"}]}, "data.path='text': must be 'stdlib'"),
        ("data", {"sources": ["text"]}, "data.sources: must be a list of tables"),
        ("data", {"tokenizer": "gpt2"}, "data.tokenizer: must not stand in a run"),
        ("data", {"path": "file:///etc/passwd"}, "must not be an address"),
        ("train", {"log": "https://example.org"}, "must not be an address, since a run tells no peer whom to call"),
        ("train", {"note": "a\x1b[2Jb"}, "must be at most 1000 characters without control characters"),
        ("train", {"a\nb": 1}, r"the key 'a\\nb' must be a plain name"),
        ("train", {"n": 2**70}, "train.n: must fit 64 bits"),
        ("algorithm", {"inner_steps": 3}, "algorithm.preset=None: must name a preset"),
    ],
)  # fmt: skip
def test_what_could_hurt_a_reader_is_refused(section: str, value: dict[str, Any], reason: str) -> None:
    """A run.json that names remote code, a local path or an address is refused with the reason."""
    with pytest.raises(WireError, match=reason):
        read_run(encode({**msgspec.to_builtins(RUN), section: value}))
    with pytest.raises(ConfigError, match=reason):
        msgspec.structs.replace(RUN, **{section: value})


def test_values_are_plain() -> None:
    for value, reason in (
        (float("inf"), "train.x=inf: must be finite"),
        (b"x", "train.x: must be a plain value, not a bytes"),
    ):
        with pytest.raises(ConfigError, match=reason):
            msgspec.structs.replace(RUN, train={"x": value})


def test_a_dataset_of_the_hub_may_be_named() -> None:
    recipe = {"sources": [{"path": "owner/name", "format": "hf", "subset": "en", "weight": 1.0}, {"path": "stdlib"}]}
    run = msgspec.structs.replace(RUN, data=recipe).signed(identity(OWNER))
    assert read_run(encode(run)).data["sources"][0]["path"] == "owner/name"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"min_peers": 0}, "policy.min_peers=0: must be from 1 to 4096; use 2, or 1 to let a peer train alone"),
        ({"min_peers": 2.5}, "policy.min_peers=2.5: must be a whole number; leave out the fraction"),
        ({"min_peers": 65}, "policy.min_peers=65: must be at most max_peers=64; lower it or raise max_peers"),
        ({"deadline_s": 0.0}, "policy.deadline_s=0.0: must be from 1 to 604800; use 600"),
        ({"deadline_s": float("nan")}, "policy.deadline_s=nan: must be from 1 to 604800; use 600"),
        ({"lease_s": 0.5}, "policy.lease_s=0.5: must be from 1 to 86400; use 120"),
        ({"max_tokens_per_round": 2**29}, "policy.max_tokens_per_round=536870912: must be from 1 to 536870911; "
         "use a little more than the fastest peer sees in a round"),
        ({"max_frame_bytes": 1}, "policy.max_frame_bytes=1: must be from 256 to 1099511627776; use the size of a frame "
         "that `describe` names"),
        ({"max_peers": 5000}, "policy.max_peers=5000: must be from 1 to 4096; use 64"),
        ({"anchor_every": 0}, "policy.anchor_every=0: must be from 1 to 1000000; use 16"),
        ({"slots": 0}, "policy.slots=0: must be from 1 to 1000000; use the value of max_peers or more"),
        ({"admission": "all"}, "policy.admission='all': must be one of open, allow-list; choose one of them"),
        ({"no_quorum": "trian"}, "policy.no_quorum='trian': must be one of wait, train; did you mean 'train'?"),
        ({"members": (identity(1).public,)}, "policy.members: is for admission='allow-list' only, since an open run "
         "admits everybody; set admission or leave the members out"),
        ({"admission": "allow-list"}, "policy.members=0 keys: must be at least min_peers=2, or no round ever closes; "
         "name all members"),
        ({"writers": ("b" * 64, "a" * 64)}, "policy.writers: must be sorted and name each key once; sort them"),
    ],
)  # fmt: skip
def test_ranges_are_checked_in_one_place(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        Policy(**settings)


def test_a_quorum_of_one_must_be_asked_for() -> None:
    """C-09: nobody becomes the source of truth by being alone."""
    assert Policy().min_peers == 2
    assert Policy(min_peers=1).min_peers == 1
    assert Policy().no_quorum == "wait"


def test_who_is_admitted_and_who_may_write() -> None:
    keys = sorted(identity(i).public for i in range(3))
    some = Policy(admission="allow-list", members=tuple(keys[:2]))
    assert some.admits(peer_id_of(keys[0]))
    assert not some.admits(peer_id_of(keys[2]))
    assert some.may_write(keys[1])
    assert not some.may_write(keys[2])
    one = Policy(writers=(keys[2],))
    assert one.admits(peer_id_of(keys[0]))
    assert [one.may_write(key) for key in keys] == [False, False, True]


def test_whole_and_broken_seconds_have_the_same_bytes() -> None:
    assert encode(Policy(deadline_s=60)) == encode(Policy(deadline_s=60.0))
    assert msgspec.json.decode(encode(Policy(deadline_s=60)), type=Policy) == Policy(deadline_s=60)


def test_an_amendment_holds_from_its_round_or_its_acknowledgement() -> None:
    """max(named round, first round whose manifest acknowledges it), as a function of the chain alone."""
    first, second = amendment(0, 10, policy__deadline_s=60.0), amendment(1, 5, policy__min_peers=3)
    assert run_at(RUN, [], 20) == RUN
    assert run_at(RUN, [first], 9) == run_at(RUN, [], 9, [first]) == RUN
    assert run_at(RUN, [first], 10).policy.deadline_s == run_at(RUN, [], 10, [first]).policy.deadline_s == 60.0
    both = run_at(RUN, [first], 9, [second]).policy
    assert (both.min_peers, both.deadline_s) == (3, 600.0)
    assert run_at(RUN, [first, second], 10).policy.deadline_s == 60.0


def test_the_outer_rate_can_be_amended_where_the_preset_has_one() -> None:
    """It is in no frame, so the fingerprint stays that of run.json."""
    run = run_at(RUN, [], 0, [amendment(0, algorithm__outer_lr=0.5)])
    assert run.algorithm == {**RUN.algorithm, "outer_lr": 0.5}
    assert run.fingerprint == RUN.fingerprint
    other = msgspec.structs.replace(RUN, algorithm={"preset": "local_sgd"})
    assert run_at(other, [amendment(0, algorithm__outer_lr=0.5)], 0) == other
    with pytest.raises(ConfigError, match=r"must be a setting of the preset, and 'local_sgd' has none; start another"):
        apply_amendment(other, amendment(0, algorithm__outer_lr=0.5))
    for wrong in (0, -1.0, 1001, True, "0.5"):
        with pytest.raises(ConfigError, match=r"^algorithm.outer_lr=.*: must be above 0 and at most 1000; use 0.7$"):
            apply_amendment(RUN, amendment(0, algorithm__outer_lr=wrong))


@pytest.mark.parametrize(
    "name",
    [
        "owner",
        "model.hidden_size",
        "policy",
        "policy.a.b",
        "run",
        "tokenizer",
        "algorithm.k",
        "train.steps",
        "fingerprint",
    ],
)
def test_what_would_be_another_run_cannot_be_amended(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^changes: '{name}' cannot be amended; name a key of policy or algorithm.outer_lr, or "
    ):
        Amendment(run=RUN.run, n=0, round=0, changes={name: 1})


def test_a_change_that_breaks_a_rule_is_left_out_by_all_alike() -> None:
    bad, good = amendment(0, policy__min_peers=0), amendment(1, policy__min_peers=3)
    unknown = amendment(2, policy__nonsense=1)
    fixed = amendment(3, policy__lease_s=1.0)
    assert run_at(RUN, [bad, good, unknown, fixed], 0) == run_at(RUN, [good], 0)
    assert run_at(RUN, [good], 0).policy.min_peers == 3
    for wrong in (bad, unknown, fixed):
        with pytest.raises(
            ConfigError, match=r"policy.min_peers=0|unknown key 'policy.nonsense'|lease_s' is read from run.json when a"
        ):
            apply_amendment(RUN, wrong)
    with pytest.raises(ConfigError, match="must not be an address"):
        amendment(0, policy__log="https://example.org")


def test_a_void_names_a_fragment_and_changes_no_rule() -> None:
    one, other = amendment(0, 7, void=2), amendment(1, 3, void=0, policy__min_peers=3)
    assert voids_of([one, amendment(1), other]) == (Void(7, 2, 0), Void(3, 0, 1))
    assert run_at(RUN, [one], 7) == RUN
    assert run_at(RUN, [], 3, [other]).policy.min_peers == 3
    for wrong in (-1, 10_000, True, "0", None):
        with pytest.raises(ConfigError, match=r"^void=.*: must be a fragment, from 0 to 9999; name one$"):
            amendment(0, void=wrong)


def test_amendments_are_checked_like_the_run() -> None:
    good = amendment(3, 7, policy__min_peers=3)
    assert read_amendment(encode(good), RUN, 3) == good
    stranger = Amendment(run=RUN.run, n=3, round=7, changes={"policy.min_peers": 3}).signed(identity(1))
    with pytest.raises(WireError, match=r"^amendment 3: the signature is not the owner's; refuse it$"):
        read_amendment(encode(stranger), RUN, 3)
    with pytest.raises(WireError, match=r"^amendment 2: says run [0-9a-f]{16} and number 3; refuse it$"):
        read_amendment(encode(good), RUN, 2)
    with pytest.raises(WireError, match=rf"must be at most {AMENDMENT_LIMIT}"):
        read_amendment(b" " * (AMENDMENT_LIMIT + 1), RUN, 0)
    with pytest.raises(ConfigError, match=r"^amendment.n=-1: must be from 0 to 99999999; mend it$"):
        Amendment(run=RUN.run, n=-1, round=0, changes={})


def test_a_run_id_follows_from_its_owner() -> None:
    with pytest.raises(ConfigError, match=r"must follow from name, nonce and owner; take run_id\(\)"):
        msgspec.structs.replace(RUN, run="f" * 16)
    assert isinstance(RUN, RunFile)
