"""``watch``: the live view of a run on this machine, from the files that it writes."""

from __future__ import annotations

import json
import math
import shlex
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sparseloco.cli.lock import is_held
from sparseloco.cli.screen import Screen
from sparseloco.errors import ConfigError
from sparseloco.metrics import Status

POLL_SECONDS = 0.5


def watch(folder: Path, screen: Screen, say_record: Callable[[str], None] | None = None) -> str | None:
    """Follow a run until its ``summary.json`` appears, or it has ended without one.

    Args:
        folder: The run's folder.
        screen: Where the view is drawn.
        say_record: Given every line of ``metrics.jsonl`` as it stands.

    Returns:
        None for a finished run; else what became of it and how it goes on.

    Raises:
        ConfigError: if the folder is not that of one run, or a line is damaged.
    """
    label, steps = _about(folder)
    status: Status | None = None
    record: dict[str, Any] = {}
    with screen.training(label, steps) as progress:
        for line in tail(folder):
            if say_record is not None:
                say_record(line)
            record = _record(folder, line)
            status = advanced(status, record, steps)
            if status is not None:
                progress(status)
            if _is_interruption(record) and is_held(folder) is None:
                break  # nobody can say whether the process is still there, but it said that it ends
    return None if (folder / "summary.json").is_file() else _unfinished(folder, record)


def tail(folder: Path) -> Iterator[str]:
    """Complete lines of ``metrics.jsonl`` as they are written, until the run is done or no process writes to it.

    A run that starts anew in the same folder is followed too.
    """
    path = folder / "metrics.jsonl"
    position, rest, inode = 0, b"", -1
    while True:
        done = is_held(folder) is False or (folder / "summary.json").is_file()  # before the last look at the lines
        try:
            with path.open("rb") as file:
                found = path.stat()
                if found.st_ino != inode or found.st_size < position:  # a new run in the same folder
                    position, rest, inode = 0, b"", found.st_ino
                file.seek(position)
                content = file.read()
        except FileNotFoundError:
            content = b""
        position += len(content)
        *lines, rest = (rest + content).split(b"\n")
        yield from (line.decode() for line in lines if line.strip())
        if done:
            return
        if not content:
            time.sleep(POLL_SECONDS)


def advanced(status: Status | None, record: dict[str, Any], steps: int) -> Status | None:
    """The state of a run after one more record of its log; None before the first that says something."""
    kind = record.get("kind")
    if kind == "evaluation" and record.get("split") == "validation":
        before = status or Status(0, steps, math.nan, None, 0.0, 0, math.nan)
        return before._replace(validation_loss=record["loss"])
    if kind != "step":
        return status
    step, seconds = record["step"], record["seconds"]
    loss = record["train_loss"]
    return Status(
        step=step,
        steps=steps,
        train_loss=math.nan if loss is None else loss,
        validation_loss=status.validation_loss if status is not None else None,
        tokens_per_s=record["tokens_per_s"],
        bytes_sent=record["bytes_sent"],
        seconds_left=seconds / step * (steps - step),
        round=record["round"],
        round_bytes=record["round_bytes"],
        compression=record["compression"],
        delta_norm=record["delta_norm"],
        residual_norm=record["residual_norm"],
        update_norm=record["update_norm"],
        sync_fraction=record["seconds_in_sync"] / seconds if seconds else 0.0,
    )


def _about(folder: Path) -> tuple[str, int]:
    """Name of a run and the steps that it will make."""
    try:
        table = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        return folder.resolve().name, int(table["train"]["steps"])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError) as error:
        inside = sorted(path.parent for path in folder.glob("*/config.toml"))
        hint = f", for example {inside[0]}" if inside else ""
        raise ConfigError(
            f"folder={str(folder)!r}: must hold the config.toml of one run; give a run's folder{hint}"
        ) from error


def _is_interruption(record: dict[str, Any]) -> bool:
    return record.get("kind") == "interrupted"


def _unfinished(folder: Path, last: dict[str, Any]) -> str:
    """What became of a run that has left no result; ``last`` is the end of its log."""
    fate = "ended without a result, and no process writes to it"
    if _is_interruption(last):
        fate = f"was interrupted at step {last['step']} {'after saving' if last['saved'] else 'without a checkpoint'}"
    words = shlex.join([*_launcher(folder), "sparseloco", "train", "--resume", str(folder)])
    return f"RUN={str(folder)!r}: {fate}; continue it with: {words}"


def _launcher(folder: Path) -> list[str]:
    """What stands before the command of a run that torchrun had started."""
    table = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    train = table["train"]
    if table.get("transport", {}).get("kind") != "process_group" or train.get("processes"):
        return []
    return ["torchrun", "--nproc-per-node", str(train.get("workers", 1) * train.get("shards", 1)), "-m"]


def _record(folder: Path, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{folder / 'metrics.jsonl'}: must hold valid JSON lines ({error.msg}); run it again"
        ) from error
    return record if isinstance(record, dict) else {}
