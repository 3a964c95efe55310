"""What a run writes about itself: one JSON object per line while it trains, one summary when it is done."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple


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
    """Appends records to ``metrics.jsonl``; each line is whole or absent."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record and hand it to the operating system; numbers that are not finite become null."""
        known = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in fields.items()}
        self._file.write(json.dumps({"kind": kind, **known}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


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
