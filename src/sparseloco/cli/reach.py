"""The first contact of a command with a store: says what it waits for, and ends soon where nobody answers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from sparseloco.cli.shell import say
from sparseloco.errors import ConfigError, Interrupted, StoreError, Unavailable
from sparseloco.peers import paths
from sparseloco.peers.run_file import RUN_LIMIT
from sparseloco.peers.store import Store, open_store


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a first answer is waited for; what comes after it may be slow.

    Attributes:
        tries: Requests at most.
        stall_s: Seconds of silence after which one has failed.
        pause_s: Seconds between two.
    """

    tries: int = 3
    stall_s: float = 10.0
    pause_s: float = 1.0


LIMITS = Limits()


def reach(url: str, *, may_make: bool = False) -> None:
    """Make sure that there is a store at a URL, before anything is asked of it; whatever it answers will do.

    Args:
        url: As of :func:`~sparseloco.peers.store.open_store`.
        may_make: A directory need not exist yet.

    Raises:
        ConfigError: if the URL is not understood, or names a directory that does not exist.
        StoreError: if nobody answers.
        Interrupted: by Ctrl-C.
    """
    scheme, split, rest = url.partition("://")
    if not split or scheme == "file":
        if not may_make and not Path(unquote(rest) if split else url).is_dir():
            raise ConfigError(
                f"url={url!r}: must be the address of a run, or a directory that exists; check the spelling"
            )
        return
    store = open_store(url, stall_s=LIMITS.stall_s)
    say(f"waiting for an answer from {url}")
    try:
        reason = _knock(store, LIMITS)
    except KeyboardInterrupt:
        raise Interrupted(f"{url} had not answered yet, and nothing was done") from None
    if reason:
        raise StoreError(
            f"url={url!r}: must be answered by a store, but {LIMITS.tries} tries have failed ({reason}); check the "
            "address, the endpoint in the environment (such as AWS_ENDPOINT_URL) and the network"
        )


def _knock(store: Store, limits: Limits) -> str:
    """Why the last try has failed; empty once anything was answered."""
    reason = ""
    for tries in range(1, limits.tries + 1):
        try:
            store.get(str(paths.Run()), limit=RUN_LIMIT)
        except Unavailable as error:
            reason = str(error).partition(";")[0]
            say(f"try {tries} of {limits.tries} has failed: {reason}")
        except StoreError:
            return ""
        else:
            return ""
        if tries < limits.tries:
            time.sleep(limits.pause_s)
    return reason


def no_run(url: str) -> ConfigError:
    """What is said of a store that holds none."""
    return ConfigError(
        f"URL={url!r}: must hold a run, but there is no run.json; check the address, or make one with `sparseloco "
        "run create`"
    )
