"""Small signed objects: JSON of one form only, so that equal contents have equal bytes and one hash."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, TypeVar

import msgspec

from sparseloco.errors import ConfigError, WireError

Hex16 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
Hex32 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
Hex64 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Hex128 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{128}\Z")]
Hash = Annotated[str, msgspec.Meta(pattern=r"\A(?:[0-9a-f]{64})?\Z")]
"""A SHA-256, or nothing."""
Line = Annotated[str, msgspec.Meta(pattern=r"\A[ -~]{1,200}\Z")]
"""Printable ASCII for people: no control characters, no letters that look like others."""

_MAX_DEPTH = 40
T = TypeVar("T")


def encode(value: Any) -> bytes:
    """Canonical bytes: keys sorted, no spaces, UTF-8."""
    return msgspec.json.encode(value, order="sorted")


def decode(data: bytes, kind: type[T], *, what: str, limit: int) -> T:
    """The value whose canonical bytes these are.

    Raises:
        WireError: if the bytes are too many, are not such a value, or are another way to write it.
    """
    if len(data) > limit:
        raise WireError(f"{what}={len(data)} bytes: must be at most {limit}; refuse it")
    _check_depth(data, what)
    try:
        value = msgspec.json.decode(data, type=kind, strict=True)
    except (msgspec.MsgspecError, ValueError) as error:
        if isinstance(error.__cause__, ConfigError):  # a value that checks itself
            raise WireError(f"{what}: {error.__cause__}") from None
        raise WireError(f"{what}: {ascii(str(error))[1:-1][:300]}; refuse it") from None
    if encode(value) != data:
        raise WireError(f"{what}: must be written in the canonical form, keys sorted and no spaces; refuse it")
    return value


def sha256(data: bytes) -> str:
    """SHA-256 as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def _check_depth(data: bytes, what: str) -> None:
    """Refuse what would exhaust the stack of a decoder; brackets inside of strings count too, and do no harm."""
    if data.count(b"[") + data.count(b"{") <= _MAX_DEPTH:
        return
    depth = 0
    for byte in data:
        depth += (byte in b"[{") - (byte in b"]}")
        if depth > _MAX_DEPTH:
            raise WireError(f"{what}: must not be nested deeper than {_MAX_DEPTH}; refuse it")
