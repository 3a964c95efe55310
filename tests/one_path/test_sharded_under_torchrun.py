"""A whole run of two replicas of two shards, as torchrun starts it; what it leaves is for everybody."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sparseloco.config import build_algorithm, load_config
from sparseloco.data import open_dataset
from sparseloco.model import build_run_model, load_model
from sparseloco.replica import Replica
from sparseloco.reshard_state import cuts_of, reshard_shared
from sparseloco.sharding import local_views
from tests import runs
from tests.cli import Call, run_file, text
from tests.torchrun import forked, ranks_of

pytestmark = [
    pytest.mark.mp,
    pytest.mark.xdist_group("mp"),
    pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs the kernel's list of processes"),
]
LAUNCH = ["--nproc-per-node", "4", "-m", "sparseloco", "train", "run.toml"]


@pytest.mark.timeout(300)
def test_a_sharded_run_leaves_a_model_and_goes_on_without_shards(cli: Call, tmp_path: Path) -> None:
    Path("run.toml").write_text(run_file().replace("k = 8\n", "k = 8\npanels = 2\n"))
    Path("text.txt").write_text(text())
    with forked(tmp_path, *LAUNCH, "--shards", "2", "--out", "mine") as launch:
        ended = launch.ended()
    assert ended.code == 0, ended.err
    assert "model: mine/model" in ended.out
    assert ranks_of(tmp_path) == []
    summary = json.loads(Path("mine/summary.json").read_text())
    found = runs.newest(Path("mine"))
    assert (summary["workers"], summary["shards"], found.facts["shards"]) == (2, 2, 2)
    assert summary["digest"] == found.facts["digest"]

    # The model is the anchor of the checkpoint, bit for bit, its tied weights once; it is measured as the run was.
    config = load_config("mine/config.toml")
    model = build_run_model(config, open_dataset(config.data).vocab_size)
    replica = Replica(model, build_algorithm(config))
    cut = cuts_of(replica.algorithm, replica.specs, {name: view.place for name, view in local_views(model).items()})
    parts = [found.part(f"shared-shard-000{shard}")["replica"] for shard in range(2)]
    replica.load_shared_state(reshard_shared(parts, cut))
    kept, ids = load_model(Path("mine/model")), torch.arange(30).view(2, 15)
    with torch.no_grad():
        assert torch.equal(kept(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    assert sum(p.numel() for p in kept.parameters()) == summary["parameters"]
    measured = json.loads(cli("eval", "mine", "--json").out)
    assert measured["loss"] == summary["held_out_loss"]
    assert cli("generate", "mine", "--prompt", "Line", "--max-tokens", "3").code == 0
    assert cli("export", "mine", "--out", "exported").code == 0

    # It ends in the same state without torchrun and without shards.
    again = cli("train", "--resume", "mine", "--shards", "1", "--set", "transport.kind=loopback", "--json")
    assert again.code == 0, again.err
    assert "warning: train.shards=1: the checkpoint has 2; all state is dealt out anew" in again.err
    whole = json.loads(again.out)
    assert (whole["digest"], whole["held_out_loss"]) == (summary["digest"], summary["held_out_loss"])
    assert whole["bytes_sent_per_replica"] == summary["bytes_sent_per_replica"]
