"""The live view and watch: what they show, from statuses and from files."""

from __future__ import annotations

import contextlib
import io
import json
import math
import threading
from pathlib import Path

import pytest
from rich.console import Console

from sparseloco.cli import screen as screens
from sparseloco.cli import watch as watching
from sparseloco.cli.live import LiveView, lines, sparkline, status_line
from sparseloco.cli.lock import only_writer
from sparseloco.cli.screen import Screen
from sparseloco.errors import ConfigError
from sparseloco.metrics import Status

LATE = Status(
    30, 60, 5.25, 5.5, 12_345.0, 52_000, 75.0, round=2, round_bytes=26_000, compression=144.3, delta_norm=1.5,
    residual_norm=19.6, update_norm=8.4, sync_fraction=0.042,
)  # fmt: skip


def drawn(view: LiveView, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(view.renderable())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_view_shows_all_figures_of_a_run() -> None:
    view = LiveView("mine", 60)
    for loss in (7.0, 6.0, 5.5, 5.25):
        view.update(LATE._replace(train_loss=loss))
    text = drawn(view)
    for expected in (
        "mine", "step 30 of 60", "1 min 15 s left", "5.250  \u2588\u2584\u2582\u2581  validation 5.500",
        "12.3 k tokens/s, 4.2 % of the time in sync", "round 2",
        "26.0 kB this round, 52.0 kB in all, 144\u00d7 smaller than dense float32",
        "delta 1.5, residual 19.6, update 8.4",
    ):  # fmt: skip
        assert expected in text, expected
    assert text.count("\n") == 5
    assert drawn(view, width=40).count("\n") == 5, "long lines are cut, not wrapped"


def test_the_view_leaves_out_what_is_not_known() -> None:
    view = LiveView("mine", 60)
    assert "step 0 of 60" in drawn(view)
    view.update(Status(1, 60, math.nan, None, 100.0, 0, math.nan))
    text = drawn(view)
    assert "norms" not in text
    assert "round" not in text
    assert "left" not in text


def test_sparklines_have_a_width_at_most() -> None:
    assert sparkline([]) == ""
    assert sparkline([2.0, 2.0]) == "\u2581\u2581"
    assert len(sparkline([1 / n for n in range(1, 1000)])) == 32
    assert sparkline([1 / n for n in range(1, 1000)])[0] == "\u2588"


def test_lines_fit_a_narrow_terminal() -> None:
    assert all(len(name) + len(text) < 80 for name, text in lines(LATE, [1.0, 2.0]))
    assert status_line(LATE) == "loss 5.250, validation 5.500, 12.3 k tokens/s, sent 52.0 kB, 1 min 15 s left"


def test_without_a_terminal_there_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter([0.0, 4.0, 11.0, 11.0, 12.0, 30.0, 30.0, 31.0, 32.0])
    monkeypatch.setattr(screens.time, "monotonic", lambda: next(seconds))
    with Screen(quiet=False) as screen, screen.training("mine", 60) as show:
        for step in (1, 2, 3, 4):
            show(LATE._replace(step=step))
        show(LATE._replace(step=60))
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.partition(",")[0] for line in err.splitlines()] == [
        "mine: step 2 of 60", "mine: step 4 of 60", "mine: 60 steps",
    ]  # fmt: skip
    with Screen(quiet=True) as screen, screen.training("mine", 60) as show:
        show(LATE)
    assert capsys.readouterr() == ("", "")


STEP = {
    "kind": "step", "step": 30, "round": 2, "tokens": 100, "train_loss": 5.25, "lr": 0.1, "bytes_sent": 52_000,
    "bytes_received": 0, "round_bytes": 26_000, "compression": 144.3, "seconds": 10.0, "seconds_in_sync": 0.5,
    "tokens_per_s": 12_345.0, "delta_norm": 1.5, "residual_norm": 19.6, "update_norm": 8.4,
}  # fmt: skip
EVALUATION = {"kind": "evaluation", "split": "validation", "step": 0, "loss": 5.5}


def run_folder(path: Path, *records: object) -> Path:
    path.mkdir(parents=True)
    (path / "config.toml").write_text("[train]\nsteps = 60\n")
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_watch_ends_when_the_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "POLL_SECONDS", 0.01)
    folder = run_folder(tmp_path / "mine", EVALUATION)
    seen: list[str] = []

    def go_on() -> None:
        with (folder / "metrics.jsonl").open("a") as file:
            half = json.dumps(STEP)
            file.write(half[:20])
            file.flush()
            file.write(half[20:] + "\n")
        (folder / "summary.json").write_text("{}")

    timer = threading.Timer(0.1, go_on)
    with only_writer(folder):
        timer.start()
        assert watching.watch(folder, Screen(quiet=True), seen.append) is None
        timer.join()
    assert [json.loads(line)["kind"] for line in seen] == ["evaluation", "step"]


