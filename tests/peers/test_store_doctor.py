"""`sparseloco doctor URL`: what a store lets this peer do, and what round time follows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, models

from sparseloco.cli import store_doctor
from sparseloco.cli.doctor import in_words, title
from sparseloco.cli.figures import describe
from sparseloco.cli.store_doctor import examine_store
from sparseloco.config import Entry
from sparseloco.config.file import resolve
from sparseloco.errors import Denied, Unavailable
from sparseloco.peers.canonical import encode, sha256
from sparseloco.peers.store import Store, open_store
from tests.cli import Call
from tests.peers import raw
from tests.peers.runs import OWNER, identity
from tests.peers.stage import IDS, ME, Stage


class Guarded:
    """A store that refuses some writes, by the beginning of their paths, and some reads."""

    def __init__(self, store: Store, *, writes: tuple[str, ...] = ("",), denied: tuple[str, ...] = ()) -> None:
        self.store, self.writes, self.denied = store, writes, denied

    def __getattr__(self, name: str) -> Any:
        def call(path: str, *args: Any, **kwargs: Any) -> Any:
            verb = "list" if name == "page" else name
            refused = verb in self.denied
            if name in ("create", "put", "delete"):
                refused = refused or not path.startswith(self.writes)
            if refused:
                raise Denied(
                    f"{verb} {path}: the store refused it (403 AccessDenied); check credentials and permissions"
                )
            return getattr(self.store, name)(path, *args, **kwargs)

        return call


class Overwriting:
    """A server that takes the condition of a conditional put and ignores it."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, "put" if name == "create" else name)


def whats(found: dict[str, Any]) -> list[str]:
    return [finding["what"] for finding in found["findings"]]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_doctor, "MEASURED_BYTES", 1 << 16)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    ME[0].save(tmp_path / "peer.key")
    return tmp_path / "peer.key"


def test_a_good_store(store: Store, key: Path) -> None:
    """C-43: with a store between them, what two machines must reach is the store; that is tried, verb by verb."""
    store.put("peers/x", b"x")
    before = [entry[:2] for entry in store.list("")]
    found = examine_store(store, key=key)
    assert [entry[:2] for entry in store.list("")] == before, "what it wrote is gone"
    assert json.loads(json.dumps(found)) == found
    assert found["usable"] is True
    assert found["store"] == {"reachable": True, "folder": f"peers/{IDS[0]}", "conditional_put": "yes"}
    assert found["permissions"] == dict.fromkeys(
        ("list", "get", "own folder", "own frames", "folders of others"), "yes"
    )
    assert set(found["latency"]) == {"create_s", "put_s", "get_s", "get_range_s", "size_s", "list_s", "delete_s"}
    assert min(found["bandwidth"]["up_bytes_per_s"], found["bandwidth"]["down_bytes_per_s"]) > 0
    assert found["run"] == {}
    assert whats(found) == ["folders of others"]


def test_credentials_for_ones_own_folders_only(key: Path) -> None:
    """C-43: permissions as docs/security.md gives them to a peer."""
    mine = (f"peers/{IDS[0]}/", f"rounds/00000000/0000/{IDS[0]}/")
    found = examine_store(Guarded(open_store("memory://"), writes=mine), key=key)
    assert found["usable"] is True
    assert found["permissions"]["folders of others"].startswith("no (create peers/0000")
    assert whats(found) == []
    without = examine_store(Guarded(open_store("memory://"), writes=mine))
    assert without["usable"] is False
    (finding,) = without["findings"]
    assert finding["what"] == "own folder"
    assert finding["why"].startswith("this peer cannot take part: no (create probe/")
    assert finding["remedy"].startswith("name the peer's key file with --key")


@pytest.mark.parametrize(
    ("denied", "what"), [("list", "list"), ("get", "get"), ("create", "own folder")], ids=["list", "get", "create"]
)
def test_what_is_not_granted_is_named(denied: str, what: str, key: Path) -> None:
    found = examine_store(Guarded(open_store("memory://"), denied=(denied,)), key=key)
    assert found["usable"] is False
    assert found["store"]["reachable"] is True
    assert what in whats(found)
    assert "AccessDenied" in found["findings"][0]["why"]
    assert found["findings"][0]["remedy"] == "grant it, see Permissions of the store in docs/security.md"


