"""Where a run's figures go besides ``metrics.jsonl``: TensorBoard, Weights & Biases, trackio.

One protocol for all; a package is imported when its writer is opened. Nothing leaves the machine unless the
package's own environment variables say so (``WANDB_MODE=online``, ``TRACKIO_SPACE_ID``).

A run that is resumed goes on in the same place and shows each step once, as ``metrics.jsonl`` does: TensorBoard takes
back what came after the checkpoint; the others cannot, so they are not told it again.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import os
import secrets
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sparseloco.errors import ConfigError
from sparseloco.metrics import MetricsLog, write_atomically
from sparseloco.settings import RunConfig, to_table


class Writer(Protocol):
    """A place for numbers by name and step.

    Attributes:
        is_cut: Whether it holds nothing of the step at which the run is resumed, nor of later ones.
    """

    is_cut: bool

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Record finite numbers that belong to one inner step; steps never fall."""
        ...

    def close(self) -> None:
        """Hand everything over; nothing is written afterwards."""
        ...


class TensorBoardWriter:
    """Event files in ``<run>/tensorboard``; see them with ``tensorboard --logdir runs``."""

    is_cut = True

    def __init__(self, folder: Path, label: str, config: RunConfig, resume: int | None = None) -> None:
        module = _import("tensorboard", "torch.utils.tensorboard")
        self._writer: Any = module.SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=resume)
        if resume is None:
            self._writer.add_text("label", label)

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a process that is killed must not take with it what metrics.jsonl has

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """A run of Weights & Biases, offline below ``<run>/wandb`` unless ``WANDB_MODE`` says otherwise."""

    def __init__(self, folder: Path, label: str, config: RunConfig, resume: int | None = None) -> None:
        module, known = _import("wandb", "wandb"), _names(folder)
        self.is_cut = "wandb" not in known
        with _stdout_kept_clean():
            self._run: Any = module.init(
                project=config.logging.project,
                name=label,
                dir=str(folder),
                config=to_table(config),
                mode=os.environ.get("WANDB_MODE", "offline"),
                # "allow", not "must": a run that was offline so far does not exist at the service yet.
                **({} if self.is_cut else {"id": known["wandb"], "resume": "allow"}),
            )
        _remember(folder, "wandb", self._run.id)

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        with _stdout_kept_clean():
            self._run.finish()


class TrackioWriter:
    """A run of trackio in its local database; see it with ``trackio show``."""

    def __init__(self, folder: Path, label: str, config: RunConfig, resume: int | None = None) -> None:
        self._module: Any = _import("trackio", "trackio")
        known = _names(folder)
        self.is_cut = "trackio" not in known
        # trackio resumes the newest run of a name, so a name must not be that of another run folder.
        name = known.get("trackio", f"{label}-{secrets.token_hex(3)}")
        with _stdout_kept_clean():
            self._module.init(
                project=config.logging.project,
                name=name,
                config=to_table(config),
                resume="never" if self.is_cut else "must",
            )
        _remember(folder, "trackio", name)

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._module.log(dict(values), step=step)

    def close(self) -> None:
        with _stdout_kept_clean():
            self._module.finish()


WRITERS: dict[str, Callable[[Path, str, RunConfig, int | None], Writer]] = {
    "tensorboard": TensorBoardWriter,
    "wandb": WandbWriter,
    "trackio": TrackioWriter,
}
"""Name in ``[logging] to``, which is also the package's and the extra's -> what opens it."""


