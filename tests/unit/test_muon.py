"""Muon for matrices and AdamW for the rest, as one optimizer with one state."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparseloco import ConfigError, adamw, muon, presets
from sparseloco.config import algorithm_to_toml, build_algorithm, parse_config, to_toml
from sparseloco.local import InnerSteps
from sparseloco.muon_adamw import MuonWithAdamW, is_muons
from tests import toy
from tests.cli import Call, run_file, text

NAMES = ("embed_tokens.weight", "layers.0.up.weight", "layers.0.norm.weight", "experts.weight", "lm_head.weight")
SHAPES = ((7, 6), (5, 6), (6,), (2, 5, 6), (7, 6))


def params(seed: int = 0) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in zip(NAMES, SHAPES, strict=True)
    }


def steps(tensors: list[torch.nn.Parameter], optimizers: list[torch.optim.Optimizer], first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for tensor in tensors:
            tensor.grad = torch.randn(tensor.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()


def test_it_is_torch_s_muon_on_matrices_and_adamw_on_the_rest() -> None:
    """Embeddings, the output layer, vectors and tensors of three dims are AdamW's."""
    mine, other = params(), params()
    spec = muon(1e-2, momentum=0.9, weight_decay=0.2)
    steps(list(mine.values()), [spec.build(mine)], 0, 4)
    up = torch.optim.Muon(
        [other["layers.0.up.weight"]], lr=1e-2, momentum=0.9, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"
    )
    rest = {name: value for name, value in other.items() if name != "layers.0.up.weight"}
    steps(list(other.values()), [up, adamw(1e-2, weight_decay=0.2).build(rest)], 0, 4)
    assert [name for name in NAMES if not torch.equal(mine[name], other[name])] == []
    assert not torch.equal(mine["layers.0.up.weight"], params()["layers.0.up.weight"])


def test_state_comes_back_through_its_dictionary() -> None:
    """The parts still step with the state of the whole after load_state_dict has replaced it."""
    straight, stopped = params(), params()
    one = muon(1e-2).build(straight)
    steps(list(straight.values()), [one], 0, 6)
    first = muon(1e-2).build(stopped)
    steps(list(stopped.values()), [first], 0, 3)
    state = copy.deepcopy(first.state_dict())
    again = muon(1e-2).build(stopped)
    again.load_state_dict(state)
    steps(list(stopped.values()), [again], 3, 6)
    assert all(torch.equal(straight[name], stopped[name]) for name in NAMES)
    assert [sorted(values) for values in again.state_dict()["state"].values()] == [
        ["momentum_buffer"],
        *[["exp_avg", "exp_avg_sq", "step"]] * 4,
    ]


def test_the_learning_rate_of_the_whole_is_that_of_the_parts() -> None:
    tensors = params()
    before = {name: value.detach().clone() for name, value in tensors.items()}
    local = InnerSteps(muon(lambda step: 0.0 if step == 1 else 1e-2, weight_decay=0.0))
    optimizer = local.build(tensors)
    for step in (1, 2):
        for tensor in tensors.values():
            tensor.grad = torch.ones_like(tensor)
        local.step_(tensors, optimizer, step)
        assert [not torch.equal(tensors[name], before[name]) for name in NAMES] == [step == 2] * 5


def test_what_muon_steps_may_be_named() -> None:
    assert not is_muons("decoder.out.weight", (4, 4), adamw_for=("out",))
    assert is_muons("out.0.weight", (4, 4), adamw_for=("out",))
    optimizer = muon(1e-2, adamw_for=("0",)).build(dict(toy.net().named_parameters()))
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 3]
    assert isinstance(optimizer, MuonWithAdamW)


def test_a_closure_gives_its_loss() -> None:
    tensors = params()
    optimizer = muon(1e-2).build(tensors)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.stack([tensor.square().sum() for tensor in tensors.values()]).sum()
        loss.backward()
        return loss

    first, second = (float(optimizer.step(closure).detach()) for _ in range(2))  # type: ignore[arg-type]
    assert second < first


def test_a_model_without_a_matrix_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        muon(1e-2).build({"embed.weight": torch.zeros(3, 4), "bias": torch.zeros(3)})
    assert str(caught.value) == (
        "name='muon': must have a matrix to step beside layers named embed, wte, wpe, head, and this model has none; "
        "use adamw"
    )


def test_parameters_without_names_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        muon(1e-2).build(list(params().values()))
    assert str(caught.value) == (
        "params=a list: must have names for MuonWithAdamW, which goes by them; pass dict(model.named_parameters())"
    )


FILE = '[algorithm]\npreset = "diloco"\n[optimizer]\nname = "muon"\nlr = 2e-3\n'


def test_a_file_may_name_it() -> None:
    config = parse_config(FILE)
    assert (config.optimizer.name, config.optimizer.momentum, config.optimizer.weight_decay) == ("muon", 0.95, 0.1)
    assert parse_config(to_toml(config)) == config
    algorithm = build_algorithm(config)
    assert isinstance(algorithm.local, InnerSteps)
    spec = algorithm.local.optimizer
    assert spec is not None
    assert replace(spec, lr=1e-3) == muon(1e-3)
    assert spec.lr.peak == 2e-3  # type: ignore[union-attr]
    assert algorithm_to_toml(algorithm).startswith('[algorithm]\npreset = "diloco"\n')
    plain = build_algorithm(parse_config(FILE, ["optimizer.momentum=0", "optimizer.betas=[0.8, 0.9]"]))
    assert {("momentum", 0.0), ("betas", (0.8, 0.9))} < set(plain.local.optimizer.settings)  # type: ignore[union-attr]


def test_the_command_line_trains_with_it_and_goes_on(cli: Call) -> None:
    """A run that goes on from its first border ends like one that never stopped."""
    Path("text.txt").write_text(text())
    Path("run.toml").write_text(run_file())
    words = ("--set", "optimizer.name=muon", "--set", "checkpoint.every=2")
    digest = json.loads(cli("train", "run.toml", "--out", "mine", "--json", *words).out)["digest"]
    assert json.loads(cli("train", "run.toml", "--out", "plain", "--json").out)["digest"] != digest
    shutil.rmtree("mine/checkpoints/step-00000004")
    Path("mine/summary.json").unlink()
    ended = cli("train", "--resume", "mine")
    assert ended.code == 0, ended.err
    assert "resuming at step 2, " in ended.err
    assert json.loads(Path("mine/summary.json").read_text())["digest"] == digest


def test_it_cannot_step_on_the_anchor() -> None:
    sentence = (
        "name='muon': must be adamw or sgd where the optimizer steps on the anchor, which is kept in blocks and not in "
        "matrices; use adamw"
    )
    with pytest.raises(ConfigError) as caught:
        presets.ddp(inner=muon(1e-2))
    assert str(caught.value) == sentence
    with pytest.raises(ConfigError) as caught:
        parse_config(FILE, ["algorithm.preset=ddp"])
    assert str(caught.value) == f"optimizer.{sentence}"


def test_a_torch_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    sentence = (
        f"name='muon': must have torch.optim.Muon, which torch {torch.__version__} lacks; install torch 2.9 or newer, "
        "or use adamw"
    )
    with pytest.raises(ConfigError) as caught:
        muon(1e-2)
    assert str(caught.value) == sentence
    with pytest.raises(ConfigError) as caught:
        parse_config(FILE)
    assert str(caught.value) == f"optimizer.{sentence}"
