"""The training loop with replicas whose loss is not finite: who sits out, what is logged, and when the run ends.

Rounds have four steps, runs eleven. Two replicas take turns, so calls 1 and 2 are those of step 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from sparseloco import DivergenceError, inner_step
from sparseloco.inner_step import accumulate_gradients
from sparseloco.launch import train_processes
from tests import runs
from tests.unit.test_trainer import algorithm, data_config, dataset, run_config, settings  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:buffers=:UserWarning")
SITS_OUT = r"^peer 1, round 0: train_loss is not finite, so this peer contributes nothing"
ADVICE = "lower optimizer.lr, lengthen optimizer.warmup_steps or set optimizer.clip_norm"


def losses(monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[int], bool]) -> list[int]:
    """Make the losses of some calls NaN; returns the numbers of all calls as they come."""
    calls: list[int] = []

    def accumulate(*arguments: object) -> float:
        calls.append(len(calls) + 1)
        loss = accumulate_gradients(*arguments)  # type: ignore[arg-type]
        return math.nan if is_bad(calls[-1]) else loss

    monkeypatch.setattr(inner_step, "accumulate_gradients", accumulate)
    return calls


def test_one_replica_sits_out_the_rest_of_the_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = losses(monkeypatch, lambda call: call == 4)
    with pytest.warns(UserWarning, match=SITS_OUT):
        summary = runs.simulated(tmp_path, runs.config(), runs.METHODS["sparseloco"]())
    assert len(calls) == 2 * runs.STEPS - 2, "peer 1 makes no steps 3 and 4"
    log = runs.metrics(tmp_path)
    assert [line for line in log if line["kind"] == "abstained"] == [
        {"kind": "abstained", "step": 4, "round": 0, "fragment": 0, "peer": 1, "cause": "train_loss"}
    ]
    assert summary["abstentions"] == runs.outcome(tmp_path)["summary"]["abstentions"] == 1
    assert all(line["train_loss"] > 0 for line in log if line["kind"] == "step")


@pytest.mark.parametrize("method", ["streaming_diloco", "sparseloco_delayed", "demo"])
def test_it_trains_again_once_every_fragment_has_posted(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses(monkeypatch, lambda call: call == 4)
    with pytest.warns(UserWarning, match=r"peer 1, round \d: train_loss is not finite"):
        summary = runs.simulated(tmp_path, runs.config(), runs.METHODS[method]())
    absent = [line for line in runs.metrics(tmp_path) if line["kind"] == "abstained"]
    assert [line["fragment"] for line in absent] == list(range(len(absent)))[::-1]
    assert {line["cause"] for line in absent} == {"train_loss"}
    assert summary["abstentions"] == len(absent) == (2 if method == "streaming_diloco" else 1)


def test_steps_that_no_replica_makes_have_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps 3 and 4, when both sit out, nothing is logged but null; later ones have losses again."""
    losses(monkeypatch, lambda call: call in (4, 5))
    seen = []
    with (
        pytest.warns(UserWarning, match="contributes nothing"),
        pytest.raises(DivergenceError, match="no contribution"),
    ):
        runs.simulated(
            tmp_path,
            runs.config(log_every=1),
            runs.METHODS["sparseloco"](),
            progress=lambda status: seen.append(status),
        )
    assert [line["train_loss"] is None for line in runs.metrics(tmp_path) if line["kind"] == "step"] == [
        False, False, True, True,
    ]  # fmt: skip
    assert [math.isnan(status.train_loss) for status in seen] == [False, False, True]


def test_with_stop_the_first_loss_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses(monkeypatch, lambda call: call == 4)
    with pytest.raises(DivergenceError) as caught:
        runs.simulated(tmp_path, runs.config(nonfinite="stop"), runs.METHODS["sparseloco"]())
    assert str(caught.value) == f"train_loss=nan at step 2 of peer 1, round 0: must be finite; {ADVICE}"


@pytest.mark.filterwarnings("ignore:.*contributes nothing:UserWarning")
def test_if_all_sit_out_the_run_ends_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses(monkeypatch, lambda call: call > 4)
    with pytest.raises(DivergenceError) as caught:
        runs.simulated(tmp_path, runs.config(), runs.METHODS["sparseloco"]())
    assert str(caught.value) == (
        f"round 0, fragment 0=no contribution: must have one, and at all 2 peers numbers were not finite; {ADVICE}"
    )
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.mp
@pytest.mark.usefixtures("forked_workers")
def test_processes_that_all_diverge_end_with_advice(data_config, dataset, monkeypatch, tmp_path) -> None:  # noqa: F811
    monkeypatch.setenv("SPARSELOCO_CACHE", str(tmp_path / "cache"))
    config = run_config(data_config, settings())
    with (
        pytest.warns(UserWarning, match=r"^peer 0, round 0: .* contributes nothing"),
        pytest.raises(DivergenceError, match=rf"^round 0, fragment 0=no contribution.* 2 peers .*; {ADVICE}$"),
    ):
        train_processes(config, algorithm(lr=1e30), dataset, None, label="run")


@pytest.mark.parametrize("step", [3, 5])
def test_a_run_resumes_in_the_midst_of_it(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While peer 1 sits out, and while its empty message is in flight."""
    losses(monkeypatch, lambda call: call == 4)
    straight, out, method = tmp_path / "straight", tmp_path / "out", runs.METHODS["sparseloco_delayed"]()
    with pytest.warns(UserWarning, match=SITS_OUT):
        runs.simulated(straight, runs.config(every=1, keep=runs.STEPS), method)
    monkeypatch.undo()
    runs.simulated(out, runs.config(), method, resume=runs.checkpoint_at(straight, step))
    assert runs.outcome(out) == runs.outcome(straight)
    assert [line["cause"] for line in runs.metrics(out) if line["kind"] == "abstained"] == ["train_loss"]


def test_the_cause_of_a_peer_that_did_not_come_back_is_not_made_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peer 2 of three said at its time what was not finite; the two that resume have its empty message alone."""
    before, out, method = tmp_path / "before", tmp_path / "out", runs.METHODS["sparseloco_delayed"]()
    losses(monkeypatch, lambda call: call == 6)
    with pytest.warns(UserWarning, match=r"^peer 2, round 0: train_loss is not finite"):
        runs.simulated(before, runs.config(every=1, keep=runs.STEPS, workers=3), method)
    monkeypatch.undo()
    with pytest.warns(UserWarning, match=r"^(train.workers=2|peer 2)") as told:
        runs.simulated(out, runs.config(), method, resume=runs.checkpoint_at(before, 5))
    said = [str(each.message) for each in told if str(each.message).startswith("peer")]
    assert said == ["peer 2, round 0: contributed nothing, for a cause that no peer here knows"]
    (line,) = [line for line in runs.metrics(out) if line["kind"] == "abstained"]
    assert (line["peer"], line["cause"]) == (2, None)
