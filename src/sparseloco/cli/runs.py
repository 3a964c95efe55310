"""From settings to run folders: everything is checked before anything is written."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sparseloco.algorithm import Algorithm
from sparseloco.checkpoint import Checkpoint, CheckpointFolder
from sparseloco.cli.figures import check_memory
from sparseloco.cli.folders import (
    COMPARISON,
    check_comparison_folder,
    check_inputs,
    check_report_folder,
    check_run_folder,
    free_folder,
    start_comparison,
    start_run,
    was_begun_by,
)
from sparseloco.cli.lock import check_not_held, only_writer
from sparseloco.cli.screen import Screen
from sparseloco.cli.shell import STOPPING, say, stop_signals
from sparseloco.config import Entry, build_algorithm, to_toml
from sparseloco.data import Dataset, check_windows, open_dataset, open_tokenizer
from sparseloco.errors import CheckpointError, ConfigError, Interrupted
from sparseloco.identity import check_identity, identity
from sparseloco.launch import (
    as_rank,
    check_ranks_and_shards,
    is_torchrun,
    job,
    launch_command,
    memory_errors,
    restarts,
    stopping_limit,
    train_processes,
    train_rank,
)
from sparseloco.metrics import write_atomically
from sparseloco.model import located
from sparseloco.report import Run, load_run, write_report
from sparseloco.settings import DataConfig, RunConfig
from sparseloco.simulate import check_simulated
from sparseloco.trainer import CHECKPOINTS, train
from sparseloco.transport.deadline import Deadline
from sparseloco.writers import check_writers

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Done:
    """What a command leaves: runs in order, their summaries, and the page about them."""

    runs: Sequence[Run]
    summaries: Sequence[dict[str, Any]]
    report: Path


class Listed(msgspec.Struct, frozen=True):
    """What ``comparison.json`` adds to the summary of a run."""

    folder: str
    tuned: tuple[str, ...] = ()


def train_one(
    entry: Entry,
    folder: Path,
    screen: Screen,
    command: str,
    *,
    again: str = "",
    keep_model: bool = True,
    resume: bool = False,
    overwrite: bool = False,
) -> Done | None:
    """Train one run into ``folder``, or continue what is there; None at ranks that do not write.

    ``command`` stands in the report, ``again`` is what continues the run if it is interrupted.
    """
    writes = not is_torchrun() or os.environ["RANK"] == "0"
    if is_torchrun():  # so that the run folder says what was used
        entry = msgspec.structs.replace(entry, config=as_rank(entry.config))
    if restarts():
        resume = resume or was_begun_by(folder, job())
        overwrite = overwrite and not resume  # it was meant for what was there before
        if writes:
            ranks = int(os.environ.get("WORLD_SIZE", "1"))
            came = f"{ranks} ranks" if ranks > 1 else "one rank, which holds all replicas"
            goes_on = "continues as --resume does" if resume else "starts, since it had not come to that"
            screen.say(f"{entry.label}: restart {restarts()} by torchrun, with {came}, {goes_on}")
    if writes:
        check_not_held(folder)
        check_run_folder(folder, resume=resume, overwrite=overwrite)
        check_inputs(folder, [] if resume else _inputs(entry.config))
    algorithm = checked_algorithm(entry.config)
    dataset = read_dataset(entry.config, screen)
    check_ranks_and_shards(entry.config, algorithm, dataset)
    if not writes:
        _follow_rank_0(entry, algorithm, dataset, folder, keep_model=keep_model, resume=resume)
        return None
    with only_writer(folder):
        check_run_folder(folder, resume=resume, overwrite=overwrite)  # again: another may have ended there meanwhile
        summary = _train(entry, algorithm, dataset, folder, screen, again, keep_model=keep_model, resume=resume)
        return Done([load_run(folder)], [summary], write_page([load_run(folder)], folder, command))


def train_all(
    entries: Sequence[Entry],
    folder: Path,
    screen: Screen,
    command: str,
    *,
    again: str = "",
    keep_models: bool = False,
    resume: bool = False,
    overwrite: bool = False,
) -> Done:
    """Train every entry into a folder of its own below ``folder``, or continue it, then write the comparison.

    ``command`` and ``again`` are as in :func:`train_one`, for the whole comparison.
    """
    if is_torchrun():
        raise ConfigError("torchrun: must not start a comparison, which starts its own replicas; call sparseloco alone")
    places = [folder, *(folder / entry.folder for entry in entries)]
    for place in places:
        check_not_held(place)
    _check_comparison(entries, folder, resume=resume, overwrite=overwrite)
    algorithms = [checked_algorithm(entry.config) for entry in entries]
    dataset = read_dataset(entries[0].config, screen)
    for entry, algorithm in zip(entries, algorithms, strict=True):
        check_ranks_and_shards(entry.config, algorithm, dataset)
    with contextlib.ExitStack() as held:
        for place in places:  # all at once, so that hours of the first entry are not lost to the second
            held.enter_context(only_writer(place))
        _check_comparison(entries, folder, resume=resume, overwrite=overwrite)
        if not resume:  # what is there is written again once every entry is done
            start_comparison(folder)
        listed: list[dict[str, Any]] = []
        for number, (entry, algorithm) in enumerate(zip(entries, algorithms, strict=True), start=1):
            screen.say(f"[{number}/{len(entries)}] {entry.label}")
            own = folder / entry.folder
            summary = _train(entry, algorithm, dataset, own, screen, again, keep_model=keep_models, resume=resume)
            listed.append({**summary, "folder": entry.folder, "tuned": list(entry.tuned)})
            write_page([load_run(own)], own, None)
        write_atomically(folder / COMPARISON, json.dumps(listed, indent=2, allow_nan=False) + "\n")
        runs = load_runs(folder)
        return Done(runs, listed, write_page(runs, folder, command))


def default_folder(*words: str) -> Path:
    """Where a run goes that was given no folder: a new one.

    Raises:
        ConfigError: under torchrun.
    """
    if is_torchrun() or job():
        raise ConfigError(
            "--out: must be given under torchrun, since ranks that each look for a free folder may find several; "
            "add --out runs/mine"
        )
    return free_folder(*words)


def report_on(folders: Sequence[Path], out: Path) -> Done:
    """Write a report about runs, and about all runs of comparisons."""
    check_report_folder(out)
    runs = [run for folder in folders for run in load_runs(folder)]
    summaries = [json.loads((run.folder / "summary.json").read_text(encoding="utf-8")) for run in runs]
    return Done(runs, summaries, write_page(runs, out, None))


def load_runs(folder: Path) -> list[Run]:
    """The run in a folder, or all runs of the comparison in it, in its order.

    Raises:
        ConfigError: if there is neither, or a file is damaged.
    """
    path = folder / COMPARISON
    if not path.is_file():
        return [load_run(folder)]
    try:
        listed = msgspec.json.decode(path.read_bytes(), type=list[Listed])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: must hold the runs of a comparison ({error}); run it again") from error
    runs = [(load_run(folder / row.folder), row.tuned) for row in listed]
    return [replace(run, summary=replace(run.summary, tuned=tuned)) for run, tuned in runs]


def checked_algorithm(config: RunConfig) -> Algorithm:
    """The algorithm of a run, after everything that can be known without reading text was checked.

    Raises:
        ConfigError: if model, algorithm and launcher do not fit together.
    """
    check_writers(config.logging.to)
    algorithm = build_algorithm(config)
    if not is_torchrun():
        check_memory(config, algorithm)
    if not is_torchrun() and not config.train.processes:
        check_simulated(config)
    by_torchrun = config.transport.kind == "process_group" and not config.train.processes
    if by_torchrun and not is_torchrun():
        raise ConfigError(
            "transport.kind='process_group': must be started by torchrun, one rank per replica or shard; "
            "use --processes to start them on this machine, or set transport.kind=loopback"
        )
    return algorithm


def read_dataset(config: RunConfig, screen: Screen) -> Dataset:
    """The text of a run as tokens, long enough for its windows."""
    with screen.reading(" + ".join(source.label for source in config.data.all_sources)) as progress:
        dataset = open_dataset(config.data, progress=progress)
    check_windows(dataset, config.train.sequence_length)
    return dataset


def read_tokenizer(config: DataConfig, screen: Screen) -> tuple[Tokenizer, str]:
    """The tokenizer of some text and the token that ends a document: the given one, or one trained on the text."""
    if config.tokenizer:
        given = open_tokenizer(config.tokenizer, config.end_token)
        return given.tokenizer, given.end_token
    with screen.reading(" + ".join(source.label for source in config.all_sources)) as progress:
        dataset = open_dataset(config, progress=progress)
    return dataset.tokenizer, dataset.end_token


def _train(
    entry: Entry,
    algorithm: Algorithm,
    dataset: Dataset,
    folder: Path,
    screen: Screen,
    again: str,
    *,
    keep_model: bool,
    resume: bool,
) -> dict[str, Any]:
    config = located(entry.config)
    run = train_rank if is_torchrun() else train_processes if config.train.processes else train
    found = _newest(folder, entry, screen) if resume else None
    if found is None and resume and (folder / "summary.json").exists():
        raise ConfigError(
            f"--resume: {str(folder)!r} holds a finished run without a checkpoint to go on from; choose another --out"
        )
    if found is None:
        start_run(folder, to_toml(config), job())
    else:
        check_identity(found, identity(config, dataset))
    if run is not train:
        screen.say(f"{entry.label}: {Deadline(config.transport.deadline_s).words}")
    progressing = screen.training(entry.label, config.train.steps)
    words = f"{STOPPING}{stopping_limit()}" if is_torchrun() else STOPPING
    with stop_signals(words) as stop, progressing as progress, memory_errors(config):
        try:
            return run(
                config,
                algorithm,
                dataset,
                folder,
                label=entry.label,
                progress=progress,
                resume=found,
                stop=stop,
                keep_model=keep_model,
            )
        except Interrupted as error:
            started = f"{launch_command()} " if is_torchrun() else ""
            raise Interrupted(f"{entry.label} {error}; continue with: {started}{again}") from error


def _follow_rank_0(
    entry: Entry, algorithm: Algorithm, dataset: Dataset, folder: Path, *, keep_model: bool, resume: bool
) -> None:
    """The part of a rank of torchrun that does not write: what holds for all is said by rank 0 alone."""
    found = CheckpointFolder(folder / CHECKPOINTS).newest()[0] if resume else None
    with stop_signals(words="") as stop:
        try:
            train_rank(
                located(entry.config),
                algorithm,
                dataset,
                folder,
                label=entry.label,
                resume=found,
                stop=stop,
                keep_model=keep_model,
            )
        except Interrupted as error:
            raise Interrupted from error


def _check_comparison(entries: Sequence[Entry], folder: Path, *, resume: bool, overwrite: bool) -> None:
    check_comparison_folder(folder, resume=resume, overwrite=overwrite)
    for entry in entries:
        check_run_folder(folder / entry.folder, resume=resume, overwrite=overwrite)
        check_inputs(folder, [] if resume else _inputs(entry.config))


def _inputs(config: RunConfig) -> list[str]:
    """Places that a run reads from."""
    data, model = config.data, config.model
    return [model.config, model.pretrained, data.tokenizer, *(source.path for source in data.all_sources)]


def _newest(folder: Path, entry: Entry, screen: Screen) -> Checkpoint | None:
    """The checkpoint to continue from, said aloud; None if there is none yet.

    Raises:
        CheckpointError: if there are only damaged ones.
    """
    found, refused = CheckpointFolder(folder / CHECKPOINTS).newest()
    for reason in refused:
        say(f"warning: a checkpoint is passed over: {reason}")
    if found is not None:
        place = f"step {found.step}, token {found.facts['tokens']}"
        screen.say(f"{entry.label}: resuming at {place}, from {found.path}")
    elif refused:
        raise CheckpointError(f"{folder / CHECKPOINTS}: must hold a whole checkpoint; start anew in another folder")
    else:
        screen.say(f"{entry.label}: no checkpoint in {folder}, starting at step 0")
    return found


def write_page(runs: Sequence[Run], folder: Path, command: str | None) -> Path:
    """Write the report about some runs, without charts where they cannot be drawn; returns its page."""
    charts = importlib.util.find_spec("matplotlib") is not None
    if not charts:
        say('warning: matplotlib is not installed, so the report has no charts; run pip install "sparseloco[plot]"')
    return write_report(runs, folder, command=command, charts=charts)