def check_writers(names: Sequence[str]) -> None:
    """Refuse writers whose package is not installed, without importing it.

    Raises:
        ConfigError: if one is missing; it names the pip command.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise _missing(name)


def open_log(folder: Path, label: str, config: RunConfig, start: bytes = b"", resume: int | None = None) -> FanOut:
    """The log of a run: ``metrics.jsonl`` always, and the writers that ``[logging]`` names.

    Args:
        folder: Of the run.
        label: Its name.
        config: Its settings.
        start: The records of a run that is resumed, until its checkpoint.
        resume: Step of that checkpoint; None for a run that starts.

    Raises:
        ConfigError: if a package is missing.
        CheckpointError: if the file cannot be written.
    """
    check_writers(config.logging.to)
    path = folder / "metrics.jsonl"
    told = frozenset(map(_about, _records(path.read_bytes()))) if resume is not None and path.exists() else frozenset()
    if resume is None:
        (folder / _NAMES).unlink(missing_ok=True)
    writers = {name: WRITERS[name](folder, label, config, resume) for name in config.logging.to}
    log = FanOut(MetricsLog(path, start), writers, told)
    if resume is not None:
        log.repeat(record for record in _records(start) if record["step"] >= resume)
    return log


class FanOut:
    """Records for the file, whose numbers go to writers too; a writer that fails is given up, the run goes on.

    Args:
        file: Gets every record.
        writers: By name.
        told: Records that writers which are not cut have had before the run was resumed.
    """

    def __init__(self, file: MetricsLog, writers: Mapping[str, Writer], told: frozenset[_About] = frozenset()) -> None:
        self._file = file
        self._writers = dict(writers)
        self._told = told

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record; the file comes first, so that it is complete whatever a writer does."""
        self._file.write(kind, **fields)
        self._tell({"kind": kind, **fields}, lambda writer, about: writer.is_cut or about not in self._told)

    def repeat(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Give records that the file has to the writers that are cut, as they lost them."""
        for record in records:
            self._tell(record, lambda writer, _: writer.is_cut)

    def _tell(self, record: Mapping[str, Any], wanted: Callable[[Writer, _About], bool]) -> None:
        about, values = _about(record), named_scalars(record["kind"], record)
        for name, writer in list(self._writers.items()):
            if wanted(writer, about):
                self._attempt(name, lambda writer=writer: writer.write(values, int(record["step"])))

    def content(self) -> bytes:
        """Every record of the file so far."""
        return self._file.content()

    def close(self) -> None:
        """Close the file and every writer."""
        self._file.close()
        for name, writer in list(self._writers.items()):
            self._attempt(name, writer.close)

    def _attempt(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  # a service that is down must not end hours of training
            del self._writers[name]
            warnings.warn(
                f"logging.to={name!r}: given up after {type(error).__name__}: {error}; metrics.jsonl goes on",
                stacklevel=4,
            )


def named_scalars(kind: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record by the names that writers show, ``group/name``.

    Example:
        >>> named_scalars("evaluation", {"split": "validation", "step": 5, "loss": 3.25, "bits_per_byte": math.nan})
        {'validation/loss': 3.25}
        >>> named_scalars("step", {"step": 5, "train_loss": 3.5, "delta_norm": 0.5, "bytes_sent": 12})
        {'train/loss': 3.5, 'norm/delta': 0.5, 'sync/bytes_sent': 12.0}
    >>> named_scalars("interrupted", {"step": 5, "saved": True})
    {}
    """
    numbers = {
        name: float(value)
        for name, value in fields.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
    if kind == "abstained":
        return {}  # a peer and a round are names
    if kind == "evaluation":
        return {f"{fields['split']}/{name}": value for name, value in numbers.items() if name in _EVALUATED}
    return {_name(name): value for name, value in numbers.items()}


_EVALUATED = ("loss", "bits_per_byte")
_SYNC = ("round", "round_bytes", "bytes_sent", "bytes_received", "compression", "seconds_in_sync")


def _name(field: str) -> str:
    if field.endswith("_norm"):
        return f"norm/{field.removesuffix('_norm')}"
    return f"sync/{field}" if field in _SYNC else f"train/{field.removeprefix('train_')}"


_About = tuple[str, str | None, int]
"""Kind, split or source, and step: what a record is about, whatever its numbers are."""

_NAMES = ".writers.json"
"""Hidden file of a run folder: what its run is called at each service."""


def _about(record: Mapping[str, Any]) -> _About:
    return record["kind"], record.get("split", record.get("source")), int(record["step"])


def _records(lines: bytes) -> Iterator[dict[str, Any]]:
    return map(json.loads, lines.splitlines())


def _names(folder: Path) -> dict[str, str]:
    path = folder / _NAMES
    return json.loads(path.read_bytes()) if path.exists() else {}


def _remember(folder: Path, service: str, name: str) -> None:
    write_atomically(folder / _NAMES, json.dumps({**_names(folder), service: name}) + "\n")


def _import(extra: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(extra) from error


def _missing(name: str) -> ConfigError:
    return ConfigError(
        f"logging.to={name!r}: must be installed, but Python finds no package {name}; "
        f'run pip install "sparseloco[{name}]" or leave it out'
    )


def _stdout_kept_clean() -> contextlib.AbstractContextManager[Any]:
    """What a package prints goes to stderr, since stdout may be JSON."""
    return contextlib.redirect_stdout(sys.stderr)
