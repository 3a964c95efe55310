"""Replicas under torchft as processes: what each does, what it saw, and the lighthouse between them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from itertools import groupby
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from sparseloco import presets, synchronize
from sparseloco.transport.torchft import ManagedGroup, managed_group
from tests import toy

INNER_STEPS = 4
TOGETHER = 3
"""Rounds with both replicas after which they end."""
METHODS = {
    "sparseloco": lambda: presets.sparseloco(inner_steps=INNER_STEPS, k=3, tile=4),
    "diloco": lambda: presets.diloco(inner_steps=INNER_STEPS),
}


class Round(NamedTuple):
    """What a replica saw of one round."""

    participants: int
    counts: bool
    digest: str
    step: int


Verdicts = list[tuple[int, bool]]
"""Participants of each quorum of a replica and whether it counted, those in which joining failed included."""


class Roles:
    """What a replica does, and whether it ends, after the quorums it was in; those of two are the same at both."""

    @staticmethod
    def stays(verdicts: Verdicts, transport: ManagedGroup) -> bool:
        """Until it has been together, alone, and together again."""
        runs = [(count, len(list(each))) for count, each in groupby(verdicts, lambda verdict: verdict[0])]
        return [count for count, _ in runs[-3:]] == [2, 1, 2] and runs[-1][1] == TOGETHER

    @staticmethod
    def killed(verdicts: Verdicts, transport: ManagedGroup) -> bool:
        """Dies in the middle of the third round with both, after they have agreed to meet."""
        if _together(verdicts) == 2:
            transport._gather = lambda replica, key: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        return False

    @staticmethod
    def returns(verdicts: Verdicts, transport: ManagedGroup) -> bool:
        return _together(verdicts) == TOGETHER

    @staticmethod
    def sees_all(verdicts: Verdicts, transport: ManagedGroup) -> bool:
        return _together(verdicts) == 2 * TOGETHER

    @staticmethod
    def misses_one(verdicts: Verdicts, transport: ManagedGroup) -> bool:
        """Has all messages of the third round with both, but for it that round fails."""
        gather = type(transport)._gather

        def failing(replica: Any, key: Any) -> Any:
            gather(transport, replica, key)
            raise RuntimeError("connection closed by peer")

        failing_now = _together(verdicts) == 2
        transport._gather = failing if failing_now else gather.__get__(transport)  # type: ignore[assignment]
        return Roles.sees_all(verdicts, transport)


def _together(verdicts: Verdicts) -> int:
    return sum(participants == 2 for participants, _ in verdicts)


def train(peer: int, lighthouse: str, method: str, role: str, answer: Connection) -> None:
    """Body of one replica."""
    torch.set_num_threads(1)
    model = toy.net()
    torch.manual_seed(peer)
    torch.nn.init.normal_(next(model.parameters()))  # whoever is there first decides about the start
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    history: list[Round] = []
    verdicts: Verdicts = []
    with managed_group(peer, lighthouse, timeout_s=20, quorum_timeout_s=60) as transport:
        manager: Any = transport.manager
        ask = manager.should_commit

        def watched() -> bool:
            verdicts.append((manager.num_participants(), ask()))
            return verdicts[-1][1]

        manager.should_commit = watched
        with synchronize(model, optimizer, METHODS[method](), transport) as replica:
            history.append(Round(*verdicts[-1], replica.digest(), replica.step))
            while not getattr(Roles, role)(verdicts, transport):
                optimizer.zero_grad()
                toy.loss_of(model, toy.batch(replica.step, peer)).backward()
                optimizer.step()
                if replica.step % INNER_STEPS == 0:
                    history.append(Round(*verdicts[-1], replica.digest(), replica.step))
    answer.send((history, transport.traffic(peer)))


def serve(answer: Connection) -> None:
    """Body of the lighthouse; a replica is dead after two seconds without a sign of life."""
    from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100, heartbeat_timeout_ms=2000)
    answer.send("http://127.0.0.1:" + server.address().rpartition(":")[2])
    answer.poll(None)


class Processes:
    """A lighthouse and replicas, none of which outlives the test."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._started: list[Any] = []
        self._open = self._start(serve)[1]  # the lighthouse ends with it
        self.lighthouse = self._open.recv()

    def replica(self, peer: int, method: str, role: str) -> tuple[Any, Connection]:
        return self._start(train, peer, self.lighthouse, method, role)

    def _start(self, body: Any, *arguments: Any) -> tuple[Any, Connection]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=body, args=(*arguments, there), daemon=True)
        process.start()
        there.close()
        self._started.append(process)
        return process, here

    @staticmethod
    def answer(pipe: Connection) -> Any:
        assert pipe.poll(100), "a replica hangs"
        return pipe.recv()

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.join()
