"""What `run` and `join` refuse, each with its reason, before anything is trained."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparseloco.cli.joining import default_folder
from sparseloco.cli.peer_runs import config_of
from sparseloco.peers import canonical
from sparseloco.peers.identity import Domain, Identity
from sparseloco.peers.run_file import read_run, run_id
from tests.cli import Call, Ended
from tests.peers.joins import prepare

MISTAKE = 2


@pytest.fixture
def made(cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run in the directory ``store``, as ``run create`` describes it."""
    monkeypatch.setenv("SPARSELOCO_CONFIG", str(tmp_path / "config"))
    prepare(tmp_path, "owner.key", "a.key", "b.key")
    created = cli("run", "create", "store", "run.toml", "--key", "owner.key", "--json")
    assert created.code == 0, created.err
    return json.loads(created.out)


def refused(ended: Ended, *words: str) -> None:
    assert ended.code == MISTAKE, ended
    error = ended.err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    for text in words:
        assert text in error, error


def replaced(**changes: Any) -> None:
    """Another ``run.json`` of the same owner in the store, with what no check has refused before it was signed."""
    owner = Identity.load("owner.key")
    table = json.loads(Path("store/run.json").read_text()) | changes
    table["signature"] = "0" * 128
    signature = owner.sign(Domain.RUN, table["run"], body=canonical.encode(table))
    Path("store/run.json").write_bytes(canonical.encode(table | {"signature": signature.hex()}))


def test_no_run(cli: Call, made: dict[str, Any]) -> None:
    Path("empty").mkdir()
    refused(
        cli("join", "empty", "--key", "a.key"),
        "URL='empty': must hold a run, but there is no run.json; check the address, or make one with `sparseloco run "
        "create`",
    )


def test_another_owner_than_asked_for(cli: Call, made: dict[str, Any]) -> None:
    other = Identity.load("a.key").public
    refused(
        cli("join", "store", "--owner", other),
        f"--owner {other}: must be the owner of the run at store, which is {made['owner']}; ask for the right address",
    )
    refused(cli("join", "store", "--owner", "me"), "public key='me': must be 64 lower-case hex digits; copy it whole")
    assert not Path("config").exists(), "nothing is remembered, and no key made"


def test_an_owner_is_trusted_once(cli: Call, made: dict[str, Any]) -> None:
    """Trust on first use is said aloud and remembered; another owner at that address is refused from then on."""
    first = cli("join", "store", "--key", "none.key")
    told = f"owner {made['owner']} is trusted on first use, since no --owner was given; compare it with a key"
    assert told in first.err
    assert Path("config/known_runs").read_text() == f"{made['owner']} {Path('store').absolute()}\n"
    assert "trusted" not in cli("join", "./store", "--key", "none.key").err, "the same place by another name"
    Path("store").rename("old")
    assert cli("run", "create", "store", "run.toml", "--key", "b.key").code == 0
    other = Identity.load("b.key").public
    refused(
        cli("join", "store", "--key", "a.key"),
        f"owner={other}: must be {made['owner']}, which was trusted for store on first use",
        "somebody put another run there, so ask its owner for the key and name it with --owner",
    )
    refused(cli("join", "store", "--key", "none.key", "--owner", other), "key='none.key': must be a file")
    assert f"{other} " in Path("config/known_runs").read_text(), "naming the new owner settles it"
    Path("config/known_runs").write_text("rubbish\n")
    refused(
        cli("join", "store"), "known_runs: must hold a public key and an address in each line; public key='rubbish'"
    )


def test_what_a_run_names(cli: Call, made: dict[str, Any]) -> None:
    """C-69: remote code and places on a reader's disk or on the network are refused, though the owner signed them."""
    model = json.loads(Path("store/run.json").read_text())["model"]
    replaced(model={**model, "trust_remote_code": True})
    refused(cli("join", "store"), "run.json: model.trust_remote_code: ")
    replaced(model=model, data={"path": "/etc"})
    refused(cli("join", "store"), "run.json: data.path='/etc': must not be a path on a peer's machine; put the content")
    replaced(data={"path": "stdlib", "name": "http://127.0.0.1/x"})
    refused(cli("join", "store"), "run.json: data.name='http://127.0.0.1/x': must not be an address")
    assert not Path("runs").exists()


def test_settings_that_nobody_knows(cli: Call, made: dict[str, Any]) -> None:
    train = json.loads(Path("store/run.json").read_text())["train"]
    replaced(train={**train, "shrads": 2})
    refused(cli("join", "store"), "train: unknown key 'shrads'; did you mean 'shards'?")


