"""A replica that abstains: the same bits and the same log in one process, in processes and under torchrun."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseloco.launch import train_processes
from sparseloco.trainer import train
from tests.driver import ROWS
from tests.mp import Group
from tests.one_path import worlds
from tests.poison import poisoned
from tests.torchrun import forked
from tests.unit.test_trainer import algorithm, data_config, dataset, lines, run_config, settings  # noqa: F401

pytestmark = [pytest.mark.mp, pytest.mark.xdist_group("mp")]


@pytest.mark.filterwarnings("ignore:.*contributes nothing:UserWarning")
@pytest.mark.parametrize("row", list(ROWS))
def test_same_bits(pair: Group, row: str) -> None:
    """Linear payloads too, which are averaged on the way: a slice of zeros that nobody adds."""
    simulated = worlds.in_one_process(row, "dropout", 2, 14, bad=(4, 1))
    real = pair.run(worlds.on_a_rank, row, "dropout", 14, (4, 1))
    assert len({outcome.digest for outcome in [*simulated, *real]}) == 1
    for mine, other in zip(simulated, real, strict=True):
        assert mine.update_norms == other.update_norms
        assert mine.private.keys() == other.private.keys()
        assert [path for path in mine.private if not torch.equal(mine.private[path], other.private[path])] == []
        assert mine.absent == other.absent == [1]


def under_torchrun(folder: Path, text: str, step: int) -> dict[str, Any]:
    words = ["--nproc-per-node", "2", "-m", "tests.one_path.poisoned_rank", text, str(step), str(folder)]
    with forked(folder, *words, SPARSELOCO_CACHE=os.environ["SPARSELOCO_CACHE"]) as launch:
        ended = launch.ended()
    assert ended.code == 0, ended.err
    assert "contributes nothing; parameters were reset to the anchor" in ended.err
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("step", [1, 3])
def test_one_guard_for_all_worlds_c20(step: int, data_config, dataset, monkeypatch, tmp_path) -> None:  # noqa: F811
    """C-20: a trainer of its own for clusters lost the NaN guard; here all worlds run the one loop.

    After step 1 the loss of step 2 is not finite, and step 3 is not made; after step 3 the delta is not.
    """
    monkeypatch.setenv("SPARSELOCO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config, method = run_config(data_config, settings()), poisoned(algorithm(), step)
    folders = [tmp_path / name for name in ("here", "processes", "torchrun")]
    for folder in folders:
        folder.mkdir()
    cause = "train_loss" if step == 1 else "delta of model.embed_tokens.weight"
    with pytest.warns(UserWarning, match=r"^peer 1, round 0: .* is not finite, so this peer contributes nothing"):
        here = train(config, method, dataset, folders[0], label="run")
    with pytest.warns(UserWarning, match=rf"^peer 1, round 0: contributed nothing, since {cause} was"):
        there = train_processes(config, method, dataset, folders[1], label="run")
    summaries = [here, there, under_torchrun(folders[2], data_config.path, step)]
    assert len({(each["digest"], each["held_out_loss"]) for each in summaries}) == 1
    assert [each["abstentions"] for each in summaries] == [1, 1, 1]
    told = [lines(folder, "abstained") for folder in folders]
    assert told[0] == told[1] == told[2]
    (line,) = told[0]
    assert {**line, "kind": ""} == {"kind": "", "step": 3, "round": 0, "fragment": 0, "peer": 1, "cause": cause}
    losses = [[record["train_loss"] for record in lines(folder, "step")] for folder in folders]
    assert losses[0] == losses[1] == losses[2]
    assert None not in losses[0]
