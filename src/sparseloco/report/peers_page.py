"""The page about a run over a store: it needs nothing but itself, and its script asks only where it came from."""

from __future__ import annotations

import base64
import hashlib

from sparseloco.peers.status import Status
from sparseloco.report import peers
from sparseloco.report.write import read_asset, style_sheet

_WIDE = ("Says loss", "Left out", "Arrivals", "Not in it", "Changes")


def peers_page(status: Status, *, every_s: float = 0) -> str:
    """HTML of one look at a run.

    Args:
        status: What was seen.
        every_s: Seconds after which the page takes the newest view; 0: never.
    """
    import jinja2

    options = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    script = read_asset("peers.js")
    return (
        jinja2.Environment(**options)
        .from_string(read_asset("peers.html"))
        .render(
            status=status,
            words=peers,
            style=style_sheet(),
            script=script,
            script_sha256=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            every_s=every_s,
            wide=_WIDE,
        )
    )
