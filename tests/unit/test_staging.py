"""State in host memory: the way there and back changes no bit. No accelerator is here, so the CPU plays one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparseloco import ConfigError, Loopback, Replica, presets, staging, synchronize
from sparseloco.channel import Channel
from sparseloco.evaluation import anchored
from sparseloco.staging import Staging
from sparseloco.transport import advance, settle
from sparseloco.types import Source
from tests import toy
from tests.driver import ROWS, train, with_synced_buffers

STEPS = 10


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor counts as being on an accelerator."""
    monkeypatch.setattr(staging, "is_elsewhere", lambda tensor: True)


def trained(row: str, model: nn.Module, storage: str) -> list[Replica]:
    """Two replicas after some rounds, each over a model of its own."""
    algorithm = with_synced_buffers(ROWS[row]()) if any(True for _ in model.buffers()) else ROWS[row]()
    models = [model, toy.batch_norm_net() if any(True for _ in model.buffers()) else toy.net()]
    replicas = [Replica(each, algorithm, peer=peer, storage=storage) for peer, each in enumerate(models)]
    transport = Loopback(2)
    for step in range(1, STEPS + 1):
        for replica, each in zip(replicas, models, strict=True):
            toy.loss_of(each, toy.batch(step, replica.peer)).backward()
            advance(replica, transport)
        for replica in replicas:
            settle(replica, transport)
    return replicas


def tensors_of(replica: Replica) -> dict[str, Tensor]:
    state = {**replica.shared_state(), **replica.private_state()}
    return {path: value for path, value in state.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("net", [toy.net, toy.batch_norm_net])
@pytest.mark.parametrize("row", list(ROWS))
def test_the_way_over_the_host_changes_no_bit(row: str, net, elsewhere: None) -> None:
    for there, here in zip(trained(row, net(), "host"), trained(row, net(), "device"), strict=True):
        assert there.digest() == here.digest()
        mine, theirs = tensors_of(there), tensors_of(here)
        assert mine.keys() == theirs.keys()
        assert [path for path in mine if not torch.equal(mine[path], theirs[path])] == []
        assert there.delta_norm() == here.delta_norm()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], weakref.ref[Tensor]]]:
    """Shape of every copy that is made, and whether it is still there."""
    made: list[tuple[tuple[int, ...], weakref.ref[Tensor]]] = []
    real = torch.empty_like

    def empty_like(tensor: Tensor, **more: Any) -> Tensor:
        out = real(tensor, **more)
        if "pin_memory" in more:
            made.append((tuple(tensor.shape), weakref.ref(out)))
        return out

    monkeypatch.setattr(torch, "empty_like", empty_like)
    return made


def test_each_live_tensor_is_copied_once_and_no_copy_stays(elsewhere: None, copies, monkeypatch) -> None:
    """Once at the start, once when a fragment is posted and once when it is settled; the channel sees copies alone."""
    live: set[int] = set()
    seen: list[int] = []
    real_outgoing, real_settle = Channel.outgoing, Channel.settle_

    def outgoing(self: Channel, sources: Sequence[Source], state: object, *, key: int) -> object:
        seen.extend(source.end.data_ptr() for source in sources)
        return real_outgoing(self, sources, state, key=key)  # type: ignore[arg-type]

    def settle_(self: Channel, inbox: object, state: object, tensors: Sequence[Tensor], **more: object) -> float:
        seen.extend(tensor.data_ptr() for tensor in tensors)
        return real_settle(self, inbox, state, tensors, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Channel, "outgoing", outgoing)
    monkeypatch.setattr(Channel, "settle_", settle_)
    model = toy.net()
    replica = Replica(model, ROWS["sparseloco"](), storage="host")
    for step in range(1, 5):
        toy.loss_of(model, toy.batch(step, 0)).backward()
        replica.local_step()
        live |= {param.data_ptr() for param in model.parameters()}
        for envelope in replica.outbox():
            replica.apply(envelope.key, [envelope])
    assert [shape for shape, _ in copies] == 3 * [tuple(param.shape) for param in model.parameters()]
    assert len(seen) == 2 * len(list(model.parameters()))
    assert not live & set(seen)
    gc.collect()
    assert [shape for shape, there in copies if there() is not None] == []


