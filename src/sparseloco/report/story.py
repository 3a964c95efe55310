"""The sentences of a report, computed from the runs: what they show, and what must be known to believe it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparseloco.report import units
from sparseloco.report.runs import Run


def headline(runs: Sequence[Run]) -> str:
    """The one sentence of the page."""
    pair = contestants(runs)
    if pair is not None:
        sparse, dense = pair
        return f"{sparse.label} {_verdict(sparse, dense)} {_thrift(sparse)}."
    best = _lowest(runs)
    if best is None:
        return "No loss to compare: " + ("the runs use different corpora." if runs else "there are no runs.")
    loss = tied(f"{units.loss(best.summary.held_out_loss)} nats")
    if len(runs) == 1:
        return f"{best.label} reaches a held-out loss of {loss} per token {_thrift(best)}."
    return f"{best.label} has the lowest held-out loss of {len(runs)} runs, {loss} per token, {_thrift(best)}."


def details(runs: Sequence[Run]) -> str:
    """The numbers behind the headline, in one or two sentences."""
    best, pair = _lowest(runs), contestants(runs)
    if best is None or len(runs) == 1:
        return ""
    text = f"Lowest held-out loss: {best.label}, {units.loss(best.summary.held_out_loss)} nats per token."
    if pair is not None:
        sparse, dense = (run.summary for run in pair)
        sent = [tied(units.num_bytes(run.bytes_sent_per_replica)) for run in (sparse, dense)]
        loss = [units.loss(run.held_out_loss) for run in (sparse, dense)]
        text += (
            f" Against the best dense DiLoCo run, {dense.label}, {sparse.label} has a loss ratio of "
            f"{sparse.held_out_loss / dense.held_out_loss:.3f} ({loss[0]} to {loss[1]}) and sends {sent[0]} "
            f"instead of {sent[1]} per replica."
        )
    return text


def contestants(runs: Sequence[Run]) -> tuple[Run, Run] | None:
    """The SparseLoCo run and the dense DiLoCo run that the headline compares, if the runs have both.

    SparseLoCo's is the one with the lowest validation loss, as a choice of settings must be; DiLoCo's is the
    one with the lowest held-out loss, so that the choice can only make things harder for SparseLoCo.
    """
    sparse = [run for run in _comparable(runs) if run.summary.preset == "sparseloco"]
    dense = [run for run in _comparable(runs) if run.summary.preset == "diloco"]
    if not sparse or not dense:
        return None
    return (
        min(sparse, key=lambda run: run.summary.validation_loss),
        min(dense, key=lambda run: run.summary.held_out_loss),
    )


def facts(runs: Sequence[Run]) -> list[str]:
    """What all runs have in common, in a few words each; what differs is left to the table."""
    common: list[str] = []
    for name, text in (
        ("workers", lambda n: f"{n} replica{'s' if n != 1 else ''}"),
        ("parameters", lambda n: f"{tied(units.count(n))} parameters"),
        ("tokens", lambda n: f"{tied(units.count(n))} tokens"),
        ("steps", lambda n: f"{units.count(n)} optimizer steps per replica"),
        ("corpus", lambda name: f"corpus {name}"),
    ):
        values = {getattr(run.summary, name) for run in runs}
        if len(values) == 1:
            common.append(text(values.pop()))
    return common


def selection(runs: Sequence[Run]) -> str:
    """How settings were chosen, and on which text the losses were measured."""
    splits = "the validation split, which the curves show; the table shows the test split"
    tuned = [f"{run.label}: {', '.join(run.summary.tuned)}" for run in runs if run.summary.tuned]
    if not tuned:
        return f"Hyper-parameters are selected on {splits}. These runs name no setting that was selected."
    return f"Hyper-parameters were selected on {splits}. Selected on validation text: {'; '.join(tuned)}."


def warnings(runs: Sequence[Run]) -> list[str]:
    """Reasons to doubt a comparison."""
    found: list[str] = []
    if len({run.summary.corpus_sha256 for run in runs}) > 1:
        found.append("The runs use different corpora, so their losses cannot be compared.")
    if len({run.summary.tokens for run in runs}) > 1:
        found.append("The runs have seen different numbers of tokens; see the table.")
    lost = [run.label for run in runs if not math.isfinite(run.summary.held_out_loss)]
    if lost:
        found.append(f"No finite held-out loss: {', '.join(lost)}.")
    silent = [run.label for run in runs if not run.curve]
    if silent:
        found.append(f"No evaluation on the validation split, hence no curve: {', '.join(silent)}.")
    return found


def tied(text: str) -> str:
    """The text with no-break spaces, so that a number keeps its unit."""
    return text.replace(" ", "\u00a0")


def _verdict(sparse: Run, dense: Run) -> str:
    excess = sparse.summary.held_out_loss / dense.summary.held_out_loss - 1
    if abs(excess) < 0.0005:
        return f"matches the held-out loss of {dense.label}"
    if excess < 0:
        return f"ends {tied(units.percent(-excess))} below the held-out loss of {dense.label}"
    # Rounded up, so that "within" stays true.
    above = tied(units.percent(math.ceil(1000 * excess - 1e-9) / 1000))
    words = ("comes within", "of") if excess <= 0.05 else ("ends", "above")
    return f"{words[0]} {above} {words[1]} the held-out loss of {dense.label}"


def _thrift(run: Run) -> str:
    factor = run.summary.compression
    if factor is None or not math.isfinite(factor) or factor < 1.05:
        return f"while sending {tied(units.num_bytes(run.summary.bytes_sent_per_replica))} per replica"
    return f"while sending {units.ratio(factor)} fewer bytes than dense float32"


def _comparable(runs: Sequence[Run]) -> list[Run]:
    if len({run.summary.corpus_sha256 for run in runs}) > 1:
        return []
    return [run for run in runs if math.isfinite(run.summary.held_out_loss)]


def _lowest(runs: Sequence[Run]) -> Run | None:
    return min(_comparable(runs), key=lambda run: run.summary.held_out_loss, default=None)
