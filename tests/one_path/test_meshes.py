"""Replicas of which several processes hold the same do what whole replicas do, bit for bit, and one process speaks.

C-50: a worker is a group of data-parallel processes. C-57: FSDP2 inside a worker, with copies of its shards.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from sparseloco.bits import add_digests
from tests.mp import Group

pytest.importorskip("transformers")

from tests.one_path import meshes, shards

pytestmark = [pytest.mark.mp, pytest.mark.xdist_group("mp")]

METHODS = ["sparseloco", "sparseloco_delayed", "diloco"]


def whole_replicas(name: str, peers: int, panels: int) -> list[shards.Outcome]:
    with warnings.catch_warnings(action="ignore"):  # one replica alone is a case here
        return shards.in_one_process(name, peers, panels)


def assert_same(copies: list[meshes.Copy], whole: list[shards.Outcome]) -> None:
    """Every copy holds its shard of the peer's replica."""
    for peer, wanted in enumerate(whole):
        for number in {copy.place[1] for copy in copies}:
            parts = [copy.outcome for copy in copies if copy.place[:2] == (peer, number)]
            assert {part.fingerprint for part in parts} == {wanted.fingerprint}
            assert all(part.losses == wanted.losses for part in parts)
            assert parts[0].live.keys() == wanted.live.keys()
            for name, tensor in wanted.live.items():
                assert torch.equal(torch.cat([part.live[name] for part in parts]), tensor), name
            assert add_digests([part.digest for part in parts]) == wanted.digest


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("wrapper", ["hsdp", "ddp"])
def test_two_replicas_of_two_copies(four: Group, wrapper: str, name: str) -> None:
    """C-50, C-57: HSDP of one shard, or DDP, inside a replica; only the first copy sends."""
    found = four.run(meshes.train, name, (2, 2, 1), 1, wrapper)
    assert_same(found, whole_replicas(name, 2, 1))
    assert {copy.place[1] for copy in found if copy.sent} == {0}


@pytest.mark.parametrize("name", METHODS)
def test_copies_of_shards(four: Group, name: str) -> None:
    """HSDP of two copies of two shards is one whole replica."""
    found = four.run(meshes.train, name, (1, 2, 2), 2, "hsdp")
    assert_same(found, whole_replicas(name, 1, 2))
    assert {copy.place[1] for copy in found if copy.sent} == {0}


def test_composable_replicate(four: Group) -> None:
    assert_same(four.run(meshes.train, "sparseloco", (2, 2, 1), 1, "replicate"), whole_replicas("sparseloco", 2, 1))


@pytest.mark.parametrize("name", ["sparseloco", "streaming_diloco", "local_sgd", "qsparse_local_sgd"])
def test_data_parallel_ranks_with_batches_of_their_own(four: Group, name: str) -> None:
    """C-50: all four end with one anchor, copies with the same parameters, though each of them saw other data."""
    found = four.run(meshes.data_parallel, name)
    assert len({digest for _, digest, _, _ in found}) == 1
    for one, other in (found[:2], found[2:]):
        assert all(torch.equal(one[0][path], tensor) for path, tensor in other[0].items())
    assert [sent > 0 for _, _, sent, _ in found] == [True, False, True, False]
    assert len({losses[0] for _, _, _, losses in found}) == 4


def test_compiled_data_parallel_ranks(four: Group) -> None:
    """C-56: around DDP, with a backend that leaves the operations alone."""
    plain, compiled = (four.run(meshes.data_parallel, "sparseloco", how) for how in (False, True))
    for (live, digest, sent, losses), (wanted, *rest) in zip(compiled, plain, strict=True):
        assert [digest, sent, losses] == rest
        assert all(torch.equal(live[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("name", ["ddp", "demo", "ef_signsgd", "powersgd"])
def test_methods_that_send_gradients_work_with_data_parallel_copies(four: Group, pair: Group, name: str) -> None:
    copies, whole = four.run(meshes.gradient_method, name, True), pair.run(meshes.gradient_method, name, False)
    for rank, (live, digest) in enumerate(copies):
        assert digest == whole[rank // 2][1]
        assert all(torch.equal(live[name], tensor) for name, tensor in whole[rank // 2][0].items())


def test_messages_collected_early_stay_at_every_copy(four: Group) -> None:
    found = four.run(meshes.early)
    assert [messages for messages, _ in found] == [2] * 4
    assert len({digest for _, digest in found}) == 1


def test_what_one_copy_saved_is_of_all_copies(four: Group) -> None:
    assert four.run(meshes.same_state) == [[True, True]] * 4


REFUSED = {
    "silent": (
        "ConfigError: transport=one for each of 2 copies: must be one for all that hold the same shard, or all bytes "
        "would be sent again for each; pass Speaker(ProcessGroup(mesh.get_group('peers')), "
        "mesh.get_group('replicate'))"
    ),
    "gradients": (
        "ConfigError: algorithm.local='gradients': must be inner_steps on a sharded replica, since only its optimizer "
        "steps every shard by itself; use a method with rounds, such as diloco"
    ),
    "buffers": (
        "ConfigError: sync_buffers=True: must be False where one process speaks for several, whose buffers differ; "
        "leave buffers private"
    ),
    "start": (
        "DivergenceError: copy 1, tensor 2.bias: starts from other values than at copy 0; "
        "initialise all copies from the same seed or the same file"
    ),
    "table": (
        "DivergenceError: copy 1=another peer, algorithm or model than copy 0: must be the same at all copies of a "
        "replica; give Speaker the group of those that hold the same"
    ),
    "drift": (
        "DivergenceError: copy 1, round 0=another message than at copy 0: must be equal at all copies of a replica; "
        "let DDP or FSDP2 average their gradients, and give them one learning rate and weight"
    ),
    "nothing": "no error",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_copies_cannot_do_is_refused_with_the_reason(four: Group, case: str) -> None:
    assert four.run(meshes.refusal, case) == [REFUSED[case]] * 4


def test_another_group_than_that_of_the_copies_is_refused(four: Group) -> None:
    texts = four.run(meshes.refusal, "group")
    assert [text.partition(":")[0] for text in texts] == ["ConfigError"] * 4
    assert "copies=[0, 2]: must be the ranks [0, 1], which hold the same shard" in texts[0]


def test_what_fails_at_the_copy_that_speaks_fails_at_all_copies(four: Group) -> None:
    texts = four.run(meshes.refusal, "lost")
    assert texts == [
        "SparseLocoError: the message was lost",
        "DivergenceError: round 0=failed at the process that speaks for this one: must succeed there; "
        "look for its message",
        "no error",
        "no error",
    ]


def test_a_nan_at_one_copy_stops_all_copies(four: Group) -> None:
    texts = four.run(meshes.refusal, "nan")
    assert [text.partition(";")[0] for text in texts] == [
        "DeltaError: delta of 2.bias=not finite at another shard of this replica: must be finite at all 2",
        "DeltaError: delta of 2.bias=not finite: must be finite (below 1e+37) to leave its replica",
    ] * 2


def test_a_nan_at_one_copy_makes_all_copies_abstain(four: Group) -> None:
    outcomes = four.run(meshes.abstention)
    assert [weights for weights, _ in outcomes] == [[1, 0]] * 4
    assert len({digest for _, digest in outcomes}) == 1
