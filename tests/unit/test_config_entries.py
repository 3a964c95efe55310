"""Comparisons: entries that change the common sections, and one sentence for each mistake in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparseloco.config import load_config, load_entries, parse_config, to_toml
from sparseloco.errors import ConfigError
from sparseloco.settings import OptimizerConfig
from tests.unit.test_config import BASE

COMPARISON = """
[algorithm]
preset = "sparseloco"
inner_steps = 15

[train]
steps = 60

[[compare]]
label = "A"

[[compare]]
label = "B (wide)"
k = 128
tuned = ["k", "optimizer.lr"]

[[compare]]
label = "C"
preset = "diloco"
inner_steps = 30
optimizer = { lr = 1e-3 }
train = { evaluate_every = 30 }
"""


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    path = tmp_path / "comparison.toml"
    path.write_text(COMPARISON)
    return path


def test_entries_change_the_common_sections(comparison: Path) -> None:
    a, b, c = load_entries(comparison)
    assert [entry.folder for entry in (a, b, c)] == ["a", "b-wide", "c"]
    assert a.config == load_config(comparison)
    assert (b.config.algorithm.settings["k"], b.config.algorithm.settings["inner_steps"]) == (128, 15)
    assert b.tuned == ("k", "optimizer.lr")
    assert (c.config.algorithm.preset, c.config.optimizer.lr, c.config.train.evaluate_every) == ("diloco", 1e-3, 30)
    assert c.config.train.steps == 60
    assert all(parse_config(to_toml(entry.config)) == entry.config for entry in (a, b, c))


def test_folders_of_entries_keep_letters_of_any_script(comparison: Path) -> None:
    entries = load_entries(comparison, ["compare.0.label='\u65e5\u672c'", "compare.1.label='\u00dcber_alles!'"])
    assert [entry.folder for entry in entries] == ["\u65e5\u672c", "\u00fcber-alles", "c"]


@pytest.mark.parametrize("section", ["train", "algorithm", "optimizer"])
def test_a_value_in_place_of_a_section(comparison: Path, section: str) -> None:
    text = comparison.read_text().partition("[[compare]]")[2]
    comparison.write_text(f"{section} = 3\n[[compare]]{text}")
    with pytest.raises(ConfigError) as caught:
        load_entries(comparison)
    assert str(caught.value) == f"{section}=3: must be a section; write [{section}] and its keys below it"
    with pytest.raises(ConfigError) as caught:
        load_entries(comparison, [f"{section}.steps=5"])
    assert str(caught.value) == f"--set {section}.steps: {section!r} is a value, not a section; write section.key=value"


def test_entries_can_be_chosen_and_overridden(comparison: Path) -> None:
    entries = load_entries(comparison, ["compare.1.k=16", "train.seed=3", "algorithm.decay=0.5"], ["C", "B (wide)"])
    assert [entry.label for entry in entries] == ["B (wide)", "C"]
    assert entries[0].config.algorithm.settings["k"] == 16
    assert entries[0].config.algorithm.settings["decay"] == 0.5
    assert {entry.config.train.seed for entry in entries} == {3}


def test_a_file_without_entries_is_one_entry(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(BASE)
    (entry,) = load_entries(path)
    assert (entry.label, entry.config) == ("sparseloco", load_config(path))


@pytest.mark.parametrize(
    ("overrides", "only", "message"),
    [
        (["compare.1.kk=3"], [], "compare 'B (wide)': algorithm: unknown key 'kk'; did you mean 'k'?"),
        (["compare.0.label=3"], [], 'compare.0.label=3: must name the entry; write, for example, label = "A"'),
        (["compare.2.label=a"], [], "compare.label='a': must differ from 'A' in a letter or digit, or both would be "
                                    "written to the same folder; change one"),
        (["compare.0.tuned=['decays']"], [], "compare 'A': tuned: unknown setting 'decays'; did you mean 'decay'?"),
        (["compare.0.train=3"], [], "compare 'A': train=3: must be a table; write, for example, train = { }"),
        (["compare.9.k=3"], [], "--set compare.9.k: must number one of the 3 entries from 0; write, for example, "
                                "compare.0.k=32"),
        (["compare.2.label=A"], [], "compare.label='A': must not stand twice; give each entry its own label"),
        (["compare.0.label=..."], [], 'compare.0.label=\'...\': must name the entry; write, for example, label = "A"'),
        (["compare.1.tuned='decay'"], [], "compare 'B (wide)': tuned='decay': must be a list of names; write, for "
                                          'example, tuned = ["outer_lr"]'),
        ([], ["b"], "--only 'b': must be the label of an entry; the labels are A, B (wide), C"),
        (["train.rounds=4"], [], "compare 'C': train.steps=120: must be 60 as in 'A', so that both see the same "
                                 "tokens in the same order; say train.steps instead of rounds, and keep these alike"),
        (["compare.2.train.batch_size=4"], ["A", "C"], "compare 'C': train.workers * batch_size=16: must be 32 as in "
                                           "'A', so that both see the same tokens in the same order; say train.steps "
                                           "instead of rounds, and keep these alike"),
    ],
)  # fmt: skip
def test_a_mistake_in_an_entry_is_one_sentence(
    comparison: Path, overrides: list[str], only: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_entries(comparison, overrides, only)
    assert str(caught.value) == message


def with_entries(comparison: Path, *entries: str) -> Path:
    """The common sections with other entries, and a learning rate for all."""
    common = comparison.read_text().partition("[[compare]]")[0]
    rows = "".join(f"[[compare]]\n{entry}\n" for entry in entries)
    comparison.write_text(f"{common}\n[optimizer]\nlr = 0.01\nclip_norm = 0.5\n{rows}")
    return comparison


def test_the_common_optimizer_is_for_those_that_use_it(comparison: Path) -> None:
    text = ('label = "A"', 'label = "B"\npreset = "demo"',
            'label = "C"\npreset = "local_sgd"\noptimizer = { lr = 0.5 }')  # fmt: skip
    entries = load_entries(with_entries(comparison, *text))
    a, b, c = (entry.config.optimizer for entry in entries)
    assert (a.name, a.lr, a.clip_norm) == ("adamw", 0.01, 0.5)
    assert b == OptimizerConfig()
    assert (c.name, c.lr, c.clip_norm) == ("sgd", 0.5, 0.5)
    assert all(parse_config(to_toml(entry.config)) == entry.config for entry in entries)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("preset = 'demo'\noptimizer = { lr = 1.0 }",
         "optimizer.lr=1.0: is not used by preset 'demo', whose learning rate is algorithm.lr; set that instead"),
        ("preset = 'local_sgd'",
         "optimizer.lr=0.01: stands in the common section for adamw, but preset 'local_sgd' uses sgd; give this entry "
         "its own, for example optimizer = { lr = 0.3 }"),
    ],
    ids=["not used", "another optimizer"],
)  # fmt: skip
def test_c14_a_learning_rate_that_an_entry_cannot_mean(comparison: Path, entry: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_entries(with_entries(comparison, f'label = "C"\n{entry}'))
    assert str(caught.value) == f"compare 'C': {message}"


def test_an_override_needs_an_entry(comparison: Path) -> None:
    comparison.write_text("compare = [1]\n" + BASE)
    with pytest.raises(ConfigError, match=r"^--set compare\.0\.k: must number one of the 1 entries from 0; write, for"):
        load_entries(comparison, ["compare.0.k=3"])
