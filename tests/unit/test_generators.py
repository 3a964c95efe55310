"""Random state of devices: saved with a replica and set again, on a GPU, and with a stand-in where there is none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sparseloco import generators
from sparseloco.replica import Replica
from tests import toy
from tests.driver import ROWS


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Stand-ins for the modules of two CUDA devices and of MPS, with the calls that torch's have."""
    states = {
        name: torch.tensor([number], dtype=torch.uint8) for number, name in enumerate(("cuda:0", "cuda:1", "mps"))
    }

    def module(device: torch.device) -> SimpleNamespace:
        if device.type == "mps":
            return SimpleNamespace(
                get_rng_state=lambda: states["mps"].clone(), set_rng_state=lambda state: states.update(mps=state)
            )
        return SimpleNamespace(
            get_rng_state=lambda which: states[str(which)].clone(),
            set_rng_state=lambda state, which: states.update({str(which): state}),
        )

    monkeypatch.setattr(torch, "get_device_module", module)
    return states


def test_the_cpu_alone_has_no_further_generator() -> None:
    assert generators.devices_of([torch.zeros(1), torch.zeros(1, device="meta")]) == []
    assert Replica(toy.net(), ROWS["diloco"]()).private_state()["rng_devices"] == []


def test_every_device_of_the_parameters_counts_once(devices: dict[str, torch.Tensor]) -> None:
    places = [torch.device("cuda", 1), torch.device("cpu"), torch.device("mps"), torch.device("cuda", 1)]
    found = generators.devices_of([SimpleNamespace(device=place) for place in places])  # type: ignore[arg-type]
    assert [str(device) for device in found] == ["cuda:1", "mps"]


def test_states_are_set_again_with_a_replica(devices: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    used = [torch.device("cuda", 0), torch.device("mps")]
    monkeypatch.setattr(generators, "devices_of", lambda _: used)
    replica = Replica(toy.net(), ROWS["diloco"]())
    state = replica.private_state()
    devices["cuda:0"], devices["mps"] = torch.tensor([7], dtype=torch.uint8), torch.tensor([8], dtype=torch.uint8)
    replica.load_private_state(state)
    assert (int(devices["cuda:0"]), int(devices["cuda:1"]), int(devices["mps"])) == (0, 1, 2)
    used[:] = [torch.device("cuda", 1)]  # it comes back on another device, and on fewer
    replica.load_private_state(state)
    assert int(devices["cuda:1"]) == 0
    used.clear()
    replica.load_private_state(state)
    del state["rng_devices"]  # as an earlier version saved it
    replica.load_private_state(state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_random_numbers_of_a_gpu_go_on_where_they_were() -> None:
    replica = Replica(toy.net().cuda(), ROWS["diloco"]())
    state = replica.private_state()
    expected = torch.rand(8, device="cuda")
    assert not torch.equal(torch.rand(8, device="cuda"), expected)
    replica.load_private_state(state)
    assert torch.equal(torch.rand(8, device="cuda"), expected)
