"""The page about a run: what it holds, that it needs nothing but itself, and that a browser shows and renews it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sparseloco.cli.seeing import Server, write_page
from sparseloco.errors import ConfigError, Unavailable
from sparseloco.peers.looking import Viewer
from sparseloco.report.peers_page import peers_page
from tests.peers.stage import NOW, Stage
from tests.peers.test_status import look, viewer

EVIL = "<script>document.title='owned'</script><img src=x onerror=alert(1)> \"' {{7*7}}"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def evil_stage() -> Stage:
    stage = Stage(lease_s=120.0)
    stage.at(70).close(0, 1, left_out={2: EVIL})
    stage.at(5).lease(0, round=1)
    stage.lease(2, round=1)
    stage.frame(0, 1)
    stage.amendment(0, 5, **{"policy.note": EVIL})
    return stage


class Page(HTMLParser):
    """Tags with their attributes, and the text of each cell."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_page_says_what_is_seen_and_escapes_what_peers_wrote() -> None:
    html = peers_page(look(evil_stage()), every_s=5)
    page = Page(html)
    assert EVIL.partition(" ")[0] in page.text, "shown as text"
    assert len(page.all("script")) == 1
    assert page.all("img") == []
    assert "49" not in re.sub(r"[0-9a-f]{8,}|<style>.*?</style>", "", html, flags=re.S), "{{7*7}} is not worked out"
    assert "1 round closed, 2 of 3 peers live, all frames agree" in page.text
    for heading in ("Peers", "Rounds", "Agreement", "Amendments", "Bytes"):
        assert f"<h2>{heading}</h2>" in html
    assert "round 1, fragment 0: 1 frame, at least 2 needed; missing: " in page.text, "C-33"


def test_page_needs_nothing_but_itself() -> None:
    html = peers_page(look(evil_stage()), every_s=5)
    page = Page(html)
    assert page.all("link") == []
    assert not any({"src", "href"} & set(attributes) for _, attributes in page.tags)
    assert "url(" not in html
    policy = next(tag["content"] for tag in page.all("meta") if tag.get("http-equiv") == "Content-Security-Policy")
    script = re.findall(r"<script>(.*?)</script>", html, re.S)[-1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; connect-src 'self'"
    )


def test_a_page_is_written_whole_and_renews_itself_only_if_asked(tmp_path: Path) -> None:
    seen = look(evil_stage())
    write_page(seen, tmp_path / "run.html")
    assert Page((tmp_path / "run.html").read_text("utf-8")).all("body") == [{"data-every": "0"}]
    write_page(seen, tmp_path / "run.html", 5.0)
    assert Page((tmp_path / "run.html").read_text("utf-8")).all("body") == [{"data-every": "5.0"}]
    assert [path.name for path in tmp_path.iterdir()] == ["run.html"]
    with pytest.raises(ConfigError, match=r"^--web '.*': must be a file that can be written \(Is a dir"):
        write_page(seen, tmp_path)


@contextmanager
def serving(one: Viewer, every_s: float = 5.0, port: int = 0) -> Iterator[Server]:
    server, stop = Server(one, port, every_s), threading.Event()
    thread = threading.Thread(target=server.serve, args=(stop.is_set,))
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        thread.join()


def fetch(url: str, **headers: str) -> tuple[int, str, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def test_the_server_answers_this_machine_only() -> None:
    stage = evil_stage()
    with serving(viewer(stage)) as server:
        assert server.url.startswith("http://127.0.0.1:")
        status, kind, html = fetch(server.url)
        assert (status, kind) == (200, "text/html; charset=utf-8")
        assert Page(html).all("body") == [{"data-every": "5.0"}]
        status, kind, text = fetch(f"{server.url}status.json?x")
        assert (status, kind) == (200, "application/json; charset=utf-8")
        assert json.loads(text)["closed"] == {"0": 1}
        status, kind, text = fetch(f"{server.url}<script>")
        assert (status, kind, text) == (404, "text/plain; charset=utf-8", "there are / and /status.json\n")
        status, _, text = fetch(server.url, Host="evil.example")
        assert (status, text) == (403, f"use {server.url}\n")
        port = int(server.url.rpartition(":")[2].strip("/"))
        with pytest.raises(ConfigError, match=rf"^--serve {port}: must be a free port \(.+\); use another, or 0$"):
            Server(viewer(stage), port, 5.0)
    with pytest.raises(ConfigError, match=r"^--serve 70000: must be a free port \(.+\); use another, or 0$"):
        Server(viewer(stage), 70000, 5.0)


def test_the_server_looks_no_more_often_than_asked_and_survives_a_dead_store() -> None:
    stage, now = evil_stage(), [0.0]
    server = Server(viewer(stage), 0, 10.0, clock=lambda: now[0])
    host = server.url.removeprefix("http://").strip("/")
    first = server.answer("/status.json", host)
    stage.close(0, 1)
    assert server.answer("/status.json", host) == first
    now[0] = 5.0
    assert json.loads(server.answer("/status.json", host)[2])["closed"] == {"0": 2}
    now[0] = 10.0
    stage.store.fails[""] = Unavailable("list: the store did not answer, or broke off; try again")
    status, _, text = server.answer("/", host)
    assert (int(status), text) == (503, "list: the store did not answer, or broke off; try again\n")
    server.serve(lambda: True)


def dump(url: str, folder: Path, budget_ms: int) -> str:
    """The document as a browser has it after some (virtual) time, its scripts run."""
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={folder}", f"--virtual-time-budget={budget_ms}", "--dump-dom", url,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser is installed; apt-get install chromium")
def test_a_browser_shows_the_page_and_renews_it(tmp_path: Path) -> None:
    stage = evil_stage()
    one = viewer(stage)
    looks: list[int] = []

    def look() -> object:
        looks.append(len(looks))
        if len(looks) == 2:
            stage.close(0, 1)
        return Viewer.look(one)

    one.look = look  # type: ignore[method-assign]
    with serving(one, every_s=1.0) as server:
        html = dump(server.url, tmp_path / "profile", 20_000)
    page = Page(html)
    assert len(looks) >= 2, "the script asked again"
    assert "2 rounds closed" in re.findall(r"<h1>(.*?)</h1>", html)[0]
    (title,) = re.findall(r"<title>(.*?)</title>", html)
    assert title.startswith("test: 2 rounds closed"), "what a peer wrote did not run"
    assert page.all("img") == []
    assert len(page.all("main")) == 1


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser is installed; apt-get install chromium")
def test_a_browser_shows_a_file(tmp_path: Path) -> None:
    write_page(look(evil_stage()), tmp_path / "run.html")
    html = dump((tmp_path / "run.html").as_uri(), tmp_path / "profile", 1000)
    assert "1 round closed" in re.findall(r"<h1>(.*?)</h1>", html)[0]
    assert f"{NOW:.0f}" not in html, "times are written out"
