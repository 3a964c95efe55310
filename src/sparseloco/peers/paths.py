"""Every path of a run, made and taken apart in one place.

A name from a store is an attack until it has been parsed: only what this file can make again, character by character,
is taken. Numbers are padded with zeros, so that listings sort.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from sparseloco.errors import WireError

MAX_ROUND = 10**8 - 1
MAX_ATTEMPT = 10**4 - 1
MAX_FRAGMENT = 10**4 - 1
_MAX_LENGTH = 200
_DIGITS = {"round": 8, "n": 8, "fragment": 4, "part": 4, "attempt": 4}
_TEXTS = {
    "peer": "[0-9a-f]{32}",
    "digest": "[0-9a-f]{32}",
    "hash": "[0-9a-f]{64}",
    "name": r"[a-z0-9][a-z0-9_-]{0,63}(?:\.[a-z0-9]{1,16})?",
}


@dataclass(frozen=True, slots=True)
class RunPath:
    """A path of a run; ``str`` makes it."""

    template: ClassVar[str] = ""

    def __str__(self) -> str:
        return _make(self)


@dataclass(frozen=True, slots=True)
class Run(RunPath):
    """What the owner signed at the start."""

    template: ClassVar[str] = "run.json"


@dataclass(frozen=True, slots=True)
class Tokenizer(RunPath):
    """The tokenizer, whose hash is in ``run.json``."""

    template: ClassVar[str] = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Amend(RunPath):
    """The n-th change by the owner, from 0 on."""

    template: ClassVar[str] = "amend/{n}.json"
    n: int


@dataclass(frozen=True, slots=True)
class Slot(RunPath):
    """Who claimed the n-th data slot."""

    template: ClassVar[str] = "slots/{n}.json"
    n: int


@dataclass(frozen=True, slots=True)
class Anchor(RunPath):
    """A file of the shared state before a round."""

    template: ClassVar[str] = "anchors/{round}/{digest}/{name}"
    round: int
    digest: str
    name: str


@dataclass(frozen=True, slots=True)
class Frame(RunPath):
    """What a peer sends in a round; ``hash`` is of all its bytes."""

    template: ClassVar[str] = "rounds/{round}/{fragment}/{peer}/{part}-{hash}.frame"
    round: int
    fragment: int
    peer: str
    part: int
    hash: str


@dataclass(frozen=True, slots=True)
class Want(RunPath):
    """``peer`` cannot fetch the listed frame with this hash."""

    template: ClassVar[str] = "rounds/{round}/{fragment}/{peer}/want-{hash}"
    round: int
    fragment: int
    peer: str
    hash: str


@dataclass(frozen=True, slots=True)
class Relay(RunPath):
    """Somebody's listed frame, put again by ``peer``, who held its bytes."""

    template: ClassVar[str] = "rounds/{round}/{fragment}/{peer}/relay-{hash}.frame"
    round: int
    fragment: int
    peer: str
    hash: str


@dataclass(frozen=True, slots=True)
class Manifest(RunPath):
    """An attempt to close a round of a fragment."""

    template: ClassVar[str] = "rounds/{round}/{fragment}/manifest-{attempt}.json"
    round: int
    fragment: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Lease(RunPath):
    """Sign of life of a peer."""

    template: ClassVar[str] = "peers/{peer}/lease.json"
    peer: str


@dataclass(frozen=True, slots=True)
class PublicKey(RunPath):
    """Public key of a peer."""

    template: ClassVar[str] = "peers/{peer}/key.json"
    peer: str


KINDS: tuple[type[RunPath], ...] = (
    Run, Tokenizer, Amend, Slot, Anchor, Frame, Want, Relay, Manifest, Lease, PublicKey,
)  # fmt: skip


def parse(path: str) -> RunPath:
    """What a path of a run names.

    Args:
        path: Relative to the run's folder, as a store lists it.

    Raises:
        WireError: if this library would never make that path; the text shows it escaped and shortened.
    """
    if len(path) <= _MAX_LENGTH:
        for kind, pattern in _PATTERNS.items():
            if found := pattern.fullmatch(path):
                texts = found.groupdict()
                values: dict[str, Any] = {name: int(text) if name in _DIGITS else text for name, text in texts.items()}
                return kind(**values)
    raise WireError(f"path={path[:80]!a}: must be a path of a run; leave the object alone")


def round_prefix(round: int, fragment: int) -> str:
    """Where everything of a round of a fragment lies, with the slash at the end."""
    return str(Manifest(round, fragment, 0)).rpartition("/")[0] + "/"


def _make(named: RunPath) -> str:
    values = {field.name: getattr(named, field.name) for field in fields(named)}
    shown = {name: f"{value:0{_DIGITS[name]}d}" if name in _DIGITS else value for name, value in values.items()}
    path = named.template.format(**shown)
    if not _PATTERNS[type(named)].fullmatch(path):
        raise WireError(f"path={path[:80]!a}: must be a path of a run; check its numbers and names")
    return path


def _pattern(kind: type[RunPath]) -> re.Pattern[str]:
    text = re.escape(kind.template).replace(r"\{", "{").replace(r"\}", "}")
    for name, digits in _DIGITS.items():
        text = text.replace(f"{{{name}}}", f"(?P<{name}>[0-9]{{{digits}}})")
    for name, pattern in _TEXTS.items():
        text = text.replace(f"{{{name}}}", f"(?P<{name}>{pattern})")
    return re.compile(text, re.ASCII)


_PATTERNS: dict[type[RunPath], re.Pattern[str]] = {kind: _pattern(kind) for kind in KINDS}
