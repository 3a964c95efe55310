"""Every verb, found in the program itself: its help has an example that works, and its figures come as JSON."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import sparseloco.cli
from sparseloco.cli.shell import print_json
from tests.cli import Call, parse

ROOT = Path(__file__).parents[2]


def walk(command: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """Every command below one as its words and itself, groups included."""
    yield " ".join(path), command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, *path, name)


COMMANDS = dict(walk(typer.main.get_command(sparseloco.cli.app)))
VERBS = [words for words, command in COMMANDS.items() if not hasattr(command, "commands")]


def test_the_walk_finds_verbs_of_all_depths() -> None:
    assert {"train", "data inspect", "cite"} <= set(VERBS)
    assert {"", "data", "run"} == set(COMMANDS) - set(VERBS)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words or "sparseloco")
def test_help_has_an_example_that_parses(cli: Call, words: str) -> None:
    ended = cli(*words.split(), "--help")
    assert ended.code == 0, ended.err
    (example,) = re.findall(r"^ *Example: (sparseloco .*(?:\n +.*)*)", ended.out, re.M)
    called = shlex.split(example)[1:]
    assert called[: len(words.split())] == words.split()
    parse(called)
    for path in (word for word in called if word.endswith(".toml")):
        assert (ROOT / path).is_file()


@pytest.mark.parametrize("words", VERBS)
def test_every_verb_speaks_json(cli: Call, words: str) -> None:
    assert "--json" in {option for parameter in COMMANDS[words].params for option in parameter.opts}
    assert re.search(r"--json\s+Print ", cli(*words.split(), "--help").out)


def test_the_package_lists_its_verbs() -> None:
    listed = re.findall(r"\w+", (sparseloco.cli.__doc__ or "").partition("\n")[0].partition(":")[2])
    assert sorted(listed) == sorted({words.split()[0] for words in COMMANDS if words})


def test_numbers_that_json_lacks_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"a": float("nan"), "b": [1.5, float("inf"), (-float("inf"), None, "NaN")], "c": {"d": True, "e": 3}}

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    print_json(value)
    shown = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert shown == {"a": None, "b": [1.5, None, [None, None, "NaN"]], "c": {"d": True, "e": 3}}
