"""A stand-in for Azure Blob Storage on 127.0.0.1: what obstore asks of it, after the service's own documentation.

It checks no signature. test_other_services.py runs the same tests over Azurite, the service's emulator, if that is
installed.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

ACCOUNT, CONTAINER = "account", "container"
PAGE = 5
"""Names in one answer to a listing; the service gives 5000."""


class Blob(NamedTuple):
    data: bytes
    etag: str
    time: str


class Blobs:
    """The blobs of one container, and the blocks that are not part of any yet."""

    def __init__(self) -> None:
        self.blobs: dict[str, Blob] = {}
        self.blocks: dict[tuple[str, str], bytes] = {}
        self.listings = 0
        self.starts = True  # Azurite gives everything from the beginning, wherever it is asked to start
        self._lock = threading.Lock()
        self._writes = 0

    def put(self, name: str, data: bytes, *, create: bool = False) -> Blob | None:
        """Write a blob; None if it may only be created and is there."""
        with self._lock:
            if create and name in self.blobs:
                return None
            self._writes += 1
            self.blobs[name] = Blob(data, f"0x{self._writes:X}", formatdate(usegmt=True))
            return self.blobs[name]

    def commit(self, name: str, listed: bytes) -> Blob | None:
        """Make a blob of the blocks that an XML list names."""
        ids = [element.text or "" for element in ElementTree.fromstring(listed)]
        return self.put(name, b"".join(self.blocks.pop((name, block)) for block in ids))

    def listing(self, asked: dict[str, str]) -> str:
        """A page of names as XML; it begins at ``startFrom`` or ``marker``, which are in it."""
        self.listings += 1
        prefix, start = asked.get("prefix", ""), asked.get("marker", "")
        if self.starts:
            start = max(start, asked.get("startFrom", ""))
        names = sorted(name for name in self.blobs if name.startswith(prefix) and name >= start)
        if asked.get("delimiter"):
            names = [name for name, _ in groupby(names, lambda name: prefix + re.sub("/.*", "/", name[len(prefix) :]))]
        shown, rest = names[:PAGE], names[PAGE : PAGE + 1]
        inside = "".join(self._entry(name) for name in shown)
        marker = f"<NextMarker>{escape(''.join(rest))}</NextMarker>"
        return f"<?xml version='1.0'?><EnumerationResults><Blobs>{inside}</Blobs>{marker}</EnumerationResults>"

    def _entry(self, name: str) -> str:
        if name.endswith("/"):
            return f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>"
        blob = self.blobs[name]
        facts = (
            f"<Last-Modified>{blob.time}</Last-Modified><Etag>{blob.etag}</Etag>"
            f"<Content-Length>{len(blob.data)}</Content-Length><Content-Type>application/octet-stream</Content-Type>"
        )
        return f"<Blob><Name>{escape(name)}</Name><Properties>{facts}</Properties></Blob>"


def asked_for(url: str) -> tuple[str, dict[str, str]]:
    """Name of the blob, and the query."""
    parts = urlsplit(url)
    name = unquote(parts.path).removeprefix(f"/{ACCOUNT}/{CONTAINER}").removeprefix("/")
    return name, {key: values[0] for key, values in parse_qs(parts.query).items()}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    held: Blobs

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name, asked = asked_for(self.path)
        if asked.get("comp") == "block":
            self.held.blocks[name, asked["blockid"]] = data
            return self._answer(201)
        if asked.get("comp") == "blocklist":
            blob = self.held.commit(name, data)
        else:
            assert self.headers["x-ms-blob-type"] == "BlockBlob"
            blob = self.held.put(name, data, create=self.headers.get("If-None-Match") == "*")
        if blob is None:
            return self._fail(409, "BlobAlreadyExists")
        self._answer(201, b"", ETag=blob.etag, Last_Modified=blob.time)

    def do_GET(self) -> None:
        name, asked = asked_for(self.path)
        if asked.get("comp") == "list":
            return self._answer(200, self.held.listing(asked).encode(), Content_Type="application/xml")
        blob = self.held.blobs.get(name)
        if blob is None:
            return self._fail(404, "BlobNotFound")
        facts = {"ETag": blob.etag, "Last_Modified": blob.time}
        size = len(blob.data)
        if not (ranged := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))):
            return self._answer(200, blob.data, **facts)
        first, last = int(ranged[1]), min(int(ranged[2]), size - 1)
        if first >= size:
            return self._fail(416, "InvalidRange")
        facts["Content_Range"] = f"bytes {first}-{last}/{size}"
        self._answer(206, blob.data[first : last + 1], **facts)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Deletes come as a batch of requests inside of one."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        parts: list[str] = []
        for number, path in enumerate(re.findall(r"^DELETE (\S+) HTTP/1.1\r$", body, re.MULTILINE)):
            name, _ = asked_for(path)
            gone = self.held.blobs.pop(name, None)
            status = "202 Accepted" if gone else "404 BlobNotFound\r\nx-ms-error-code: BlobNotFound"
            parts.append(
                f"--x\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\nHTTP/1.1 {status}\r\n\r\n"
            )
        answer = "".join([*parts, "--x--\r\n"]).encode()
        self._answer(202, answer, Content_Type="multipart/mixed; boundary=x")

    def _fail(self, status: int, code: str) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        self._answer(status, body, x_ms_error_code=code)

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def serving_blobs() -> Iterator[tuple[str, Blobs]]:
    """Address of the account, and what is in its container."""
    held = Blobs()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"held": held}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/{ACCOUNT}", held
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
