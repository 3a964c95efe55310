"""``sparseloco data``: prepare text before a run, and look at what was made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sparseloco.cli.shell import command, print_json

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Prepare text, and look at what was made of it.",
    epilog="Example: sparseloco data prepare examples/demo.toml",
)

Config = Annotated[Path, typer.Argument(metavar="CONFIG.toml", show_default=False, help="Settings with [data].")]
Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="A.B=C", show_default=False, help="Replace one setting; may be repeated."),
]
Samples = Annotated[int, typer.Option(metavar="N", help="Windows of the train split to show as text.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else, to stdout.")]


@app.command("prepare", epilog="Example: sparseloco data prepare examples/demo.toml --set data.path=my-texts")
@command
def prepare(config: Config, overrides: Overrides = [], as_json: AsJson = False) -> None:  # noqa: B006
    """Read the text of a run and make tokens of it, so that the run itself starts at once."""
    from sparseloco.cli.screen import Screen
    from sparseloco.data import open_dataset

    settings = _data_of(config, overrides)
    with Screen(quiet=as_json) as screen, screen.reading(" + ".join(s.label for s in settings.all_sources)) as progress:
        dataset = open_dataset(settings, progress=progress)
    _show(_figures(dataset, 0), as_json)


@app.command("inspect", epilog="Example: sparseloco data inspect examples/demo.toml --samples 2 --json")
@command
def inspect(
    place: Annotated[
        Path,
        typer.Argument(metavar="CONFIG.toml|CACHE", show_default=False, help="Settings, or a folder of the cache."),
    ],
    overrides: Overrides = [],  # noqa: B006
    samples: Samples = 1,
    as_json: AsJson = False,
) -> None:
    """Say what prepared text holds: tokens by split and source, bytes a token, hashes, and samples as text."""
    from sparseloco.data import find_dataset, open_entry
    from sparseloco.errors import ConfigError

    if samples < 0:
        raise ConfigError(f"--samples {samples}: must be at least 0; use 1")
    dataset = open_entry(place) if place.is_dir() else find_dataset(_data_of(place, overrides))
    _show(_figures(dataset, samples), as_json)


def _data_of(config: Path, overrides: list[str]) -> Any:
    """``[data]`` of a file; a file of comparisons alone has it as well."""
    from sparseloco.config import load_entries

    return load_entries(config, overrides)[0].config.data


def _figures(dataset: Any, num_samples: int) -> dict[str, Any]:
    from sparseloco.data import describe_dataset

    return describe_dataset(dataset, num_samples)


def _show(figures: dict[str, Any], as_json: bool) -> None:
    from sparseloco.cli.screen import Screen

    if as_json:
        print_json(figures)
    else:
        Screen(quiet=True).show_dataset(figures)
