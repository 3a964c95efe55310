"""Writers: what they are given, that a missing package is one sentence, and that metrics.jsonl is always there."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparseloco import writers
from sparseloco.config import parse_config, to_toml
from sparseloco.errors import ConfigError
from sparseloco.settings import LoggingConfig, RunConfig
from tests.runs import METHODS, checkpoint_at, simulated
from tests.runs import config as toy_config


def config(*names: str, project: str = "p") -> RunConfig:
    return parse_config(f'[algorithm]\npreset = "diloco"\n[logging]\nto = {list(names)}\nproject = "{project}"\n')


def write_some(log: writers.FanOut) -> None:
    log.write("evaluation", split="validation", step=0, loss=6.5, bits_per_byte=3.0, evaluated_tokens=64)
    log.write("step", step=30, train_loss=5.5, update_norm=None, delta_norm=float("nan"), compression=144.0)
    log.close()


class FakeRun:
    """What wandb.init returns, and the trackio module: log(values, step=) and finish(), as documented."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []
        self.started: dict[str, Any] = {}
        self.finished = 0
        self.id = "abc123"

    def init(self, **keywords: Any) -> FakeRun:
        print("a banner")
        self.started = keywords
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((values, step))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    run = FakeRun()
    module = types.ModuleType(request.param)
    module.__spec__ = importlib.util.spec_from_loader(request.param, loader=None)
    for name in ("init", "log", "finish"):
        setattr(module, name, getattr(run, name))
    monkeypatch.setitem(sys.modules, request.param, module)
    return run