def test_frames_that_may_not_be_posted(key: Path) -> None:
    found = examine_store(Guarded(open_store("memory://"), writes=(f"peers/{IDS[0]}/",)), key=key)
    assert (found["usable"], whats(found)) == (False, ["own frames"])


def test_a_store_that_overwrites() -> None:
    found = examine_store(Overwriting(open_store("memory://")))
    assert (found["usable"], found["store"]["conditional_put"]) == (False, "no")
    assert found["findings"][0]["remedy"] == "see docs/peers.md for stores that are tried"
    assert "the store wrote over an object that was there" in found["findings"][0]["why"]
    assert found["bandwidth"] == {}


def test_a_server_that_hangs_up() -> None:
    with raw.serving(raw.hang_up, stall_s=5.0) as store:
        found = examine_store(store)
    assert (found["usable"], found["store"]["reachable"]) == (False, False)
    (finding,) = found["findings"]
    assert finding == {
        "what": "store",
        "why": "it cannot be reached: no (list peers: the store did not answer, or broke off; try again)",
        "remedy": "check URL, endpoint and network",
    }


def test_a_server_that_refuses_everything_tells_no_secret() -> None:
    with raw.serving(raw.status(403, "AccessDenied"), stall_s=5.0) as store:
        found = examine_store(store)
    assert (found["usable"], found["store"]["reachable"]) == (False, True)
    assert whats(found) == ["list", "get", "own folder"]
    assert "PLANTED" not in json.dumps(found)


def clocked(stage: Stage, seconds: float, **more: Any) -> dict[str, Any]:
    """Examine with a clock on which each transfer takes as long."""
    ticks = iter(range(1000))
    return examine_store(stage.store, clock=lambda: next(ticks) * seconds, **more)


def test_the_round_time_follows_from_frames_and_bandwidth() -> None:
    """C-43: what a round costs on this link: the own frame up, those of the others down."""
    stage = Stage(deadline_s=600.0)
    for _ in range(2):
        stage.close(0, 1, 2)
    frame = stage.frame(0, 5).size
    found = clocked(stage, 0.5)
    rate = (1 << 16) / 0.5
    assert found["bandwidth"] == {"measured_bytes": 1 << 16, "up_bytes_per_s": rate, "down_bytes_per_s": rate}
    run = found["run"]
    assert (run["peers"], run["sent_per_round_bytes"], run["fetched_per_round_bytes"]) == (3, frame, 2 * frame)
    assert run["frames_from"] == "manifests of the newest rounds"
    latency = found["latency"]
    requests = latency["put_s"] + latency["create_s"] + 2 * latency["list_s"] + 2 * latency["get_s"]
    assert run["transfer_s"] == pytest.approx(3 * frame / rate + requests)
    assert "round time" not in whats(found)
    slow = clocked(stage, 400_000.0)
    (finding,) = [finding for finding in slow["findings"] if finding["what"] == "round time"]
    assert finding["why"].endswith("here, and rounds close 10 min 00 s after the first frame")


def test_a_peer_that_takes_part_already_is_not_counted_twice(key: Path) -> None:
    stage = Stage(deadline_s=600.0)
    for peer in range(3):
        stage.lease(peer)
    stage.close(0, 1, 2)
    assert clocked(stage, 0.5, key=key)["run"]["peers"] == 3
    assert clocked(stage, 0.5)["run"]["peers"] == 4  # whoever asks without a key is one more


def test_a_run_is_reckoned_with_as_it_was_amended() -> None:
    stage = Stage(min_peers=5, deadline_s=600.0)
    amended = stage.amendment(0, 0, **{"policy.min_peers": 2, "policy.deadline_s": 30.0})
    stage.close(0, 1, amended=(amended,))
    run = clocked(stage, 0.5)["run"]
    assert (run["peers"], run["deadline_s"]) == (2, 30.0)


def test_before_the_first_round_only_settings_can_tell() -> None:
    """Settings that leave the size of the model open are not guessed at."""
    found = clocked(Stage(), 0.5)
    assert found["run"]["frames_from"] == "nothing yet: no round is closed"
    assert found["run"]["sent_per_round_bytes"] is None
    assert found["run"]["transfer_s"] is None


