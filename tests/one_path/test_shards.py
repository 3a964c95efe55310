"""Replicas of two FSDP2 shards do what whole replicas do, bit for bit; four processes of one gloo group.

C-51: no rule for top-k is needed of DTensor, and the result does not depend on the wrapper. C-57: FSDP2 inside a
worker; ``examples/fsdp2.py`` is the example, run by ``tests/test_examples.py``.
"""

from __future__ import annotations

import pytest
import torch

from sparseloco.bits import add_digests
from tests.mp import Group

pytest.importorskip("transformers")

from tests.one_path import shards

pytestmark = [pytest.mark.mp, pytest.mark.xdist_group("mp")]


@pytest.fixture(scope="module")
def two(pair: Group) -> Group:
    pair.run(shards.ready, limit=300)
    return pair


def assert_same(parts: list[shards.Outcome], whole: shards.Outcome) -> None:
    assert {part.fingerprint for part in parts} == {whole.fingerprint}
    assert all(part.losses == whole.losses for part in parts)
    assert parts[0].live.keys() == whole.live.keys()
    odd = [n for n in whole.live if not torch.equal(torch.cat([part.live[n] for part in parts]), whole.live[n])]
    assert odd == []
    assert add_digests([part.digest for part in parts]) == whole.digest


CASES = [*((name, "plain") for name in shards.METHODS)]
CASES += [
    ("sparseloco", kind) for kind in ("tied", "bf16", "checkpointing", "experts", "modules", "modules by themselves")
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_two_shards_each_equal_whole_replicas(two: Group, four: Group, name: str, kind: str) -> None:
    """Two peers, three rounds; parameters, losses, digests and fingerprints, with evaluations in between."""
    halves = four.run(shards.train, name, 2, 2, kind)
    whole = two.run(shards.train, name, None, 2, kind)
    assert len({outcome.digest for outcome in whole}) == 1
    for peer in range(2):
        assert_same(halves[2 * peer : 2 * peer + 2], whole[peer])
    assert whole[0].losses[0] != whole[1].losses[0]  # they do see other data


@pytest.mark.parametrize("name", ["sparseloco", "diloco", "streaming_diloco"])
def test_four_replicas_of_one_shard_equal_replicas_of_one_process(four: Group, name: str) -> None:
    real = four.run(shards.train, name, 1, 1)
    for mine, other in zip(real, shards.in_one_process(name, 4, 1), strict=True):
        assert_same([mine], other)


def test_messages_of_shards_are_the_rows_of_the_whole_message(four: Group, two: Group) -> None:
    """C-51: two and four shards of one replica send the chunks of one message; their digests add up to its own."""
    whole, digest = two.run(shards.outbox, 1, 4)[0]
    for count in (2, 4):
        found = four.run(shards.outbox, count, 4)
        parts = [part for part, _ in found[:count]]
        assert all(part.keys() == whole.keys() for part in parts)
        assert [name for name in whole if not torch.equal(torch.cat([p[name] for p in parts]), whole[name])] == []
        assert add_digests([part for _, part in found[:count]]) == digest


def test_uneven_and_empty_shards_and_frozen_parameters(four: Group, two: Group) -> None:
    (whole, digest), _ = two.run(shards.uneven, 1)
    parts = four.run(shards.uneven, 4)
    assert [part["2.bias"].numel() for part, _ in parts] == [2, 2, 1, 0]
    assert [name for name in whole if not torch.equal(torch.cat([part[name] for part, _ in parts]), whole[name])] == []
    assert add_digests([part for _, part in parts]) == digest


REFUSED = {
    "edges": (
        "panels=3: must have an edge at every edge of a shard, and model.embed_tokens.weight of 128 rows in 2 shards "
        "has one at row 64; use panels=2"
    ),
    "flat": (
        "layout='flat': must cut dim 0 into panels on a sharded replica; use panels=2 where the method has that setting"
    ),
    "statistical": (
        "values='statistical': must code each chunk alone and without randomness on a sharded replica; "
        "use sign_two_level values, or a method such as diloco"
    ),
    "gradients": (
        "algorithm.local='gradients': must be inner_steps on a sharded replica, since only its optimizer steps every "
        "shard by itself; use a method with rounds, such as diloco"
    ),
    "buffers": (
        "sync_buffers=True: must be False on a sharded replica, whose processes hold buffers of their own; "
        "leave buffers private"
    ),
    "partly": (
        "model.embed_tokens.weight=not sharded like model.layers.0.self_attn.q_proj.weight: must be sharded over the "
        "same processes, since its gradient would differ between them; call fully_shard on the whole model with one "
        "mesh and no ignored_params"
    ),
    "columns": (
        "model.embed_tokens.weight.placements=(Shard(dim=1),): must be Shard(dim=0), Replicate() or one of "
        "each, since panels are cut along dim 0; leave shard_placement_fn and tensor parallelism out"
    ),
    "tensor parallel": (
        "model.layers.0.mlp.down_proj.weight.placements=(Shard(dim=1),): must be Shard(dim=0), Replicate() or one of "
        "each, since panels are cut along dim 0; leave shard_placement_fn and tensor parallelism out"
    ),
    "columns alone": (
        "model.embed_tokens.weight=not sharded like model.layers.0.mlp.up_proj.weight: must be sharded over the "
        "same processes, since its gradient would differ between them; call fully_shard on the whole model with one "
        "mesh and no ignored_params"
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_shards_cannot_do_is_refused_with_the_reason(four: Group, case: str) -> None:
    """C-52: the support matrix of docs/cluster.md, whose refused combinations raise before the first step."""
    assert four.run(shards.refusal, case) == [f"ConfigError: {REFUSED[case]}"] * 4


def test_aligned_shards_are_accepted(four: Group) -> None:
    assert four.run(shards.refusal, "nothing") == ["no error"] * 4


def test_a_group_of_other_shards_is_refused(four: Group) -> None:
    """The exchange runs between those who hold the same shard, never inside a replica."""
    texts = four.run(shards.refusal, "group")
    assert texts[0] == (
        "ConfigError: group=shard 0 of 2 and, at peer 1, shard 1 of 2: must join the same shard of every replica; "
        "pass ProcessGroup(mesh.get_group('peers'))"
    )
    assert all("must join the same shard of every replica" in text for text in texts)


def test_other_values_on_one_shard_stop_all_of_both_replicas(four: Group) -> None:
    texts = four.run(shards.other_start)
    here = "peer 1, tensor model.norm.weight: starts from other values than at peer 0"
    elsewhere = "start=failed at another shard of this replica: must succeed at all 2; look for the message"
    assert [text.startswith(what) for text, what in zip(texts, [elsewhere, here] * 2, strict=True)] == [True] * 4


def test_a_nan_on_one_shard_makes_all_shards_of_its_replica_abstain(four: Group) -> None:
    """The other replica goes on, and both shards of the one that abstains know the cause."""
    outcomes = four.run(shards.nan_on_one_shard, "abstain")
    said = (
        "peer 1, round 0: delta of model.norm.weight is not finite, so this peer contributes nothing; parameters were "
        "reset to the anchor and the caller's optimizer should be made anew"
    )
    assert [text for text, *_ in outcomes] == ["nothing", "nothing", said, said]
    assert [at_anchor for _, at_anchor, *_ in outcomes] == [False, False, True, True]
    assert outcomes[0][2] == outcomes[2][2]
    assert outcomes[1][2] == outcomes[3][2]
    assert [causes for *_, causes in outcomes] == [[""]] * 2 + [["delta of model.norm.weight"]] * 2


def test_a_nan_on_one_shard_stops_all_shards_of_its_replica(four: Group) -> None:
    """In the round, the replica that was reset says that it has not moved."""
    outcomes = four.run(shards.nan_on_one_shard, "stop")
    assert [text for text, *_ in outcomes[:2]] == ["nothing"] * 2
    assert outcomes[2][0] == (
        "delta of model.norm.weight=not finite at another shard of this replica: must be finite at all 2; "
        "look for the message of that shard"
    )
    assert outcomes[3][0].startswith("delta of model.norm.weight=not finite: must be finite")
    assert [at_anchor for _, at_anchor, *_ in outcomes[2:]] == [True] * 2
    assert outcomes[0][2] == outcomes[2][2]
    assert outcomes[1][2] == outcomes[3][2]
    assert [causes for *_, causes in outcomes] == [[]] * 4


def test_state_of_a_shard_is_for_that_shard(four: Group) -> None:
    for rank, (same, text) in enumerate(four.run(shards.states)):
        assert all(same)
        assert text == (
            f"shard='shard {(rank + 1) % 4} of 4': must be 'shard {rank} of 4'; load what the same shard saved"
        )
