"""One peer's counterpart: answers its operations by the book, unless told otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparseloco.peers import paths
from sparseloco.peers.manifest import History
from sparseloco.peers.operations import (
    Create,
    Delete,
    Done,
    Exists,
    Fetch,
    Fetched,
    Found,
    Get,
    Good,
    Inspect,
    Inspected,
    List,
    Listing,
    Missing,
    Operation,
    Outcome,
    Put,
    Tell,
    TooLarge,
    Upload,
    Wait,
)
from sparseloco.peers.rounds import Round
from tests.peers.runs import identity, make_run

PEERS = [identity(i).peer_id for i in range(40)]


def frame(peer: int, hash: str = "", size: int = 100, round: int = 0) -> tuple[str, int]:
    return str(paths.Frame(round, 0, PEERS[peer], 0, hash or f"{peer:064x}")), size


class Desk:
    """Answers one peer's operations from a store of names and sizes, and keeps what it was asked and told."""

    def __init__(self, objects: dict[str, int] | None = None, verdicts: dict[str, Any] | None = None) -> None:
        self.objects = objects or {}
        self.data: dict[str, bytes] = {}
        self.verdicts = verdicts or {}
        self.asked: list[Operation] = []
        self.time = 0.0
        self.on_wait: Callable[[], None] = lambda: None
        self.on_write: Callable[[Operation], Outcome] = lambda operation: Done()

    def now(self) -> float:
        return self.time

    def said(self, kind: str) -> list[str]:
        return [one.text for one in self.asked if isinstance(one, Tell) and one.kind == kind]

    def of(self, kind: type) -> list[Any]:
        return [one for one in self.asked if isinstance(one, kind)]

    def answer(self, operation: Operation) -> Outcome:
        self.asked.append(operation)
        if len(self.asked) > 2000:
            raise AssertionError("asks for ever")
        if isinstance(operation, Get):
            found = self.data.get(operation.path)
            too_large = found is not None and len(found) > operation.limit
            return TooLarge() if too_large else Missing() if found is None else Found(found)
        if isinstance(operation, List):
            return Listing(tuple(sorted(item for item in self.objects.items() if item[0].startswith(operation.prefix))))
        if isinstance(operation, Inspect):
            return Inspected(tuple(self.verdicts.get(one.path.split("/")[3], Good(7)) for one in operation.frames))
        if isinstance(operation, Fetch):
            return Fetched(frozenset(one.hash for one in operation.objects if self.objects.get(one.path) == one.size))
        if isinstance(operation, Wait):
            self.time += operation.seconds
            self.on_wait()
            return Done()
        return self.write(operation)

    def write(self, operation: Operation) -> Outcome:
        outcome = self.on_write(operation)
        if isinstance(outcome, Done) and isinstance(operation, Create | Put):
            if isinstance(operation, Create) and operation.path in self.data:
                return Exists()
            self.data[operation.path] = operation.data
            self.objects[operation.path] = len(operation.data)
        if isinstance(outcome, Done) and isinstance(operation, Upload):
            self.objects[operation.path] = 100
        if isinstance(operation, Delete):
            self.objects.pop(operation.path, None)
        return outcome

    def drive(self, steps: Any) -> Any:
        try:
            operation = next(steps)
            while True:
                operation = steps.send(self.answer(operation))
        except StopIteration as ended:
            return ended.value


def history(round: int = 0, **policy: Any) -> History:
    """Of a run with this policy, at a round."""
    due = "e" * 64 if round % 16 == 0 else ""
    return History(run=make_run(**policy), round=round, fragment=0, digest="a" * 32, state_sha256=due)


def a_round(desk: Desk, me: int = 0, live: tuple[int, ...] = (0, 1, 2), own: bool = True, **more: Any) -> Round:
    policy = more.pop("policy", {})
    return Round(
        history=more.pop("history", None) or history(**policy),
        me=identity(me),
        own=(f"{me:064x}", 100) if own else None,
        live=lambda: [PEERS[i] for i in live],
        now=desk.now,
        **more,
    )
