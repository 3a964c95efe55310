"""``[[compare]]``: several runs in one file, on the same tokens in the same order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sparseloco.config.file import check_sections, overlay, read_table, resolve, resolve_run
from sparseloco.config.sections import did_you_mean
from sparseloco.errors import ConfigError
from sparseloco.presets import PRESETS
from sparseloco.settings import OptimizerConfig, RunConfig, optimizer_defaults, optimizer_keys, to_table

_OVERLAYS = ("train", "optimizer")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a comparison.

    Attributes:
        label: Its name in tables and pictures.
        config: Its settings.
        tuned: Names of the settings that were chosen on validation text.
    """

    label: str
    config: RunConfig
    tuned: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """Name of its run folder: the label in lower case, with hyphens for all but letters and digits."""
        return re.sub(r"[\W_]+", "-", self.label.lower()).strip("-")


def load_entries(path: str | Path, overrides: Sequence[str] = (), only: Sequence[str] = ()) -> tuple[Entry, ...]:
    """Read the ``[[compare]]`` entries of a file, each as the complete settings of a run.

    An entry has a ``label`` and the keywords of a preset. With a ``preset`` of its own it stands alone, without one it
    changes ``[algorithm]``. Its tables ``train`` and ``optimizer`` change the common sections, and ``tuned`` lists the
    settings that were chosen on validation text.

    Args:
        path: A TOML file.
        overrides: As in ``load_config``; ``compare.0.k=32`` reaches the first entry.
        only: Labels to take, in the order of the file; none means all.

    Returns:
        The entries in the order of the file; one, labelled with its preset, if the file has none.

    Raises:
        ConfigError: if an entry is wrong, or entries would not see the same tokens in the same order.
    """
    table = read_table(path, overrides)
    if "compare" not in table:
        config = resolve_run(table)
        return _chosen([Entry(label=config.algorithm.preset, config=config)], only)
    rows = table.pop("compare")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"compare={rows!r}: must be a list of entries; write [[compare]] before each of them")
    check_sections(table)
    first = table.get("algorithm", rows[0]).get("preset")
    entries = _chosen([_entry(table, row, number, first) for number, row in enumerate(rows)], only)
    _check_folders(entries)
    for entry in entries[1:]:
        _check_same_text(entries[0], entry)
    return entries


def _entry(common: Mapping[str, Any], row: Mapping[str, Any], number: int, first: Any) -> Entry:
    label, tuned = row.get("label"), row.get("tuned", [])
    if not isinstance(label, str) or not any(map(str.isalnum, label)):
        raise ConfigError(f'compare.{number}.label={label!r}: must name the entry; write, for example, label = "A"')
    try:
        changes = {name: row.get(name, {}) for name in _OVERLAYS}
        for name, change in changes.items():
            if not isinstance(change, dict):
                raise ConfigError(f"{name}={change!r}: must be a table; write, for example, {name} = {{ }}")
        keywords = {name: value for name, value in row.items() if name not in ("label", "tuned", *_OVERLAYS)}
        algorithm = keywords if "preset" in keywords else {**common.get("algorithm", {}), **keywords}
        inherited = {**common, "optimizer": _inherited(common, algorithm)}
        sections = {name: overlay(inherited.get(name, {}), change) for name, change in changes.items()}
        config = resolve({**common, **sections, "algorithm": algorithm})
        _check_rate(row, common, first, config)
        _check_tuned(tuned, config)
    except ConfigError as error:
        raise ConfigError(f"compare {label!r}: {error}") from error
    return Entry(label=label, config=config, tuned=tuple(tuned))


def _inherited(common: Mapping[str, Any], algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """The common ``[optimizer]``, which is for all entries, without keys that are nothing to this one's preset."""
    section, preset = common.get("optimizer", {}), algorithm.get("preset")
    unused = set(OptimizerConfig.__struct_fields__) - set(optimizer_keys(preset)) if preset in list(PRESETS) else set()
    return {name: value for name, value in section.items() if name not in unused}


def _check_rate(row: Mapping[str, Any], common: Mapping[str, Any], first: Any, config: RunConfig) -> None:
    """Refuse a common learning rate that was meant for another optimizer than this entry has by default."""
    section, change, preset = common.get("optimizer", {}), row.get("optimizer", {}), config.algorithm.preset
    if "lr" not in section or "lr" in change or "name" in {**section, **change} or "lr" not in optimizer_keys(preset):
        return
    meant, own = (optimizer_defaults(name, {}).get("name", "adamw") for name in (first, preset))
    if own != meant:
        raise ConfigError(
            f"optimizer.lr={section['lr']!r}: stands in the common section for {meant}, but preset {preset!r} uses "
            f"{own}; give this entry its own, for example optimizer = {{ lr = {0.3 if own == 'sgd' else 0.003} }}"
        )


def _check_tuned(tuned: Any, config: RunConfig) -> None:
    if not isinstance(tuned, list):
        raise ConfigError(f'tuned={tuned!r}: must be a list of names; write, for example, tuned = ["outer_lr"]')
    sections = to_table(config)
    names = [*config.algorithm.settings, *(f"{name}.{key}" for name in _OVERLAYS for key in sections[name])]
    for name in tuned:
        if name not in names:
            raise ConfigError(f"tuned: unknown setting {name!r}; {did_you_mean(str(name), names, 'settings')}")


def _chosen(entries: Sequence[Entry], only: Sequence[str]) -> tuple[Entry, ...]:
    labels = [entry.label for entry in entries]
    for label in only:
        if label not in labels:
            raise ConfigError(
                f"--only {label!r}: must be the label of an entry; {did_you_mean(label, labels, 'labels')}"
            )
    return tuple(entry for entry in entries if not only or entry.label in only)


def _check_folders(entries: Sequence[Entry]) -> None:
    taken: dict[str, str] = {}
    for entry in entries:
        if entry.label == taken.get(entry.folder):
            raise ConfigError(f"compare.label={entry.label!r}: must not stand twice; give each entry its own label")
        if entry.folder in taken:
            raise ConfigError(
                f"compare.label={entry.label!r}: must differ from {taken[entry.folder]!r} in a letter or digit, or "
                "both would be written to the same folder; change one"
            )
        taken[entry.folder] = entry.label


def _check_same_text(first: Entry, other: Entry) -> None:
    """Refuse runs whose losses could not be compared."""
    for name in ("steps", "sequence_length", "seed", "evaluation_tokens"):
        values = [getattr(entry.config.train, name) for entry in (first, other)]
        _check_equal(f"train.{name}", other, first, values)
    slots = [entry.config.train.workers * entry.config.train.batch_size for entry in (first, other)]
    _check_equal("train.workers * batch_size", other, first, slots)


def _check_equal(name: str, other: Entry, first: Entry, values: Sequence[int]) -> None:
    if values[0] != values[1]:
        raise ConfigError(
            f"compare {other.label!r}: {name}={values[1]}: must be {values[0]} as in {first.label!r}, so that both see "
            "the same tokens in the same order; say train.steps instead of rounds, and keep these alike"
        )
