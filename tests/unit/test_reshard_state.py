"""State on another number of shards: what was split and merged is what it was, and nothing else is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseloco import CheckpointError, presets
from sparseloco.bits import add_digests
from sparseloco.reshard_state import (
    Cuts,
    StoredTensor,
    cuts_of,
    reshard_inboxes,
    reshard_private,
    reshard_shared,
)
from sparseloco.sharding import Place
from tests.driver import INNER, Peer, lockstep
from tests.runs import same

METHODS = {
    "sparseloco_delayed": lambda: presets.sparseloco(inner_steps=4, k=3, tile=4, delay=2, panels=5, inner=INNER),
    "diloco_momentum": lambda: presets.diloco(inner_steps=4, panels=5, inner=INNER),
    "streaming_diloco": lambda: presets.streaming_diloco(inner_steps=4, panels=5, fragment_by="size", inner=INNER),
}


def cuts(peer: Peer, shard: int, count: int) -> Cuts:
    """What FSDP2 leaves a shard: ``ceil(n / count)`` rows each, the last ones fewer or none."""
    places = {}
    for spec in peer.replica.specs:
        size = -(-spec.shape[0] // count)
        first = min(spec.shape[0], shard * size)
        places[spec.name] = Place(spec.shape, first, min(spec.shape[0], first + size), shard, count)
    return cuts_of(peer.replica.algorithm, peer.replica.specs, places)


def trained(method: str) -> tuple[Peer, list[Any]]:
    """A replica of two after some steps, and the messages in flight as a checkpoint holds them."""
    peers, mail = [Peer(METHODS[method](), i) for i in range(2)], {}
    lockstep(peers, 6 if method == "streaming_diloco" else 5, mail)
    flying = peers[1].replica.in_flight()
    inboxes = [
        [list(key), [{"peer": e.peer, "digest": e.digest, "tensors": dict(e.payload.tensors)} for e in mail[key]]]
        for key in flying
    ]
    return peers[1], inboxes


def dealt(states: Sequence[tuple[Any, Any]], cut: Cuts) -> tuple[Any, Any]:
    """Shared and private state of one shard."""
    shared, private = zip(*states, strict=True)
    return reshard_shared(shared, cut), reshard_private(private, cut)


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("count", [2, 4])
def test_merging_undoes_splitting(method: str, count: int) -> None:
    """Uneven and empty shards too: four hold 3, 3, 3, 2 rows of eleven and 2, 2, 1, 0 of five."""
    peer, inboxes = trained(method)
    whole = peer.replica.shared_state(), peer.replica.private_state()
    parts = [dealt([whole], cuts(peer, shard, count)) for shard in range(count)]
    mail = [reshard_inboxes([inboxes], cuts(peer, shard, count)) for shard in range(count)]
    assert [shared["shard"] for shared, _ in parts] == [f"shard {shard} of {count}" for shard in range(count)]
    assert same(dealt(parts, cuts(peer, 0, 1)), whole)
    assert same(reshard_inboxes(mail, cuts(peer, 0, 1)), inboxes)
    assert bool(inboxes) == (method != "diloco_momentum")


@pytest.mark.parametrize("method", list(METHODS))
def test_splitting_undoes_merging_and_the_way_does_not_matter(method: str) -> None:
    """From one to four shards, and over two, is the same; from two over one to two is nothing."""
    peer, _ = trained(method)
    whole = peer.replica.shared_state(), peer.replica.private_state()
    two = [dealt([whole], cuts(peer, shard, 2)) for shard in range(2)]
    for shard in range(4):
        assert same(dealt(two, cuts(peer, shard, 4)), dealt([whole], cuts(peer, shard, 4)))
    one = dealt(two, cuts(peer, 0, 1))
    assert same([dealt([one], cuts(peer, shard, 2)) for shard in range(2)], two)


@pytest.mark.parametrize("method", ["sparseloco_delayed", "streaming_diloco"])
def test_a_message_without_a_contribution_stays_one(method: str) -> None:
    peers, mail = [Peer(METHODS[method](), i) for i in range(2)], {}
    lockstep(peers, 3, mail)
    with pytest.warns(UserWarning, match="train_loss is not finite"):
        peers[1].replica.abstain("train_loss")
    lockstep(peers, 1, mail)
    whole = peers[1].replica.shared_state(), peers[1].replica.private_state()
    parts = [dealt([whole], cuts(peers[1], shard, 2)) for shard in range(2)]
    assert [private["in_flight/0/0/abstained"] for _, private in parts] == ["train_loss"] * 2
    assert same(dealt(parts, cuts(peers[1], 0, 1)), whole)


def test_digests_of_a_past_moment_stay_a_sum() -> None:
    peer, _ = trained("sparseloco_delayed")
    shared = peer.replica.shared_state()
    path = next(path for path in shared if path.startswith("awaited/"))
    parts = [reshard_shared([shared], cuts(peer, shard, 2))[path] for shard in range(2)]
    assert add_digests(parts) == shared[path] != parts[1]


def test_only_rows_that_are_taken_are_read() -> None:
    peer, _ = trained("diloco_momentum")
    private = peer.replica.private_state()
    halves = [reshard_private([private], cuts(peer, shard, 2)) for shard in range(2)]
    asked: list[tuple[int, tuple[int, int] | None]] = []

    def stored(value: Any, half: int) -> Any:
        if isinstance(value, dict):
            return {key: stored(item, half) for key, item in value.items()}
        if not isinstance(value, Tensor):
            return value

        def read(rows: tuple[int, int] | None) -> Tensor:
            asked.append((half, rows))
            return value if rows is None else value[rows[0] : rows[1]]

        return StoredTensor(tuple(value.shape), read)

    lazy = [{key: stored(item, half) for key, item in state.items()} for half, state in enumerate(halves)]
    found = reshard_private(lazy, cuts(peer, 0, 4))
    assert same(found, reshard_private([private], cuts(peer, 0, 4)))
    assert {half for half, _ in asked} == {0}
    assert (0, (0, 3)) in asked


def test_tensors_of_another_model_are_refused() -> None:
    peer, _ = trained("diloco_momentum")
    state = peer.replica.private_state()
    state["live/0.weight"] = state["live/0.weight"][:9]
    with pytest.raises(CheckpointError) as caught:
        reshard_private([state], cuts(peer, 0, 2))
    assert str(caught.value) == (
        "live/0.weight=[9] entries at the shards: must be 11 together; resume with the model it came from"
    )


def test_random_state_and_buffers_are_those_of_the_shard_of_the_same_number_or_of_the_last() -> None:
    peer, _ = trained("diloco_momentum")
    private = peer.replica.private_state()
    parts = [reshard_private([private], cuts(peer, shard, 2)) for shard in range(2)]
    for number, part in enumerate(parts):
        part["rng"] = torch.tensor([number])
        part["buffer/x"] = torch.tensor([number])
    found = [reshard_private(parts, cuts(peer, shard, 4)) for shard in range(4)]
    assert [int(part["rng"]) for part in found] == [0, 1, 1, 1]
    assert [int(part["buffer/x"]) for part in found] == [0, 1, 1, 1]
