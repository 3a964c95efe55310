"""The training loop: what it logs, what it counts, what it refuses, and that both worlds run the same."""

from __future__ import annotations

import json
import math
from collections import namedtuple
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from sparseloco import ConfigError, DivergenceError, WarmupCosine, adamw, presets, trainer, wire
from sparseloco.algorithm import Recipe
from sparseloco.data import Dataset, Sampler, load_corpus, prepare
from sparseloco.evaluation import Evaluation, evaluate_anchor
from sparseloco.inner_step import accumulate_gradients
from sparseloco.launch import train_processes
from sparseloco.model import next_token_loss
from sparseloco.settings import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from sparseloco.simulate import Cohort
from sparseloco.trainer import build_run_model, train
from sparseloco.types import Envelope

Output = namedtuple("Output", "logits")


class Toy(nn.Module):
    """A language model of one table, in any precision."""

    def __init__(self, vocab: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(vocab, vocab, dtype=dtype, generator=torch.Generator().manual_seed(0)))

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Output:
        return Output(self.table[input_ids])


def settings(**changes: object) -> TrainConfig:
    base: dict[str, object] = {
        "workers": 2,
        "steps": 6,
        "batch_size": 2,
        "sequence_length": 16,
        "evaluate_every": 3,
        "log_every": 2,
        "evaluation_tokens": 256,
        "autocast": "off",
    }
    return TrainConfig(**{**base, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def data_config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    folder = tmp_path_factory.mktemp("text")
    words = ["slow", "links", "carry", "few", "bytes", "and", "many", "steps", "to", "peers"]
    generator = torch.Generator().manual_seed(1)
    for number in range(30):
        picks = torch.randint(len(words), (300,), generator=generator).tolist()
        (folder / f"{number}.txt").write_text(" ".join(words[i] for i in picks))
    return data_config_of(str(folder))


def data_config_of(path: str) -> DataConfig:
    return DataConfig(path=path, vocab_size=280, validation_fraction=0.1, test_fraction=0.1)


@pytest.fixture(scope="module")
def dataset(data_config: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    cache = tmp_path_factory.mktemp("cache")
    return prepare(load_corpus(data_config.path), 280, 0.1, 0.1, cache_dir=cache)


def run_config(data_config: DataConfig, train_config: TrainConfig, preset: str = "sparseloco") -> RunConfig:
    model = ModelConfig(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32)
    optimizer = OptimizerConfig(warmup_steps=1)
    return RunConfig(
        algorithm=Recipe(preset, {}), model=model, data=data_config, train=train_config, optimizer=optimizer
    )


def algorithm(preset: str = "sparseloco", inner_steps: int = 3, lr: float = 1e-2, **kw: object):
    inner = adamw(WarmupCosine(peak=lr, total_steps=6, warmup_steps=1))
    return presets.build(preset, {"inner_steps": inner_steps, **kw}, inner=inner, clip_norm=1.0)


def lines(folder: Path, kind: str) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == kind]


def test_c11_the_logged_loss_is_the_mean_since_the_last_line(data_config, dataset, tmp_path) -> None:
    """C-11: a running loss that is never reset makes a wrong curve."""
    config, method = run_config(data_config, settings()), algorithm()
    train(config, method, dataset, tmp_path, label="run")

    cohort = Cohort(build_run_model(config, dataset.vocab_size), method, 2)
    sampler = Sampler(dataset.split("train"), 16, 0)
    per_step = []
    for step in range(6):
        losses = []
        for peer in range(2):
            with cohort.turn(peer):
                loss = next_token_loss(cohort.model, sampler.batch([2 * peer, 2 * peer + 1], step, 4))
                loss.backward()
                losses.append(loss.item())
                cohort.advance(peer)
        cohort.settle()
        per_step.append(sum(losses) / 2)
    expected = [sum(per_step[i : i + 2]) / 2 for i in (0, 2, 4)]
    logged = lines(tmp_path, "step")
    assert [line["train_loss"] for line in logged] == expected
    assert [line["tokens"] for line in logged] == [2 * 64, 4 * 64, 6 * 64]
    assert [line["step"] for line in logged] == [2, 4, 6]


def test_evaluations_and_summary_count_what_was_sent(data_config, dataset, tmp_path, monkeypatch) -> None:
    config, method = run_config(data_config, settings()), algorithm()
    sent: dict[int, int] = {0: 0, 1: 0}
    encode = wire.encode

    def counted(envelope: Envelope, **kw: Any) -> bytes:
        frame = encode(envelope, **kw)
        sent[envelope.peer] += len(frame)
        return frame

    monkeypatch.setattr(wire, "encode", counted)
    summary = train(config, method, dataset, tmp_path, label="run")
    replica = Cohort(build_run_model(config, dataset.vocab_size), method, 2).replicas[0]
    assert (summary["bytes_sent_per_replica"], summary["bytes_received_per_replica"]) == (sent[0], sent[1])
    assert sent[0] > 0
    assert summary["rounds"] == 2
    assert summary["parameters"] == sum(s.numel for s in replica.specs)
    assert summary["dense_bytes_per_replica"] == 2 * 4 * summary["parameters"]
    assert summary["compression"] == summary["dense_bytes_per_replica"] / summary["bytes_sent_per_replica"]
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    evaluations = lines(tmp_path, "evaluation")
    assert [(e["split"], e["step"]) for e in evaluations] == [
        ("validation", 0),
        ("validation", 3),
        ("validation", 6),
        ("test", 6),
    ]
    assert evaluations[-2]["loss"] < evaluations[0]["loss"]
    assert summary["bits_per_byte"] > 0
    assert math.isfinite(summary["held_out_loss"])


def test_evaluation_leaves_live_parameters_and_mode_alone(data_config, dataset) -> None:
    config = run_config(data_config, settings())
    cohort = Cohort(build_run_model(config, dataset.vocab_size), algorithm(), 2)
    with cohort.turn(0):
        next_token_loss(cohort.model, torch.zeros(1, 5, dtype=torch.int64)).backward()
        cohort.advance(0)
        before = [p.clone() for p in cohort.model.parameters()]
    first = evaluate_anchor(cohort, dataset, "validation", config.train)
    assert first == evaluate_anchor(cohort, dataset, "validation", config.train)
    with cohort.turn(0):
        assert all(torch.equal(a, b) for a, b in zip(before, cohort.model.parameters(), strict=True))
        assert cohort.model.training


def test_c13_accumulation_gives_the_gradient_of_the_whole_batch() -> None:
    """C-13: H counts optimizer steps; 1 x 8 sequences and 4 x 2 are the same step."""
    batch = torch.randint(11, (8, 9), generator=torch.Generator().manual_seed(2))
    gradients = []
    for accumulation in (1, 4):
        model = Toy(11)
        loss = accumulate_gradients(model, batch, settings(batch_size=8, accumulation=accumulation))
        assert math.isclose(loss, next_token_loss(model, batch).item(), rel_tol=1e-14)
        gradients.append(model.table.grad)
    # Sums of eight float64 terms in another order.
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-12)


def test_a_loss_that_is_not_finite_stops_the_run_without_a_summary(data_config, dataset, tmp_path) -> None:
    config, method = run_config(data_config, settings(nonfinite="stop")), algorithm(lr=1e30)
    with pytest.raises(DivergenceError, match=r"^(train_loss|delta of) ?.*must be finite"):
        train(config, method, dataset, tmp_path, label="run")
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("split", ["validation", "test"])
def test_an_evaluation_that_is_not_finite_ends_the_run(data_config, dataset, tmp_path, monkeypatch, split) -> None:
    def evaluate(world, text, name, settings) -> Evaluation:
        return Evaluation(math.inf if name == split else 1.0, 1.0, 1)

    monkeypatch.setattr(trainer, "evaluate_anchor", evaluate)
    keys = {"sparseloco": {"outer_lr": 1.0}, "demo": {"lr": 0.1}}
    for preset, rates in (("sparseloco", "optimizer.lr or algorithm.outer_lr"), ("demo", "algorithm.lr")):
        config = msgspec.structs.replace(run_config(data_config, settings()), algorithm=Recipe(preset, keys[preset]))
        with pytest.raises(DivergenceError) as caught:
            train(config, algorithm(), dataset, tmp_path, label="run")
        at = {"validation": 0, "test": 6}[split]
        clip = " or set optimizer.clip_norm" if preset == "sparseloco" else ""
        assert str(caught.value) == (
            f"{split}_loss=inf at step {at}: must be finite; lower {rates}, lengthen optimizer.warmup_steps{clip}"
        )
    assert not (tmp_path / "summary.json").exists()


def test_the_last_status_has_the_last_evaluation(data_config, dataset) -> None:
    seen = []
    summary = train(run_config(data_config, settings()), algorithm(), dataset, None, label="run", progress=seen.append)
    assert [status.step for status in seen] == [1, 2, 3, 4, 5, 6, 6]
    assert seen[-1].validation_loss == summary["validation_loss"] != seen[-2].validation_loss
    assert seen[-1].train_loss == seen[-2].train_loss


def test_a_model_with_another_vocabulary_is_refused(data_config, dataset) -> None:
    config = run_config(data_config, settings())
    cohort = Cohort(build_run_model(config, dataset.vocab_size + 1), algorithm(), 2)
    with pytest.raises(ConfigError, match=r"vocab_size=281: the model's vocabulary must be the tokenizer's"):
        train(config, algorithm(), dataset, None, label="run", world=cohort)


def test_messages_in_flight_reach_the_last_anchor(data_config, dataset) -> None:
    config = run_config(data_config, settings())
    summary = train(config, algorithm(delay=2), dataset, None, label="run")
    still_in_flight = Cohort(build_run_model(config, dataset.vocab_size), algorithm(delay=2), 2)
    assert summary["rounds"] == 2
    assert summary["digest"] != still_in_flight.replicas[0].digest()
    assert summary["bytes_sent_per_replica"] > 0


@pytest.mark.mp
@pytest.mark.parametrize("preset", ["sparseloco", "diloco"])
def test_processes_train_to_the_same_bits(preset, data_config, dataset, monkeypatch, tmp_path, request) -> None:
    if preset == "diloco":  # the other one starts new interpreters
        request.getfixturevalue("forked_workers")
    monkeypatch.setenv("SPARSELOCO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config, method = run_config(data_config, settings(), preset), algorithm(preset)
    here = train(config, method, dataset, None, label="run")
    out = tmp_path / "run"
    out.mkdir()
    seen = []
    there = train_processes(config, method, dataset, out, label="run", progress=seen.append)
    assert there["digest"] == here["digest"]
    assert there["held_out_loss"] == here["held_out_loss"]
    assert [status.step for status in seen] == [1, 2, 3, 4, 5, 6, 6]
    assert seen[-1].validation_loss == there["validation_loss"]
    assert json.loads((out / "summary.json").read_text()) == there


@pytest.mark.mp
@pytest.mark.usefixtures("forked_workers")
def test_an_error_in_one_process_is_raised_here_and_ends_all(data_config, dataset, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("SPARSELOCO_CACHE", str(tmp_path / "cache"))
    config = run_config(data_config, settings(nonfinite="stop"))
    with pytest.raises(DivergenceError, match=r"must be finite"):
        train_processes(config, algorithm(lr=1e30), dataset, None, label="run")
