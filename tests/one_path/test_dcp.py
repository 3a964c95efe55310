"""``torch.distributed.checkpoint``: a replica saved by two shards goes on in one, and the other way round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from sparseloco.bits import add_digests
from tests.mp import Group
from tests.one_path import dcp_runs

pytestmark = [pytest.mark.mp, pytest.mark.xdist_group("mp")]


def assert_same(parts: list[dcp_runs.End], whole: dcp_runs.End) -> None:
    assert add_digests([part.digest for part in parts]) == whole.digest
    for name, tensor in whole.live.items():
        assert torch.equal(torch.cat([part.live[name] for part in parts]), tensor), name
    # A square root of sums of squares, which are added in another order.
    assert sum(part.residual**2 for part in parts) == pytest.approx(whole.residual**2, rel=1e-12)


@pytest.mark.parametrize("steps", [1, 4, 5], ids=["before the first round", "at a border", "inside a round"])
@pytest.mark.parametrize("name", dcp_runs.METHODS)
def test_from_two_shards_to_one(four: Group, pair: Group, name: str, steps: int, tmp_path: Path) -> None:
    """Two peers, of short shards too: the digests of what was saved, and the bits of a run that never stopped."""
    halves = four.run(dcp_runs.save_and_go_on, name, 2, str(tmp_path), steps)
    whole = pair.run(dcp_runs.load_and_go_on, name, 1, str(tmp_path), steps)
    for peer in range(2):
        for moment in range(2):
            assert_same([halves[2 * peer + shard][moment] for shard in range(2)], whole[peer][moment])
    assert whole[0][1].digest == whole[1][1].digest != whole[0][0].digest
    assert (whole[0][0].residual > 0) is (name == "sparseloco" and steps > 1)


def test_from_one_shard_to_two(four: Group, pair: Group, tmp_path: Path) -> None:
    whole = pair.run(dcp_runs.save_and_go_on, "sparseloco", 1, str(tmp_path), 5)
    halves = four.run(dcp_runs.load_and_go_on, "sparseloco", 2, str(tmp_path), 5)
    for peer in range(2):
        for moment in range(2):
            assert_same([halves[2 * peer + shard][moment] for shard in range(2)], whole[peer][moment])


@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
def test_from_two_copies_to_one_process(four: Group, pair: Group, wrapper: str, tmp_path: Path) -> None:
    """HSDP and DDP: both copies offer what they hold, and it is written once."""
    copies = four.run(dcp_runs.save_and_go_on, "sparseloco", 1, str(tmp_path), 5, 2, wrapper)
    whole = pair.run(dcp_runs.load_and_go_on, "sparseloco", 1, str(tmp_path), 5)
    for rank, ends in enumerate(copies):
        for moment in range(2):
            assert_same([ends[moment]], whole[rank // 2][moment])


def test_the_shared_part_alone_is_for_a_peer_that_joins(four: Group, pair: Group, tmp_path: Path) -> None:
    saved = four.run(dcp_runs.save_and_go_on, "sparseloco", 2, str(tmp_path), 5)
    for end, anchor in pair.run(dcp_runs.join, "sparseloco", str(tmp_path)):
        assert end.digest == add_digests([saved[0][0].digest, saved[1][0].digest])
        assert end.residual == 0
        assert all(torch.equal(end.live[name], anchor[name]) for name in anchor)


def test_shared_state_is_written_once(pair: Group, tmp_path: Path) -> None:
    """Two peers in one folder: one anchor, and live parameters and residual of both."""
    pair.run(dcp_runs.save_and_go_on, "sparseloco", 1, str(tmp_path), 5)
    found = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    anchors = [path for path in found if "anchor" in path]
    assert sorted(anchors) == sorted(f"replica.shared.anchor/{n}" for n in ("0.weight", "0.bias", "2.weight", "2.bias"))
    assert all(len(found[path].chunks) == 1 for path in anchors)  # pyright: ignore
    assert {path.split(".")[1] for path in found} == {"shared", "peer-0000", "peer-0001"}


def test_training_goes_on_while_a_snapshot_is_written(four: Group, tmp_path: Path) -> None:
    for saved, read in four.run(dcp_runs.save_in_the_background, "sparseloco", str(tmp_path)):
        assert (read.digest, read.residual) == (saved.digest, saved.residual)
        assert all(torch.equal(read.live[name], tensor) for name, tensor in saved.live.items())


def test_a_folder_for_each_replica(four: Group, tmp_path: Path) -> None:
    for saved, read in four.run(dcp_runs.each_in_its_folder, "diloco", str(tmp_path)):
        assert read.digest == saved.digest
        assert all(torch.equal(read.live[name], tensor) for name, tensor in saved.live.items())


def test_messages_in_flight_are_refused_until_they_are_drained(pair: Group, tmp_path: Path) -> None:
    text = (
        "in_flight=1 messages: must be none when DCP saves; call sparseloco.drain(replica, transport) first, "
        "or save at a step at which nothing is under way"
    )
    assert pair.run(dcp_runs.in_flight, str(tmp_path)) == [(text, "no error")] * 2
