"""SeaweedFS for tests: an S3 server that checks signatures and permissions, on 127.0.0.1, in a folder of its own."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.peers.crowd import identities

BUCKET = "bucket"
_STARTS = 3
SECRETS = {
    "owner": "OWNERSECRET", "peer7": "PEERSECRET", "guest": "GUESTSECRET", "writer": "WRITERSECRET",
    "member": "MEMBERSECRET",
}  # fmt: skip
"""Access keys, with the secret of each."""

WRITER, MEMBER = (peer.peer_id for peer in identities(2))
"""Peers of a run: one that may write manifests, and one that may not."""


def of_a_peer(peer: str) -> list[str]:
    """What docs/security.md says that a peer may do. A wildcard of fixed length ends before the folders of others."""
    folders = (f"peers/{peer}/*", f"rounds/????????/????/{peer}/*", "anchors/*", "slots/*")
    return [f"Read:{BUCKET}", f"List:{BUCKET}", *(f"Write:{BUCKET}/run/{folder}" for folder in folders)]


ACTIONS: Mapping[str, Sequence[str]] = {
    "owner": ["Admin", "Read", "List", "Tagging", "Write"],
    "peer7": [f"Read:{BUCKET}", f"List:{BUCKET}", f"Write:{BUCKET}/run/peers/peer7/*"],
    "guest": [f"Read:{BUCKET}", f"List:{BUCKET}"],
    "writer": [*of_a_peer(WRITER), f"Write:{BUCKET}/run/rounds/????????/????/manifest-*"],
    "member": of_a_peer(MEMBER),
}


def find_weed() -> str | None:
    """The server's program, beside this interpreter or on the path."""
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


@contextmanager
def running(weed: str, folder: Path, limit_s: float = 90.0) -> Iterator[str]:
    """Address of a server with no bucket."""
    identities = [
        {"name": name, "credentials": [{"accessKey": name, "secretKey": SECRETS[name]}], "actions": list(actions)}
        for name, actions in ACTIONS.items()
    ]
    (folder / "identities.json").write_text(json.dumps({"identities": identities}))
    (folder / "data").mkdir()
    for _ in range(_STARTS):
        server, port = start(weed, folder)
        try:
            if is_listening(server, port, limit_s, folder / "log"):
                yield f"http://127.0.0.1:{port}"
                return
        finally:
            server.kill()  # a gentle end takes ten seconds, for data that nobody will read
            server.wait()
    raise AssertionError(f"weed ended {_STARTS} times: {(folder / 'log').read_text(errors='replace')[-2000:]}")


def start(weed: str, folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A server, and the port at which it speaks S3. Somebody may take a port before it does; then it ends."""
    names = [
        *["s3.port", "s3.port.grpc", "s3.port.iceberg", "s3.port.lance", "master.port", "master.port.grpc"],
        *["volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc"],
    ]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    command = [
        *[weed, "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-volume.max=4"],
        *["-s3", f"-s3.config={folder / 'identities.json'}", *(f"-{name}={port}" for name, port in ports.items())],
    ]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=folder), ports["s3.port"]


def free_ports(count: int) -> list[int]:
    """Ports that nobody has at the moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def is_listening(server: subprocess.Popen[bytes], port: int, limit_s: float, log: Path) -> bool:
    """Wait until the server takes connections; False if it ended, and a failure with its log if it is late."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if server.poll() is not None:
            return False
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return True
        time.sleep(0.1)
    raise AssertionError(f"weed is not up: {log.read_text(errors='replace')[-2000:]}")
