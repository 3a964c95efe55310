"""Runs whose replicas are two processes each: the same bits after a resume, and state on any number of shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparseloco.bits import add_digests
from sparseloco.replica import Replica
from tests import runs
from tests.mp import Group
from tests.one_path import sharded_runs
from tests.runs import PANELED, STEPS

pytestmark = [
    pytest.mark.mp,
    pytest.mark.xdist_group("mp"),
    pytest.mark.filterwarnings("ignore:(buffers|train.shards|num_peers)=:UserWarning"),
]


@pytest.fixture(scope="module")
def four() -> Iterator[Group]:
    group = Group(4)
    yield group
    group.close()


def settings(**changes: Any) -> Any:
    return runs.config(**{"shards": 2, "every": 1, "keep": STEPS, **changes})


def on_ranks(group: Group, out: Path, method: str, step: int | None = None, source: Any = "", **changes: Any) -> None:
    group.run(runs.on_a_rank, str(out), settings(**changes), method, step, str(source), limit=240)


def parts(out: Path, step: int, kind: str) -> list[str]:
    return sorted(name for name in runs.checkpoint_at(out, step).index.files if name.startswith(kind))


@pytest.mark.parametrize("method", list(PANELED))
def test_resume_is_as_if_never_stopped_c16_c23(method: str, four: Group, tmp_path: Path) -> None:
    """Inside a round, with a message in flight and at a border; peers agree; evaluating more often changes no bit."""
    straight = tmp_path / "straight"
    on_ranks(four, straight, method)
    expected = runs.outcome(straight)
    assert parts(straight, STEPS, "shared") == [f"shared-shard-000{shard}.safetensors" for shard in range(2)]
    assert len(expected["private"]) == 4
    assert expected["digest"] == expected["summary"]["digest"]
    for step in (2, 5):
        on_ranks(four, tmp_path / str(step), method, step, straight, every=0)
        assert runs.outcome(tmp_path / str(step)) == expected, f"resumed at step {step}"
    on_ranks(four, tmp_path / "seen", method, every=0, evaluate_every=1)
    seen = runs.outcome(tmp_path / "seen")
    assert (seen["digest"], seen["private"]) == (expected["digest"], expected["private"])


@pytest.mark.parametrize("method", list(PANELED))
def test_another_number_of_shards_c21(method: str, four: Group, tmp_path: Path) -> None:
    """From two to one and from one to two: the same shared state at the border, and messages in flight are applied."""
    algorithm = PANELED[method]()
    on_ranks(four, tmp_path / "two", method)
    runs.simulated(tmp_path / "one", runs.config(every=1, keep=STEPS), algorithm)
    flying = 0
    for step in (5, 6):
        for source, out in (("two", f"to-one-{step}"), ("one", f"to-two-{step}")):
            there = runs.checkpoint_at(tmp_path / source, step)
            if out.startswith("to-one"):
                again = runs.config(every=1, keep=STEPS)
                runs.simulated(tmp_path / out, again, algorithm, resume=there)
                flying += len(there.part("shared-shard-0000")["inboxes"])
            else:
                on_ranks(four, tmp_path / out, method, step, tmp_path / source)
            # The next step posts at most, and what it applies was sent before the border.
            straight, mine = (runs.checkpoint_at(tmp_path / name, step + 1).facts["digest"] for name in (source, out))
            assert mine == straight
            assert runs.outcome(tmp_path / out)["summary"]["tokens"] == STEPS * 2 * 2 * 8
            first, last = (
                [line["bytes_sent"] for line in runs.metrics(tmp_path / name) if line["kind"] == "evaluation"][-1]
                for name in (source, out)
            )
            assert abs(first - last) < first / 2, "bytes go on from those of the whole replica"
    assert bool(flying) == (method != "diloco_2_panels")


@pytest.mark.parametrize(("before", "after"), [(4, 2), (1, 2)])
def test_another_number_of_peers_and_of_shards_c19_c21(before: int, after: int, four: Group, tmp_path: Path) -> None:
    """Whole replicas become two of two shards; new ones start from the shared state alone."""
    method = "sparseloco_2_panels"
    runs.simulated(tmp_path / "old", runs.config(every=5, keep=3, workers=before), PANELED[method]())
    there = runs.checkpoint_at(tmp_path / "old", 5)
    on_ranks(four, tmp_path / "new", method, 5, tmp_path / "old")
    first = runs.checkpoint_at(tmp_path / "new", 6)
    assert (first.facts["workers"], first.facts["shards"]) == (after, 2)
    assert first.part("shared-shard-0000")["books"]["data_step"] == -(-5 * before // after) + 1
    assert runs.checkpoint_at(tmp_path / "new", 6).facts["tokens"] == there.facts["tokens"] + after * 2 * 8


def test_three_peers_of_one_shard_from_two_of_two(four: Group, tmp_path: Path) -> None:
    method = "sparseloco_2_panels"
    on_ranks(four, tmp_path / "old", method)
    there = runs.checkpoint_at(tmp_path / "old", 5)
    again = runs.config(every=1, keep=STEPS, workers=3)
    with pytest.warns(UserWarning, match=r"^train\.") as told:
        runs.simulated(tmp_path / "new", again, PANELED[method](), resume=there)
    words = [str(each.message) for each in told if str(each.message).startswith("train.")]
    assert words == [
        "train.shards=1: the checkpoint has 2; all state is dealt out anew, and from here on the run equals one of "
        "that number up to rounding",
        "train.workers=3: the checkpoint has 2; peers 2 to 2 are new and start from the shared state without a "
        "residual",
    ]
    assert runs.checkpoint_at(tmp_path / "new", 6).part("peer-0002")["replica"]["step"] == 6


def test_an_evaluation_puts_back_every_bit(four: Group) -> None:
    for found in four.run(sharded_runs.looked_at, "sparseloco_2_panels"):
        assert found == {
            "same": True,
            "mode": (False, True),
            "live again": True,
            "anchor inside": True,
            "moved": True,
        }


def test_the_anchor_is_gathered_at_one_process_alone(four: Group) -> None:
    found = four.run(sharded_runs.gathered, "diloco_2_panels")
    assert [equal for equal, _, _ in found] == [True] * 4
    assert [kept for _, kept, _ in found] == [len(list(runs.ToyLM().parameters())), 0, 0, 0]
    assert len({digest for _, _, digest in found}) == 1, "the digest of the whole replica, at every shard of both"


def test_gradients_are_clipped_by_their_norm_over_all_shards(four: Group) -> None:
    for length, part in four.run(sharded_runs.norm_of_gradients):
        assert 0.0 < part < length
        assert length == pytest.approx(1.0, rel=1e-5)  # torch divides by the norm plus 1e-6


def test_digests_of_shards_add_up_in_the_index(four: Group, tmp_path: Path) -> None:
    on_ranks(four, tmp_path, "diloco_2_panels")
    found = runs.newest(tmp_path)
    alone = runs.simulated(tmp_path / "one", runs.config(every=0), PANELED["diloco_2_panels"](), resume=found)
    assert alone["digest"] == found.facts["digest"] == add_digests([found.facts["digest"], "0" * 32])


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (
            "diloco",
            "layout='flat': must cut dim 0 into panels on a sharded replica; use panels=2 where the method has that "
            "setting",
        ),
        (
            "ddp",
            "algorithm.local='gradients': must be inner_steps on a sharded replica, since only its optimizer steps "
            "every shard by itself; use a method with rounds, such as diloco",
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_every_rank(method: str, text: str, four: Group) -> None:
    assert four.run(sharded_runs.refused, method, 2) == [text] * 4


def test_layers_of_the_outermost_lists_are_sharded_by_themselves(four: Group) -> None:
    (names,) = {tuple(found) for found in four.run(sharded_runs.lists_sharded)}
    assert names == ("", "blocks.0", "blocks.1")


def test_a_slow_writer_holds_nobody_up_c26_c27(four: Group, tmp_path: Path) -> None:
    """C-26, C-27: rank 1 writes the checkpoint of step 6 when step 10 is in the log, which needs all ranks."""
    quick = settings(every=6, asynchronous=True, log_every=5)
    four.run(sharded_runs.with_a_slow_writer, str(tmp_path / "slow"), quick, "sparseloco_2_panels", 10, limit=240)
    on_ranks(four, tmp_path / "straight", "sparseloco_2_panels", every=0)
    assert runs.outcome(tmp_path / "slow") == runs.outcome(tmp_path / "straight")
    assert [path.name for path in sorted((tmp_path / "slow" / "checkpoints").iterdir())] == [
        "step-00000006",
        "step-00000011",
    ]


def test_frozen_parameters_are_known_by_all_their_rows(four: Group) -> None:
    """So a checkpoint of shards and one of whole replicas name the same frozen weights."""
    whole = Replica(sharded_runs.WithFrozen(), PANELED["diloco_2_panels"]()).fixed_digests()
    assert set(whole) == {"base.weight", "base.bias", "table"}
    assert four.run(sharded_runs.fixed) == [whole] * 4
