"""What one user's peers keep between runs: their key, and which owner was trusted at which address."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from sparseloco.errors import ConfigError
from sparseloco.metrics import write_atomically
from sparseloco.peers.identity import Identity, peer_id_of

KEY = "peer.key"
KNOWN = "known_runs"


def config_dir() -> Path:
    """``$SPARSELOCO_CONFIG``, else ``$XDG_CONFIG_HOME/sparseloco``, else ``~/.config/sparseloco``."""
    if own := os.environ.get("SPARSELOCO_CONFIG"):
        return Path(own)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "sparseloco"


def new_key(path: Path) -> Identity:
    """A new key in a new file.

    Raises:
        ConfigError: if there is a file already, or none can be made there.
    """
    identity = Identity.generate()
    try:
        identity.save(path)
    except OSError as error:
        raise ConfigError(
            f"key={str(path)!r}: must be a file that can be made ({error.strerror}); choose another place"
        ) from None
    return identity


def peer_key(given: Path | None) -> tuple[Path, bool]:
    """The key file of a peer: the one that was named, or the user's own, which is made at its first use.

    Returns:
        The file, and whether it was made now.
    """
    if given is not None:
        return given, False
    path = config_dir() / KEY
    if path.exists():
        return path, False
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new_key(path)
    return path, True


@contextlib.contextmanager
def only_user(path: Path) -> Iterator[Identity]:
    """Inside this block no other process of this machine takes part with the same key.

    Raises:
        ConfigError: if one does, or the file is not a key.
    """
    identity = Identity.load(path)
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"key={str(path)!r}: is in use by another peer on this machine, and two peers must not have one key; "
                "give this one its own with --key"
            ) from None
        except OSError:  # no locks on this file system
            pass
        yield identity
    finally:
        os.close(handle)


def known_owner(url: str) -> str | None:
    """The owner that was trusted for an address before; None if it is new.

    Raises:
        ConfigError: if the file that remembers it is damaged.
    """
    return _known().get(_place(url))


def remember(url: str, owner: str) -> None:
    """Trust an owner for an address from now on."""
    known = _known()
    if known.get(_place(url)) == owner:
        return
    known[_place(url)] = owner
    config_dir().mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(known_file(), "".join(f"{key} {place}\n" for place, key in sorted(known.items())))


def known_file() -> Path:
    """Where trusted owners are remembered: one line each, the public key and the address."""
    return config_dir() / KNOWN


def check_owner(url: str, found: str, asked: str | None) -> bool:
    """Whether an owner is new here; refuse another one than was asked for, or was trusted before.

    Args:
        url: Address of the run.
        found: Public key in its ``run.json``.
        asked: That of ``--owner``, if it was given.

    Raises:
        ConfigError: naming both keys.
    """
    if asked is not None:
        peer_id_of(asked)  # refuses what is no public key
        if asked != found:
            raise ConfigError(
                f"--owner {asked}: must be the owner of the run at {url}, which is {found}; ask for the right address "
                "or key"
            )
        return False
    known = known_owner(url)
    if known is not None and known != found:
        raise ConfigError(
            f"owner={found}: must be {known}, which was trusted for {url} on first use ({known_file()}); somebody put "
            "another run there, so ask its owner for the key and name it with --owner"
        )
    return known is None


def _place(url: str) -> str:
    """The address as it is compared: a folder of this machine by its whole path."""
    return url.rstrip("/") if "://" in url else str(Path(url).absolute())


def _known() -> dict[str, str]:
    try:
        lines = known_file().read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{known_file()}: must be a text file that can be read ({error}); mend it") from None
    found: dict[str, str] = {}
    for line in lines:
        key, _, place = line.partition(" ")
        try:
            peer_id_of(key)
        except ConfigError as error:
            raise ConfigError(f"{known_file()}: must hold a public key and an address in each line; {error}") from None
        found[place] = key
    return found
