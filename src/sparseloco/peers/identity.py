"""Who a peer is: an Ed25519 key, a file for it, and signatures that mean one thing only.

A signature is over a domain, the fields that say where the signed bytes belong, and the hash of these bytes, so that
what is signed for one place proves nothing at another. The secret half is never printed, pickled or named in an error.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from sparseloco.errors import ConfigError

SIGNATURE_BYTES = 64
PUBLIC_BYTES = 32
_SEED_BYTES = 32
_FILE_HEAD = "sparseloco secret key 1"
_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)


class Domain(Enum):
    """What a signature is for; the value starts the message that is signed."""

    FRAME = b"sparseloco frame\0"
    MANIFEST = b"sparseloco manifest\0"
    RUN = b"sparseloco run\0"
    AMENDMENT = b"sparseloco amendment\0"
    LEASE = b"sparseloco lease\0"
    ANCHOR = b"sparseloco anchor\0"


class Identity:
    """An Ed25519 key pair.

    Args:
        seed: 32 secret bytes; ``generate`` draws them.

    Raises:
        ConfigError: if pynacl is not installed, or the seed has another size.
    """

    __slots__ = ("_key", "peer_id", "public")

    def __init__(self, seed: bytes) -> None:
        if len(seed) != _SEED_BYTES:
            raise ConfigError(f"seed={len(seed)} bytes: must be {_SEED_BYTES} bytes; take Identity.generate()")
        self._key = _signing().SigningKey(seed)
        self.public: str = bytes(self._key.verify_key).hex()
        """Public key, 64 hex digits."""
        self.peer_id: str = peer_id_of(self.public)
        """Name of this peer in every path, 32 hex digits."""

    @classmethod
    def generate(cls) -> Identity:
        """A new key from the randomness of the operating system."""
        return cls(os.urandom(_SEED_BYTES))

    def save(self, path: str | Path) -> None:
        """Write the key to a new file that only its owner can read.

        Raises:
            ConfigError: if there is a file already; a key is never overwritten.
        """
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise ConfigError(
                f"key={str(path)!r}: must not exist yet, since a lost key cannot be made again; choose another name"
            ) from None
        with os.fdopen(handle, "w", encoding="ascii") as file:
            os.fchmod(file.fileno(), 0o600)  # whatever the umask says
            file.write(f"{_FILE_HEAD}\n{bytes(self._key).hex()}\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def load(cls, path: str | Path) -> Identity:
        """Read the key of a file that ``save`` wrote.

        Raises:
            ConfigError: if there is none, if others can read it, or if it holds something else.
        """
        try:
            with open(path, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                data = file.read(1024)
        except OSError as error:
            why = error.strerror
            raise ConfigError(
                f"key={str(path)!r}: must be a file that can be read ({why}); make one with `sparseloco run keygen`"
            ) from None
        if os.name == "posix" and mode & 0o077:
            raise ConfigError(
                f"key={str(path)!r}: must be readable by its owner alone, but has mode {mode & 0o777:03o}; "
                "run chmod 600 on it, and make a new key if somebody else may have read it"
            )
        head, _, rest = data.decode("ascii", "replace").partition("\n")
        if head != _FILE_HEAD or not _KEY.fullmatch(rest.removesuffix("\n")):
            raise ConfigError(f"key={str(path)!r}: must be a key file of this library; name the right file")
        return cls(bytes.fromhex(rest.removesuffix("\n")))

    def sign(self, domain: Domain, *fields: str | int, body: bytes | memoryview) -> bytes:
        """Signature of 64 bytes over the domain, the fields and the hash of ``body``."""
        return self._key.sign(_message(domain, fields, body)).signature

    def __repr__(self) -> str:
        return f"Identity(peer_id={self.peer_id!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("Identity: must not be pickled or copied, since it holds a secret key; use save and load")


def peer_id_of(public: str) -> str:
    """Name of the peer with this public key: 16 bytes of its SHA-256 as 32 hex digits.

    Raises:
        ConfigError: if it is not 64 lower-case hex digits.
    """
    if not _KEY.fullmatch(public):
        raise ConfigError(f"public key={public[:80]!r}: must be 64 lower-case hex digits; copy it whole")
    return hashlib.sha256(bytes.fromhex(public)).hexdigest()[:32]


def verify(public: str, signature: bytes, domain: Domain, *fields: str | int, body: bytes | memoryview) -> bool:
    """Whether the owner of ``public`` signed just this."""
    if not _KEY.fullmatch(public) or len(signature) != SIGNATURE_BYTES:
        return False
    signing = _signing()
    from nacl.exceptions import BadSignatureError

    try:
        signing.VerifyKey(bytes.fromhex(public)).verify(_message(domain, fields, body), signature)
    except (BadSignatureError, ValueError):
        return False
    return True


def _message(domain: Domain, fields: tuple[str | int, ...], body: bytes | memoryview) -> bytes:
    """Bytes of which no two different (domain, fields, body) have the same."""
    pieces = [domain.value]
    for field in fields:
        if isinstance(field, int):
            pieces.append(b"i" + struct.pack("<Q", field))
        else:
            text = field.encode()
            pieces.append(b"s" + struct.pack("<I", len(text)) + text)
    return b"".join([*pieces, b"h", hashlib.sha256(body).digest()])


def _signing() -> Any:
    try:
        import nacl.signing
    except ImportError:
        raise ConfigError(
            "signatures: need the package pynacl, which is not installed; run pip install 'sparseloco[peers]'"
        ) from None
    return nacl.signing
