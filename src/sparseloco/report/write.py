"""Writing a report: all bytes are made first, then each file appears whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sparseloco.errors import ConfigError
from sparseloco.report import chart, png
from sparseloco.report.page import page
from sparseloco.report.runs import Run, distinct


def write_report(
    runs: Sequence[Run],
    out_dir: str | Path,
    *,
    title: str = "SparseLoCo report",
    command: str | None = None,
    tuned: Mapping[str, Sequence[str]] | None = None,
    pngs: bool = True,
) -> Path:
    """Write ``report.html``, and the two charts as PNG, of one or more runs.

    Args:
        runs: The runs in the order in which tables and colours take them.
        out_dir: Folder of the report; made where it does not exist.
        title: The line above the headline, and the title of the page.
        command: The command line that makes these runs again. Without it, the page names one
            ``sparseloco train`` per run.
        tuned: Label -> names of the settings that were selected on the validation split. Labels that are not
            named keep what their ``summary.json`` says under ``tuned``.
        pngs: Also write ``loss_over_tokens.png`` and ``loss_over_bytes.png``; this needs matplotlib, the page
            does not.

    Returns:
        The path of ``report.html``.

    Raises:
        ConfigError: if there are no runs, ``tuned`` names an unknown run, matplotlib is missing or the folder
            cannot be written.
    """
    if not runs:
        raise ConfigError("runs=[]: must hold at least one run; give the folder of a finished run")
    runs = [_with_tuned(run, tuned or {}) for run in runs]
    if unknown := sorted(set(tuned or {}) - {run.label for run in runs}):
        known = ", ".join(run.label for run in runs)
        raise ConfigError(f"tuned={unknown[0]!r}: must be the label of a run; use one of {known}")
    runs = distinct(runs)
    files: dict[str, bytes] = {}
    if pngs:
        png.require_matplotlib()
        files = {f"{c.name}.png": png.draw(c) for c in (chart.over_tokens(runs), chart.over_bytes(runs))}
    files["report.html"] = page(runs, title=title, command=command).encode()
    out_dir = Path(out_dir)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            _write_atomically(out_dir / name, content)
    except OSError as error:
        rule = f"must be a folder that can be written ({error.strerror})"
        raise ConfigError(f"out_dir={str(out_dir)!r}: {rule}; choose another") from error
    return out_dir / "report.html"


def _with_tuned(run: Run, tuned: Mapping[str, Sequence[str]]) -> Run:
    if run.label not in tuned:
        return run
    return replace(run, summary=replace(run.summary, tuned=tuple(tuned[run.label])))


def _write_atomically(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        # mkstemp makes files private; a report is to be shown.
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
