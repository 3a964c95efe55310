"""The verbs and their options; what they do is in the other modules of this package."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from sparseloco.cli.shell import command, print_json
from sparseloco.cli.texts import app as data_app

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Pre-train one language model on machines that are joined by slow links.",
    epilog="Example: sparseloco compare examples/demo.toml --out runs/demo",
)

app.add_typer(data_app, name="data")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG.toml", show_default=False, help="Settings of the run.")]
Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="A.B=C", show_default=False, help="Replace one setting; may be repeated."),
]
Only = Annotated[
    list[str],
    typer.Option("--only", metavar="LABEL", show_default=False, help="Take only this entry; may be repeated."),
]
OutPath = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", show_default=False, help="Folder to write to; a new one below runs/ if absent."
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint in the folder.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the earlier run in the folder.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print a line per peer and round to stderr.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else, to stdout.")]


@app.command("train", epilog="Example: sparseloco train examples/sparseloco.toml --set train.seed=1 --out runs/mine")
@command
def train(
    config: ConfigPath,
    overrides: Overrides = [],  # noqa: B006
    data: Annotated[
        str | None,
        typer.Option(metavar="PATH", show_default=False, help="A text file or a directory of text files."),
    ] = None,
    workers: Annotated[int | None, typer.Option(metavar="N", show_default=False, help="Number of replicas.")] = None,
    shards: Annotated[
        int | None, typer.Option(metavar="S", show_default=False, help="Processes that hold one replica together.")
    ] = None,
    processes: Annotated[bool, typer.Option("--processes", help="Run each replica as a process of its own.")] = False,
    no_model: Annotated[bool, typer.Option("--no-model", help="Do not keep the trained model.")] = False,
    out: OutPath = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Train one model and write a run folder with metrics, checkpoints, summary, report and the trained model.

    Needs no further terminal or environment variable. Started by torchrun, each rank is one replica, or
    one shard of it with --shards. Ctrl-C stops after saving; `sparseloco train --resume RUN` continues the run in
    that folder.
    """
    from sparseloco.cli import folders, runs
    from sparseloco.cli.screen import Screen
    from sparseloco.config import Entry, load_config

    if resume:
        config, out = _resumed(config, out, overwrite)

    shorthands = {
        "data.path": data,
        "train.workers": workers,
        "train.shards": shards,
        "train.processes": processes or None,
    }
    # JSON's strings, numbers and booleans are TOML's as well.
    asked = [f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in shorthands.items() if v is not None]
    settings = load_config(config, [*overrides, *asked])
    entry = Entry(label=settings.algorithm.preset, config=settings)
    folder = out or runs.default_folder(config.stem, settings.algorithm.preset)
    words = ["train", str(config), *_options("--set", [*overrides, *asked])]
    with Screen(quiet=as_json, verbose=verbose) as screen:
        line = _command_line(words, folder)
        flags = _flags(no_model=no_model, verbose=verbose, json=as_json)
        again = shlex.join(["sparseloco", "train", "--resume", str(folder), *flags])
        options = {"keep_model": not no_model, "resume": resume, "overwrite": overwrite}
        done = runs.train_one(entry, folder, screen, line, again=again, **options)
    if done is None:
        return
    if as_json:
        print_json(done.summaries[0])
        return
    screen.show_runs(done.runs, done.report)
    if not no_model:
        typer.echo(f"model: {folder / folders.MODEL_FOLDER}")


@app.command("compare", epilog="Example: sparseloco compare examples/demo.toml --out runs/demo")
@command
def compare(
    config: ConfigPath,
    overrides: Overrides = [],  # noqa: B006
    only: Only = [],  # noqa: B006
    models: Annotated[bool, typer.Option("--models", help="Keep the trained model of each run.")] = False,
    out: OutPath = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Train every [[compare]] entry of a file on the same text in the same order, and report on all."""
    from sparseloco.cli import folders, runs
    from sparseloco.cli.screen import Screen
    from sparseloco.config import load_entries

    if resume:
        config, out = _resumed(config, out, overwrite)
    entries = load_entries(config, overrides, only)
    folder = out or folders.free_folder(config.stem)
    words = ["compare", str(config), *_options("--set", overrides), *_options("--only", only)]
    with Screen(quiet=as_json, verbose=verbose) as screen:
        line = _command_line(words, folder)
        again = " ".join([line, "--resume", *_flags(models=models, verbose=verbose, json=as_json)])
        options = {"keep_models": models, "resume": resume, "overwrite": overwrite}
        done = runs.train_all(entries, folder, screen, line, again=again, **options)
    if as_json:
        print_json(done.summaries)
    else:
        screen.show_runs(done.runs, done.report)


@app.command("describe", epilog="Example: sparseloco describe examples/sparseloco.toml --set algorithm.k=32")
@command
def describe(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.toml", show_default=False, help="Settings of the run.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006
    only: Only = [],  # noqa: B006
    list_presets: Annotated[bool, typer.Option("--list", help="List the presets and their keywords.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what methods cost on a model: bytes, memory, compression. Nothing is trained and no text is read."""
    from sparseloco.cli import figures
    from sparseloco.cli.screen import Screen
    from sparseloco.config import load_entries
    from sparseloco.errors import ConfigError

    screen = Screen(quiet=True)
    if list_presets:
        rows = figures.presets()
        print_json(rows) if as_json else screen.show_presets(rows)
        return
    if config is None:
        raise ConfigError("CONFIG.toml: missing argument; name a file, or list the presets with --list")
    described = [figures.describe(entry) for entry in load_entries(config, overrides, only)]
    print_json(described) if as_json else screen.show_figures(described)


@app.command("report", epilog="Example: sparseloco report runs/demo runs/mine --out runs/report")
@command
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", show_default=False, help="Folders of runs or of comparisons.")
    ],
    out: OutPath = None,
    as_json: AsJson = False,
) -> None:
    """Write one page and two pictures about finished runs; several seeds of the same settings give an interval."""
    from sparseloco.cli import runs
    from sparseloco.cli.screen import Screen
    from sparseloco.report import groups

    done = runs.report_on(folders, out or (folders[0] if len(folders) == 1 else Path("runs/report")))
    if as_json:
        repeated = [group.as_json() for group in groups(done.runs)]
        print_json({"report": str(done.report), "runs": done.summaries, "over_seeds": repeated})
    else:
        Screen(quiet=True).show_runs(done.runs, done.report)


def _resumed(config: Path, out: Path | None, overwrite: bool) -> tuple[Path, Path]:
    """Settings and folder of a run that is continued; a run folder stands for both."""
    from sparseloco.errors import ConfigError

    if overwrite:
        raise ConfigError("--overwrite: must not stand beside --resume; keep one of them")
    if config.is_dir():
        if out is not None and out.resolve() != config.resolve():
            raise ConfigError(
                f"--out {str(out)!r}: must be left out beside a run folder, which is continued in place; drop it"
            )
        return config / "config.toml", config
    if out is None:
        raise ConfigError(
            "--resume: must know the folder of the run; add --out DIR, or name the folder instead of CONFIG.toml"
        )
    return config, out


def _options(name: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (name, value)]


def _flags(**given: bool) -> list[str]:
    """Options without a value that were given."""
    return [f"--{name.replace('_', '-')}" for name, is_given in given.items() if is_given]


def _command_line(words: Sequence[str], folder: Path) -> str:
    return shlex.join(["sparseloco", *words, "--out", str(folder)])