def test_a_signature_of_somebody_else(cli: Call, made: dict[str, Any]) -> None:
    place = Path("store/run.json")
    place.write_text(place.read_text().replace('"steps":4', '"steps":6'))
    refused(
        cli("join", "store"), "run.json: the signature is not its owner's; somebody changed the file, so do not join"
    )


def test_another_algorithm_or_model(cli: Call, made: dict[str, Any]) -> None:
    """A version that computes otherwise finds it before it trains."""
    replaced(fingerprint="ab" * 8)
    refused(
        cli("join", "store", "--data", "text.txt"),
        f"fingerprint={made['fingerprint']}: must be {'ab' * 8}, as in run",
        "use the [algorithm] of run.json",
    )
    replaced(fingerprint=made["fingerprint"], tensors="cd" * 32)
    refused(cli("join", "store", "--data", "text.txt"), "tensors=", "build the model that run.json describes")


def test_another_tokenizer(cli: Call, made: dict[str, Any]) -> None:
    Path("store/tokenizer.json").write_text("{}")
    refused(
        cli("join", "store", "--data", "text.txt"),
        "tokenizer.json: must have the hash ",
        "that run.json names, but has 44136fa355b3678a; somebody changed it, so do not join",
    )


def test_a_key_in_use(cli: Call, made: dict[str, Any]) -> None:
    """C-45: two peers on one host."""
    handle = os.open("a.key", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        refused(
            cli("join", "store", "--key", "a.key"),
            "key='a.key': is in use by another peer on this machine, and two peers must not have one key; give this "
            "one its own with --key",
        )
    finally:
        os.close(handle)


def test_folders_of_something_else(cli: Call, made: dict[str, Any]) -> None:
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("a")
    refused(
        cli("join", "store", "--out", "mine"), "--out 'mine': must be new, empty or hold nothing but an earlier run"
    )
    Path("other").mkdir()
    Path("other/run.json").write_bytes(Path("store/run.json").read_bytes())
    Path("store").rename("old")
    assert cli("run", "create", "store", "run.toml", "--key", "owner.key").code == 0
    refused(cli("join", "store", "--out", "other"), f"--out 'other': holds run {made['run']}, but this is run ")
    Path("other/run.json").write_text("{")
    refused(cli("join", "store", "--out", "other"), "--out 'other': its run.json cannot be read (run.json: ")


def test_a_folder_of_another_peer(cli: Call, made: dict[str, Any]) -> None:
    """Its residual would count twice if that peer came back elsewhere."""
    Path("mine/peer").mkdir(parents=True)
    Path("mine/run.json").write_bytes(Path("store/run.json").read_bytes())
    mine, other = Identity.load("a.key").peer_id, Identity.load("b.key").peer_id
    Path("mine/peer/id").write_text(f"{other}\n")
    refused(
        cli("join", "store", "--key", "a.key", "--out", "mine"),
        f"--out 'mine': holds what peer {other[:8]} has left, but this key is peer {mine[:8]}'s; pass the key of that "
        "peer, or choose another folder",
    )


def test_a_folder_follows_from_the_run(made: dict[str, Any]) -> None:
    """The same at every start, and nothing that a name could lead to."""
    run = read_run(Path("store/run.json").read_bytes())
    assert default_folder(run) == Path("runs") / f"run-{made['run'][:8]}"
    nonce, owner = run.nonce, run.owner
    odd = msgspec.structs.replace(run, name="../a b", run=run_id("../a b", nonce, owner))
    assert default_folder(odd) == Path("runs") / f"---a-b-{odd.run[:8]}"


def test_how_many_is_not_the_owners_to_say(cli: Call, made: dict[str, Any]) -> None:
    run = read_run(Path("store/run.json").read_bytes())
    odd = msgspec.structs.replace(run, train={**run.train, "workers": 7, "shards": 2, "processes": True})
    config = config_of(odd, Path("tokenizer.json"), overrides=["train.accumulation=2", "checkpoint.every=4"])
    assert (config.train.workers, config.train.shards, config.train.processes) == (1, 1, False)
    assert (config.train.accumulation, config.checkpoint.every) == (2, 4)


def test_settings_that_are_not_a_peers(cli: Call, made: dict[str, Any]) -> None:
    refused(
        cli("join", "store", "--key", "a.key", "--set", "train.batch_size=1"),
        "--set train.batch_size: must be the same for all peers; a peer may choose train.accumulation, train.autocast",
    )


@pytest.mark.parametrize("package", ["obstore", "nacl"])
def test_without_the_extra(cli: Call, made: dict[str, Any], package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    ended = cli("join", "store")
    assert (ended.code, "sparseloco[peers]" in ended.err) == (MISTAKE, True)


def test_create_refuses(cli: Call, made: dict[str, Any]) -> None:
    def create(url: str, *words: str) -> Ended:
        return cli("run", "create", url, "run.toml", "--key", "owner.key", *words)

    refused(create("store"), f"URL='store': holds a run already ({made['run']}); use another folder of the store")
    refused(create("new", "--set", "data.path=text.txt"), "data.path='text.txt': must be 'stdlib', or owner/name of a")
    refused(create("new", "--policy", "min_pers=1"), "policy: unknown key 'min_pers'; did you mean 'min_peers'?")
    refused(create("new", "--policy", "deadline_s=0"), "policy.deadline_s=0")
    refused(
        create("new", "--policy", "max_tokens_per_round=63"),
        "policy.max_tokens_per_round=63: must be at least the 64 tokens that a peer sees in a round; raise it",
    )
    refused(create("new", "--policy", "max_frame_bytes=256"), "policy.max_frame_bytes=256: must be at least the ")
    refused(cli("run", "create", "new", "run.toml", "--key", "no.key"), "make one with `sparseloco run keygen`")
    Path("new").mkdir(exist_ok=True)
    Path("new/tokenizer.json").write_text("{}")
    refused(create("new"), "URL='new': holds the tokenizer of another run; use an empty folder of the store")
    assert not Path("new/run.json").exists()


def test_create_refuses_a_store_that_overwrites(
    cli: Call, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparseloco.peers import store as stores

    opened = stores.open_store("memory://")
    monkeypatch.setattr(type(opened), "create", lambda self, path, data: self.put(path, data))
    refused(
        cli("run", "create", "new", "run.toml", "--key", "owner.key"),
        "the store wrote over an object that was there",
        "use a store that honours conditional puts (If-None-Match)",
    )


def test_keygen_never_overwrites(cli: Call, made: dict[str, Any]) -> None:
    refused(cli("run", "keygen", "a.key"), "key='a.key': must not exist yet, since a lost key cannot be made again")
    refused(cli("run", "keygen", "no/a.key"), "key='no/a.key': must be a file that can be made (No such file")


def test_amend(cli: Call, made: dict[str, Any]) -> None:
    def amend(*changes: str, key: str = "owner.key") -> Ended:
        return cli("run", "amend", "store", "--key", key, "--round", "3", *changes, "--json")

    assert json.loads(amend("policy.deadline_s=30").out) == {
        "run": made["run"], "n": 0, "round": 3, "changes": {"policy.deadline_s": 30}
    }  # fmt: skip
    assert json.loads(amend("policy.min_peers=3", "policy.max_peers=3").out)["n"] == 1
    refused(amend("policy.max_peers=2"), "policy.min_peers=3: must be at most max_peers=2")
    refused(amend("policy.dedline_s=3"), "changes: unknown key 'policy.dedline_s'; see the policy in run.json")
    assert json.loads(amend("algorithm.outer_lr=0.5").out)["changes"] == {"algorithm.outer_lr": 0.5}
    refused(amend("algorithm.outer_lr=0"), "algorithm.outer_lr=0: must be above 0 and at most 1000; use 0.7")
    for name in ("algorithm.k", "train.steps", "model.width"):
        refused(amend(f"{name}=8"), f"changes: {name!r} cannot be amended; name a key of policy or algorithm.outer_lr")
    refused(amend("policy.lease_s=3"), "changes: 'policy.lease_s' is read from run.json when a peer starts; start ano")
    plain = cli("run", "amend", "store", "--key", "owner.key", "policy.max_peers=9", "policy.deadline_s=31")
    assert plain.out == (
        f"amendment 3 of run {made['run']}: policy.max_peers=9, policy.deadline_s=31, from the first round whose "
        "manifest acknowledges it, which may be one that is open now; policy.max_peers from the round after that\n"
    )
    later = cli("run", "amend", "store", "--key", "owner.key", "--round", "9", "policy.deadline_s=32")
    assert ": policy.deadline_s=32, from round 9 on, or from the first round whose manifest ack" in later.out
    refused(amend("policy.min_peers=2", key="a.key"), f"--key: is that of {Identity.load('a.key').public}, but run ")
