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

BUCKET = "bucket"
SECRETS = {"owner": "OWNERSECRET", "peer7": "PEERSECRET", "guest": "GUESTSECRET"}
"""Access keys, with the secret of each."""

ACTIONS: Mapping[str, Sequence[str]] = {
    "owner": ["Admin", "Read", "List", "Tagging", "Write"],
    "peer7": [f"Read:{BUCKET}", f"List:{BUCKET}", f"Write:{BUCKET}/run/peers/peer7/*"],
    "guest": [f"Read:{BUCKET}", f"List:{BUCKET}"],
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
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        wait_until_listening(server, ports["s3.port"], limit_s, folder / "log")
        yield f"http://127.0.0.1:{ports['s3.port']}"
    finally:
        server.kill()  # a gentle end takes ten seconds, for data that nobody will read
        server.wait()


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


def wait_until_listening(server: subprocess.Popen[bytes], port: int, limit_s: float, log: Path) -> None:
    """Return when the server takes connections; fail with its log if it ended or is late."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"weed is not up: {log.read_text(errors='replace')[-2000:]}")
