"""``doctor URL``: what a store lets this key do, how fast it is, and what round time to expect of it."""

from __future__ import annotations

import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from sparseloco.cli.doctor import Finding
from sparseloco.cli.reach import reach
from sparseloco.errors import NotFound, SparseLocoError, StoreError, Unavailable, WireError
from sparseloco.peers import canonical, paths
from sparseloco.peers.identity import Identity
from sparseloco.peers.looking import Viewer
from sparseloco.peers.run_file import RUN_LIMIT, RunFile, read_run
from sparseloco.peers.status import Status
from sparseloco.peers.store import Facts, Store, open_store, probe
from sparseloco.report import units

MEASURED_BYTES = 4 << 20
"""Size of the object that is put and fetched; below the size from which uploads go in parts."""
_YES = "yes"
_OVERWRITES = "wrote over"
_NEEDED = {
    "list": "peers cannot find each other's frames",
    "get": "the run cannot be read",
    "own folder": "this peer cannot take part",
    "own frames": "this peer cannot post",
}
_STALL_S = 30.0
_TOKENIZER_LIMIT = 2**26
_SKEW_S = 30.0
_STRANGER = "0" * 32
"""A folder that no peer has: nobody has a key with this id."""


def examine_url(url: str, key: Path | None) -> dict[str, Any]:
    """See :func:`examine_store`.

    Raises:
        ConfigError: if the URL or the key file cannot be used.
        StoreError: if nobody answers.
    """
    reach(url)
    return examine_store(open_store(url, stall_s=_STALL_S), key=key)


