"""Folders that runs are written to: which are free, which hold an earlier run, and what of that may be removed."""

from __future__ import annotations

import itertools
import shutil
import tomllib
from collections.abc import Iterable
from pathlib import Path

from sparseloco.errors import ConfigError
from sparseloco.metrics import write_atomically
from sparseloco.model import MODEL_FOLDER
from sparseloco.trainer import CHECKPOINTS

COMPARISON = "comparison.json"
LOCK = ".lock"
"""File in a run folder that the process which writes there holds."""
_JOB = ".job"
"""File with the name of the job of torchrun that began the run."""
_RUN_FILES = ("config.toml", "metrics.jsonl", "summary.json")
_REPORT_FILES = ("report.html", "loss_over_tokens.png", "loss_over_bytes.png")
_OF_A_RUN = {*_RUN_FILES, *_REPORT_FILES, CHECKPOINTS, MODEL_FOLDER, "tensorboard", "wandb"}
_OUR_PAGE = b'<meta name="generator" content="sparseloco">'
_LONGEST_NAME = 200


def free_folder(*words: str) -> Path:
    """A folder below ``runs/`` that does not exist yet; words that repeat the one before are left out."""
    name = "-".join(word for number, word in enumerate(words) if word != words[number - 1] or number == 0)
    place = Path("runs") / name[:_LONGEST_NAME]
    others = (place.with_name(f"{place.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([place], others) if not path.exists())


def check_run_folder(folder: Path, *, resume: bool = False, overwrite: bool = False) -> None:
    """Refuse a folder for a run that holds anything but an earlier run, or one that nobody asked to replace.

    Raises:
        ConfigError: saying what is there.
    """
    inside = _inside(folder)
    if not inside:
        return
    if not is_run(folder):
        lacking = "config.toml with [algorithm]" if "metrics.jsonl" in inside else "metrics.jsonl"
        raise _not_ours(folder, "run", f"it has no {lacking}")
    if resume:
        return
    _check_names(folder, "run", (name for name in inside if name not in _OF_A_RUN))
    if overwrite:
        return
    if "summary.json" in inside:
        raise _finished(folder, "run")
    if CHECKPOINTS in inside and _inside(folder / CHECKPOINTS):
        raise ConfigError(
            f"--out {str(folder)!r}: holds checkpoints of a run that is not finished; continue it with --resume, "
            "replace it with --overwrite, or choose another folder"
        )


def check_inputs(folder: Path, inputs: Iterable[str]) -> None:
    """Refuse to start a run in a folder that holds what the run reads, since its start makes room there.

    Raises:
        ConfigError: naming the input.
    """
    for place in inputs:
        if place and Path(place).exists() and Path(place).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"--out {str(folder)!r}: must not hold what the run reads, {place!r}; choose another")


def check_comparison_folder(folder: Path, *, resume: bool = False, overwrite: bool = False) -> None:
    """The same for the folder that holds the folders of several runs."""
    known = {COMPARISON, *_REPORT_FILES}
    inside = _inside(folder)
    others = [name for name in inside if name not in known and not _is_of_a_comparison(folder / name)]
    if not resume:
        _check_names(folder, "comparison", others)
    if inside and COMPARISON not in inside and all(name in known or name in others for name in inside):
        raise _not_ours(folder, "comparison", f"it has no {COMPARISON} and no folder of a run")
    if COMPARISON in inside and not resume and not overwrite:
        raise _finished(folder, "comparison")


def check_report_folder(folder: Path) -> None:
    """Refuse to write over a page that is not one of ours.

    Raises:
        ConfigError: naming it.
    """
    if "report.html" in _inside(folder) and _OUR_PAGE not in (folder / "report.html").read_bytes():
        raise ConfigError(f"--out {str(folder)!r}: its report.html was not written by sparseloco; choose another")


def is_run(folder: Path) -> bool:
    """Whether a folder holds what a run leaves from its first moment on."""
    try:
        table = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        return isinstance(table.get("algorithm"), dict) and (folder / "metrics.jsonl").is_file()
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return False


def was_begun_by(folder: Path, job: str) -> bool:
    """Whether a job of torchrun, by its name, began the run in a folder, so that a restart of that job resumes it.

    A launcher that names no job is believed, since its run must not be replaced by its own restart.
    """
    place = folder / _JOB
    return (place.read_text(encoding="utf-8") if place.is_file() else "") == job


def start_run(folder: Path, config: str, job: str = "") -> None:
    """Make a folder that was checked, or remove what the run in it has left, and write the settings of a new one.

    Args:
        folder: Of the run.
        config: Its settings.
        job: Name of the job of torchrun that begins it.

    Raises:
        ConfigError: if it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        model = [MODEL_FOLDER] if (folder / MODEL_FOLDER / "config.json").is_file() else []
        for name in (CHECKPOINTS, "tensorboard", *model):  # event files add up
            if (folder / name).is_dir():
                shutil.rmtree(folder / name)
        _remove(folder, (_JOB, "summary.json", *_REPORT_FILES))
        write_atomically(folder / "metrics.jsonl", "")
        write_atomically(folder / "config.toml", config)
        if job:  # last, when nothing is left of the run before
            write_atomically(folder / _JOB, job)
    except OSError as error:
        raise not_writable(folder, error) from error


def start_comparison(folder: Path) -> None:
    """Make a folder that was checked, or remove the comparison in it, but not its runs.

    Raises:
        ConfigError: if it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove(folder, (COMPARISON, *_REPORT_FILES))
    except OSError as error:
        raise not_writable(folder, error) from error


def not_writable(folder: Path, error: OSError) -> ConfigError:
    """The one sentence for a folder in which nothing can be written."""
    return ConfigError(
        f"--out {str(folder)!r}: must be a folder that can be written ({error.strerror}); choose another"
    )


def _is_of_a_comparison(folder: Path) -> bool:
    """Whether a folder holds a run, or nothing but the lock of a killed comparison that had not come to it."""
    return is_run(folder) or (folder.is_dir() and [path.name for path in folder.iterdir()] == [LOCK])


def _inside(folder: Path) -> list[str]:
    """Names in a folder, or none if it does not exist; hidden files are nobody's."""
    try:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"--out {str(folder)!r}: must be a folder, but is a file; choose another")
        return sorted(path.name for path in folder.iterdir() if path.name[0] != ".") if folder.exists() else []
    except OSError as error:
        raise ConfigError(f"--out {str(folder)!r}: must be readable ({error.strerror}); choose another") from error


def _check_names(folder: Path, what: str, unknown: Iterable[str]) -> None:
    for name in unknown:
        raise _not_ours(folder, what, f"{name!r} is there")


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)


def _not_ours(folder: Path, what: str, why: str) -> ConfigError:
    return ConfigError(
        f"--out {str(folder)!r}: must be new, empty or hold nothing but an earlier {what}, but {why}; choose another"
    )


def _finished(folder: Path, what: str) -> ConfigError:
    return ConfigError(
        f"--out {str(folder)!r}: holds a finished {what}; replace it with --overwrite, or choose another folder"
    )
