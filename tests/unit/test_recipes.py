"""The recipes: every figure has a source, `describe` says what they cost, and what it says is what really happens."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseloco.cli.figures import describe
from sparseloco.config import Entry, build_algorithm, load_config, parse_config, to_toml
from sparseloco.model import build_run_model
from sparseloco.presets import PRESETS
from sparseloco.replica import Replica
from sparseloco.report import units
from sparseloco.settings import RunConfig
from sparseloco.types import Coding
from sparseloco.wire import encode
from tests.cli import Call, text

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"), key=lambda path: path.name)
PARAMETERS = {
    "covenant-72b": 72_747_327_488,
    "llama-178m": 177_622_016,
    "llama-2b": 2_016_131_328,
    "llama-512m": 512_398_848,
    "moe-645m-a273m": 645_080_064,
}
PER_TOKEN = {**PARAMETERS, "moe-645m-a273m": 645_080_064 - 20 * 6 * 3 * 1024 * 1008}
"""Parameters that one token uses: six of eight experts rest."""

TINY = {
    "model.shape.vocab_size": 300,
    "model.shape.hidden_size": 32,
    "model.shape.num_hidden_layers": 1,
    "model.shape.num_attention_heads": 4,
    "model.shape.num_key_value_heads": 2,
    "model.shape.intermediate_size": 24,
    "train.batch_size": 2,
    "train.accumulation": 1,
    "train.sequence_length": 16,
    "train.workers": 2,
    "train.autocast": "off",
    "data.vocab_size": 300,
    "data.tokenizer": "",
}


def tiny(path: Path, **changes: Any) -> RunConfig:
    return load_config(path, [f"{name}={value}" for name, value in {**TINY, **changes}.items()])


def entry(config: RunConfig) -> Entry:
    return Entry(label="x", config=config)


def posted_bytes(replica: Replica, steps: int) -> int:
    """Bytes of the frames of one round, in the fixed coding, after steps with random gradients."""
    sent = 0
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for param in replica.params.values():
            param.grad = torch.randn(param.shape, generator=generator)
        replica.local_step()
        sent += sum(len(encode(envelope, coding=Coding.FIXED)) for envelope in replica.outbox())
    return sent


def test_there_is_a_recipe_of_every_size() -> None:
    assert [path.stem for path in RECIPES] == list(PARAMETERS)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_figure_has_a_source(path: Path) -> None:
    """A comment behind each value names one of the sources that the head of the file explains."""
    lines = path.read_text("utf-8").splitlines()
    explained = set(re.findall(r"^#   (\w+) ", "\n".join(lines), re.M)) - {"sparseloco", "torchrun"}
    assert "own" in explained
    used: set[str] = set()
    for line in lines:
        if not line or line.startswith(("#", "[", "preset =", "kind =")):
            continue
        named = set(re.findall(r"\[(\w+)\]", line.partition("#")[2]))
        assert named, line
        used |= named
    assert used == explained


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_describe_says_what_a_recipe_costs(path: Path) -> None:
    """Also for a model that no machine here could hold."""
    figures = describe(entry(load_config(path)))
    size = PARAMETERS[path.stem]
    assert figures["parameters"] == size
    assert figures["tokens"] / PER_TOKEN[path.stem] == pytest.approx(20, rel=0.01)
    memory = figures["memory_bytes_per_rank"]
    assert {kind: value / size for kind, value in memory.items() if kind != "payload"} == {
        "parameters": 4, "gradients": 4, "inner optimizer": 8, "anchor": 4, "residual": 4, "snapshot": 0,
        "outer optimizer": 0, "compressor": 0,
    }  # fmt: skip
    assert memory["payload"] == figures["workers"] * figures["bytes_sent_per_round"]
    keywords = figures["settings"]
    kept = keywords["k"] / keywords["tile"] ** 2
    assert figures["density"] == pytest.approx(kept, rel=0.06)
    # Between the least that positions and 2-bit codes can take and what two whole bytes a value would.
    assert 8 / 8 < figures["bytes_sent_per_round"] / (figures["density"] * size) < 2


def test_the_page_says_what_describe_says() -> None:
    rows = re.findall(r"^\| \[`([\w-]+)`\]\(\S+\) \| (.+) \|$", (ROOT / "docs" / "recipes.md").read_text("utf-8"), re.M)
    assert sorted(name for name, _ in rows) == list(PARAMETERS)
    for name, told in rows:
        figures = describe(entry(load_config(ROOT / "recipes" / f"{name}.toml")))
        assert told.split(" | ") == [
            f"{figures['parameters']:,}",
            str(figures["workers"]),
            f"{figures['tokens'] / 1e9:.2f} G",
            units.num_bytes(figures["bytes_sent_per_round"]),
            units.ratio(figures["compression"]),
            units.num_bytes(sum(figures["memory_bytes_per_rank"].values())),
        ]


@pytest.mark.mp
@pytest.mark.slow
def test_the_benchmark_of_a_round_runs(tmp_path: Path) -> None:
    """On a small shape; with the 178M's own it takes minutes and gigabytes."""
    (tmp_path / "text.txt").write_text(text())
    changes = {"model.shape.vocab_size": 300, "model.shape.num_hidden_layers": 1, "model.shape.hidden_size": 32}
    changes |= {"model.shape.intermediate_size": 24, "data.vocab_size": 300, "data.path": str(tmp_path / "text.txt")}
    words = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "recipe_round.py"), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "SPARSELOCO_CACHE": str(tmp_path)},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    figures = json.loads(ended.stdout)
    sent = figures["bytes_sent_per_round"]
    assert sent["measured"] == sent["described"] > 0
    assert (figures["ranks"], figures["steps"], figures["rounds"]) == (2, 2, 1)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_once_it_is_small(path: Path, cli: Call) -> None:
    Path("text.txt").write_text(text())
    shutil.copy(path, "recipe.toml")
    words = {**TINY, "transport.kind": "loopback", "algorithm.inner_steps": 2, "train.steps": 2}
    words |= {"optimizer.warmup_steps": 1, "train.evaluation_tokens": 64, "algorithm.tile": 8, "algorithm.k": 4}
    ended = cli(
        "train", "recipe.toml", "--data", "text.txt", "--out", "mine", "--json",
        *[word for name, value in words.items() for word in ("--set", f"{name}={value}")],
    )  # fmt: skip
    assert ended.code == 0, ended.err
    summary = json.loads(ended.out)
    assert (summary["rounds"], summary["steps"]) == (1, 2)
    kind = json.loads(Path("mine/model/config.json").read_text())["model_type"]
    assert kind == tomllib.loads(path.read_text("utf-8"))["model"]["shape"]["model_type"]
    again = load_config("mine/config.toml")
    assert again.model.shape["hidden_size"] == 32
    assert parse_config(to_toml(again)) == again


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_described_bytes_are_those_of_real_frames(path: Path) -> None:
    config = tiny(path)
    figures = describe(entry(config))
    replica = Replica(build_run_model(config, 300), build_algorithm(config))
    assert posted_bytes(replica, figures["inner_steps"]) == figures["bytes_sent_per_round"]


