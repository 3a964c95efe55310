"""Documentation that is true: links resolve, make targets exist, snippets compile, names are real."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
MAKE = re.compile(r"(?:^|`)(?:\w+=\S+ )*make ((?:[a-z]+\b ?)+)", re.M)


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """A page without its code."""
    return FENCE.sub("", page.read_text("utf-8"))


def snippets(page: Path, language: str) -> Iterator[str]:
    return (body for kind, body in FENCE.findall(page.read_text("utf-8")) if kind == language)


def anchors(page: Path) -> set[str]:
    """Anchors that the usual Markdown renderers give to headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_relative_links_resolve(page: Path) -> None:
    broken: list[str] = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    code = [*re.findall(r"`make [^`]*`", prose(page)), *snippets(page, "sh")]
    named = {word for words in MAKE.findall("\n".join(code)) for word in words.split()}
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_snippets_compile_and_import(page: Path) -> None:
    for code in snippets(page, "python"):
        for node in ast.walk(ast.parse(code, filename=page_id(page))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sparseloco"):
                module = importlib.import_module(node.module or "")
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert not missing, f"{page_id(page)}: {node.module} has no {missing}"
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "sparseloco":
                assert hasattr(importlib.import_module("sparseloco"), node.attr), f"{page_id(page)}: {node.attr}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_toml_snippets_parse(page: Path) -> None:
    for text in snippets(page, "toml"):
        tomllib.loads(text)


def test_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    citation = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.M)
    assert citation == [project["version"]] == [importlib.import_module("sparseloco").__version__]


def test_method_table_names_the_presets() -> None:
    presets = importlib.import_module("sparseloco.presets")
    readme = (ROOT / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| \*{0,2}`(\w+)`", readme, re.M)
    assert rows, "README.md has a table whose rows start with a preset's name"
    assert set(rows) == set(presets.PRESETS)
