"""Write the generated pages of the documentation: `python tools/reference.py`, or with --check only compare.

docs/configuration.md comes from the settings' types, docs/methods/*.md from the presets' signatures and docstrings.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from sparseloco.algorithm import Algorithm
from sparseloco.citations import cite
from sparseloco.config import keywords_of
from sparseloco.config.method import PRIVATE
from sparseloco.config.sections import SECTIONS, as_toml, default_of, in_words
from sparseloco.peers.policy import Policy
from sparseloco.presets import PRESETS
from sparseloco.settings import optimizer_defaults

DOCS = Path(__file__).parents[1] / "docs"
_NOTE = "<!-- Written by tools/reference.py from the source; `make reference` writes it again. -->\n"
_PARTS = (
    "local", "layout", "feedback", "compressor", "reducer", "transforms", "outer", "schedule", "merge",
    "fragments",
)  # fmt: skip
_ALGORITHM = """## `[algorithm]`

`preset` names a method; its other keys are the keywords of that [preset](methods/index.md), listed here once for all of
them. A preset takes only the keys of its own page.
"""
_PRIVATE_WORDS = {"inner": "the optimizer with its learning rate", "clip_norm": "`clip_norm`"}
_ALSO = {
    "train": [("rounds", "a whole number", "none", "Rounds of H steps, instead of `steps`; one of the two.")],
}
"""Keys that a file may hold beside the fields of a section: key, type, default, meaning."""


def pages() -> dict[Path, str]:
    """Every generated page by its place below ``docs/``."""
    found = {Path("configuration.md"): configuration(), Path("methods/index.md"): methods()}
    return found | {Path(f"methods/{name}.md"): method(name) for name in PRESETS}


def configuration() -> str:
    """The reference of every key of a configuration file."""
    parts = [
        "# Configuration reference\n",
        _NOTE,
        "A run is one TOML file, or that file with single settings replaced on the command line:\n",
        "```sh\nsparseloco train examples/sparseloco.toml --set train.seed=1 --set algorithm.k=32\n```\n",
        "Every key has a default, but for `algorithm.preset`. The run folder's `config.toml` spells all of them out, "
        "and is accepted back unchanged. An unknown key is refused with the nearest name.\n",
        _ALGORITHM,
        _table(_algorithm_rows()),
    ]
    for name, kind in SECTIONS.items():
        summary, described = _docstring(kind)
        summary = re.sub(r"^`\[\w+\]`: ", "", summary)
        rows = [
            (field.name, in_type(field.type), _default(default_of(field)), described[field.name])
            for field in msgspec.structs.fields(kind)
        ]
        parts += [f"## `[{name}]`\n", f"{_sentence(summary)}\n", _table([*rows, *_ALSO.get(name, [])])]
    parts += [
        "## `[policy]`\n",
        "Rules of a run over a store, for [`sparseloco run create`](peers.md#start-and-join-a-run); other verbs check "
        "this section and do nothing with it.\n",
        _table(_policy_rows()),
        "## `[[compare]]`\n",
        "Entries of a comparison, for `sparseloco compare`. An entry holds `label`, the keys of `[algorithm]`, "
        "optional tables `train` and `optimizer` that change those sections, and `tuned`: the names of settings that "
        "were chosen on validation text. All entries see the same tokens in the same order.\n",
    ]
    return "\n".join(parts)


def methods() -> str:
    """The table of presets."""
    rows = [f"| [`{name}`]({name}.md) | {_sentence(_docstring(function)[0])} |" for name, function in PRESETS.items()]
    lines = ["# Methods\n", _NOTE, "Every method is a value made of parts: one short function, no branch elsewhere.\n"]
    lines += ["Each page says how to run its entry of [`examples/methods.toml`](../../examples/methods.toml).\n"]
    return "\n".join([*lines, "| preset | what it does |\n|---|---|", *rows, ""])


def method(name: str) -> str:
    """The page of one preset: its docstring, keywords, parts and references."""
    function = PRESETS[name]
    body = inspect.cleandoc(function.__doc__ or "")
    summary, _, rest = body.partition("\n")
    prose = re.split(r"^Args:", rest, maxsplit=1, flags=re.M)[0].strip()
    _, described = _docstring(function)
    keywords = [
        (key, in_type(kind), _default(default), described[key]) for key, (kind, default) in keywords_of(name).items()
    ]
    taken = [key for key in inspect.signature(function).parameters if key in PRIVATE]
    parts = [f"# {name}\n", _NOTE, f"{summary.strip()}\n"]
    parts += [f"{_links(prose)}\n"] if prose else []
    parts += ["## Settings\n", _table(keywords) if keywords else "None in `[algorithm]`.\n"]
    if taken:
        words = " and ".join(_PRIVATE_WORDS[key] for key in taken)
        changed = [f"`{key} = {as_toml(value)}`" for key, value in optimizer_defaults(name, {}).items()]
        here = f", whose defaults are here {', '.join(changed)}" if changed else ""
        parts.append(f"{_sentence(words + ' come from `[optimizer]`' + here)}\n")
    parts += [
        "```toml\n[algorithm]\n"
        + "\n".join([f'preset = "{name}"', *(f"{k} = {d}" for k, _, d, _ in keywords)])
        + "\n```\n",
        "## Try it\n",
        "One entry of [`examples/methods.toml`](../../examples/methods.toml), on text that is on this machine already; "
        f"without `--only` all methods are trained and reported on together:\n\n```sh\nsparseloco compare "
        f"examples/methods.toml --only {name} --out runs/{name}\n```\n",
        "## Parts\n",
        "| part | value |\n|---|---|",
        *(f"| {part} | `{_part(function(), part)}` |" for part in _PARTS),
        "",
        "## References\n",
        *(f"- {role}: {_paper(reference)}" for role, reference in cite(name)),
        f"\nAs BibTeX:\n\n```sh\nsparseloco cite {name}\n```\n",
    ]
    return "\n".join(parts)


def in_type(kind: Any) -> str:
    """A type as the tables say it."""
    if get_origin(kind) is Literal:
        return " or ".join(f"`{as_toml(choice)}`" for choice in get_args(kind))
    return in_words(kind)


def _algorithm_rows() -> list[tuple[str, str, str, str]]:
    rows = [
        ("preset", "text in quotes", "none, must be given", f"One of {', '.join(f'`{name}`' for name in PRESETS)}.")
    ]
    names = dict.fromkeys(key for preset in PRESETS for key in keywords_of(preset))
    for key in names:
        users = [preset for preset in PRESETS if key in keywords_of(preset)]
        kind, _ = keywords_of(users[0])[key]
        defaults = {preset: _default(keywords_of(preset)[key][1]) for preset in users}
        values = dict.fromkeys(defaults.values())
        default = next(iter(values)) if len(values) == 1 else "by preset"
        _, described = _docstring(PRESETS[users[0]])
        rows.append((key, in_type(kind), default, f"{_sentence(described[key])} Of {', '.join(users)}."))
    return rows


def _policy_rows() -> list[tuple[str, str, str, str]]:
    _, described = _docstring(Policy)
    fields = msgspec.structs.fields(Policy)
    return [(field.name, in_type(field.type), _default(field.default), described[field.name]) for field in fields]


def _docstring(thing: Any) -> tuple[str, dict[str, str]]:
    """First paragraph, and the entries of ``Attributes`` or ``Args``."""
    text = inspect.cleandoc(thing.__doc__ or "")
    listed = re.split(r"^(?:Attributes|Args):\n", text, maxsplit=1, flags=re.M)
    found: dict[str, str] = {}
    for entry in re.findall(r"^ {4}(\w+: .*(?:\n {8}.*)*)", listed[1] if len(listed) > 1 else "", re.M):
        key, _, meaning = entry.partition(": ")
        found[key] = " ".join(meaning.split()).replace("``", "`")
    return " ".join(text.partition("\n\n")[0].split()).replace("``", "`"), found


def _table(rows: list[tuple[str, str, str, str]]) -> str:
    lines = ["| key | is | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| `{k}` | {kind} | {d} | {text} |" for k, kind, d, text in rows), ""])


def _default(value: Any) -> str:
    return as_toml(value)


def _part(algorithm: Algorithm, name: str) -> str:
    holder = algorithm if hasattr(algorithm, name) else algorithm.channel
    text = repr(getattr(holder, name)).replace("|", "\\|")
    return re.sub(r"<class '[\w.]*\.(\w+)'>", r"\1", text)


def _links(prose: str) -> str:
    text = re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", prose)
    return text.replace("``", "`")


def _paper(reference: Any) -> str:
    where = (
        f"[arXiv:{reference.arxiv}](https://arxiv.org/abs/{reference.arxiv})" if reference.arxiv else reference.venue
    )
    return f"{reference.title}, {reference.year}, {where}"


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    check = parser.parse_args().check
    stale = [
        path
        for path, text in pages().items()
        if not (DOCS / path).is_file() or (DOCS / path).read_text("utf-8") != text
    ]
    for path in stale:
        print(f"docs/{path}: {'stale' if check else 'written'}")
        if not check:
            (DOCS / path).parent.mkdir(exist_ok=True)
            (DOCS / path).write_text(pages()[path], encoding="utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
