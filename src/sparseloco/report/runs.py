"""What a report knows of a run: its summary, its evaluations and its settings, read from the run folder."""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from sparseloco.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The contents of ``summary.json``; bytes and compression are per replica, losses in nats per token.

    ``tuned`` names the settings of this run that were selected on the validation split.
    """

    label: str
    preset: str
    held_out_loss: float
    validation_loss: float
    bits_per_byte: float
    tokens: int
    rounds: int
    steps: int
    workers: int
    parameters: int
    bytes_sent_per_replica: int
    bytes_received_per_replica: int
    dense_bytes_per_replica: int
    compression: float | None
    seconds: float
    seconds_in_sync: float
    corpus: str
    corpus_sha256: str
    settings: dict[str, Any]
    tuned: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """What every line of ``metrics.jsonl`` has."""

    kind: str


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One evaluation of the anchor: an ``evaluation`` line of ``metrics.jsonl``."""

    split: str
    step: int
    round: int
    tokens: int
    bytes_sent: int
    loss: float
    bits_per_byte: float


@dataclass(frozen=True)
class Run:
    """A finished run, as its folder tells it."""

    folder: Path
    summary: Summary
    evaluations: tuple[Evaluation, ...]
    config: dict[str, Any]
    config_text: str

    @property
    def label(self) -> str:
        """The name of the run in tables and pictures."""
        return self.summary.label

    @property
    def curve(self) -> list[Evaluation]:
        """Evaluations on the validation split with a finite loss, in the order of training."""
        finite = (e for e in self.evaluations if e.split == "validation" and math.isfinite(e.loss))
        return sorted(finite, key=lambda e: (e.tokens, e.bytes_sent))

    @property
    def sync_fraction(self) -> float:
        """Share of the run's time spent in encoding, exchange and outer steps."""
        seconds = self.summary.seconds
        return self.summary.seconds_in_sync / seconds if seconds > 0 else math.nan


def load_run(folder: str | Path) -> Run:
    """Read the run folder that ``train`` or ``compare`` has written.

    Args:
        folder: Folder with ``summary.json``, ``metrics.jsonl`` and ``config.toml``.

    Returns:
        The run, checked: every field that a report shows is there and has its type.

    Raises:
        ConfigError: if a file is missing, unreadable or not what a run folder holds.
    """
    folder = Path(folder)
    config_text = _read(folder / "config.toml")
    try:
        config = tomllib.loads(config_text)
    except tomllib.TOMLDecodeError as error:
        raise _damaged(folder / "config.toml", f"valid TOML ({error})") from error
    path = folder / "summary.json"
    summary = _parse(_read(path), Summary, path)
    return Run(folder, summary, _evaluations(folder / "metrics.jsonl"), config, config_text)


def distinct(runs: Sequence[Run]) -> list[Run]:
    """The same runs, with the folder's name added to labels that occur more than once."""
    count = Counter(run.label for run in runs)
    labels = [
        run.label if count[run.label] == 1 else f"{run.label} ({run.folder.name or number})"
        for number, run in enumerate(runs, start=1)
    ]
    return [replace(run, summary=replace(run.summary, label=label)) for run, label in zip(runs, labels, strict=True)]


def _evaluations(path: Path) -> tuple[Evaluation, ...]:
    lines = [(f" on line {n}", line) for n, line in enumerate(_read(path).splitlines(), start=1) if line.strip()]
    return tuple(
        _parse(line, Evaluation, path, where)
        for where, line in lines
        if _parse(line, Record, path, where).kind == "evaluation"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"folder={str(path.parent)!r}: must hold {path.name}; give the folder of a finished run"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: must be a readable text file ({error}); run it again or leave it out") from error


def _parse(text: str, kind: type[T], path: Path, where: str = "") -> T:
    import msgspec

    try:
        return msgspec.convert(json.loads(text), type=kind)
    except json.JSONDecodeError as error:
        raise _damaged(path, f"valid JSON{where} ({error.msg})") from error
    except msgspec.ValidationError as error:
        raise _damaged(path, f"the fields of {kind.__name__}{where} ({error})") from error


def _damaged(path: Path, rule: str) -> ConfigError:
    return ConfigError(f"{path}: must hold {rule}; run it again or leave this run out of the report")
