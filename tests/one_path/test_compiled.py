"""C-56: sharded replicas of compiled layers, or compiled as a whole, do what those do that are not compiled."""

from __future__ import annotations

import pytest
import torch

from sparseloco.bits import add_digests
from tests.mp import Group

pytest.importorskip("transformers")

from tests.one_path import compiled, shards

pytestmark = [pytest.mark.mp, pytest.mark.xdist_group("mp")]


@pytest.mark.parametrize("how", ["layers", "whole"])
def test_sharded_and_compiled(four: Group, how: str) -> None:
    """Three rounds with the bits of whole replicas, and nothing is compiled again because of one."""
    found = four.run(compiled.train, how, limit=200)
    for peer, wanted in enumerate(shards.in_one_process("sparseloco", 2, 2, compiled.KINDS[how])):
        parts = [outcome for outcome, _ in found[2 * peer : 2 * peer + 2]]
        assert {part.fingerprint for part in parts} == {wanted.fingerprint}
        assert all(part.losses == wanted.losses for part in parts)
        for name, tensor in wanted.live.items():
            assert torch.equal(torch.cat([part.live[name] for part in parts]), tensor), name
        assert add_digests([part.digest for part in parts]) == wanted.digest
    for _, graphs in found:
        # Training is compiled at the first step, evaluation before the second.
        assert 0 < graphs[0] < graphs[1] == graphs[-1]
