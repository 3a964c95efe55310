"""The verbs of peers over a store: join, and the group run with keygen, create, amend and void."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from sparseloco.cli.app import AsJson, Verbose, app
from sparseloco.cli.shell import command, print_json

run_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Runs of peers that meet in a store: make one, change its rules.",
    epilog="Example: sparseloco run create s3://bucket/mine examples/peers.toml --key owner.key",
)
app.add_typer(run_app, name="run")

Url = Annotated[
    str, typer.Argument(metavar="URL", show_default=False, help="Address of the run: s3://bucket/run, or a directory.")
]
OwnerKey = Annotated[Path, typer.Option("--key", metavar="FILE", show_default=False, help="Key file of the owner.")]


@run_app.command("keygen", epilog="Example: sparseloco run keygen owner.key")
@command
def keygen(
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help="New file for the secret key.")],
    as_json: AsJson = False,
) -> None:
    """Make a key, of a run's owner or of a peer, in a new file that nobody else can read."""
    from sparseloco.cli.trust import new_key

    made = new_key(file)
    if as_json:
        print_json({"file": str(file), "public": made.public, "peer_id": made.peer_id})
        return
    typer.echo(f"key: {file}, to be kept secret\npublic key: {made.public}\npeer id: {made.peer_id}")


@run_app.command("create", epilog="Example: sparseloco run create s3://bucket/mine examples/peers.toml --key owner.key")
@command
def create(
    url: Url,
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", show_default=False, help="Settings of the run.")],
    key: OwnerKey,
    overrides: Annotated[
        list[str],
        typer.Option("--set", metavar="A.B=C", show_default=False, help="Replace one setting; may be repeated."),
    ] = [],  # noqa: B006
    rules: Annotated[
        list[str],
        typer.Option("--policy", metavar="KEY=VALUE", show_default=False, help="Set one rule; as --set policy.KEY."),
    ] = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Write a run into a store, for peers to join: signed settings, rules and tokenizer. Nothing is trained.

    The store is tried first. What a stranger's machine must not be told, such as a path, is refused.
    """
    from sparseloco.cli import peer_runs
    from sparseloco.cli.runs import read_tokenizer
    from sparseloco.cli.screen import Screen
    from sparseloco.peers.identity import Identity

    owner = Identity.load(key)
    asked = [*overrides, *(f"policy.{rule}" for rule in rules)]
    with Screen(quiet=as_json) as screen:
        made = peer_runs.create_run(url, config, asked, owner, lambda data: read_tokenizer(data, screen))
    line = shlex.join(["sparseloco", "join", url, "--owner", made.owner])
    if as_json:
        print_json({"url": url, "run": made.run, "owner": made.owner, "fingerprint": made.fingerprint, "join": line})
    else:
        typer.echo(f"run: {made.run} at {url}\nowner: {made.owner}\njoin with: {line}")


@run_app.command("amend", epilog="Example: sparseloco run amend s3://bucket/mine --key owner.key policy.min_peers=2")
@command
def amend(
    url: Url,
    changes: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE...", show_default=False, help="New values: policy.KEY, or algorithm.outer_lr."
        ),
    ],
    key: OwnerKey,
    round_: Annotated[
        int, typer.Option("--round", metavar="N", help="First round in which they may hold; 0: as soon as they can.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Change rules of a run, or its outer learning rate, while peers train.

    It holds from --round on, or from the first round whose manifest acknowledges it, if that is later: without --round,
    also in a round that is open and stuck.
    """
    from sparseloco.cli import owning
    from sparseloco.peers.identity import Identity

    made = owning.amend_run(url, Identity.load(key), round_, changes)
    found: dict[str, Any] = {"run": made.run, "n": made.n, "round": made.round, "changes": made.changes}
    if as_json:
        print_json(found)
    else:
        typer.echo(owning.told(made))


@run_app.command("void", epilog="Example: sparseloco run void s3://bucket/mine --round 41 --key owner.key --bar-writer")
@command
def void(
    url: Url,
    key: OwnerKey,
    round_: Annotated[int, typer.Option("--round", metavar="N", show_default=False, help="The round.")],
    changes: Annotated[
        list[str],
        typer.Argument(metavar="KEY=VALUE...", show_default=False, help="Further changes, as of `run amend`."),
    ] = [],  # noqa: B006
    fragment: Annotated[int, typer.Option(metavar="F", help="The fragment.")] = 0,
    bar_writer: Annotated[
        bool, typer.Option("--bar-writer", help="Its writer may write no manifest any more.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also a round from before the anchors that peers could start over from.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Let a round be closed anew: for a manifest that lists a frame which nobody can fetch, so that all wait.

    Peers that wait go on with another manifest. Peers that have applied it start over from an anchor, and lose what
    they had not sent yet.
    """
    from sparseloco.cli import owning
    from sparseloco.peers.identity import Identity, peer_id_of
    from sparseloco.types import Key

    owner = Identity.load(key)
    made, gone = owning.void_round(url, owner, Key(round_, fragment), changes, bar_writer=bar_writer, force=force)
    if as_json:
        voided = {"attempt": gone.attempt, "sha256": gone.sha256, "writer": gone.writer}
        entries = [{"peer": entry.peer, "hash": entry.hash, "size": entry.size} for entry in gone.entries]
        print_json({"run": made.run, "n": made.n, "round": round_, "fragment": fragment, "changes": made.changes,
                    "manifest": voided | {"entries": entries}})  # fmt: skip
        return
    typer.echo(
        f"amendment {made.n} of run {made.run} voids round {round_}, fragment {fragment}: attempt {gone.attempt}"
    )
    typer.echo(f"written by {gone.writer}, peer {peer_id_of(gone.writer)}; it lists:")
    for entry in gone.entries:
        typer.echo(f"  {entry.peer}  {entry.hash}  {entry.size} bytes")
    typer.echo("peers that wait close the round anew; those that have applied it start over from an anchor")
    if "policy.writers" in made.changes:
        typer.echo(f"writers from then on: {', '.join(made.changes['policy.writers'])}")
    else:
        line = shlex.join(["sparseloco", "run", "amend", url, "--key", str(key), "policy.writers=[...]"])
        typer.echo(f"its writer may write others; to shut it out, name those who may: {line}")


@app.command("join", epilog="Example: sparseloco join s3://bucket/mine --out runs/mine")
@command
def join(
    url: Url,
    owner: Annotated[
        str | None,
        typer.Option(metavar="PUBLIC_KEY", show_default=False, help="Key that the run's owner must have."),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Key file of this peer; the user's own if absent."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="PATH", show_default=False, help="Text of this peer instead of the run's."),
    ] = None,
    overrides: Annotated[
        list[str],
        typer.Option("--set", metavar="A.B=C", show_default=False, help="Choose one setting of this machine."),
    ] = [],  # noqa: B006
    no_model: Annotated[bool, typer.Option("--no-model", help="Do not keep the trained model.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", show_default=False, help="Run folder; one below runs/ if absent."),
    ] = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Take part in a run over a store: fetch what it is, catch up, and train until it is done.

    Ctrl-C leaves at the next round border; the same command continues. Without --owner the key in the run is trusted
    at the first use of an address.
    """
    from sparseloco.cli import joining
    from sparseloco.cli.screen import Screen

    given = {"--owner": owner, "--key": key, "--data": data}
    words = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    words += [word for value in overrides for word in ("--set", value)] + (["--no-model"] if no_model else [])
    asked = joining.Asked(url, owner, key, out, data, overrides, keep_model=not no_model)
    with Screen(quiet=as_json, verbose=verbose) as screen:
        done = joining.join(
            asked, screen, lambda folder: shlex.join(["sparseloco", "join", url, *words, "--out", str(folder)])
        )
    print_json(done.summaries[0]) if as_json else screen.show_runs(done.runs, done.report)
