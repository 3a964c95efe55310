"""Training on a card, by the same code on the CPU with a tiny model; nothing here looks at speed."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_simulation
from benchmarks.gpu_simulation import CARD, TINY, Stopwatch, agreed, build, compare, main, methods, train
from sparseloco.data import open_dataset
from sparseloco.data.settings import DataConfig
from sparseloco.model import parameter_specs

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err == (
        "device=cuda: must be an NVIDIA card that torch sees; run this on a machine with one, "
        "or try --device cpu --tiny\n"
    )


def test_both_methods_in_a_tiny_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    assert main(["--device", "cpu", "--tiny", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert list(found["methods"]) == ["sparseloco", "diloco"]
    for row in found["methods"].values():
        assert (row["steps"], row["rounds"], row["replicas_agree"]) == (12, 3, True)
        assert row["tokens"] == 12 * 4 * 2 * 32
        assert row["tokens_per_s"] > 0
        assert 0 < row["sync_fraction"] < 1
    sparse, dense = found["methods"].values()
    assert sparse["compression"] > 100 > 1.01 > dense["compression"]
    # 1024 tokens of vocabulary: a guess costs log(1024) = 6.93 nats.
    assert dense["held_out_loss"] < sparse["held_out_loss"] < 6.93
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["sparseloco", "diloco"]
    assert all("tokens/s" in line and "of the time in sync, held-out loss" in line for line in lines)


def test_the_model_of_a_card_has_30_million_parameters() -> None:
    shape = {name: getattr(CARD, name) for name in ("hidden_size", "num_layers", "num_heads", "intermediate_size")}
    count = sum(spec.numel for spec in parameter_specs(vocab_size=1024, sequence_length=CARD.sequence_length, **shape))
    assert 29e6 < count < 31e6
    assert 2 * CARD.limit_s < 360


def test_it_stops_after_the_round_in_which_its_time_is_over() -> None:
    """A clock that counts how often it is read: nothing but the limit decides."""
    dataset = open_dataset(DataConfig())
    size = replace(TINY, limit_s=10.0)
    cohort = build(dataset, methods(size)["sparseloco"], size, CPU)
    ticks = itertools.count()
    watch = Stopwatch(CPU, lambda: float(next(ticks)))
    assert train(cohort, dataset, size, CPU, watch) == TINY.inner_steps  # ten reads in a round of four replicas
    assert cohort.replicas[0].rounds == 1
    assert watch.in_sync == 0, "the first round counts for nothing"
    whole = build(dataset, methods(size)["sparseloco"], size, CPU)
    assert train(whole, dataset, replace(TINY, limit_s=1e9), CPU, Stopwatch(CPU)) == TINY.steps


def test_the_second_method_gets_no_more_steps_than_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    found = compare(CPU, replace(TINY, limit_s=0.0))
    assert [row["steps"] for row in found["methods"].values()] == [4, 4]
    assert "sparseloco: stopped after 0 s, at step 4 of 12" in capsys.readouterr().out


def test_replicas_that_differ_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    row: dict[str, Any] = {"replicas_agree": False}
    found = {"methods": {"sparseloco": row}}
    assert not agreed(found)
    monkeypatch.setattr(gpu_simulation, "compare", lambda device, size: found)
    assert main(["--device", "cpu", "--tiny"]) == 1
