"""Where a run's figures go besides ``metrics.jsonl``: TensorBoard, Weights & Biases, trackio.

One protocol for all; a package is imported when its writer is opened. Nothing leaves the machine unless the
package's own environment variables say so (``WANDB_MODE=online``, ``TRACKIO_SPACE_ID``).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sparseloco.errors import ConfigError
from sparseloco.metrics import MetricsLog
from sparseloco.settings import RunConfig, to_table


class Writer(Protocol):
    """A place for numbers by name and step."""

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Record finite numbers that belong to one inner step; steps never fall."""
        ...

    def close(self) -> None:
        """Hand everything over; nothing is written afterwards."""
        ...


class TensorBoardWriter:
    """Event files in ``<run>/tensorboard``; see them with ``tensorboard --logdir runs``."""

    def __init__(self, folder: Path, label: str, config: RunConfig) -> None:
        module = _import("tensorboard", "torch.utils.tensorboard")
        self._writer: Any = module.SummaryWriter(log_dir=str(folder / "tensorboard"))
        self._writer.add_text("label", label)

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """A run of Weights & Biases, offline below ``<run>/wandb`` unless ``WANDB_MODE`` says otherwise."""

    def __init__(self, folder: Path, label: str, config: RunConfig) -> None:
        module = _import("wandb", "wandb")
        with _stdout_kept_clean():
            self._run: Any = module.init(
                project=config.logging.project,
                name=label,
                dir=str(folder),
                config=to_table(config),
                mode=os.environ.get("WANDB_MODE", "offline"),
            )

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        with _stdout_kept_clean():
            self._run.finish()


class TrackioWriter:
    """A run of trackio in its local database; see it with ``trackio show``."""

    def __init__(self, folder: Path, label: str, config: RunConfig) -> None:
        self._module: Any = _import("trackio", "trackio")
        with _stdout_kept_clean():
            self._module.init(project=config.logging.project, name=label, config=to_table(config))

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._module.log(dict(values), step=step)

    def close(self) -> None:
        with _stdout_kept_clean():
            self._module.finish()


WRITERS: dict[str, Callable[[Path, str, RunConfig], Writer]] = {
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


def open_log(folder: Path, label: str, config: RunConfig, start: bytes = b"") -> FanOut:
    """The log of a run: ``metrics.jsonl`` always, and the writers that ``[logging]`` names.

    ``start`` holds the records of a run that is resumed.
    """
    check_writers(config.logging.to)
    writers = {name: WRITERS[name](folder, label, config) for name in config.logging.to}
    return FanOut(MetricsLog(folder / "metrics.jsonl", start), writers)


class FanOut:
    """Records for the file, whose numbers go to writers too; a writer that fails is given up, the run goes on."""

    def __init__(self, file: MetricsLog, writers: Mapping[str, Writer]) -> None:
        self._file = file
        self._writers = dict(writers)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record; the file comes first, so that it is complete whatever a writer does."""
        self._file.write(kind, **fields)
        values = named_scalars(kind, fields)
        for name, writer in list(self._writers.items()):
            self._attempt(name, lambda writer=writer: writer.write(values, int(fields["step"])))

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
                stacklevel=3,
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
    if kind == "evaluation":
        return {f"{fields['split']}/{name}": value for name, value in numbers.items() if name in _EVALUATED}
    return {_name(name): value for name, value in numbers.items()}


_EVALUATED = ("loss", "bits_per_byte")
_SYNC = ("round", "round_bytes", "bytes_sent", "bytes_received", "compression", "seconds_in_sync")


def _name(field: str) -> str:
    if field.endswith("_norm"):
        return f"norm/{field.removesuffix('_norm')}"
    return f"sync/{field}" if field in _SYNC else f"train/{field.removeprefix('train_')}"


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
