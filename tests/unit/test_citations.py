"""References: every method has one, every one is used, and they agree with the docstrings."""

from __future__ import annotations

import re

import pytest

from sparseloco.citations import METHODS, REFERENCES, cite
from sparseloco.errors import ConfigError
from sparseloco.presets import PRESETS


def test_every_preset_is_a_method_with_a_paper() -> None:
    assert set(METHODS) == set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_docstring_and_references_name_the_same_papers(preset: str) -> None:
    named = set(re.findall(r"arXiv:(\d{4}\.\d{5})", PRESETS[preset].__doc__ or ""))
    assert named, f"{preset}: its docstring must name its paper"
    assert named <= {REFERENCES[key].arxiv for key in METHODS[preset]}
    assert REFERENCES[METHODS[preset][0]].arxiv in named


def test_every_reference_is_used() -> None:
    used = {reference.key for preset in PRESETS for _, reference in cite(preset)}
    used |= {reference.key for _, reference in cite("sparseloco", values="statistical")}
    assert used == set(REFERENCES)


@pytest.mark.parametrize("preset", PRESETS)
def test_each_paper_comes_once_and_the_method_first(preset: str) -> None:
    found = cite(preset)
    assert found[0][0] == "method"
    assert len({reference.key for _, reference in found}) == len(found)


def test_entries_are_bibtex() -> None:
    for reference in REFERENCES.values():
        entry = reference.bibtex()
        assert entry.count("{") == entry.count("}")
        assert re.match(r"@(misc|inproceedings)\{[a-z0-9]+,\n", entry)
        assert bool(reference.arxiv) != bool(reference.venue)
    assert "eprint = {2508.15706}" in REFERENCES["sarfi2025sparseloco"].bibtex()


def test_settings_choose_the_parts() -> None:
    assert "seide2014onebit" not in [reference.key for _, reference in cite("diloco")]
    assert "sutskever2013importance" in [reference.key for _, reference in cite("diloco")]
    assert "sutskever2013importance" not in [reference.key for _, reference in cite("diloco", outer_momentum=0.0)]


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"preset='Sparse': must be one of ddp, local_sgd.*; did you mean 'sparseloco'\?"
    ):
        cite("Sparse")
