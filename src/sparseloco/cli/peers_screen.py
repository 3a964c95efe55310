"""A run over a store in a terminal: tables, and lines for what stands alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from sparseloco.peers.status import Status
from sparseloco.report import peers

_LEFT = ("Peer", "State", "Says loss", "Arrivals", "Not in it", "Left out", "Changes", "Digest")


def renderable(status: Status) -> Group:
    """Everything of one look."""
    return Group(*_parts(status))


def _parts(status: Status) -> Iterator[RenderableType]:
    yield Text(f"{status.name}: {peers.headline(status)}", style="bold")
    yield Text(", ".join(peers.facts(status)))
    for alert in peers.alerts(status):
        yield Text(f"! {alert}", style="yellow")
    tables = (peers.peers(status), peers.rounds(status), peers.amendments(status), peers.anchors(status))
    for rows in filter(None, tables):
        yield _table(rows)
    for line in [*peers.agreement(status), *peers.sums(status)]:
        yield Text(line)


def _table(rows: Sequence[peers.Row]) -> Table:
    columns = [Column(Text(name), justify="left" if name in _LEFT else "right", overflow="fold") for name in rows[0]]
    table = Table(*columns)
    for row in rows:
        table.add_row(*map(Text, row.values()))
    return table
