"""Verbs: train, compare, describe, report, data, watch, generate, eval, export, doctor, bench, cite, join, run, status.

Settings are checked before anything is written. Heavy packages are imported by the commands that need them.
"""

from sparseloco.cli import model_verbs as _model_verbs  # noqa: F401  # registers its verbs
from sparseloco.cli import peer_verbs as _peer_verbs  # noqa: F401  # registers its verbs
from sparseloco.cli import status_verbs as _status_verbs  # noqa: F401  # registers its verb
from sparseloco.cli import view_verbs as _view_verbs  # noqa: F401  # registers its verbs
from sparseloco.cli.app import app


def main() -> None:
    """Run the command line and exit with 0, with 2 for a mistake in what was asked, with 130 if interrupted.

    ``watch`` exits with 1 if the run that it shows has ended without a result.
    """
    app(prog_name="sparseloco")


__all__ = ["app", "main"]
