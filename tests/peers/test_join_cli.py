"""The command line over a store, as people use it: create, join, join late, leave and come back."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from sparseloco.peers import paths
from tests.cli import Call, process
from tests.forked import Fork, python
from tests.peers.joins import prepare, secrets_in

SPARSELOCO, STOPPED = ("-m", "sparseloco"), 130


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that a run needs, in which processes keep their cache and their trust."""
    monkeypatch.setenv("SPARSELOCO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SPARSELOCO_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    prepare(tmp_path, "owner.key", "a.key", "b.key")
    return tmp_path


def finished(process: Fork) -> dict[str, Any]:
    code, out, err = process.ended()
    assert code == 0, err
    return json.loads(out)


def create(folder: Path, *settings: str) -> dict[str, Any]:
    words = [word for setting in settings for word in ("--set", setting)]
    return finished(
        python(folder, *SPARSELOCO, "run", "create", "store", "run.toml", "--key", "owner.key", *words, "--json")
    )


def join(folder: Path, name: str, *more: str) -> Fork:
    return python(folder, *SPARSELOCO, *words_of(folder, name), *more)


def words_of(folder: Path, name: str) -> list[str]:
    key = ["--key", f"{name}.key"] if (folder / f"{name}.key").exists() else []
    return ["join", "store", *key, "--data", "text.txt", "--out", name]


def wait_for(folder: Path, pattern: str) -> None:
    """Until a peer has put such an object."""
    until = time.monotonic() + 100
    while not list((folder / "store").glob(pattern)):
        assert time.monotonic() < until, pattern
        time.sleep(0.05)


@pytest.mark.mp
def test_two_peers_and_a_late_one_end_alike(folder: Path) -> None:
    """C-08, C-10, C-40: whoever joins has what the others have, by its digest; no key is written anywhere."""
    made = create(folder)
    pair = [join(folder, name, "--json", "--owner", made["owner"]) for name in ("a", "b")]
    summaries = [finished(each) for each in pair]
    late = process(*words_of(folder, "late"), "--no-model", cwd=folder)  # as people start it
    assert late.returncode == 0, late.stderr
    summaries.append(json.loads((folder / "late" / "summary.json").read_text()))
    assert len({summary["digest"] for summary in summaries}) == 1
    assert [summary["rounds"] for summary in summaries] == [2, 2, 2]
    assert [summary["tokens"] for summary in summaries] == [128, 128, 0], "each counts what it has seen itself"
    dense = 4 * summaries[0]["parameters"]
    assert [summary["dense_bytes_per_replica"] for summary in summaries] == [2 * dense, 2 * dense, 0]
    assert "a key for this user's peers was made in" in late.stderr
    assert "caught up 2 of 2 rounds, " in late.stderr
    assert "report: late/report.html" in late.stdout
    assert {path.name for path in (folder / "a").iterdir()} >= {"model", "report.html", "run.json", "metrics.jsonl"}
    assert not (folder / "late" / "model").exists()
    secrets = secrets_in(folder)
    assert len(secrets) == 4
    written = [path for place in ("a", "b", "late", "store") for path in (folder / place).rglob("*") if path.is_file()]
    for secret in secrets:
        assert not any(
            secret in path.read_bytes() or bytes.fromhex(secret.decode()) in path.read_bytes() for path in written
        )
        assert secret.decode() not in late.stdout + late.stderr


@pytest.mark.mp
def test_a_peer_that_waits_leaves_and_comes_back(folder: Path) -> None:
    """C-49: SIGTERM while it waits alone; its frame counts when it is back, and what it had not sent is not dropped."""
    create(folder)
    alone = join(folder, "a")
    wait_for(folder, "rounds/00000000/*/*/*.frame")
    alone.send_signal(signal.SIGTERM)
    code, _, err = alone.ended()
    assert code == STOPPED
    assert (
        "left while round 0 was open; what was sent in it stays in the store; join again with: sparseloco join" in err
    )
    (lease,) = (folder / "store" / "peers").glob("*/lease.json")
    assert json.loads(lease.read_text())["left"] is True
    frames = set((folder / "store" / "rounds" / "00000000").rglob("*.frame"))
    pair = [join(folder, name) for name in ("a", "b")]
    errors = [each.ended() for each in pair]
    assert [code for code, _, _ in errors] == [0, 0], errors
    assert "going on from the store, with what was written down here" in errors[0][2]
    assert "dropped" not in errors[0][2]
    assert len(frames) == 1
    place = paths.parse(str(next(iter(frames)).relative_to(folder / "store")))
    manifest = json.loads((folder / "store" / "rounds/00000000/0000/manifest-0000.json").read_text())
    assert place.hash in [entry["hash"] for entry in manifest["entries"]]  # pyright: ignore
    digests = [json.loads((folder / name / "summary.json").read_text())["digest"] for name in ("a", "b")]
    assert digests[0] == digests[1]


@pytest.mark.mp
def test_a_peer_that_trains_leaves_at_a_border_and_continues(folder: Path) -> None:
    """Ctrl-C: the lease is released, a checkpoint holds the private state, and the same command goes on from there."""
    create(folder, "train.steps=60", "policy.min_peers=1", "policy.lease_s=2")
    first = join(folder, "a")
    wait_for(folder, "rounds/00000001/*/manifest-0000.json")
    first.send_signal(signal.SIGINT)
    code, _, err = first.ended()
    assert code == STOPPED, err
    assert "after saving; join again with: sparseloco join store --key a.key --data text.txt --out a" in err
    (saved,) = (folder / "a" / "checkpoints").iterdir()
    step = int(saved.name.removeprefix("step-"))
    assert step % 2 == 0, "a round is two steps"
    code, _, err = join(folder, "a", "--no-model").ended()
    assert code == 0, err
    assert f"going on at step {step}, from a/checkpoints/{saved.name}" in err
    summary = json.loads((folder / "a" / "summary.json").read_text())
    assert (summary["rounds"], summary["tokens"]) == (30, 60 * 2 * 16), "no step was made twice"


def test_over_s3(cli: Call, moto_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket of a real server, named by the environment as other tools do; a run of one must be asked for (C-09)."""
    prepare(tmp_path, "owner.key", "a.key")
    keys = {"AWS_ACCESS_KEY_ID": "AKIDPLANTED", "AWS_SECRET_ACCESS_KEY": "SECRETPLANTED", "AWS_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": moto_url, "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SPARSELOCO_CONFIG", str(tmp_path / "config"))
    url = "s3://bucket/joined"
    made = cli("run", "create", url, "run.toml", "--key", "owner.key", "--policy", "min_peers=1")
    assert made.code == 0, made.err
    done = cli("join", url, "--key", "a.key", "--data", "text.txt", "--out", "a", "--no-model")
    assert done.code == 0, done.err
    assert json.loads(Path("a/summary.json").read_text())["rounds"] == 2
    shown = [made.out, made.err, done.out, done.err]
    shown += [path.read_bytes().decode("latin-1") for path in Path("a").rglob("*") if path.is_file()]
    assert not any("PLANTED" in text for text in shown)
