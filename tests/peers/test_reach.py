"""The first contact of a command with a store that does not answer, or whose name is mistyped."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparseloco.cli import reach
from tests.cli import Call
from tests.peers.joins import prepare

URL = "s3://bucket/run"
VERBS: dict[str, tuple[str, ...]] = {
    "status": ("status",),
    "status json": ("status", "--json"),
    "join": ("join", "--key", "a.key", "--out", "out"),
    "doctor": ("doctor",),
    "create": ("run", "create", "run.toml", "--key", "owner.key"),
    "amend": ("run", "amend", "policy.deadline_s=5", "--key", "owner.key", "--round", "1"),
    "void": ("run", "void", "--key", "owner.key", "--round", "1"),
}


def words(verb: str, url: str) -> list[str]:
    """The command line with the URL where it belongs."""
    line = [*VERBS[verb]]
    line.insert(2 if line[0] == "run" else 1, url)
    return line


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the endpoint to a port of this machine, with little patience."""
    prepare(tmp_path, "owner.key", "a.key")
    monkeypatch.setattr(reach, "LIMITS", reach.Limits(tries=2, stall_s=0.5, pause_s=0.0))
    keys = {"AWS_ACCESS_KEY_ID": "AKIDPLANTED", "AWS_SECRET_ACCESS_KEY": "SECRETPLANTED", "AWS_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ALLOW_HTTP": "true", "SPARSELOCO_CONFIG": str(tmp_path / "config")}.items():
        monkeypatch.setenv(name, value)
    return lambda port: monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")


@pytest.fixture(params=["closed", "silent"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """A port where nobody listens, or one that takes connections and never says a word."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if request.param == "silent":
            server.listen(64)
        yield server.getsockname()[1]


@pytest.mark.parametrize("verb", VERBS)
def test_a_store_that_does_not_answer_is_said_at_once_and_given_up(
    cli: Call, at: Callable[[int], None], port: int, verb: str
) -> None:
    at(port)
    ended = cli(*words(verb, URL))
    why = "get run.json: the store did not answer, or broke off"
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.splitlines() == [
        f"waiting for an answer from {URL}",
        f"try 1 of 2 has failed: {why}",
        f"try 2 of 2 has failed: {why}",
        f"error: url='{URL}': must be answered by a store, but 2 tries have failed ({why}); check the address, the "
        "endpoint in the environment (such as AWS_ENDPOINT_URL) and the network",
    ]


def test_ctrl_c_ends_the_waiting_in_words(
    cli: Call, at: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    at(1)
    monkeypatch.setattr(reach, "_knock", interrupted)
    ended = cli("status", URL)
    assert (ended.code, ended.out) == (130, "")
    assert ended.err.splitlines()[1:] == [f"interrupted: {URL} had not answered yet, and nothing was done"]


@pytest.mark.parametrize("verb", sorted(VERBS.keys() - {"create"}))
@pytest.mark.parametrize("url", ["runs/mistyped", "file:///nowhere/mistyped"])
def test_a_mistyped_directory_is_refused_and_not_made(
    cli: Call, at: Callable[[int], None], tmp_path: Path, verb: str, url: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    ended = cli(*words(verb, url))
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == (
        f"error: url='{url}': must be the address of a run, or a directory that exists; check the spelling\n"
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_any_answer_will_do(moto_url: str, at: Callable[[int], None], capsys: pytest.CaptureFixture[str]) -> None:
    """Whether there is a run is for the verb to say, and so are credentials."""
    at(int(moto_url.rpartition(":")[2]))
    reach.reach("s3://bucket/nothing-here")
    assert capsys.readouterr().err == "waiting for an answer from s3://bucket/nothing-here\n"
