"""C-58: a device without collectives is no obstacle, since no transport ever sees a tensor of a device."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparseloco import sections
from sparseloco.transport import ProcessGroup, collectives
from sparseloco.transport.collectives import Collectives
from sparseloco.transport.deadline import Deadline
from sparseloco.types import Coding, PartSpec, Payload


class OnDevice:
    """Stands for a tensor that is somewhere else: all that it can do is to be copied to the CPU."""

    device = torch.device("mps")

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def detach(self) -> OnDevice:
        return self

    def to(self, device: str) -> torch.Tensor:
        assert device == "cpu"
        return torch.tensor(self.values)


def payload() -> Payload:
    spec = PartSpec("0.value", (3,), torch.float32, 32)
    tensors: Any = {"0.value": OnDevice([1.0, 2.0, 3.0])}
    return Payload.of_tensors((spec,), tensors, linear=True)


def test_a_frame_is_made_of_cpu_bytes() -> None:
    sent = payload()
    data = sections._pack_part(sent.tensors["0.value"], sent.specs[0], Coding.COMPACT)
    assert torch.frombuffer(bytearray(data), dtype=torch.float32).tolist() == [1.0, 2.0, 3.0]


def test_a_collective_gets_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []

    def all_to_all(out: torch.Tensor, padded: torch.Tensor, **_: Any) -> object:
        given.append(padded)
        return object()

    monkeypatch.setattr(collectives.dist, "all_to_all_single", all_to_all)
    monkeypatch.setattr(collectives.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(collectives.dist, "get_backend", lambda group: "gloo")
    group: Any = SimpleNamespace(_collectives=Collectives(None, Deadline(), contextlib.nullcontext))
    ProcessGroup._scatter_slices(group, payload())
    assert [tensor.device.type for tensor in given] == ["cpu"]
    assert given[0].tolist() == [1.0, 2.0, 3.0, 0.0]


@pytest.mark.parametrize("backend", ["gloo", "mpi", "cpu:gloo,cuda:nccl"])
def test_buffers_lie_in_main_memory_unless_the_backend_is_for_cards(backend: str) -> None:
    assert collectives.buffer_device(backend) == torch.device("cpu")


def test_what_lies_on_a_card_stays_there_for_a_backend_of_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """No card here: a backend whose buffers are on the meta device, from which nothing could be copied."""
    monkeypatch.setitem(collectives.CARD_OF, "cards", lambda: torch.device("meta"))
    monkeypatch.setattr(collectives.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(collectives.dist, "get_backend", lambda group: "cards")
    given: list[torch.Tensor] = []

    def collective(out: object, sent: torch.Tensor, **_: Any) -> object:
        given.append(sent)
        return object()

    monkeypatch.setattr(collectives.dist, "all_to_all_single", collective)
    monkeypatch.setattr(collectives.dist, "all_gather", collective)
    group = Collectives(None, Deadline(), contextlib.nullcontext)
    assert group.device == torch.device("meta")
    slices, _ = group.start_slices([torch.empty(3, device="meta"), torch.empty(2, device="meta")])
    frames, _ = group.start_gather(b"frame")
    assert [(tuple(t.shape), t.device.type) for t in given] == [((6,), "meta"), ((5,), "meta")]
    assert slices.device.type == "meta"
    assert [(frame.numel(), frame.device.type) for frame in frames] == [(5, "meta"), (5, "meta")]
