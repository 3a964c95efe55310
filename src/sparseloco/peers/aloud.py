"""What a peer says in the log while it takes part."""

from __future__ import annotations

import logging

from sparseloco.peers.operations import Tell
from sparseloco.peers.replay import Progress

_LOG = logging.getLogger("sparseloco.peers")
QUIET = frozenset({"closed", "deadline", "clipped-other", "norms"})
"""Kinds of what the protocol says that need nobody's attention."""


def log_aloud(tell: Tell) -> None:
    """Log what the protocol says: what is ``QUIET`` as information, all else as a warning."""
    _LOG.log(logging.INFO if tell.kind in QUIET else logging.WARNING, "%s", tell.text)


def log_progress(progress: Progress) -> None:
    """Log how far a replay has come."""
    left = "" if progress.left_s is None else f", {progress.left_s:.0f} s left"
    _LOG.info(
        "replayed %d of %d rounds, %d bytes, %.0f bytes/s%s",
        progress.rounds, progress.total, progress.received_bytes, progress.bytes_per_s, left,
    )  # fmt: skip
