"""What a run writes about itself: one JSON object per line while it trains, one summary when it is done."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sparseloco.errors import CheckpointError


class Status(NamedTuple):
    """State of a run for a progress display; bytes and norms are those of the first replica here.

    Attributes:
        step: Inner steps made, of ``steps``.
        train_loss: Mean over this step's replicas, nats per token.
        validation_loss: Of the anchor at the last evaluation; None before the first.
        tokens_per_s: All replicas of the run together.
        bytes_sent: Frame bytes per replica so far.
        seconds_left: Estimate until the last step.
        round: Rounds posted so far.
        round_bytes: Frame bytes of the last round.
        compression: Dense float32 bytes over frame bytes so far; None before the first round.
        delta_norm: Way from the anchor to the live parameters when the log was last written; None before.
        residual_norm: What was not sent yet, at the same time.
        update_norm: Last update of the anchor; None before the first.
        sync_fraction: Share of the time spent on encoding, exchanging and applying.
    """

    step: int
    steps: int
    train_loss: float
    validation_loss: float | None
    tokens_per_s: float
    bytes_sent: int
    seconds_left: float
    round: int = 0
    round_bytes: int = 0
    compression: float | None = None
    delta_norm: float | None = None
    residual_norm: float | None = None
    update_norm: float | None = None
    sync_fraction: float = 0.0


class MetricsLog:
    """Appends records to ``metrics.jsonl``; each line is whole or absent.

    Args:
        path: The file, which is replaced.
        start: What it holds at first: the records of a run that is resumed.

    Raises:
        CheckpointError: if it cannot be written.
    """

    def __init__(self, path: Path, start: bytes = b"") -> None:
        self._path = path
        with named_errors(path):
            write_atomically(path, start)
            self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record and hand it to the operating system; numbers that are not finite become null."""
        known = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in fields.items()}
        with named_errors(self._path):
            self._file.write(json.dumps({"kind": kind, **known}, allow_nan=False) + "\n")
            self._file.flush()

    def content(self) -> bytes:
        """Everything written so far."""
        return self._path.read_bytes()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Errors of the disk inside this block become one sentence."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path}: must be writable ({error.strerror or error}); free space there, then continue with --resume"
        ) from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file as a whole: a reader sees the old or the new content, never half of one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
