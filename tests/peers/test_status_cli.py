"""`sparseloco status`: tables, JSON, pages, and what is said when there is no run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sparseloco.cli import seeing
from sparseloco.cli.peers_screen import renderable
from sparseloco.errors import Unavailable
from sparseloco.peers.store import open_store
from tests.cli import Call
from tests.peers.stage import IDS, Stage
from tests.peers.test_status import look, viewer
from tests.peers.test_status_page import EVIL, evil_stage


def staged(folder: Path) -> Stage:
    """The same objects in a directory."""
    stage = evil_stage()
    store = open_store(str(folder))
    for entry in stage.store.list(""):
        store.put(entry.path, stage.store.get(entry.path, limit=entry.size))
    return stage


def test_status_prints_tables_and_json(cli: Call, tmp_path: Path) -> None:
    stage = staged(tmp_path / "run")
    ended = cli("status", "run")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("test: 1 round closed, 2 of 3 peers live, all frames agree\n")
    assert "missing: " in ended.out, "C-33"
    assert ", done after 600 steps, 30 to a round, " in ended.out
    found = json.loads(cli("status", "run", "--json").out)
    assert found["run"] == stage.run.run
    assert found["closed"] == {"0": 1}
    assert {peer["peer"] for peer in found["peers"]} == set(IDS[:3])


def test_terminals_are_not_written_to_by_peers() -> None:
    """Neither by control characters nor by markup."""
    stage = evil_stage()
    stage.close(0, 1, left_out={2: "[bold red]x[/] [link=http://evil]y[/link]"})
    console = Console(width=300, force_terminal=True, markup=True)
    with console.capture() as capture:
        console.print(renderable(look(stage)))
    shown = capture.get()
    assert "[bold red]x[/] [link=http://evil]y[/link]" in shown
    assert EVIL in shown
    assert "\x1b]8" not in shown


def test_status_writes_a_page(cli: Call, tmp_path: Path) -> None:
    staged(tmp_path / "run")
    ended = cli("status", "run", "--web", "page.html")
    assert (ended.code, ended.out) == (0, "page: page.html\n")
    assert "<h2>Peers</h2>" in (tmp_path / "page.html").read_text("utf-8")


REFUSED = {
    "no such folder": (
        ("status", "nothing"),
        "error: url='nothing': must be the address of a run, or a directory that exists; check the spelling\n",
    ),
    "no run": (
        ("status", "."),
        "error: URL='.': must hold a run, but there is no run.json; check the address, or make one with `sparseloco "
        "run create`\n",
    ),
    "every": (("status", ".", "--every", "0"), "error: --every 0: must be from 1 to 86400 seconds; use 5\n"),
    "serve and web": (
        ("status", ".", "--serve", "0", "--web", "x.html"),
        "error: --serve: must stand without --web, --watch and --json; drop them\n",
    ),
    "password": (
        ("status", "s3://user:secret@bucket/run"),
        "error: url='s3://...': must hold no password, query or control character; "
        "give credentials in the environment\n",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused(cli: Call, tmp_path: Path, why: str) -> None:
    words, said = REFUSED[why]
    ended = cli(*words)
    assert (ended.code, ended.out, ended.err) == (2, "", said)
    assert not (tmp_path / "nothing").exists()


class Enough(BaseException):
    """Ends a loop that only Ctrl-C ends."""


def watched(stage: Stage, show: Any, times: int) -> list[str]:
    said: list[str] = []
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        stage.store.fails.pop("", None)
        if len(slept) == 1:
            stage.store.fails[""] = Unavailable("list: the store did not answer, or broke off; try again")
        if len(slept) == times:
            raise Enough

    with pytest.raises(Enough):
        seeing.follow(viewer(stage), 3.0, show, said.append, sleep)
    assert slept == [3.0] * times
    return said


def test_watching_goes_on_when_the_store_is_away_for_a_while(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = evil_stage()
    with seeing.live(tmp_path / "page.html", 3.0, as_json=True) as show:
        said = watched(stage, show, 3)
    assert said == ["status: list: the store did not answer, or broke off; try again"]
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["closed"] for line in lines] == [{"0": 1}] * 2
    assert 'data-every="3.0"' in (tmp_path / "page.html").read_text("utf-8")


def test_watching_without_a_terminal_prints_one_look_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    with seeing.live(None, 3.0, as_json=False) as show:
        watched(evil_stage(), show, 3)
    assert capsys.readouterr().out.count("1 round closed, 2 of 3 peers live") == 2


def test_ctrl_c_ends_watching_and_serving(cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged(tmp_path / "run")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(seeing, "follow", interrupted)
    assert cli("status", "run", "--watch")[:2] == (0, "")
    served: list[str] = []
    serve = seeing.Server.serve

    def stopped_at_once(server: seeing.Server, _: object) -> None:
        served.append(server.url)
        serve(server, lambda: True)

    monkeypatch.setattr(seeing.Server, "serve", stopped_at_once)
    ended = cli("status", "run", "--serve", "0")
    assert (ended.code, ended.err) == (0, f"the run is shown at {served[0]}, until Ctrl-C\n")
