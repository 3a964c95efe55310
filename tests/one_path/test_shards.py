"""Replicas of two FSDP2 shards do what whole replicas do, bit for bit; four processes of one gloo group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sparseloco.bits import add_digests
from tests.mp import Group

pytest.importorskip("transformers")

from tests.one_path import shards

pytestmark = [pytest.mark.mp, pytest.mark.xdist_group("mp")]


@pytest.fixture(scope="module")
def four() -> Iterator[Group]:
    group = Group(4)
    yield group
    group.close()


def assert_same(parts: list[shards.Outcome], whole: shards.Outcome) -> None:
    assert {part.fingerprint for part in parts} == {whole.fingerprint}
    assert all(part.losses == whole.losses for part in parts)
    assert parts[0].live.keys() == whole.live.keys()
    odd = [n for n in whole.live if not torch.equal(torch.cat([part.live[n] for part in parts]), whole.live[n])]
    assert odd == []
    assert add_digests([part.digest for part in parts]) == whole.digest


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", shards.METHODS)
def test_two_shards_each_equal_whole_replicas(pair: Group, four: Group, name: str, tied: bool) -> None:
    """Two peers, five rounds; parameters, losses, digests and fingerprints, with evaluations in between."""
    halves = four.run(shards.train, name, 2, 2, tied)
    whole = pair.run(shards.train, name, 1, 2, tied)
    assert len({outcome.digest for outcome in whole}) == 1
    for peer in range(2):
        assert_same(halves[2 * peer : 2 * peer + 2], whole[peer])
    assert whole[0].losses[0] != whole[1].losses[0]  # they do see other data
