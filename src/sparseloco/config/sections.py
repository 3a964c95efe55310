"""One section of a file as a checked value: every key known, every value of its type."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, NoReturn, TypeVar

import msgspec

from sparseloco.errors import ConfigError
from sparseloco.peers.policy import Policy
from sparseloco.settings import (
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    TransportConfig,
)

S = TypeVar("S", bound=msgspec.Struct)

SECTIONS: dict[str, type[msgspec.Struct]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "optimizer": OptimizerConfig,
    "transport": TransportConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
}
"""Every section but ``[algorithm]``, whose keys depend on the preset."""

_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}


def to_struct(kind: type[S], where: str, section: Mapping[str, Any], *, also: Iterable[str] = ()) -> S:
    """Convert a section, key by key, so that errors name key and value.

    Args:
        kind: Its type; defaults come from there.
        where: Its name in errors.
        section: What stands in the file.
        also: Further keys that may be meant by a misspelled one.

    Raises:
        ConfigError: for an unknown key, or a value of the wrong type or out of range.
    """
    known = {field.name: field for field in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    for name, value in section.items():
        if name not in known:
            refuse_key(where, name, [*known, *also])
        field = known[name]
        if (entry := _entry_kind(field.type)) is not None:
            values[name] = _to_structs(entry, f"{where}.{name}", value)
            continue
        try:
            values[name] = msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}.{name}={value!r}: must be {in_words(field.type)}; {_way_out(field)}") from error
        if isinstance(values[name], float) and not math.isfinite(values[name]):
            raise ConfigError(
                f"{where}.{name}={value!r}: must be a finite number; the default is {as_toml(field.default)}"
            )
    return kind(**values)


def policy_of(section: Any) -> Policy:
    """``[policy]`` as a checked value; lists of keys need no order.

    Raises:
        ConfigError: for an unknown key, or a value of the wrong type or out of range.
    """
    if not isinstance(section, dict):
        raise ConfigError(f"policy={section!r}: must be a section; write [policy] and its keys below it")
    lists = {name: sorted(section[name]) for name in ("members", "writers") if isinstance(section.get(name), list)}
    return to_struct(Policy, "policy", {**section, **lists})


def _entry_kind(kind: Any) -> type[msgspec.Struct] | None:
    """The type of the entries, for a field that is a list of tables."""
    first = typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else None
    return first if isinstance(first, type) and issubclass(first, msgspec.Struct) else None


def _to_structs(kind: type[S], where: str, entries: Any) -> tuple[S, ...]:
    if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{where}={entries!r}: must be a list of entries; write [[{where}]] before each of them")
    for number, entry in enumerate(entries):
        for field in msgspec.structs.fields(kind):
            if field.required and field.name not in entry:
                raise ConfigError(f"{where}.{number}: has no {field.name}; add one")
    return tuple(to_struct(kind, f"{where}.{number}", entry) for number, entry in enumerate(entries))


def refuse_key(where: str, name: str, known: Iterable[str]) -> NoReturn:
    """Raise the error for an unknown key: with the nearest name, or with all of them."""
    known = list(known)
    if where != "algorithm" and not nearest(name, known):
        for section, kind in SECTIONS.items():
            if name in kind.__struct_fields__:
                raise ConfigError(f"{where}: unknown key {name!r}; did you mean '{section}.{name}'?")
    if where == "algorithm" and name == "clip_norm":
        raise ConfigError("algorithm: unknown key 'clip_norm'; did you mean 'optimizer.clip_norm'?")
    raise ConfigError(f"{where}: unknown key {name!r}; {did_you_mean(name, known, 'keys')}")


def refuse_section(name: str, value: object) -> NoReturn:
    """Raise the error for a name at the top of a file that is no section."""
    if isinstance(value, (dict, list)):
        known = ["algorithm", *SECTIONS, "compare"]
        raise ConfigError(f"config: unknown section {name!r}; {did_you_mean(name, known, 'sections')}")
    refuse_key("config", name, [])


def did_you_mean(name: str, known: Iterable[str], what: str) -> str:
    """``did you mean 'x'?``, or a list of what there is where nothing is near."""
    known = list(known)
    if near := nearest(name, known):
        return f"did you mean {near!r}?"
    return f"the {what} are {', '.join(known)}" if known else f"there are no {what} here"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelled one is most like, if any is."""
    by_lower = {other.lower(): other for other in known}
    found = get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[found[0]] if found else None


def as_toml(value: object) -> str:
    """A plain value as it stands in a file."""
    import tomli_w

    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {as_toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()


def _way_out(field: msgspec.structs.FieldInfo) -> str:
    return "there is no default" if field.required else f"the default is {as_toml(default_of(field))}"


def default_of(field: msgspec.structs.FieldInfo) -> Any:
    """What a setting is where a file leaves it out."""
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()  # pyright: ignore


def in_words(kind: Any) -> str:
    """What a setting of this type must be, as errors and the reference say it."""
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(map(as_toml, typing.get_args(kind)))}"
    if typing.get_origin(kind) is tuple:
        if typing.get_args(kind)[-1] is Ellipsis:
            return "a list of texts in quotes"
        return f"a list of {len(typing.get_args(kind))} numbers"
    return "a table" if typing.get_origin(kind) is dict else _WORDS[kind]
