"""Replicas of several processes: which settings they take, and the sentence for those they do not."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from sparseloco import ConfigError, launch
from sparseloco.settings import OptimizerConfig, TrainConfig
from sparseloco.trainer import train
from tests import runs
from tests.cli import Call, run_file, text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shards": 0}, "train.shards=0: must be at least 1; use 1 or more"),
        (
            {"shards": 3, "batch_size": 8},
            "train.batch_size=8: must be a multiple of shards=3 times accumulation=1, since every shard sees an equal "
            "part; use 3",
        ),
        (
            {"shards": 2, "batch_size": 6, "accumulation": 2},
            "train.batch_size=6: must be a multiple of shards=2 times accumulation=2, since every shard sees an equal "
            "part; use 4",
        ),
    ],
)
def test_shards_share_a_batch_in_equal_parts(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**changes)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_muon_needs_whole_matrices() -> None:
    """torch's Muon takes sharded matrices, but rounds differently on them: about 1e-3 after three steps."""
    settings = runs.config(shards=2)
    with pytest.raises(ConfigError) as caught:
        msgspec.structs.replace(settings, optimizer=OptimizerConfig(name="muon", momentum=0.95, warmup_steps=1))
    assert str(caught.value) == (
        "optimizer.name='muon': must be adamw or sgd with train.shards above 1, since its orthogonalization needs "
        "whole matrices and would round differently on shards; use adamw"
    )


IN_ONE = (
    "train.shards=2: must be 1 where all replicas live in one process; add --processes, or start one rank per shard "
    "with torchrun"
)


def test_a_simulation_has_no_shards() -> None:
    with pytest.raises(ConfigError) as caught:
        train(runs.config(shards=2), runs.PANELED["diloco_2_panels"](), runs.dataset(), None, label="toy")
    assert str(caught.value) == IN_ONE


def test_a_simulation_is_refused_before_text_is_read(cli: Call) -> None:
    Path("run.toml").write_text(run_file())
    ended = cli("train", "run.toml", "--shards", "2", "--out", "mine")
    assert (ended.code, ended.err) == (2, f"error: {IN_ONE}\n")
    assert not Path("mine").exists()


@pytest.mark.parametrize(
    ("ranks", "shards", "message"),
    [
        (3, 1, "train.workers=2: must be the 3 ranks that torchrun started; pass --workers 3"),
        (
            2,
            2,
            "train.workers=2: must be the 2 ranks that torchrun started over train.shards=2; start 4 ranks, or change "
            "--workers or --shards",
        ),
    ],
)
def test_torchrun_starts_a_rank_per_shard(
    ranks: int, shards: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    settings = runs.config(shards=shards)
    with pytest.raises(ConfigError) as caught:
        launch.train_rank(settings, runs.PANELED["diloco_2_panels"](), runs.dataset(), None, label="toy")
    assert str(caught.value) == message


@pytest.mark.mp
@pytest.mark.usefixtures("forked_workers")
def test_processes_name_panels_that_do_not_fit_and_train_with_others(
    cli: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("run.toml").write_text(run_file())
    Path("text.txt").write_text(text(range(600)))
    words = ["train", "run.toml", "--workers", "1", "--shards", "2", "--processes", "--out", "mine"]
    ended = cli(*words)
    assert ended.code == 2
    assert ended.err.splitlines()[-1] == (
        "error: panels=1: must have an edge at every edge of a shard, and model.embed_tokens.weight of 300 rows in 2 "
        "shards has one at row 150; use panels=2"
    )
    assert not Path("mine").exists()
    ended = cli(*words, "--set", "algorithm.panels=2", "--no-model", "--json")
    assert ended.code == 0, ended.err
    summary = json.loads(ended.out)
    assert (summary["shards"], summary["digest"]) == (2, runs.newest(Path("mine")).facts["digest"])


@pytest.mark.parametrize(
    ("arguments", "ranks", "message"),
    [
        (("--shards", "2", "--processes"), None, "panels=1: must have an edge at every edge of a shard"),
        (("--processes", "--set", "transport.interface=none0"), None, "transport.interface='none0': must be an"),
        (("--workers", "3"), "2", "train.workers=3: must be the 2 ranks that torchrun started"),
    ],
)
def test_a_start_that_is_refused_replaces_no_run(
    arguments: tuple[str, ...], ranks: str | None, message: str, cli: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("run.toml").write_text(run_file())
    Path("text.txt").write_text(text(range(600)))
    assert cli("train", "run.toml", "--out", "mine", "--no-model").code == 0
    before = {path: path.read_bytes() for path in Path("mine").rglob("*") if path.is_file()}
    if ranks:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", ranks)
    ended = cli("train", "run.toml", "--out", "mine", "--overwrite", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.splitlines()[-1].startswith(f"error: {message}")
    assert {path: path.read_bytes() for path in Path("mine").rglob("*") if path.is_file()} == before
