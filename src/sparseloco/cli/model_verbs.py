"""The verbs for trained models: generate, eval, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparseloco.cli.app import AsJson, app
from sparseloco.cli.shell import command, print_json

Place = Annotated[
    Path,
    typer.Argument(metavar="RUN", show_default=False, help="A run folder, or the folder of a model."),
]


@app.command("generate", epilog='Example: sparseloco generate runs/mine --prompt "def " --max-tokens 60 --seed 1')
@command
def generate(
    run: Place,
    prompt: Annotated[str, typer.Option(metavar="TEXT", show_default=False, help="Text to continue.")] = "",
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", help="Tokens to write at most.")] = 100,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Spread of the draws; 0 always takes the likeliest token.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(metavar="S", help="The same seed gives the same text.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Continue a text with a trained model."""
    from dataclasses import asdict

    from sparseloco.model import find_model
    from sparseloco.model import generate as write

    folder = find_model(run)
    if as_json:
        print_json(
            asdict(write(folder, prompt, max_tokens=max_tokens, temperature=temperature, seed=seed)) | {"seed": seed}
        )
        return

    def show(piece: str) -> None:
        typer.echo(piece, nl=False)

    show(prompt)
    write(folder, prompt, max_tokens=max_tokens, temperature=temperature, seed=seed, stream=show)
    typer.echo()


@app.command("eval", epilog="Example: sparseloco eval runs/mine --data other.txt --json")
@command
def evaluate(
    run: Place,
    data: Annotated[
        str | None,
        typer.Option(metavar="PATH", show_default=False, help="Text to measure on; absent: the run's held-out text."),
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", show_default=False, help="YAML tasks of lm-evaluation-harness, offline with local data."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", metavar="N", show_default=False, help="Tokens of text at most."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a trained model: perplexity and bits per byte of text, or tasks of lm-evaluation-harness."""
    from sparseloco.cli import models
    from sparseloco.cli.screen import Screen

    with Screen(quiet=as_json) as screen:
        figures = models.evaluate(run, data, tasks, max_tokens, screen)
    if as_json:
        print_json(figures)
        return
    for line in models.in_words(figures):
        typer.echo(line)


@app.command("export", epilog="Example: sparseloco export runs/mine --out my-model")
@command
def export(
    run: Place,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", show_default=False, help="Folder to write.")],
    as_json: AsJson = False,
) -> None:
    """Copy the model of a run to a folder that transformers' from_pretrained loads, with its tokenizer."""
    from sparseloco.model import export_model, find_model

    files = export_model(find_model(run), out)
    if as_json:
        print_json({"folder": str(out), "files": files})
    else:
        typer.echo(f"model: {out} ({', '.join(files)})")
