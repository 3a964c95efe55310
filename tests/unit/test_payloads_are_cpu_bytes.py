"""C-58: a device without collectives is no obstacle, since no transport ever sees a tensor of a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparseloco import sections
from sparseloco.transport import process_group
from sparseloco.types import Coding, PartSpec, Payload


class OnDevice:
    """Stands for a tensor that is somewhere else: all that it can do is to be copied to the CPU."""

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

    monkeypatch.setattr(process_group.dist, "all_to_all_single", all_to_all)
    group: Any = SimpleNamespace(num_peers=2, group=None)
    process_group.ProcessGroup._scatter_slices(group, payload())
    assert [tensor.device.type for tensor in given] == ["cpu"]
    assert given[0].tolist() == [1.0, 2.0, 3.0, 0.0]
