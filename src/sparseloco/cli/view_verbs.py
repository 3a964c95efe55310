"""The verbs that show things and train nothing: watch, doctor, bench, cite."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparseloco.cli.app import AsJson, app
from sparseloco.cli.shell import UNFINISHED, command, print_json, say


@app.command("watch", epilog="Example: sparseloco watch runs/mine")
@command
def watch(
    folder: Annotated[Path, typer.Argument(metavar="RUN", show_default=False, help="Folder of a run under way.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print every record of the run as a line of JSON.")] = False,
) -> None:
    """Show a run on this machine while it trains; ends when the run does, and Ctrl-C stops only the watching.

    The exit code is 1 if the run has ended without a result: it was interrupted, failed or was killed.
    """
    from sparseloco.cli import watch as watching
    from sparseloco.cli.screen import Screen

    try:
        with Screen(quiet=as_json) as screen:
            fate = watching.watch(folder, screen, typer.echo if as_json else None)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    if fate is not None:
        say(fate)
        raise typer.Exit(UNFINISHED)


@app.command("doctor", epilog="Example: sparseloco doctor s3://bucket/run --key peer.key")
@command
def doctor(
    url: Annotated[
        str | None, typer.Argument(metavar="URL", show_default=False, help="A store to examine instead of the machine.")
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Key file of a peer, whose own folders are tried."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what this machine has, what is slow on it and why. Takes some seconds and writes nothing that stays.

    With URL the store of a run instead: whether it can be reached and does conditional puts, what these credentials
    may do, latency, bandwidth, clock skew, and what round time to expect. The exit code is 1 if a peer could not take
    part from here.
    """
    from sparseloco.cli.screen import Screen

    if url is None:
        from sparseloco.cli import doctor as examination
        from sparseloco.errors import ConfigError

        if key is not None:
            raise ConfigError("--key: must stand beside a URL, whose store is tried with it; add the URL or drop it")
        found = examination.examine()
    else:
        from sparseloco.cli import store_doctor

        found = store_doctor.examine_url(url, key)
    print_json(found) if as_json else Screen(quiet=True).show_examination(found)
    if not found.get("usable", True):
        raise typer.Exit(UNFINISHED)


@app.command(
    "bench",
    epilog="Example: sparseloco bench --plot bench.png",
)
@command
def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Measure k = 64 only; under a minute on two cores.")] = False,
    side: Annotated[
        int | None,
        typer.Option(metavar="N", show_default=False, help="Rows and columns of all matrices, a multiple of 64."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Draw time over k into a .png or .svg file."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure encode and decode on this machine against plain PyTorch and the memory's limit. Takes some minutes.

    Nothing is trained and nothing is fetched. Ends with 1, after its output, if the plain baseline takes more than 30
    times the limit: then no speed-up counts.
    """
    from sparseloco.cli import benching
    from sparseloco.cli.screen import Screen

    settings = benching.settings(quick=quick, side=side, plot=plot)
    with Screen(quiet=as_json) as screen:
        found = benching.measure(settings, screen)
    print_json(found) if as_json else screen.show_bench(found)
    benching.finish(found, plot)


@app.command("cite", epilog="Example: sparseloco cite sparseloco")
@command
def cite(
    preset: Annotated[
        str, typer.Argument(metavar="PRESET", show_default=False, help="A method; list them with describe --list.")
    ],
    as_json: AsJson = False,
) -> None:
    """Print the references of a method and of its parts as BibTeX."""
    from sparseloco.citations import cite as references_of

    found = references_of(preset)
    if as_json:
        print_json([{"role": role, **reference.fields(), "bibtex": reference.bibtex()} for role, reference in found])
    else:
        typer.echo("\n\n".join(f"% {role}\n{reference.bibtex()}" for role, reference in found))
