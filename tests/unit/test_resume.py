"""Resume: a run that was stopped and continued is, bit for bit, the run that never stopped; others are refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from sparseloco import CheckpointError, adamw, presets
from sparseloco.errors import Interrupted
from sparseloco.simulate import Cohort
from sparseloco.trainer import CHECKPOINTS, train
from tests import runs
from tests.runs import METHODS, STEPS

pytestmark = pytest.mark.filterwarnings("ignore:buffers=:UserWarning")


@pytest.mark.parametrize("method", list(METHODS))
def test_resume_is_as_if_never_stopped_c16_c23(method: str, tmp_path: Path) -> None:
    """C-16, C-17, C-23: at every inner step, also with a message in flight."""
    straight, algorithm = tmp_path / "straight", METHODS[method]()
    runs.simulated(straight, runs.config(every=1, keep=STEPS), algorithm)
    expected = runs.outcome(straight)
    in_flight = 0
    for step in range(1, STEPS + 1):
        checkpoint, out = runs.checkpoint_at(straight, step), tmp_path / str(step)
        in_flight += len(checkpoint.part("shared")["inboxes"])
        runs.simulated(out, runs.config(), algorithm, resume=checkpoint)
        assert runs.outcome(out) == expected, f"resumed at step {step}"
    assert bool(in_flight) == (method in ("streaming_diloco", "sparseloco_delayed"))


def test_saving_changes_nothing(tmp_path: Path) -> None:
    """C-28: with messages in flight too, and there is nothing to call before a save."""
    algorithm = METHODS["sparseloco_delayed"]()
    for name, every in (("often", 1), ("never", 0)):
        runs.simulated(tmp_path / name, runs.config(every=every), algorithm)
    assert runs.outcome(tmp_path / "often") == runs.outcome(tmp_path / "never")


def test_a_stop_saves_at_the_round_border_and_goes_on_from_there_c39(tmp_path: Path) -> None:
    algorithm = METHODS["sparseloco_delayed"]()
    settings = runs.config(steps=24)
    runs.simulated(tmp_path / "straight", settings, algorithm)
    with pytest.raises(Interrupted, match=r"^stopped at step 12 after saving$"):
        runs.simulated(tmp_path / "stopped", settings, algorithm, stop=lambda: True)
    runs.simulated(tmp_path / "stopped", settings, algorithm, resume=runs.newest(tmp_path / "stopped"))
    assert runs.outcome(tmp_path / "stopped") == runs.outcome(tmp_path / "straight")
    with pytest.raises(Interrupted, match=r"^stopped at step 12 without a checkpoint$"):
        runs.simulated(None, settings, algorithm, stop=lambda: True)


def refusal(out: Path, settings: Any, algorithm: Any, **more: Any) -> str:
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError) as caught:
        runs.simulated(out, settings, algorithm, resume=runs.newest(out), **more)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before, "nothing is lost"
    text = str(caught.value)
    assert text.startswith(f"{out / CHECKPOINTS}/step-00000011: must come from this run, but ")
    assert text.endswith("; resume with the same settings, text and model, or start anew in another folder")
    return text.partition("but ")[2].rpartition("; ")[0]


def test_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    algorithm = METHODS["sparseloco"]()
    runs.simulated(tmp_path, runs.config(), algorithm)
    assert refusal(tmp_path, runs.config(lr=2e-2), algorithm) == "optimizer.lr is 0.01 there and 0.02 here"
    assert refusal(tmp_path, runs.config(seed=1), algorithm) == "train.seed is 0 there and 1 here"
    text = refusal(tmp_path, runs.config(), algorithm, text=runs.dataset(seed=1))
    assert text == f"corpus.sha256 is {'0' * 64!r} there and {'0' * 63 + '1'!r} here"
    other = presets.sparseloco(inner_steps=4, k=2, tile=4, inner=adamw(1e-2))
    assert refusal(tmp_path, runs.config(), other) == "algorithm.channel.compressor.k is 3 there and 2 here"


def test_another_type_is_refused_c22(tmp_path: Path) -> None:
    algorithm = METHODS["diloco"]()
    runs.simulated(tmp_path, runs.config(), algorithm)
    text = refusal(tmp_path, runs.config(), algorithm, dtype=torch.bfloat16)
    first = "embedding.weight is 'torch.float32 [23, 6]' there and 'torch.bfloat16 [23, 6]' here"
    assert text.startswith(first)
    assert text.endswith(", and 3 more")


class WithFrozen(runs.ToyLM):
    """A layer that is not trained, and a table that the model derives anew each time, of numbers or of marks."""

    def __init__(self, weight: float = 1.0, table: float = 1.0, mark: bool = True) -> None:
        super().__init__()
        self.base = torch.nn.Linear(6, 6, bias=False).to(torch.bfloat16).requires_grad_(False)
        self.base.weight.fill_(weight)
        self.register_buffer("table", torch.tensor([table]), persistent=False)
        self.register_buffer("marks", torch.tensor([mark]), persistent=False)


@pytest.mark.parametrize(
    ("now", "named"),
    [
        ({"weight": 2.0}, "base.weight is 'torch.bfloat16 [6, 6] "),
        ({"table": 1.5}, "table is 'torch.float32 [1] "),
        ({"mark": False}, "marks is 'torch.bool [1] "),
    ],
    ids=["weight", "table", "marks"],
)
def test_what_is_not_trained_must_be_what_it_was(now: dict[str, Any], named: str, tmp_path: Path) -> None:
    """Frozen weights and derived buffers are not in a checkpoint, so a resumed run takes those of its own model."""
    algorithm = METHODS["sparseloco"]()
    settings = runs.config()

    def go(**values: Any) -> None:
        resume = runs.newest(tmp_path) if values else None
        world = Cohort(WithFrozen(**values), algorithm, settings.train.workers)
        train(settings, algorithm, runs.dataset(), tmp_path, label="toy", world=world, resume=resume)

    go()
    with pytest.raises(CheckpointError) as caught:
        go(**now)
    assert f"must come from this run, but {named}" in str(caught.value)
    assert "; resume with the same settings, text and model, or" in str(caught.value)
    go(weight=1.0)


def test_types_of_optimizer_state_are_kept_c22() -> None:
    """C-22: torch would cast the moments to the type of the parameters."""
    from tests.driver import Peer

    peer = Peer(METHODS["diloco"]())
    peer.step()
    state = peer.replica.private_state()
    for moments in state["optimizer"]["state"].values():
        moments["exp_avg"] = moments["exp_avg"].double() + 1e-12
    again = Peer(METHODS["diloco"]())
    again.replica.load_shared_state(peer.replica.shared_state())
    again.replica.load_private_state(state)
    loaded = again.replica.private_state()["optimizer"]["state"]
    for number, moments in state["optimizer"]["state"].items():
        assert torch.equal(loaded[number]["exp_avg"], moments["exp_avg"])
        assert loaded[number]["exp_avg"].dtype == torch.float64


@pytest.mark.parametrize("method", ["sparseloco", "sparseloco_delayed", "streaming_diloco", "ddp"])
@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4)])
def test_another_number_of_workers_c19_c21(method: str, before: int, after: int, tmp_path: Path) -> None:
    """C-19, C-21: kept peers keep everything, new ones start without a residual, messages in flight still count."""
    algorithm = METHODS[method]()
    runs.simulated(tmp_path, runs.config(every=5, workers=before, steps=16), algorithm)
    checkpoint = runs.checkpoint_at(tmp_path, 15)
    fate = "residuals of peers 3 to 3 are dropped" if after < before else "peers 3 to 3 are new and start from the"
    out = tmp_path / "other"
    with pytest.warns(UserWarning, match=rf"^train\.workers={after}: the checkpoint has {before}; {fate}"):
        runs.simulated(out, runs.config(every=1, keep=9, workers=after, steps=20), algorithm, resume=_with(checkpoint))
    lines = runs.metrics(out)
    assert lines[-1]["tokens"] == (15 * before + 5 * after) * 2 * 8
    first = runs.checkpoint_at(out, 16)
    assert [name for name in first.index.files if name.startswith("peer-")] == [
        f"peer-{peer:04}.safetensors" for peer in range(after)
    ]
    assert first.part("shared")["books"]["data_step"] == -(-15 * before // after) + 1


def _with(checkpoint: Any) -> Any:
    """The same checkpoint as if its run had been meant to be longer."""
    checkpoint.facts["identity"]["settings"]["train.steps"] = 20
    return checkpoint


def test_a_new_worker_starts_from_the_shared_state_alone(tmp_path: Path) -> None:
    """Its live parameters are the anchor, its residual is empty, its random numbers are its own."""
    from sparseloco.books import Books
    from sparseloco.checkpoint import CheckpointFolder
    from sparseloco.resume import Keeper
    from sparseloco.simulate import Cohort

    algorithm = METHODS["sparseloco_delayed"]()
    runs.simulated(tmp_path, runs.config(every=9, workers=2), algorithm)
    settings = runs.config(workers=3)
    world = Cohort(runs.ToyLM(), algorithm, 3)
    there = runs.checkpoint_at(tmp_path, 9)
    keeper = Keeper(CheckpointFolder(tmp_path / CHECKPOINTS), settings, algorithm, runs.dataset(), world, there)
    with pytest.warns(UserWarning, match="peers 2 to 2 are new"):
        keeper.load(there, Books([[], [], []]))
    for peer, replica in enumerate(world.replicas):
        with world.turn(peer):
            state = replica.private_state()
            residual = [value for path, value in state.items() if path.startswith("residual/")]
            live = {name: torch.equal(value, state[f"live/{name}"]) for name, value in replica.anchor().items()}
        assert all(not value.any() for value in residual) == (peer == 2)
        assert all(live.values()) == (peer == 2)
        assert [key.round for key in replica.in_flight()] == [1]
        assert len(world.transport.collect(replica.in_flight()[0])) == 2
        assert replica.digest() == world.replicas[0].digest()


def test_another_number_of_workers_is_refused_where_sources_are_dealt_out(tmp_path: Path) -> None:
    """C-21: the order of samples of each source follows from the number of its workers."""
    from sparseloco.books import Books
    from sparseloco.checkpoint import CheckpointFolder
    from sparseloco.data.settings import DataConfig, SourceConfig
    from sparseloco.identity import identity
    from sparseloco.resume import Keeper
    from sparseloco.simulate import Cohort

    algorithm = METHODS["sparseloco"]()
    runs.simulated(tmp_path, runs.config(every=9, workers=2), algorithm)
    there = runs.checkpoint_at(tmp_path, 9)
    sources = DataConfig(sources=(SourceConfig(path="a"), SourceConfig(path="b")), per_worker="source")
    settings = msgspec.structs.replace(runs.config(workers=3), data=sources)
    facts = json.loads(json.dumps(identity(settings, runs.dataset())))  # as they come back from a disk
    there.facts["identity"]["settings"].update(facts["settings"])
    world = Cohort(runs.ToyLM(), algorithm, 3)
    keeper = Keeper(CheckpointFolder(tmp_path / CHECKPOINTS), settings, algorithm, runs.dataset(), world, there)
    before = world.replicas[0].digest()
    with pytest.raises(CheckpointError, match=r"train\.workers=3: must be 2 as in the checkpoint.*go on with"):
        keeper.load(there, Books([[], [], []]))
    assert world.replicas[0].digest() == before


def test_a_checkpoint_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disk full: training goes on, earlier checkpoints stay, and the next one is tried again."""
    from sparseloco import checkpoint

    write = checkpoint.write_durably

    def full(path: Path, data: bytes) -> None:
        if "step-00000004" in path.parent.name and path.name == "peer-0001.safetensors":
            path.write_bytes(data[:100])
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(checkpoint, "write_durably", full)
    algorithm = METHODS["sparseloco"]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs.simulated(tmp_path / "full", runs.config(every=2, keep=9), algorithm)
    told = [str(each.message) for each in caught if "checkpoint" in str(each.message)]
    assert told == [
        f"{tmp_path}/full/checkpoints: checkpoint of step 4 cannot be written (No space left on device); free space "
        "there or make it writable; that of step 2 stays"
    ]
    names = sorted(path.name for path in (tmp_path / "full" / CHECKPOINTS).iterdir())
    assert names == [f"step-{step:08}" for step in (2, 6, 8, 10, 11)]
    runs.simulated(tmp_path / "straight", runs.config(), algorithm)
    assert runs.outcome(tmp_path / "full") == runs.outcome(tmp_path / "straight")


def test_metrics_that_cannot_be_written_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseloco import metrics

    def full(path: Path, content: bytes | str) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(metrics, "write_atomically", full)
    with pytest.raises(CheckpointError) as caught:
        runs.simulated(tmp_path, runs.config(), METHODS["ddp"]())
    assert str(caught.value) == (
        f"{tmp_path}/metrics.jsonl: must be writable (Read-only file system); free space there, then continue with "
        "--resume"
    )
