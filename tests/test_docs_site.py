"""The documentation site: generated pages are current, every key is listed, commands work, the build is strict."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import typer.main

from sparseloco.cli import app
from sparseloco.config import keywords_of
from sparseloco.config.sections import SECTIONS
from sparseloco.presets import PRESETS
from tests.cli import parse
from tests.test_docs import PAGES, ROOT, page_id, snippets

QUICK = {"describe", "cite", "doctor"}
"""Verbs that are run as they stand in the documentation; of the others, and of what needs a store elsewhere, only the
options are checked."""


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_current(reference: ModuleType) -> None:
    stale = [
        str(path)
        for path, text in reference.pages().items()
        if not (ROOT / "docs" / path).is_file() or (ROOT / "docs" / path).read_text("utf-8") != text
    ]
    assert not stale, "run `make reference` and commit what it writes"


def test_the_reference_lists_every_key() -> None:
    """C-72: no option that only the source knows."""
    text = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    sections = {
        title: set(re.findall(r"^\| `(\w+)` \|", body, re.M))
        for title, body in re.findall(r"^## `\[+(\w+)\]+`\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    }
    for name, kind in SECTIONS.items():
        assert {field.name for field in msgspec.structs.fields(kind)} <= sections[name], name
    assert {key for preset in PRESETS for key in keywords_of(preset)} | {"preset"} == sections["algorithm"]


def commands() -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        for block in snippets(page, "sh"):
            for line in block.splitlines():
                if line.startswith("sparseloco "):
                    yield page_id(page), shlex.split(line)[1:]


@pytest.mark.parametrize(
    ("page", "words"), list(commands()), ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_commands_of_the_documentation_work(
    page: str, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """C-72, C-78: what the pages tell people to type is what the program takes."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SPARSELOCO_CACHE", str(tmp_path))
    if words[0] in QUICK and "://" not in " ".join(words):
        with pytest.raises(SystemExit) as ended:
            app(words, prog_name="sparseloco")
        assert ended.value.code == 0
        return
    if words[0].startswith("-"):
        group: Any = typer.main.get_command(app)
        known = {option for parameter in group.params for option in parameter.opts}
        assert set(words) <= known
        return
    parsed = parse(words)
    for path in re.findall(r"\S+\.toml", " ".join(words)):
        assert (ROOT / path).is_file() or path.startswith("runs/"), f"{page}: {path}"
    assert parsed.params


def test_the_site_builds_strictly_and_fetches_nothing(tmp_path: Path) -> None:
    if importlib.util.find_spec("material") is None:
        pytest.skip('mkdocs-material is not installed; run pip install "sparseloco[docs]"')
    command = [sys.executable, "-m", "mkdocs", "--quiet", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # an advertisement of the theme's, not of our pages
    ended = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout + ended.stderr == ""
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert {page.stem for page in pages} >= {"index", "configuration", "faq", "assumptions", *PRESETS}
    for page in pages:
        text = page.read_text("utf-8")
        fetched = re.findall(
            r'(?:<script[^>]*src|<img[^>]*src|<link[^>]*rel="stylesheet"[^>]*href)="(https?:[^"]+)"', text
        )
        assert not fetched, page.name


def test_questions_of_the_readers_are_answered() -> None:
    """C-79, C-77, C-78, C-58: the pages that answer them."""
    text = (ROOT / "docs" / "faq.md").read_text("utf-8")
    for heading in (
        "What was the bandwidth?", "Can it be reproduced without the chain?", "How are cheaters handled?",
        "Why am I warned about one worker?", "How many terminals do I need?", "Does it work on Apple's machines?",
    ):  # fmt: skip
        assert f"### {heading}\n" in text


def test_users_of_wrappers_find_their_answer() -> None:
    """C-55, C-74: how not to synchronize under each wrapper, and the method around an accelerate loop."""
    text = (ROOT / "docs" / "library.md").read_text("utf-8")
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    assert "sparseloco.synchronize(" in sections["With accelerate"]
    assert "accelerator.backward(" in sections["With accelerate"]
    assert "no_sync" in sections["Wrappers, and when not to synchronize"]
