"""A proxy on 127.0.0.1 in front of an S3 server, which writes down what went through: an access log with body bytes."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "server", "date"}


class Line(NamedTuple):
    """One request: path below the bucket, bytes of its body, number of the answer, bytes of its body."""

    method: str
    path: str
    listing: bool
    sent: int
    status: int
    received: int

    @property
    def done(self) -> bool:
        return 200 <= self.status < 300


class AccessLog:
    """Where to connect, and what was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.lines: list[Line] = []

    def put_bytes(self, suffix: str = "") -> int:
        """Bodies of uploads that were taken."""
        done = (line for line in self.lines if line.method == "PUT" and line.done)
        return sum(line.sent for line in done if line.path.endswith(suffix))

    def got_bytes(self) -> int:
        """Bodies of objects that were given out."""
        done = (line for line in self.lines if line.method == "GET" and line.done)
        return sum(line.received for line in done if not line.listing)


@contextmanager
def in_front_of(server_url: str, headers_to: Callable[[dict[str, str]], dict[str, str]] = dict) -> Iterator[AccessLog]:
    """Forward everything to a server; ``headers_to`` makes of a request's headers those that the server is sent."""
    upstream = urlsplit(server_url).netloc
    log = AccessLog()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            connection = http.client.HTTPConnection(upstream, timeout=60)
            try:
                headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
                connection.request(self.command, self.path, body=body, headers=headers_to(headers))
                answer = connection.getresponse()
                content = answer.read()
            finally:
                connection.close()
            parts = urlsplit(self.path)
            path = unquote(parts.path).split("/", 2)[-1]
            listing = "list-type" in parse_qs(parts.query)
            log.lines.append(Line(self.command, path, listing, len(body), answer.status, len(content)))
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
            if length is not None and answer.status != 204:
                self.send_header("Content-Length", length)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = forward

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda request, client_address: None  # a client may hang up
    log.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield log
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