def test_the_section_comes_back_from_its_own_file() -> None:
    settings = config("wandb", "trackio")
    assert settings.logging == LoggingConfig(to=("wandb", "trackio"), project="p")
    assert parse_config(to_toml(settings)) == settings


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('to = ["mlflow"]', "logging.to='mlflow': must be one of tensorboard, wandb, trackio; choose one of them"),
        ('to = "wandb"', "logging.to='wandb': must be a list of texts in quotes; the default is []"),
        ('to = ["wandb", "wandb"]', "logging.to=['wandb', 'wandb']: must name each writer once"),
        ('project = ""', "logging.project='': must name a project; use sparseloco"),
    ],
)
def test_bad_settings_are_refused(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f'[algorithm]\npreset = "diloco"\n[logging]\n{line}\n')
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", writers.WRITERS)
def test_a_missing_package_names_the_pip_command(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError) as caught:
        writers.open_log(tmp_path, "label", config(name))
    assert str(caught.value) == (
        f"logging.to={name!r}: must be installed, but Python finds no package {name}; "
        f'run pip install "sparseloco[{name}]" or leave it out'
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fake", ["wandb", "trackio"], indirect=True)
def test_online_services_get_the_same_numbers(
    fake: FakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["fake"]
    write_some(writers.open_log(tmp_path, "my run", config(name)))
    assert fake.logged == [
        ({"validation/loss": 6.5, "validation/bits_per_byte": 3.0}, 0),
        ({"train/loss": 5.5, "sync/compression": 144.0}, 30),
    ]
    assert fake.finished == 1
    assert fake.started["project"] == "p"
    assert re.fullmatch(r"my run(-\w{6})?", fake.started["name"])
    assert fake.started["config"]["algorithm"]["preset"] == "diloco"
    out, err = capsys.readouterr()
    assert (out, err) == ("", "a banner\n"), "stdout may be JSON"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("fake", ["wandb"], indirect=True)
def test_wandb_is_offline_unless_its_own_variable_says_otherwise(
    fake: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    writers.open_log(tmp_path, "a", config("wandb")).close()
    assert (fake.started["mode"], fake.started["dir"]) == ("offline", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "online")
    writers.open_log(tmp_path, "a", config("wandb")).close()
    assert fake.started["mode"] == "online"


@pytest.mark.parametrize("fake", ["trackio"], indirect=True)
def test_trackio_is_asked_for_no_space(fake: FakeRun, tmp_path: Path) -> None:
    writers.open_log(tmp_path, "a", config("trackio")).close()
    assert set(fake.started) == {"project", "name", "config", "resume"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_files_hold_the_curves(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_some(writers.open_log(tmp_path, "my run", config("tensorboard")))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == [
        "sync/compression", "train/loss", "validation/bits_per_byte", "validation/loss",
    ]  # fmt: skip
    point = events.Scalars("train/loss")[0]
    assert (point.step, point.value) == (30, 5.5)


def logged_run(out: Path, name: str) -> Any:
    """A toy run with a checkpoint after every step; returns a function that resumes it, in place."""
    settings = msgspec.structs.replace(toy_config(every=1, keep=20), logging=LoggingConfig(to=(name,)))
    simulated(out, settings, METHODS["buffers_synced"]())
    return lambda step: simulated(out, settings, METHODS["buffers_synced"](), resume=checkpoint_at(out, step))


def in_the_file(out: Path) -> dict[str, list[tuple[int, float]]]:
    """Curves of ``metrics.jsonl`` by the names that writers show."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()):
        for name, value in writers.named_scalars(record.pop("kind"), record).items():
            curves.setdefault(name, []).append((record["step"], pytest.approx(value)))
    return curves


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("step", [5, 6, 11], ids=["at a line of the log", "between two", "after the last step"])
def test_a_resumed_tensorboard_shows_each_step_once(tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event files hold every record of metrics.jsonl, those at the step of the checkpoint too, and no other."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # Files of one second and process are read in the order of this number as text.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))

    resume = logged_run(tmp_path, "tensorboard")
    for _ in range(2):
        resume(step)
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        shown = {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}
        assert shown == in_the_file(tmp_path)
        assert [at for at, _ in shown["train/loss"]] == [5, 10, 11]
        assert events.Tags()["tensors"] == ["label/text_summary"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_has_on_the_disk_what_the_file_has(tmp_path: Path) -> None:
    """A run that is killed closes nothing."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = writers.open_log(tmp_path, "a", config("tensorboard"))
    log.write("step", step=1, train_loss=2.0)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 2.0)]
    log.close()


@pytest.mark.parametrize("fake", ["wandb", "trackio"], indirect=True)
def test_services_go_on_in_the_same_run_and_are_told_nothing_twice(
    fake: FakeRun, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["fake"]
    resume = logged_run(tmp_path, name)
    first, told = fake.started, list(fake.logged)
    assert ("id" in first, first.get("resume", "never")) == (False, "never")
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines[:-2]))  # killed before the last two
    del fake.logged[-2:]
    resume(6)
    assert [(set(values), step) for values, step in fake.logged] == [(set(values), step) for values, step in told]
    expected = {"wandb": {"id": "abc123", "resume": "allow"}, "trackio": {"name": first["name"], "resume": "must"}}
    assert fake.started == {**first, **expected[name]}


@pytest.mark.parametrize("fake", ["wandb", "trackio"], indirect=True)
def test_a_run_that_starts_anew_is_another_run_there(
    fake: FakeRun, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["fake"]
    writers.open_log(tmp_path, "a", config(name)).close()
    first = fake.started
    writers.open_log(tmp_path, "a", config(name)).close()
    assert "id" not in fake.started
    assert fake.started.get("resume", "never") == "never"
    assert (fake.started["name"] == first["name"]) is (name == "wandb")


@pytest.mark.parametrize("fake", ["wandb"], indirect=True)
def test_a_service_that_is_new_when_a_run_resumes_gets_everything_from_there(fake: FakeRun, tmp_path: Path) -> None:
    log = writers.open_log(tmp_path, "a", config())
    for step in (1, 2, 3):
        log.write("step", step=step, train_loss=float(step))
    log.close()
    start = b"".join((tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:2])
    log = writers.open_log(tmp_path, "a", config("wandb"), start, resume=2)
    log.write("step", step=3, train_loss=3.0)
    log.close()
    assert fake.logged == [({"train/loss": 2.0}, 2), ({"train/loss": 3.0}, 3)]


def test_a_writer_that_fails_is_given_up_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Broken:
        is_cut = True

        def __init__(self, *_: Any) -> None: ...

        def write(self, values: Any, step: int) -> None:
            asked.append("write")
            raise OSError("no route")

        def close(self) -> None:
            asked.append("close")

    monkeypatch.setitem(writers.WRITERS, "tensorboard", Broken)
    monkeypatch.setattr(writers, "check_writers", lambda names: None)
    log = writers.open_log(tmp_path, "a", config("tensorboard"))
    rule = "logging.to='tensorboard': given up after OSError: no route; metrics.jsonl goes on"
    with pytest.warns(UserWarning, match=rule):
        log.write("step", step=1, train_loss=2.0)
    log.write("step", step=2, train_loss=1.5)
    log.close()
    assert asked == ["write"]
    losses = [json.loads(line)["train_loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert losses == [2.0, 1.5]
