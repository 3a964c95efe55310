"""``status``: looks at a run over a store, once or again and again, for a terminal, as JSON, as a page."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import typer
from rich.console import Console
from rich.live import Live

from sparseloco.cli.peers_screen import renderable
from sparseloco.cli.reach import no_run, reach
from sparseloco.errors import ConfigError, NotFound, StoreError
from sparseloco.metrics import write_atomically
from sparseloco.peers.looking import Viewer
from sparseloco.peers.patience import Patience, Patient
from sparseloco.peers.status import Status
from sparseloco.peers.store import open_store
from sparseloco.report.peers_page import peers_page

_TRIES = 4
_STALL_S = 30.0
_POLL_S = 0.2
_WIDE = 160
_HOST = "127.0.0.1"


def open_viewer(url: str, *, owner: str | None, rounds: int) -> Viewer:
    """A reader of the run at a URL.

    Raises:
        ConfigError: if the URL is not understood, or there is no run.
        StoreError: if the store does not answer.
        WireError: if it is not what its owner signed.
    """
    reach(url)
    store = Patient(open_store(url, stall_s=_STALL_S), Patience(max_tries=_TRIES, stall_s=_STALL_S))
    try:
        return Viewer(store, owner=owner, keep=rounds)
    except NotFound:
        raise no_run(url) from None


def check_every(every_s: float) -> None:
    """Refuse a pause that would never end, or that would flood the store.

    Raises:
        ConfigError: saying the range.
    """
    if not 1 <= every_s <= 86400:
        raise ConfigError(f"--every {every_s:g}: must be from 1 to 86400 seconds; use 5")


def follow(
    viewer: Viewer,
    every_s: float,
    show: Callable[[Status], None],
    complain: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Look again and again, until interrupted; a store that does not answer is tried again at the next look."""
    while True:
        try:
            show(viewer.look())
        except StoreError as error:
            complain(f"status: {error}")
        sleep(every_s)


def write_page(status: Status, path: Path, every_s: float = 0) -> None:
    """Write the page, whole or not at all.

    Raises:
        ConfigError: if it cannot be written.
    """
    try:
        write_atomically(path, peers_page(status, every_s=every_s))
    except OSError as error:
        raise ConfigError(
            f"--web {str(path)!r}: must be a file that can be written ({error.strerror}); choose another"
        ) from error


def as_line(status: Status) -> str:
    """One look as a line of JSON."""
    return json.dumps(status.to_json(), allow_nan=False)


def print_status(status: Status) -> None:
    """Tables on stdout; wide ones into a file or a pipe."""
    _console().print(renderable(status))


@contextmanager
def live(web: Path | None, every_s: float, *, as_json: bool) -> Iterator[Callable[[Status], None]]:
    """How the looks of ``--watch`` are shown: a file, lines of JSON, a picture drawn in place, or tables one by one."""
    if as_json or web is not None:

        def put(status: Status) -> None:
            if web is not None:
                write_page(status, web, every_s)
            if as_json:
                typer.echo(as_line(status))

        yield put
        return
    console = _console()
    if not console.is_terminal:
        yield lambda status: console.print(renderable(status))
        return
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="ellipsis") as view:
        yield lambda status: view.update(renderable(status), refresh=True)


def _console() -> Console:
    console = Console(highlight=False, markup=False, emoji=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, emoji=False, width=_WIDE)


class Server:
    """Serves the page and ``status.json`` to this machine alone.

    Args:
        viewer: What looks.
        port: 0 takes a free one.
        every_s: A look is not older than this when it is served.
        clock: Seconds that never go back.

    Raises:
        ConfigError: if the port cannot be had.
    """

    def __init__(self, viewer: Viewer, port: int, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._viewer, self._every_s, self._clock = viewer, every_s, clock
        self._lock = threading.Lock()
        self._last: tuple[float, Status] | None = None
        try:
            self._http = ThreadingHTTPServer((_HOST, port), self._handler())
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or "it must be from 0 to 65535"
            raise ConfigError(f"--serve {port}: must be a free port ({why}); use another, or 0") from error
        self._http.timeout = _POLL_S
        self._http.daemon_threads = True

    @property
    def url(self) -> str:
        """Where a browser finds it."""
        return f"http://{_HOST}:{self._http.server_port}/"

    def serve(self, stopped: Callable[[], bool]) -> None:
        """Answer until stopped."""
        with self._http:
            while not stopped():
                self._http.handle_request()

    def answer(self, path: str, host: str) -> tuple[HTTPStatus, str, str]:
        """Status, media type and text for a request; only those that name this machine are answered."""
        port = self._http.server_port
        if host not in (f"{_HOST}:{port}", f"localhost:{port}"):
            # Else a page from elsewhere could read this one, by a name that it lets point here.
            return HTTPStatus.FORBIDDEN, "text/plain", f"use {self.url}\n"
        if path not in ("/", "/status.json"):
            return HTTPStatus.NOT_FOUND, "text/plain", "there are / and /status.json\n"
        try:
            status = self._look()
        except StoreError as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n"
        if path == "/":
            return HTTPStatus.OK, "text/html", peers_page(status, every_s=self._every_s)
        return HTTPStatus.OK, "application/json", as_line(status)

    def _look(self) -> Status:
        with self._lock:
            if self._last is None or self._clock() - self._last[0] >= self._every_s / 2:
                status = self._viewer.look()
                self._last = (self._clock(), status)
            return self._last[1]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, kind, text = server.answer(self.path.partition("?")[0], self.headers.get("Host", ""))
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing: paths come from outside."""

        return Handler