def examine_store(
    store: Store, *, key: Path | None = None, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Everything that ``doctor URL`` shows, as plain values. What it writes is removed again.

    Args:
        store: What is tried; without patience around it, or its retries would be measured.
        key: Key file of a peer, whose folders are tried then; None tries a folder ``probe``.
        clock: Measures seconds.

    Raises:
        ConfigError: if the key file cannot be used.
    """
    peer = Identity.load(key).peer_id if key is not None else None
    folder = f"peers/{peer}" if peer else "probe"
    asked = _Asked()
    permissions = {"list": asked.try_to(lambda: store.page("peers"))}
    permissions["get"], run = _get_run(store, asked)
    facts: Facts | None = None
    if asked.reached:
        permissions["own folder"], facts = _probe(store, folder)
        if peer:
            permissions["own frames"] = _write(store, f"{paths.round_prefix(0, 0)}{peer}/doctor-{secrets.token_hex(8)}")
        permissions["folders of others"] = _write(store, f"peers/{_STRANGER}/doctor-{secrets.token_hex(8)}")
    overwrites = _OVERWRITES in permissions.get("own folder", "")
    found: dict[str, Any] = {
        "store": {
            "reachable": asked.reached,
            "folder": folder,
            "conditional_put": _YES if facts is not None else "no" if overwrites else "not tried",
        },
        "permissions": permissions,
        "latency": {f"{verb}_s": seconds for verb, seconds in facts.latency_s.items()} if facts is not None else {},
        "bandwidth": _bandwidth(store, folder, clock) if facts is not None else {},
        "clock": {"ahead_of_ours_s": facts.clock_skew_s} if facts is not None else {},
    }
    found["run"] = _expect(store, run, found, peer) if run is not None else {}
    found["findings"] = [finding._asdict() for finding in findings(found)]
    needed = ("list", "get", "own folder", *(["own frames"] if peer else []))
    found["usable"] = all(permissions.get(what) == _YES for what in needed)
    return found


def findings(found: Mapping[str, Any]) -> Iterator[Finding]:
    """What follows, the worst first."""
    if not found["store"]["reachable"]:
        why = f"it cannot be reached: {found['permissions']['list']}"
        yield Finding("store", why, "check URL, endpoint and network")
        return
    yield from _about_permissions(found)
    ahead = found["clock"].get("ahead_of_ours_s")
    if ahead is not None and abs(ahead) > _SKEW_S:
        yield Finding(
            "clock",
            f"the store's is {units.duration(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} this machine's; a "
            "run decides nothing by it, but services refuse requests whose time is minutes off",
            "set this machine's clock by NTP",
        )
    run = found["run"]
    if run.get("transfer_s") is not None and run["transfer_s"] > run["deadline_s"] / 2:
        yield Finding(
            "round time",
            f"sending and fetching the frames of a round takes {units.duration(run['transfer_s'])} here, and rounds "
            f"close {units.duration(run['deadline_s'])} after the first frame",
            "ask the owner for a longer deadline_s, or for smaller frames",
        )


def _about_permissions(found: Mapping[str, Any]) -> Iterator[Finding]:
    permissions = found["permissions"]
    for what, why in _NEEDED.items():
        said = permissions.get(what, _YES)
        if said == _YES:
            continue
        remedy = "grant it, see Permissions of the store in docs/security.md"
        if _OVERWRITES in said:
            remedy = "see docs/peers.md for stores that are tried"
        elif what == "own folder" and found["store"]["folder"] == "probe":
            remedy = "name the peer's key file with --key, so that its own folder is tried, or grant it"
        yield Finding(what, f"{why}: {said}", remedy)
    if permissions["folders of others"].startswith(_YES):
        yield Finding(
            "folders of others",
            "these credentials may write there, so signatures show a forgery, but nothing keeps their holder from "
            "deleting what others wrote",
            "in a run with strangers give each peer credentials of its own, see docs/security.md",
        )


class _Asked:
    """Tries requests, and knows whether the store ever answered."""

    def __init__(self) -> None:
        self.reached = False

    def try_to(self, request: Callable[[], object]) -> str:
        """Either "yes", or why not."""
        try:
            request()
        except StoreError as error:
            self.reached = self.reached or not isinstance(error, Unavailable)
            return f"no ({error})"
        self.reached = True
        return _YES


def _get_run(store: Store, asked: _Asked) -> tuple[str, RunFile | None]:
    """Whether objects can be read, and the run, if there is one in order."""
    data: list[bytes] = []

    def get() -> None:
        with suppress(NotFound):
            data.append(store.get(str(paths.Run()), limit=RUN_LIMIT))

    said = asked.try_to(get)
    try:
        return said, read_run(data[0]) if data else None
    except WireError as error:
        return f"no ({error})", None


def _probe(store: Store, folder: str) -> tuple[str, Facts | None]:
    try:
        return _YES, probe(store, folder)
    except StoreError as error:
        return f"no ({error})", None


def _write(store: Store, path: str) -> str:
    """Whether an object can be made at a path; it is removed again."""
    asked = _Asked()
    said = asked.try_to(lambda: store.create(path, b"tried by sparseloco doctor"))
    if said != _YES:
        return said
    removed = asked.try_to(lambda: store.delete(path))
    return said if removed == _YES else f"yes, but what was written stays: {removed}"


def _bandwidth(store: Store, folder: str, clock: Callable[[], float]) -> dict[str, Any]:
    """Bytes per second up and down, of one object each way."""
    path, data = f"{folder}/{secrets.token_hex(8)}-speed", os.urandom(MEASURED_BYTES)
    try:
        up_s = _seconds(lambda: store.put(path, data), clock)
        down_s = _seconds(lambda: store.get(path, limit=len(data)), clock)
    except StoreError as error:
        return {"measured_bytes": len(data), "failed": str(error)}
    finally:
        with suppress(StoreError):
            store.delete(path)
    return {
        "measured_bytes": len(data),
        "up_bytes_per_s": len(data) / up_s,
        "down_bytes_per_s": len(data) / down_s,
    }


def _seconds(request: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    request()
    return max(clock() - start, 1e-9)


def _expect(store: Store, run: RunFile, found: Mapping[str, Any], peer: str | None) -> dict[str, Any]:
    """What a round of this run moves, and how long that takes at the measured rates."""
    seen: Status | None = None
    with suppress(SparseLocoError):
        seen = Viewer(store).look()
    frame_bytes, source = _frame_bytes(store, run, seen)
    rules: Mapping[str, Any] = msgspec.to_builtins(run.policy) if seen is None else seen.policy
    peers = _num_peers(rules["min_peers"], seen, peer)
    speed, latency = found["bandwidth"], found["latency"]
    transfer_s: float | None = None
    if frame_bytes is not None and "up_bytes_per_s" in speed:
        up_s = frame_bytes / speed["up_bytes_per_s"]
        down_s = (peers - 1) * frame_bytes / speed["down_bytes_per_s"]
        # A frame and a manifest go, the folder is listed before and after, frames come several at a time.
        requests_s = latency["put_s"] + latency["create_s"] + 2 * latency["list_s"] + 2 * latency["get_s"]
        transfer_s = up_s + down_s + requests_s
    return {
        "run": run.run,
        "peers": peers,
        "frames_from": source,
        "sent_per_round_bytes": frame_bytes,
        "fetched_per_round_bytes": None if frame_bytes is None else (peers - 1) * frame_bytes,
        "transfer_s": transfer_s,
        "deadline_s": rules["deadline_s"],
    }


def _frame_bytes(store: Store, run: RunFile, seen: Status | None) -> tuple[int | None, str]:
    """Bytes that a peer sends in a round of all fragments, and where that is from."""
    newest: dict[int, float] = {}
    for one in seen.rounds if seen is not None else ():
        if one.closed and one.sent:
            newest.setdefault(one.fragment, statistics.median(sent.nbytes for sent in one.sent))
    if newest:
        return round(sum(newest.values())), "manifests of the newest rounds"
    counted = _counted(store, run)
    return counted, "the settings in run.json" if counted is not None else "nothing yet: no round is closed"


def _counted(store: Store, run: RunFile) -> int | None:
    """From the settings; None if they do not make what run.json has the fingerprint of."""
    from sparseloco.cli.figures import describe
    from sparseloco.config import Entry
    from sparseloco.config.file import resolve

    train = {key: value for key, value in run.train.items() if key != "optimizer"}
    table = {
        "algorithm": run.algorithm,
        "model": run.model,
        "train": train,
        "optimizer": run.train.get("optimizer", {}),
    }
    try:
        data = store.get(str(paths.Tokenizer()), limit=_TOKENIZER_LIMIT)
        if canonical.sha256(data) != run.tokenizer:
            return None
        with tempfile.TemporaryDirectory() as folder:  # the size of the vocabulary is in it
            place = Path(folder) / "tokenizer.json"
            place.write_bytes(data)
            config = resolve({**table, "data": {**run.data, "tokenizer": str(place)}})
            figures = describe(Entry(label=run.name, config=config))
    except SparseLocoError:
        return None
    return int(figures["bytes_sent_per_round"]) if figures["fingerprint"] == run.fingerprint else None


def _num_peers(min_peers: int, seen: Status | None, peer: str | None) -> int:
    """How many take part: those of the newest round, or those that are here, and this one if it is not among them."""
    least = max(2, min_peers)
    if seen is None:
        return least
    listed = next((len(one.sent) for one in seen.rounds if one.closed and one.sent), 0)
    live = sum(one.state == "live" and one.peer != peer for one in seen.peers)
    return max(least, listed, live + 1)
