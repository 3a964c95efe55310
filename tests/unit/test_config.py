"""Configuration files: defaults, overrides, the way back to TOML, and one sentence for each mistake."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparseloco import presets
from sparseloco.algorithm import Algorithm
from sparseloco.config import (
    algorithm_to_toml,
    build_algorithm,
    keywords_of,
    load_config,
    load_entries,
    parse_config,
    to_toml,
)
from sparseloco.errors import ConfigError
from sparseloco.local import InnerSteps, adamw
from sparseloco.merge import Blend
from sparseloco.outer import Sgd, TorchOptimizer
from sparseloco.presets import PRESETS
from sparseloco.schedule import WarmupCosine
from sparseloco.settings import TrainConfig, to_table
from sparseloco.update import ClipNorm

EXAMPLES = Path(__file__).parents[2] / "examples"
BASE = '[algorithm]\npreset = "sparseloco"\ninner_steps = 15\n'


def text_of(preset: str) -> str:
    return f'[algorithm]\npreset = "{preset}"\n'


@pytest.mark.parametrize("preset", PRESETS)
def test_resolved_settings_come_back_unchanged(preset: str) -> None:
    config = parse_config(text_of(preset))
    text = to_toml(config)
    assert parse_config(text) == config
    assert to_toml(parse_config(text)) == text
    assert set(config.algorithm.settings) == set(keywords_of(preset))


@pytest.mark.parametrize("preset", PRESETS)
def test_built_algorithms_can_be_written(preset: str) -> None:
    config = parse_config(text_of(preset))
    written = algorithm_to_toml(build_algorithm(config))
    assert parse_config(written).algorithm == config.algorithm
    assert to_toml(config).startswith(written)


def test_private_keywords_are_no_settings() -> None:
    for preset in PRESETS:
        assert not {"inner", "clip_norm"} & set(keywords_of(preset))


def test_inner_optimizer_comes_from_its_section() -> None:
    config = parse_config(BASE, ["optimizer.lr=0.01", "optimizer.clip_norm=0", "optimizer.betas=[0.8, 0.9]"])
    lr = WarmupCosine(peak=0.01, total_steps=450, warmup_steps=30, final_fraction=0.1)
    algorithm = build_algorithm(config)
    assert algorithm.local == InnerSteps(adamw(lr, betas=(0.8, 0.9)), None)
    assert algorithm == presets.sparseloco(inner_steps=15, inner=adamw(lr, betas=(0.8, 0.9)))
    shorter = build_algorithm(config, 90).local
    assert isinstance(shorter, InnerSteps)
    assert shorter.optimizer == adamw(replace(lr, total_steps=90), betas=(0.8, 0.9))


def test_data_parallel_training_clips_the_mean() -> None:
    algorithm = build_algorithm(parse_config(text_of("ddp"), ["optimizer.clip_norm=0.5"]))
    assert algorithm.channel.transforms == (ClipNorm(0.5),)
    assert isinstance(algorithm.outer, TorchOptimizer)


def test_sgd_is_an_inner_optimizer() -> None:
    config = parse_config(text_of("local_sgd"), ["optimizer.name=sgd", "optimizer.momentum=0.9"])
    local = build_algorithm(config).local
    assert isinstance(local, InnerSteps)
    assert local.optimizer is not None
    assert local.optimizer.cls.__name__ == "SGD"
    assert parse_config(to_toml(config)) == config


@pytest.mark.parametrize("preset", ["local_sgd", "qsparse_local_sgd"])
def test_c14_methods_of_sgd_train_with_sgd(preset: str) -> None:
    """C-14: no other optimizer than the one that the documentation names, and no setting is swallowed."""
    config = parse_config(text_of(preset))
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.weight_decay) == ("sgd", 0.3, 0.0)
    local = build_algorithm(config).local
    assert isinstance(local, InnerSteps)
    assert local.optimizer is not None
    assert local.optimizer.cls is torch.optim.SGD
    own = parse_config(text_of(preset), ["optimizer.lr=2.0", "optimizer.weight_decay=0.1"]).optimizer
    assert (own.name, own.lr, own.weight_decay) == ("sgd", 2.0, 0.1)
    adam = parse_config(text_of(preset), ["optimizer.name=adamw"]).optimizer
    assert adam == parse_config(text_of("diloco")).optimizer
    assert parse_config(text_of("diloco"), ["optimizer.name=sgd"]).optimizer.lr == 0.3


@pytest.mark.parametrize("preset", ["demo", "ef_signsgd", "powersgd"])
def test_c14_settings_that_a_method_ignores_are_refused(preset: str) -> None:
    """C-14, for the file and for --set alike; a resolved file has none of them."""
    for key, value in {"name": "sgd", "lr": 1, "betas": [0.9, 0.95], "momentum": 0, "weight_decay": 0}.items():
        with pytest.raises(ConfigError, match=rf"^optimizer\.{key}=.*: is not used by preset '{preset}', wh"):
            parse_config(text_of(preset), [f"optimizer.{key}={value}"])
    config = parse_config(text_of(preset), ["optimizer.warmup_steps=3", "optimizer.final_lr_fraction=0.5"])
    written = to_toml(config)
    assert "[optimizer]\nwarmup_steps = 3\nfinal_lr_fraction = 0.5\n" in written
    assert parse_config(written) == config


def test_learning_rates_of_gradient_methods_follow_the_same_curve() -> None:
    algorithm = build_algorithm(parse_config(text_of("demo"), ["algorithm.lr=2e-3"]))
    lr = WarmupCosine(peak=2e-3, total_steps=450, warmup_steps=30, final_fraction=0.1)
    assert algorithm == presets.demo(lr=lr)
    assert isinstance(algorithm.outer, Sgd)
    assert algorithm.recipe is not None
    assert algorithm.recipe.settings["lr"] == 2e-3


def test_rounds_are_steps() -> None:
    config = parse_config(BASE, ["train.rounds=4"])
    assert config.train.steps == 60
    assert "rounds" not in to_toml(config)
    assert parse_config(BASE + "[train]\nrounds = 4\n") == config
    assert parse_config(BASE + "[train]\nsteps = 450\n", ["train.rounds=4"]) == config
    assert parse_config(text_of("ddp"), ["train.rounds=100"]).train.steps == 100


def test_overrides_are_toml_or_text() -> None:
    overrides = ["data.path=some/text file.txt", "train.autocast=bf16", "train.processes=true", "train.seed = 7"]
    config = parse_config(BASE, overrides)
    assert (config.data.path, config.train.autocast) == ("some/text file.txt", "bf16")
    assert (config.train.processes, config.train.seed) == (True, 7)
    assert parse_config(BASE, ["train.seed=1", "train.seed=2"]).train.seed == 2
    assert parse_config(BASE, ["data.path=1\nseed = 2"]).data.path == "1\nseed = 2"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.inner_step=3", "algorithm: unknown key 'inner_step'; did you mean 'inner_steps'?"),
        ("algorithm.K=3", "algorithm: unknown key 'K'; did you mean 'k'?"),
        ("algorithm.zzz=3", "algorithm: unknown key 'zzz'; the keys are inner_steps, k, tile, decay, values, "
                            "mean_over, outer_lr, delay, panels"),
        ("algorithm.clip_norm=1", "algorithm: unknown key 'clip_norm'; did you mean 'optimizer.clip_norm'?"),
        ("algorithm.preset=sparselco", "algorithm: unknown preset 'sparselco'; did you mean 'sparseloco'?"),
        ("algorithm.k=5000", "algorithm.k=5000: must be between 1 and chunk_size=4096; use a larger chunk_size or a "
                             "smaller k"),
        ("algorithm.k=many", "algorithm.k='many': must be a whole number; the default is 64"),
        ("algorithm.inner_steps=0", "algorithm.inner_steps=0: must be at least 1; use 1 to synchronize after every "
                                    "step"),
        ("algorithm.decay=1.5", "algorithm.decay=1.5: must be between 0 and 1; the paper uses 0.95"),
        ("algorithm.decay=nan", "algorithm.decay=nan: must be a finite number; the default is 0.95"),
        ("algorithm.outer_lr=-1", "algorithm.outer_lr=-1.0: must be positive; the outer step moves along minus the "
                                  "update"),
        ("algorithm.tile=0", "algorithm.tile=0: must be at least 1; use a positive whole number"),
        ("algorithm.mean_over=us", "algorithm.mean_over='us': must be 'contributors' or 'peers'; choose one of them"),
        ("modle.hidden_size=3", "config: unknown section 'modle'; did you mean 'model'?"),
        ("train.wokers=2", "train: unknown key 'wokers'; did you mean 'workers'?"),
        ("train.round=2", "train: unknown key 'round'; did you mean 'rounds'?"),
        ("train.lr=1", "train: unknown key 'lr'; did you mean 'optimizer.lr'?"),
        ("train.workers=four", "train.workers='four': must be a whole number; the default is 4"),
        ("train.workers=true", "train.workers=True: must be a whole number; the default is 4"),
        ("train.workers=0", "train.workers=0: must be at least 1; use 1 or more"),
        ("train.steps=100", "train.steps=100: must be a multiple of inner_steps=15, or the last steps would never be "
                            "synchronized; use 90 or 105"),
        ("train.rounds=0", "train.rounds=0: must be a whole number of at least 1; use 30"),
        ("train.accumulation=3", "train.accumulation=3: must divide batch_size=8; use 1, 2, 4 or 8"),
        ("train.sequence_length=1", "train.sequence_length=1: must be at least 2; use 128"),
        ("train.autocast=fp8", 'train.autocast=\'fp8\': must be one of "auto", "off", "bf16"; the default is "auto"'),
        ("train.seed=-1", "train.seed=-1: must be in 0..2**63 - 1; use 0"),
        ("train.evaluation_tokens=5", "train.evaluation_tokens=5: must be at least 128 (one sequence); use 128 or "
                                      "more"),
        ("data.vocab_size=256", "data.vocab_size=256: must be at least 257 (256 bytes and the end token); use 1024"),
        ("data.test_fraction=1.0", "data.test_fraction=1.0: must be above 0 and below 1; use 0.02"),
        ("data.test_fraction=0.99", "data.validation_fraction=0.02: must be below 1 - test_fraction = 0.01, or "
                                    "nothing is left to train on; use 0.02 for both"),
        ("optimizer.lr=0", "optimizer.lr=0.0: must be positive; use 0.003"),
        ("optimizer.betas=[0.9]", "optimizer.betas=[0.9]: must be a list of 2 numbers; the default is [0.9, 0.95]"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas=[0.9, 1.0]: must be in [0, 1); use [0.9, 0.95]"),
        ("optimizer.momentum=0.9", "optimizer.momentum=0.9: must be 0 for name='adamw'; set betas instead"),
        ("optimizer.clip_norm=-1", "optimizer.clip_norm=-1.0: must not be negative; use 0 for no clipping"),
        ("optimizer.warmup_steps=450", "optimizer.warmup_steps=450: must be below train.steps=450; shorten the "
                                       "warm-up or train longer"),
        ("optimizer.final_lr_fraction=2", "optimizer.final_lr_fraction=2.0: must be between 0 and 1; use 0.1 for a "
                                          "tenth"),
        ("model.num_layers=0", "model.num_layers=0: must be at least 1; use 1 or more"),
        ("transport.kind=s3", 'transport.kind=\'s3\': must be one of "loopback", "process_group"; the default is '
                              '"loopback"'),
        ("transport.deadline_s=0", "transport.deadline_s=0.0: must be seconds from 1 to 604800, a week; use 600"),
        ("seed", "--set 'seed': must be section.key=value; write, for example, --set train.seed=1"),
        ("seed=1", "--set 'seed=1': must be section.key=value; write, for example, --set train.seed=1"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(override: str, message: str) -> None:
    """C-59: the ranges of all settings, each with its reason or its remedy; those of parts: test_config_errors.py."""
    with pytest.raises(ConfigError) as caught:
        parse_config(BASE, [override])
    assert str(caught.value) == message


def test_there_is_no_magic_minimum_c59() -> None:
    """C-59: the least value of each range is taken, all of them at once."""
    least = {
        "algorithm.inner_steps": 1, "algorithm.k": 1, "algorithm.tile": 1, "algorithm.decay": 0, "algorithm.delay": 0,
        "train.workers": 1, "train.steps": 1, "train.batch_size": 1, "train.accumulation": 1,
        "train.sequence_length": 2, "train.seed": 0, "train.evaluate_every": 1, "train.log_every": 1,
        "train.evaluation_tokens": 2,
        "optimizer.warmup_steps": 0, "optimizer.weight_decay": 0, "optimizer.clip_norm": 0,
        "optimizer.final_lr_fraction": 0, "checkpoint.every": 0, "checkpoint.keep": 1, "transport.deadline_s": 1,
    }  # fmt: skip
    config = parse_config(BASE, [f"{name}={value}" for name, value in least.items()])
    found = {f"{section}.{key}": value for section, keys in to_table(config).items() for key, value in keys.items()}
    assert {name: found[name] for name in least} == least
    assert build_algorithm(config).schedule.every == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'algorithm: missing section; add [algorithm] with, for example, preset = "sparseloco"'),
        ("[algorithm]", f"algorithm.preset: missing key; name one of {', '.join(PRESETS)}"),
        ("[algorithm]\npreset = 3", f"algorithm.preset=3: must be text in quotes; name one of {', '.join(PRESETS)}"),
        ("train = 3", "train=3: must be a section; write [train] and its keys below it"),
        ("lr = 3", "config: unknown key 'lr'; did you mean 'optimizer.lr'?"),
        (text_of("demo") + "lr = 0", "algorithm.lr=0.0: must be positive; use 0.001"),
        (text_of("diloco") + "k = 3", "algorithm: unknown key 'k'; the keys are inner_steps, outer_lr, "
                                      "outer_momentum, panels"),
        (BASE + "[train]\nsteps = 30\nrounds = 2", "train.rounds=2: must not stand beside train.steps=30; keep one "
                                                   "of them"),
        (text_of("demo") + "[optimizer]\nlr = 0.5", "optimizer.lr=0.5: is not used by preset 'demo', whose learning "
                                                    "rate is algorithm.lr; set that instead"),
        (text_of("powersgd") + "[optimizer]\nmomentum = 0.0", "optimizer.momentum=0.0: is not used by preset "
                                                              "'powersgd', whose momentum is algorithm.momentum; set "
                                                              "that instead"),
        (text_of("ef_signsgd") + "[optimizer]\nclip_norm = 1.0", "optimizer.clip_norm=1.0: is not used by preset "
                                                                 "'ef_signsgd', which takes only warmup_steps and "
                                                                 "final_lr_fraction from [optimizer]; leave it out"),
        ("[[compare]]", "algorithm: missing section, this file has only [[compare]] entries; add [algorithm], or run "
                        "them with: sparseloco compare"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    assert str(caught.value) == message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config='.*none\.toml': must be an existing TOML file; check the path"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"must be a readable TOML file \(Is a directory\)"):
        load_config(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="it is not UTF-8 text"):
        load_config(broken)
    broken.write_text("[algorithm\n")
    with pytest.raises(ConfigError, match=r"must be valid TOML \(.*line 1.*\); mend that place"):
        load_config(broken)


def test_settings_check_themselves_in_python_too() -> None:
    with pytest.raises(ConfigError, match=r"train\.accumulation=3: must divide batch_size=4; use 1, 2 or 4"):
        TrainConfig(batch_size=4, accumulation=3)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (presets.sparseloco(), r"algorithm\.recipe=None: must name a preset .* composed by hand has none; "),
        (
            replace(presets.build("sparseloco", {"k": 32}), merge=Blend(0.5)),
            r"algorithm\.recipe='sparseloco': must give the algorithm back .* but its merge would not be the same; ",
        ),
        (
            replace(presets.build("demo"), outer=Sgd(WarmupCosine(peak=1.0, total_steps=9))),
            r"algorithm\.recipe='demo': .* but its outer would not be the same; ",
        ),
    ],
    ids=["by hand", "changed", "other rate"],
)
def test_composed_algorithms_refuse_to_be_written(algorithm: Algorithm, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        algorithm_to_toml(algorithm)


def test_preset_calls_with_an_inner_optimizer_can_be_written() -> None:
    algorithm = presets.build("sparseloco", {"k": 32}, inner=adamw(1e-2), clip_norm=0.3)
    assert "k = 32" in algorithm_to_toml(algorithm)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_examples_are_valid(path: Path) -> None:
    assert load_config(path).algorithm.preset == "sparseloco"
    steps = {"methods": 150}.get(path.stem, 450)
    assert {entry.config.train.steps for entry in load_entries(path)} == {steps}
