"""Stores for tests: memory, a directory, and a bucket of a real server on 127.0.0.1."""

from __future__ import annotations

import itertools
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparseloco.peers.store import Store, open_store

_runs = itertools.count()


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    """Address of an S3 server with an empty bucket ``bucket``; it takes any key."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    with urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"), timeout=60):
        yield url
    server.stop()


@pytest.fixture(scope="session")
def open_moto(moto_url: str) -> Callable[[str], Store]:
    """Opens a URL of that server."""
    options = {"endpoint": moto_url, "region": "us-east-1", "allow_http": "true"}
    keys = {"access_key_id": "AKIDPLANTED", "secret_access_key": "SECRETPLANTED"}
    return lambda url: open_store(url, options={**options, **keys})


@pytest.fixture(params=["memory", "directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Every kind of store, empty."""
    if request.param == "memory":
        return open_store("memory://")
    if request.param == "directory":
        return open_store(str(tmp_path / "new" / "run"))
    return request.getfixturevalue("open_moto")(f"s3://bucket/run-{next(_runs)}")