def test_watch_shows_what_the_run_itself_shows() -> None:
    status = watching.advanced(None, EVALUATION, 60)
    assert status is not None
    assert (status.step, status.validation_loss) == (0, 5.5)
    assert watching.advanced(status, STEP, 60) == LATE._replace(seconds_left=10.0, sync_fraction=0.05)
    assert watching.advanced(status, {"kind": "note"}, 60) is status
    later = watching.advanced(LATE, EVALUATION | {"split": "test", "loss": 9.0}, 60)
    assert later == LATE


def test_watch_wants_the_folder_of_one_run(tmp_path: Path) -> None:
    run_folder(tmp_path / "both" / "sparse")
    with pytest.raises(ConfigError) as caught:
        watching.watch(tmp_path / "both", Screen(quiet=True))
    assert str(caught.value) == (
        f"folder={str(tmp_path / 'both')!r}: must hold the config.toml of one run; "
        f"give a run's folder, for example {tmp_path / 'both' / 'sparse'}"
    )
    folder = run_folder(tmp_path / "bad")
    (folder / "metrics.jsonl").write_text("{no\n")
    with pytest.raises(ConfigError, match="must hold valid JSON lines"):
        watching.watch(folder, Screen(quiet=True))


def test_watch_follows_a_run_that_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "POLL_SECONDS", 0.0)
    folder = run_folder(tmp_path / "mine", EVALUATION, STEP)
    with only_writer(folder):
        lines = watching.tail(folder)
        assert [json.loads(next(lines))["kind"] for _ in range(2)] == ["evaluation", "step"]
    (folder / "metrics.jsonl").write_text('{"kind": "new"}\n')
    (folder / "summary.json").write_text("{}")
    assert [json.loads(line)["kind"] for line in lines] == ["new"]


def test_watch_ends_with_a_run_that_leaves_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path / "mine", EVALUATION, STEP)
    seen: list[str] = []

    def end(_: float) -> None:  # instead of the pause between two looks
        held.close()

    monkeypatch.setattr(watching.time, "sleep", end)
    with contextlib.ExitStack() as held:
        held.enter_context(only_writer(folder))
        fate = watching.watch(folder, Screen(quiet=True), seen.append)
    assert len(seen) == 2
    rest = f"continue it with: sparseloco train --resume {folder}"
    assert fate == f"RUN={str(folder)!r}: ended without a result, and no process writes to it; {rest}"


@pytest.mark.parametrize(("saved", "how"), [(True, "after saving"), (False, "without a checkpoint")])
@pytest.mark.parametrize("held", [False, None], ids=["gone", "no locks"])
def test_watch_says_that_a_run_was_interrupted(
    saved: bool, how: str, held: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "is_held", lambda _: held)
    folder = run_folder(tmp_path / "mine", EVALUATION, STEP, {"kind": "interrupted", "step": 30, "saved": saved})
    fate = watching.watch(folder, Screen(quiet=True))
    assert fate is not None
    assert fate.startswith(f"RUN={str(folder)!r}: was interrupted at step 30 {how}; continue it with: sparseloco train")


def test_watch_names_torchrun_for_a_run_that_it_started(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "mine", EVALUATION)
    with (folder / "config.toml").open("a") as file:
        file.write('workers = 3\n[transport]\nkind = "process_group"\n')
    fate = watching.watch(folder, Screen(quiet=True))
    again = f"torchrun --nproc-per-node 3 -m sparseloco train --resume {folder}"
    assert fate is not None
    assert fate.endswith(f"; continue it with: {again}")


def test_the_command_of_torchrun_names_nodes_only_if_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseloco.launch import launch_command, stopping_limit

    monkeypatch.setenv("WORLD_SIZE", "8")
    assert launch_command() == "torchrun --nproc-per-node 8 -m"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert launch_command() == "torchrun --nnodes 2 --nproc-per-node 4 -m"
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "90")
    assert "has not ended in 90 s;" in stopping_limit()


def test_ctrl_c_stops_only_the_watching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from sparseloco.cli import app

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watching.time, "sleep", interrupt)
    folder = run_folder(tmp_path / "mine", EVALUATION)
    with only_writer(folder):
        ended = CliRunner().invoke(app, ["watch", str(folder)])
    assert ended.exit_code == 0
    assert "interrupted" not in ended.output
