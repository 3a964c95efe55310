"""What the process that speaks hands on to the other copies, as bytes; no processes here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseloco import Loopback, presets
from sparseloco.algorithm import Algorithm
from sparseloco.errors import ConfigError
from sparseloco.reduce import MAX_WEIGHT
from sparseloco.replica import Replica
from sparseloco.transport import post_due, speaker
from sparseloco.transport.torchft import ManagedGroup
from sparseloco.types import Envelope
from tests import toy


def inbox_of(algorithm: Algorithm) -> tuple[list[Envelope], Replica]:
    """What two replicas that have moved get from each other, and one of them."""
    replicas = [Replica(toy.net(), algorithm, peer=peer) for peer in range(2)]
    transport = Loopback(2)
    for replica in replicas:
        transport.connect(replica)
    with torch.no_grad():
        for replica in replicas:
            for param in replica.params.values():
                param.mul_(0.5 + replica.peer)
            replica.stepped()
            post_due(replica, transport)
        (key,) = replicas[0].due()
    return transport.collect(key), replicas[0]


def parts(envelope: Envelope) -> dict[str, Tensor]:
    return dict(envelope.payload.tensors)


@pytest.mark.parametrize("name", ["sparseloco", "diloco"])
def test_an_inbox_arrives_as_it_was(name: str) -> None:
    inbox, replica = inbox_of(getattr(presets, name)(inner_steps=1))
    found = speaker.unpack(speaker.pack(inbox), inbox[0].payload.specs, replica.fingerprint)
    assert len(found) == 2
    for mine, theirs in zip(found, inbox, strict=True):
        assert replace(mine, payload=theirs.payload) == theirs
        assert parts(mine).keys() == parts(theirs).keys()
        assert [path for path, part in parts(theirs).items() if not torch.equal(parts(mine)[path], part)] == []


def test_a_mean_of_several_peers_keeps_who_is_in_it_and_its_weight() -> None:
    """A frame has room for one peer and for a weight below 2^29."""
    (first, _), replica = inbox_of(presets.diloco(inner_steps=1))
    mean = replace(first, covers=(0, 1, 70000), weight=3 * MAX_WEIGHT)
    (found,) = speaker.unpack(speaker.pack([mean]), first.payload.specs, replica.fingerprint)
    assert (found.covers, found.weight, found.peers) == ((0, 1, 70000), 3 * MAX_WEIGHT, (0, 1, 70000))


def test_an_empty_inbox_arrives_empty() -> None:
    assert speaker.unpack(speaker.pack([]), (), "0" * 16) == []


def test_a_group_without_gloo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speaker.dist, "get_backend_config", lambda _: "cuda:nccl")
    group: Any = None
    message = (
        "copies='cuda:nccl': must be a group with gloo, since messages lie in main memory; make the mesh or the group "
        "with backend 'cpu:gloo,cuda:nccl'"
    )
    with pytest.warns(UserWarning, match="one replica alone"), pytest.raises(ConfigError) as error:
        speaker.Speaker(Loopback(1), group)
    assert str(error.value) == message


def test_a_group_of_torchft_is_refused_at_once() -> None:
    """Not at the first message, when the copies differ because one of them has taken over state."""
    nothing: Any = None
    with pytest.raises(ConfigError) as error:
        speaker.Speaker(ManagedGroup(nothing, nothing, peer=0), nothing)
    assert str(error.value) == (
        "transport='ManagedGroup': must not take over state where one process speaks for several, since the others "
        "would keep theirs; use ProcessGroup, or one process for each replica under torchft"
    )
