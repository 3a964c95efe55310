"""An S3 server that answers every request in one way, for what real servers do only on bad days."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from sparseloco.peers.store import Store, open_store

Answer = Callable[[BaseHTTPRequestHandler], None]


def status(number: int, code: str = "Odd") -> Answer:
    """An error whose body tells everything that was sent, as some servers do for the sake of debugging."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        echo = (
            f"<Error><Code>{code}</Code><StringToSign>{handler.path} {handler.headers}</StringToSign></Error>".encode()
        )
        handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        handler.send_response(number)
        handler.send_header("Content-Length", str(len(echo)))
        handler.end_headers()
        handler.wfile.write(echo)

    return answer


def body(announced: int, chunks: list[bytes], wait: Callable[[], object] = lambda: None) -> Answer:
    """200 with a body that need not be as long as announced; ``wait`` is called before every chunk."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(announced))
        handler.send_header("ETag", '"x"')
        handler.send_header("Last-Modified", "Mon, 30 Nov 2026 16:25:01 GMT")
        handler.end_headers()
        for chunk in chunks:
            wait()
            handler.wfile.write(chunk)
            handler.wfile.flush()
        handler.close_connection = True

    return answer


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    """No answer at all."""
    handler.close_connection = True


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """Address of such a server."""

    class Handler(BaseHTTPRequestHandler):
        def __getattr__(self, name: str) -> Callable[[], None]:
            if not name.startswith("do_"):
                raise AttributeError(name)
            return lambda: answer(self)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda request, client_address: None  # the client may hang up
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def serving(answer: Answer, stall_s: float = 60.0, **options: str) -> Iterator[Store]:
    """A store on such a server, with keys that the caller may look for."""
    keys = {"access_key_id": "AKIDPLANTED", "secret_access_key": "SECRETPLANTED", "token": "TOKENPLANTED"}
    with answering(answer) as url:
        settings = {"endpoint": url, "region": "us-east-1", "allow_http": "true"}
        yield open_store("s3://bucket/run", stall_s=stall_s, options={**settings, **keys, **options})
