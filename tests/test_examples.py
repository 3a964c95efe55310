"""Examples that run as they are printed (C-71): each as processes of its own, new interpreters or forks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparseloco.config import load_entries
from sparseloco.presets import PRESETS
from tests.cli import Call, text
from tests.one_path.managed import Processes
from tests.torchrun import forked

ROOT = Path(__file__).parents[1]
ENTRIES = load_entries(ROOT / "examples" / "methods.toml")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def output_of_ranks(folder: Path, name: str | Path, ranks: int) -> str:
    """What an example prints whose ranks, like torchrun, need not import all anew; one test starts the real ones."""
    words = ("--nproc-per-node", str(ranks), str(ROOT / "examples" / name))
    with forked(folder, *words, ACCELERATE_USE_CPU="true") as launch:
        ended = launch.ended()
    assert ended.code == 0, ended.err
    return ended.out


def output_of(name: str | Path, *launcher: str, arguments: tuple[str, ...] = ()) -> str:
    command = [sys.executable, *(launcher or ("-W", "error")), str(ROOT / "examples" / name), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.mp
def test_plain_loop_by_torchrun() -> None:
    """C-76: the context manager around a loop with its own module, schedule, clipping and accumulation."""
    found = re.findall(
        r"rank \d: loss (\S+) -> (\S+), (\d+) rounds, sent (\d+) bytes, anchor (\w{32})",
        output_of("plain_loop.py", *TORCHRUN),
    )
    assert len(found) == 2
    for first, last, rounds, sent, _ in found:
        assert float(last) < 0.7 * float(first)
        assert (int(rounds), int(sent) > 0) == (6, True)
    assert found[0][4] == found[1][4]


@pytest.mark.mp
def test_sharded_replicas_by_torchrun(tmp_path: Path) -> None:
    """C-57: two replicas of two shards; those who hold the same shard end with the same anchor."""
    found = re.findall(
        r"peer (\d), shard (\d): loss (\S+) -> (\S+), 6 rounds, sent (\d+) bytes, anchor (\w{32})",
        output_of_ranks(tmp_path, "fsdp2.py", 4),
    )
    anchors = {(peer, shard): anchor for peer, shard, _, _, _, anchor in found}
    assert sorted(anchors) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert all(float(last) < 0.3 * float(first) for _, _, first, last, _, _ in found)
    assert anchors["0", "0"] == anchors["1", "0"] != anchors["0", "1"] == anchors["1", "1"]


@pytest.mark.mp
def test_a_loop_under_torchft() -> None:
    """One replica with a lighthouse; tests/one_path/test_torchft.py kills one of two and lets it come back."""
    pytest.importorskip("torchft", reason="torchft is not installed: pip install sparseloco[torchft]")
    processes = Processes()
    try:
        words = ("--peer", "0", "--lighthouse", processes.lighthouse, "--steps", "40")
        output = output_of("torchft_loop.py", "-W", "default", arguments=words)  # torchft warns at import
    finally:
        processes.close()
    found = re.fullmatch(
        r"peer 0: joined at step 0, anchor (\w{32})\npeer 0: step 40, loss (\S+), anchor (\w{32})\n", output
    )
    assert found
    assert found[1] != found[3]
    assert float(found[2]) < 0.5, "the targets have a mean square of 1"


def test_vision_with_batch_normalization() -> None:
    accuracy = re.fullmatch(r"accuracy (\S+), running means alike, digest \w{32}\n", output_of("vision_batchnorm.py"))
    assert accuracy
    assert float(accuracy[1]) > 0.9


def test_adapters_alone_travel() -> None:
    """C-60: a trainable subset, several replicas in one process."""
    found = re.fullmatch(
        r"loss (\S+) -> (\S+), trained (\d+) of (\d+) values, sent (\d+) bytes each\n", output_of("lora.py")
    )
    assert found
    first, last, trained, whole, sent = map(float, found.groups())
    assert last < first - 0.2
    assert trained < whole / 30
    # Eight rounds: dense float32 of the adapters would be 4 bytes for each value and round.
    assert sent < 8 * 4 * trained / 10


AROUND = """
import os
import torch

torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
data = torch.randn(2 * 8 * 60, 8)
loader = torch.utils.data.DataLoader(data, batch_size=8)
seen = []

def loss_of(model, batch):
    seen.append(float(batch.sum()))
    return (model(batch) - batch[:, :4]).square().mean()
SNIPPET
import torch.distributed as dist

last = [*model.parameters()]
line = f"seen {len(seen)} {sum(seen):.6f}, sum {sum(float(p.double().sum()) for p in last):.12f};"
os.write(1, line.encode() + bytes([10]))  # in one piece, or two ranks' lines may mix
dist.destroy_process_group()
"""


@pytest.mark.mp
def test_c74_the_loop_of_accelerate_as_it_is_printed(tmp_path: Path) -> None:
    """C-74: both ranks see half of the batches and end, after two rounds of 30 steps, with the same parameters."""
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    page = (ROOT / "docs" / "library.md").read_text("utf-8")
    (snippet,) = re.findall(r"^## With accelerate\n.*?^```python\n(.*?)^```", page, re.M | re.S)
    script = tmp_path / "loop.py"
    script.write_text(AROUND.replace("SNIPPET", snippet))
    found = re.findall(r"seen (\d+) (\S+), sum (\S+);", output_of_ranks(tmp_path, script, 2))
    assert [count for count, _, _ in found] == ["60", "60"]
    assert found[0][1] != found[1][1]
    assert found[0][2] == found[1][2]


def test_every_example_is_tested_and_named_on_the_page() -> None:
    page = (ROOT / "docs" / "library.md").read_text("utf-8")
    tests = Path(__file__).read_text("utf-8")
    for example in (ROOT / "examples").glob("*.py"):
        assert f"../examples/{example.name}" in page
        assert f'"{example.name}"' in tests


def test_every_method_has_an_entry() -> None:
    assert sorted(entry.label for entry in ENTRIES) == sorted(entry.config.algorithm.preset for entry in ENTRIES)
    assert {entry.label for entry in ENTRIES} == set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_example_of_a_method_trains(cli: Call, preset: str) -> None:
    """With the settings of the method as they stand, on less text and fewer steps."""
    Path("text.txt").write_text(text())
    smaller = {"workers": 2, "steps": 30, "batch_size": 2, "sequence_length": 32, "evaluation_tokens": 2048}
    words = [word for name, value in smaller.items() for word in ("--set", f"train.{name}={value}")]
    config = ["compare", str(ROOT / "examples" / "methods.toml"), "--set", "data.path=text.txt", *words]
    ended = cli(*config, "--only", preset, "--out", "mine", "--json")
    assert ended.code == 0, ended.err
    (summary,) = json.loads(ended.out)
    (entry,) = [entry for entry in ENTRIES if entry.label == preset]
    assert summary["settings"] == entry.config.algorithm.settings
    assert summary["rounds"] >= 2
    metrics = [json.loads(line) for line in Path("mine", summary["folder"], "metrics.jsonl").read_text().splitlines()]
    assert summary["held_out_loss"] < metrics[0]["loss"] - 0.02, "the model must be better than at the start"
