"""``sparseloco data``, and runs on several sources: what is said, and what ends well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli import Call, run_file

CONFIG = run_file(
    """
[data]
vocab_size = 300
validation_fraction = 0.2
test_fraction = 0.2

[[data.sources]]
path = "tales.txt"

[[data.sources]]
path = "rows.jsonl"
"""
)


@pytest.fixture
def call(cli: Call) -> Call:
    """In a folder with a configuration and two small sources."""
    Path("run.toml").write_text(CONFIG)
    Path("tales.txt").write_text("".join(f"Line {n} says {n * 7919 % 1000}.\n\n" for n in range(2000)))
    Path("rows.jsonl").write_text("".join(json.dumps({"text": f"row {n} of few {n % 13}"}) + "\n" for n in range(60)))
    return cli


def test_prepare_then_inspect(call: Call, tmp_path: Path) -> None:
    code, out, err = call("data", "inspect", "run.toml")
    assert (code, out) == (2, "")
    assert err == (
        "error: data='tales.txt+rows.jsonl': is not prepared, or its files have changed since; run: sparseloco data "
        "prepare CONFIG.toml\n"
    )
    code, out, _ = call("data", "prepare", "run.toml")
    assert code == 0
    for word in ("tales.txt", "rows.jsonl", "train", "validation", "test", "sha256", "<|end|>"):
        assert word in out
    code, out, _ = call("data", "inspect", "run.toml", "--json", "--samples", "3")
    figures = json.loads(out)
    assert code == 0
    assert [source["name"] for source in figures["sources"]] == ["tales.txt", "rows.jsonl"]
    assert len(figures["samples"]) == 3
    assert (
        json.loads(call("data", "inspect", figures["entry"], "--json", "--samples", "3")[1])["files"]
        == figures["files"]
    )
    assert json.loads(call("data", "prepare", "run.toml", "--json")[1])["entry"] == figures["entry"]


def test_sentences(call: Call, tmp_path: Path) -> None:
    assert (
        call("data", "inspect", "run.toml", "--samples", "-1")[2] == "error: --samples -1: must be at least 0; use 1\n"
    )
    code, _, err = call("data", "prepare", "run.toml", "--set", "data.tokenizer=gone.json")
    assert (code, err) == (
        2,
        "error: data.tokenizer='gone.json': must be an existing file or folder, or a name on the hub; check it\n",
    )
    assert "must be a finished entry of the cache" in call("data", "inspect", str(tmp_path))[2]


def test_c38_text_that_ends_in_a_run_starts_again_and_it_is_said_once(call: Call) -> None:
    """C-38 on one machine: nobody waits for data that has come to an end."""
    code, _, err = call(
        "train", "run.toml", "--set", "data.per_worker=source", "--out", "run", "--set", "train.steps=40"
    )
    assert code == 0
    said = [line for line in err.splitlines() if line.startswith("warning: data=")]
    # The small source is the second worker's alone, who sees 80 windows of it.
    (line,) = said
    assert line.startswith("warning: data='rows.jsonl': all of it was seen by step ")
    assert line.endswith(" of 40, so it starts again in another order")
    records = [json.loads(record) for record in Path("run/metrics.jsonl").read_text().splitlines()]
    (epoch,) = [record for record in records if record["kind"] == "epoch"]
    assert epoch["source"] == "rows.jsonl"
    assert f"by step {epoch['step']} of" in line


def test_weights_and_workers_change_what_is_seen_but_not_the_tokens(call: Call) -> None:
    weights = ["--set", "data.sources.0.weight=1", "--set", "data.sources.1.weight=3"]
    losses = set()
    for number, more in enumerate(([], weights, ["--set", "data.per_worker=source"])):
        code, out, _ = call("train", "run.toml", "--json", "--out", f"run{number}", *more)
        assert code == 0
        losses.add(json.loads(out)["held_out_loss"])
    assert len(losses) == 3
    assert len([path for path in Path("cache").iterdir() if path.is_dir()]) == 1


@pytest.mark.mp
@pytest.mark.usefixtures("forked_workers")
def test_processes_see_the_same_windows(call: Call) -> None:
    command = ["train", "run.toml", "--json", "--set", "data.per_worker=source", "--out"]
    digests = {json.loads(call(*command, *more)[1])["digest"] for more in (["one"], ["two", "--processes"])}
    assert len(digests) == 1


def test_given_tokenizer_decides_the_model(call: Call) -> None:
    entry = json.loads(call("data", "prepare", "run.toml", "--json")[1])["entry"]
    for verb in (["describe", "run.toml"], ["train", "run.toml", "--out", "own"]):
        code, out, err = call(
            *verb, "--json", "--set", f"data.tokenizer={entry}/tokenizer.json", "--set", "data.vocab_size=4096"
        )
        assert code == 0, err
        assert "4096" not in out