def test_an_evaluation_of_the_anchor_and_a_reset_find_their_way(elsewhere: None) -> None:
    (replica, _) = trained("sparseloco_delayed", toy.net(), "host")
    model = toy.net()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(replica.params[name])
    anchor = replica.anchor()
    with anchored(model, replica):
        assert all(torch.equal(param.data, anchor[name]) for name, param in model.named_parameters())
    with pytest.warns(UserWarning, match="were reset to the anchor"):
        replica.reset()
    assert all(torch.equal(param.data, anchor[name]) for name, param in replica.params.items())


def test_transposed_parameters_keep_their_strides(elsewhere: None) -> None:
    tensor = torch.arange(12.0).view(3, 4).t()
    home = Staging("host").home(tensor)
    assert (home.stride(), home.data_ptr() != tensor.data_ptr()) == (tensor.stride(), True)
    assert torch.equal(home, tensor)
    assert Staging("device").home(tensor) is tensor
    with Staging("host").lent([tensor]) as lent:
        lent[0].add_(1)
        assert tensor[0, 0] == 0
    assert tensor[0, 0] == 1


def test_on_the_host_nothing_is_copied() -> None:
    tensor = torch.ones(3)
    assert Staging("host").home(tensor) is tensor
    with Staging("host").lent([tensor]) as lent:
        assert lent[0] is tensor


def test_what_failed_does_not_go_back(elsewhere: None) -> None:
    tensor = torch.ones(3)
    with pytest.raises(ZeroDivisionError), Staging("host").lent([tensor]) as lent:
        lent[0].fill_(1 / 0)
    assert torch.equal(tensor, torch.ones(3))


def test_storage_is_one_of_two() -> None:
    with pytest.raises(ConfigError, match=r"storage='hots': must be one of device, host; did you mean 'host'\?"):
        Replica(toy.net(), ROWS["diloco"](), storage="hots")


def test_synchronize_hands_it_on(elsewhere: None, copies) -> None:
    digests: list[str] = []
    for storage in ("device", "host"):
        model = toy.net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.warns(UserWarning, match="one replica alone"):
            transport = Loopback(1)
        with synchronize(model, optimizer, presets.diloco(inner_steps=1), transport, storage=storage) as replica:
            toy.loss_of(model, toy.batch(1, 0)).backward()
            optimizer.step()
        digests.append(replica.digest())
        assert len(copies) == (0 if storage == "device" else 3 * 4)
    assert digests[0] == digests[1]


@pytest.mark.parametrize("row", ["diloco", "sparseloco_delayed", "streaming_diloco", "powersgd"])
def test_state_from_main_memory_goes_where_the_replica_is(row: str) -> None:
    """A file, another machine and DCP hand over tensors of the CPU; here the replica is on a device without values."""
    cohort = train(ROWS[row](), peers=2, steps=5)
    given = cohort.replicas[0]
    replica = Replica(toy.net().to("meta"), ROWS[row]())
    replica.load_shared_state(given.shared_state())
    replica.load_private_state(given.private_state())
    state = {**replica.shared_state(), **replica.private_state()}
    devices = {path: value.device.type for path, value in state.items() if isinstance(value, Tensor) and value.ndim}
    assert any(path.startswith(("outer/", "residual/", "codec/")) for path in devices)
    host = {path for path, device in devices.items() if device != "meta" and "/payload/" not in path}
    assert host == {"rng"}
    moments = (replica.optimizer.state if replica.optimizer else {}).values()
    assert {value.device.type for each in moments for value in each.values() if value.ndim} <= {"meta"}