@pytest.mark.parametrize("preset", PRESETS)
def test_described_bytes_are_those_of_every_method(preset: str) -> None:
    config = parse_config(
        f'[algorithm]\npreset = "{preset}"\n[model]\nhidden_size = 24\nnum_layers = 2\nnum_heads = 2\n'
    )
    figures = describe(entry(config))
    replica = Replica(build_run_model(config, config.data.vocab_size), build_algorithm(config))
    steps = figures["inner_steps"]
    assert posted_bytes(replica, steps) == figures["bytes_sent_per_round"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_described_memory_is_that_of_real_state(optimizer: str) -> None:
    config = tiny(RECIPES[1], **{"optimizer.name": optimizer, "algorithm.delay": 2, "algorithm.inner_steps": 5})
    if optimizer == "sgd":
        config = tiny(RECIPES[1], **{"optimizer.name": "sgd", "optimizer.momentum": 0.9, "optimizer.lr": 1e-3})
    memory = describe(entry(config))["memory_bytes_per_rank"]
    replica = Replica(build_run_model(config, 300), build_algorithm(config))
    posted_bytes(replica, build_algorithm(config).schedule.every)
    shared, private = replica.shared_state(), replica.private_state()

    def held(state: dict[str, Any], *parts: str) -> int:
        return sum(value.nbytes for path, value in state.items() if any(part in path for part in parts))

    assert held(shared, "anchor/") == memory["anchor"]
    assert held(private, "residual/") == memory["residual"]
    assert held(private, "live/") == memory["parameters"]
    assert held(private, "/snapshot/") == memory["snapshot"]
    assert (memory["snapshot"] > 0) == (optimizer != "sgd")
    moments = [value for rows in private["optimizer"]["state"].values() for name, value in rows.items()
               if isinstance(value, torch.Tensor) and name != "step"]  # fmt: skip
    assert sum(moment.nbytes for moment in moments) == memory["inner optimizer"]


@pytest.mark.slow
def test_described_bytes_are_those_of_real_frames_at_178m() -> None:
    """Three of its fifteen steps: what a frame holds does not change its size."""
    config = load_config(RECIPES[1], ["algorithm.inner_steps=3", "train.rounds=57", "optimizer.warmup_steps=1"])
    figures = describe(entry(config))
    assert figures["parameters"] == 177_622_016
    replica = Replica(build_run_model(config, 32_000), build_algorithm(config))
    assert posted_bytes(replica, 3) == figures["bytes_sent_per_round"] == 6_287_994


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            ["model.shape.hidden_sise=8"],
            "model.shape.hidden_sise=8: must be a key of LlamaConfig; did you mean 'hidden_size'?",
        ),
        (
            ["model.shape.nothing_like_it_=8"],
            "model.shape.nothing_like_it_=8: must be a key of LlamaConfig; leave it out",
        ),
        (
            ["model.shape.model_type=lama"],
            "model.shape.model_type='lama': must be a model that transformers knows; did you mean 'llama'?",
        ),
        (
            ["model.shape.model_type=0%"],
            "model.shape.model_type='0%': must be a model that transformers knows; write, for example, \"llama\"",
        ),
        (
            ["model.shape.model_type=7"],
            "model.shape.model_type=7: must name a model of transformers in quotes; write, for example, "
            'model_type = "llama"',
        ),
        (
            ["model.config=a.json"],
            "model.config='a.json': must not stand beside [model.shape], which says what is built; keep one of them",
        ),
        (
            ["model.num_layers=3"],
            "model.num_layers=3: must be left out beside [model.shape], which says it already; change it there",
        ),
        (["model.shape=3"], "model.shape=3: must be a table; the default is {}"),
        (
            ["model.shape.max_position_embeddings=64"],
            "train.sequence_length=2048: must be at most 64, the positions of model.shape.model_type='llama'; use 64 "
            "or less",
        ),
        (
            ["model.shape.model_type=t5", "model.shape=" + '{model_type="t5"}'],
            "model.shape.model_type='t5': must be a causal language model that transformers can read",
        ),
    ],
)
def test_shapes_that_cannot_be_built(changes: list[str], sentence: str, cli: Call) -> None:
    ended = cli("describe", str(RECIPES[1]), *[word for change in changes for word in ("--set", change)])
    assert ended.code == 2
    assert ended.err.startswith(f"error: {sentence}")


def test_a_wrong_value_of_a_shape_is_named(cli: Call) -> None:
    ended = cli("describe", str(RECIPES[1]), "--set", "model.shape.hidden_size=many")
    assert ended.err == (
        "error: model.shape.model_type='llama': must have keys in [model.shape] that LlamaConfig takes (Validation "
        "error for field 'hidden_size': TypeError: Field 'hidden_size' expected int, got str (value: 'many')); mend "
        "them\n"
    )