def test_a_run_that_somebody_changed_is_not_reckoned_with(key: Path) -> None:
    stage = Stage()
    stage.store.delete("run.json")
    stage.store.put("run.json", b'{"format":1}')
    found = examine_store(stage.store, key=key)
    assert found["permissions"]["get"].startswith("no (run.json: ")
    assert (found["usable"], found["run"]) == (False, {})


def test_settings_tell_the_bytes_before_the_first_round(tmp_path: Path) -> None:
    """As `describe` counts them, with the run's own tokenizer, if they make what run.json has the fingerprint of."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "<end>": 2}, []))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    table: dict[str, Any] = {
        "algorithm": {"preset": "sparseloco", "inner_steps": 2, "tile": 8, "k": 8},
        "model": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 24},
        "data": {"path": "stdlib", "end_token": "<end>"},
        "train": {"steps": 4, "batch_size": 2, "sequence_length": 16},
    }
    optimizer = {"warmup_steps": 1}
    given = {**table["data"], "tokenizer": str(tmp_path / "tokenizer.json")}
    config = resolve({**table, "data": given, "optimizer": optimizer})
    figures = describe(Entry(label="run", config=config))
    data = (tmp_path / "tokenizer.json").read_bytes()
    table["train"]["optimizer"] = optimizer
    stage = Stage()
    run = msgspec.structs.replace(
        stage.run, **table, fingerprint=figures["fingerprint"], tokenizer=sha256(data)
    ).signed(identity(OWNER))
    stage.store.put("run.json", encode(run))
    assert clocked(stage, 0.5)["run"]["sent_per_round_bytes"] is None, "its tokenizer is not there"
    stage.store.put("tokenizer.json", b"{}")
    assert clocked(stage, 0.5)["run"]["sent_per_round_bytes"] is None, "it is another one"
    stage.store.put("tokenizer.json", data)
    found = clocked(stage, 0.5)["run"]
    assert found["frames_from"] == "the settings in run.json"
    assert found["sent_per_round_bytes"] == figures["bytes_sent_per_round"]


def test_a_clock_that_is_off_is_said_for_information() -> None:
    stage = Stage()
    stage.store.clock = 0.0
    found = examine_store(stage.store)
    (finding,) = [finding for finding in found["findings"] if finding["what"] == "clock"]
    assert "behind this machine's; a run decides nothing by it" in finding["why"]
    assert found["usable"] is True


def test_a_transfer_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("memory://")

    class Thin:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def put(self, path: str, data: bytes) -> None:
            if len(data) > 1000:
                raise Unavailable(f"put {path}: the store did not answer, or broke off; try again")
            store.put(path, data)

    found = examine_store(Thin())
    assert found["bandwidth"]["failed"].startswith("put probe/")
    assert found["usable"] is True
    assert store.list("") == []


def test_doctor_url_prints_a_page_and_json(cli: Call, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    ended = cli("doctor", "run")
    assert (ended.code, ended.err) == (0, "")
    assert "conditional put" in ended.out
    assert "up " in ended.out
    assert json.loads(cli("doctor", "run", "--json").out)["usable"] is True
    assert cli("doctor", "gone")[::2] == (
        2,
        "error: url='gone': must be the address of a run, or a directory that exists; check the spelling\n",
    )
    assert cli("doctor", "--key", "x").err == (
        "error: --key: must stand beside a URL, whose store is tried with it; add the URL or drop it\n"
    )


def test_who_could_not_take_part_ends_with_1(cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(store_doctor, "open_store", lambda url, stall_s: Overwriting(open_store("memory://")))
    ended = cli("doctor", "run")
    assert ended.code == 1
    assert "own folder: this peer cannot take part: no (create" in ended.out


def test_figures_in_words() -> None:
    assert (title("up_bytes_per_s"), in_words("up_bytes_per_s", 12_300_000.0)) == ("up", "12.3 MB/s")
    assert (title("get_range_s"), in_words("get_range_s", 0.0123)) == ("get range", "12.3 ms")
    assert in_words("deadline_s", 600.0) == "10 min 00 s"
    assert in_words("ahead_of_ours_s", None) == "none"
