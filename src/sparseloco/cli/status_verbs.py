"""The verb that shows a run over a store: status."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparseloco.cli.app import app
from sparseloco.cli.shell import command, print_json, say, stop_signals

Url = Annotated[
    str, typer.Argument(metavar="URL", show_default=False, help="Where the run is: s3://bucket/run, or a directory.")
]


@app.command("status", epilog="Example: sparseloco status s3://bucket/run --watch")
@command
def status(
    url: Url,
    owner: Annotated[
        str | None, typer.Option(metavar="KEY", show_default=False, help="Public key that must be the owner's.")
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="Newest rounds of each fragment to show.")] = 16,
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(metavar="S", help="Seconds between two looks.")] = 5.0,
    web: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", show_default=False, help="Write a page; with --watch it renews itself."),
    ] = None,
    serve: Annotated[
        int | None,
        typer.Option(metavar="PORT", show_default=False, help="Serve a live page to this machine; 0: a free port."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what is seen as JSON; with --watch, a line for each look.")
    ] = False,
) -> None:
    """Show a run over a store: rounds, peers, bytes, who was left out and why, whether they agree.

    Needs no key and writes nothing to the store. All manifests are checked, from the first one on.
    """
    from sparseloco.cli import seeing
    from sparseloco.errors import ConfigError

    seeing.check_every(every)
    if serve is not None and (web is not None or watch or as_json):
        raise ConfigError("--serve: must stand without --web, --watch and --json; drop them")
    viewer = seeing.open_viewer(url, owner=owner, rounds=rounds)
    if serve is not None:
        server = seeing.Server(viewer, serve, every)
        say(f"the run is shown at {server.url}, until Ctrl-C")
        with stop_signals("") as stopped:
            server.serve(stopped)
        return
    if not watch:
        seen = viewer.look()
        if web is not None:
            seeing.write_page(seen, web)
        if as_json:
            print_json(seen.to_json())
        elif web is not None:
            typer.echo(f"page: {web}")
        else:
            seeing.print_status(seen)
        return
    with seeing.live(web, every, as_json=as_json) as show:
        try:
            seeing.follow(viewer, every, show, say)
        except KeyboardInterrupt:
            raise typer.Exit(0) from None
