"""Pure functions of the protocol, whose values the explorer keeps; signatures take most of the time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from sparseloco.peers import manifest as manifests
from sparseloco.peers import paths
from sparseloco.peers.identity import Identity
from sparseloco.peers.manifest import History, Manifest
from sparseloco.peers.run_file import Amendment, RunFile, run_at


@cache
def read_manifest(data: bytes) -> Manifest:
    return manifests.canonical.decode(data, Manifest, what="manifest", limit=10**6)


_VERDICTS: dict[Any, Any] = {}


def cached_judge(data: bytes, place: paths.Manifest, history: History) -> Any:
    """``judge`` is a pure function, so its values may be kept."""
    key = (data, place, history.previous, history.digest, history.policy, len(history.amendments), history.voids)
    if key not in _VERDICTS:
        _VERDICTS[key] = manifests.judge(data, place, history)
    return _VERDICTS[key]


_SEALED: dict[Any, bytes] = {}


def cached_seal(manifest: Manifest, writer: Identity) -> bytes:
    key = (manifests.canonical.encode(manifest), writer.public)
    if key not in _SEALED:
        _SEALED[key] = manifests.seal(manifest, writer)
    return _SEALED[key]


_RUNS: dict[Any, RunFile] = {}


def cached_run_at(run: RunFile, before: Sequence[Amendment], round: int, amended: Sequence[Amendment] = ()) -> RunFile:
    signatures = tuple(tuple(one.signature for one in known) for known in (before, amended))
    key = (run.policy, round, signatures)
    if key not in _RUNS:
        _RUNS[key] = run_at(run, before, round, amended)
    return _RUNS[key]
