"""From a file and overrides to the resolved settings of a run."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparseloco.algorithm import Recipe
from sparseloco.config.method import build_algorithm, parse_recipe
from sparseloco.config.sections import SECTIONS, policy_of, refuse_section, to_struct
from sparseloco.errors import ConfigError
from sparseloco.settings import OptimizerConfig, RunConfig, optimizer_defaults, optimizer_keys

Table = dict[str, Any]

_RIVALS = {"steps": "rounds", "rounds": "steps"}
"""Keys of ``[train]`` that say the same thing: one of them replaces the other."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration file, apply overrides, and check all of it.

    ``[[compare]]`` entries are left aside.

    Args:
        path: A TOML file.
        overrides: Settings to replace, each as ``section.key=value``; the value is TOML, or else text.

    Raises:
        ConfigError: if anything is missing, unknown, of the wrong type or out of range.
    """
    return resolve_run(read_table(path, overrides))


def parse_config(text: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The same from the text of a file; ``parse_config(to_toml(config)) == config``."""
    return resolve_run(parse_table(text, overrides))


def read_table(path: str | Path, overrides: Sequence[str] = ()) -> Table:
    """The sections of a file after overrides, not checked yet.

    Raises:
        ConfigError: if the file cannot be read or an override does not say what to replace.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"config={str(path)!r}: must be an existing TOML file; check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"config={str(path)!r}: must be a readable TOML file ({reason}); check the path") from error
    return parse_table(text, overrides, name=str(path))


def parse_table(text: str, overrides: Sequence[str] = (), *, name: str = "text") -> Table:
    """The same from the text of a file that errors call ``name``."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config={name!r}: must be valid TOML ({error}); mend that place") from error
    overridden = [_parse_override(override) for override in overrides]
    for path, value in overridden:
        section, key = path[:-1], path[-1]
        if (
            section == ["train"]
            and key in _RIVALS
            and [*section, _RIVALS[key]] not in [other for other, _ in overridden]
            and isinstance(table.get("train"), dict)
        ):
            table["train"].pop(_RIVALS[key], None)
        _assign(table, path, value)
    return table


def resolve_run(table: Mapping[str, Any]) -> RunConfig:
    """Settings of the run that the common sections describe; entries of a comparison are left aside."""
    if "algorithm" not in table and "compare" in table:
        raise ConfigError(
            "algorithm: missing section, this file has only [[compare]] entries; add [algorithm], "
            "or run them with: sparseloco compare"
        )
    return resolve({name: value for name, value in table.items() if name != "compare"})


def resolve(table: Mapping[str, Any]) -> RunConfig:
    """All sections checked, defaults spelled out, and the algorithm built once to see that it can be.

    Raises:
        ConfigError: if anything is missing, unknown, of the wrong type or out of range.
    """
    check_sections(table)
    recipe = parse_recipe(table.get("algorithm"))
    sections: dict[str, Any] = {}
    for name, kind in SECTIONS.items():
        section = table.get(name, {})
        if name == "train":
            section = _steps_from_rounds(section, recipe)
        if name == "optimizer":
            section = _optimizer_section(section, recipe)
        sections[name] = to_struct(kind, name, section, also=["rounds"] if name == "train" else [])
    config = RunConfig(algorithm=recipe, **sections)
    build_algorithm(config)
    return config


def check_sections(table: Mapping[str, Any]) -> None:
    """Refuse names at the top of a file that are no sections.

    Raises:
        ConfigError: naming the first.
    """
    for name, value in table.items():
        if name == "policy":  # of a run in a store; a run on one machine has none, but its file may
            policy_of(value)
        elif name != "algorithm" and name not in SECTIONS:
            refuse_section(name, value)
        if not isinstance(value, dict):
            raise ConfigError(f"{name}={value!r}: must be a section; write [{name}] and its keys below it")


def overlay(common: Mapping[str, Any], changes: Mapping[str, Any]) -> Table:
    """A section with some keys replaced; ``steps`` replaces ``rounds`` and the other way round."""
    gone = {_RIVALS[name] for name in changes if name in _RIVALS} - set(changes)
    return {**{name: value for name, value in common.items() if name not in gone}, **changes}


def _steps_from_rounds(section: Table, recipe: Recipe) -> Table:
    if "rounds" not in section:
        return section
    rounds = section["rounds"]
    if "steps" in section:
        raise ConfigError(
            f"train.rounds={rounds!r}: must not stand beside train.steps={section['steps']!r}; keep one of them"
        )
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
        raise ConfigError(f"train.rounds={rounds!r}: must be a whole number of at least 1; use 30")
    steps = rounds * recipe.settings.get("inner_steps", 1)
    return {**{name: value for name, value in section.items() if name != "rounds"}, "steps": steps}


def _optimizer_section(section: Table, recipe: Recipe) -> Table:
    """The section with the defaults of the preset; keys that it would ignore are refused."""
    preset, used = recipe.preset, optimizer_keys(recipe.preset)
    for name, value in section.items():
        if name in OptimizerConfig.__struct_fields__ and name not in used:
            if name in recipe.settings:
                words = "learning rate" if name == "lr" else name
                way = f"whose {words} is algorithm.{name}; set that instead"
            else:
                way = f"which takes only {' and '.join(used)} from [optimizer]; leave it out"
            raise ConfigError(f"optimizer.{name}={value!r}: is not used by preset {preset!r}, {way}")
    return {**optimizer_defaults(preset, section), **section} if "name" in used else section


def _parse_override(text: str) -> tuple[list[str], Any]:
    name, equals, value = text.partition("=")
    path = [part.strip() for part in name.split(".")]
    if not equals or len(path) < 2 or not all(path):
        raise ConfigError(f"--set {text!r}: must be section.key=value; write, for example, --set train.seed=1")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return path, value
    return path, parsed["value"] if len(parsed) == 1 else value


def _assign(table: Table, path: Sequence[str], value: Any) -> None:
    """Set one value; a number in the path counts the entries of a list from 0."""
    name, place = ".".join(path), table
    for part in path[:-1]:
        found: Any = place.setdefault(part, {})
        if isinstance(found, list):
            return _assign_entry(found, path[path.index(part) + 1 :], value, name)
        if not isinstance(found, dict):
            raise ConfigError(f"--set {name}: {part!r} is a value, not a section; write section.key=value")
        place = found
    place[path[-1]] = value


def _assign_entry(entries: list[Any], path: Sequence[str], value: Any, name: str) -> None:
    number, rest = path[0], path[1:]
    if not number.isdecimal() or int(number) >= len(entries) or not rest or not isinstance(entries[int(number)], dict):
        raise ConfigError(
            f"--set {name}: must number one of the {len(entries)} entries from 0; write, for example, compare.0.k=32"
        )
    _assign(entries[int(number)], rest, value)
