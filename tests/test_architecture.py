"""The layer rules of docs/architecture.md, read off the source, and house rules for every tracked file."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "sparseloco"

# A package is named once and holds all its modules. A new module or package needs a line here.
LAYERS = {
    "L0": {"errors", "types", "bits", "keys", "sharding"},
    "L1": {"layout", "panels", "compress", "reduce", "gaps", "sections", "kernels", "channel"},
    "L2": {
        "schedule", "local", "muon_adamw", "outer", "update", "merge", "fragments", "algorithm", "presets", "lane",
        "inbox", "saved", "replica", "citations", "generators", "support", "optimizer_state", "reshard_state",
        "staging", "rejoin",
    },
    "L3": {"wire", "transport", "session", "checkpoint", "part_file", "background", "dcp", "peers"},
    "L4": {
        "model", "data", "trainer", "simulate", "metrics", "settings", "resume", "launch", "evaluation", "harness",
        "writers", "absences", "inner_step", "joined", "solo", "whole", "books", "identity", "meter",
    },
    "L5": {"config", "cli", "report", "bench", "__main__", "__init__"},
}  # fmt: skip
LAYER_OF = {module: int(layer[1]) for layer, modules in LAYERS.items() for module in modules}

# Where the mesh of a run is made, its model is sharded over it (solo).
# transport.torchft needs the store and the options that torchft's process groups are made with.
MAY_USE_TORCH_DISTRIBUTED = {
    "sharding",
    "transport.process_group",
    "transport.collectives",  # its collectives, apart from what they carry
    "transport.meeting",  # how its group is made and left
    "transport.speaker",
    "transport.torchft",
    "checkpoint",
    "trainer",
    "solo",
}
MAY_NAME_DTENSOR = {"sharding"}
# Clocks, files, sockets, processes and stores: none of these below L3.
OUTSIDE_WORLD = {
    "asyncio", "boto3",
    "concurrent", "datetime", "fsspec", "glob", "http", "io", "multiprocessing", "obstore",
    "os", "pathlib", "select", "selectors", "shutil", "signal", "socket", "socketserver", "ssl", "subprocess",
    "tempfile", "threading", "time", "urllib",
}  # fmt: skip
# All randomness of the method comes from keys.
HIDDEN_RANDOMNESS = {"random", "secrets", "uuid"}
LAZY = {
    "transformers", "tokenizers", "msgspec", "tomli_w", "rich", "typer", "click", "matplotlib", "obstore",
    "safetensors", "datasets", "pyarrow", "sentencepiece", "huggingface_hub", "pydantic", "boto3", "wandb",
    "tensorboard", "trackio", "lm_eval", "triton", "torchft", "nacl",
}  # fmt: skip

MAX_LINES = 400
MACHINE_PATH = re.compile(r"(?<![\w.:/])/(?:work|root|opt|home/\w+|Users/\w+)/")
INDEX_HOST = re.compile(r"(?:\bpypi|pythonhosted|npmjs|download\.pytorch|deb\.debian)\.(?:org|com)\b")


@dataclass(frozen=True)
class Module:
    """One source file: dotted name below the package, its syntax tree, its path."""

    name: str
    tree: ast.Module
    path: Path

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


@cache
def modules() -> tuple[Module, ...]:
    found: list[Module] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found.append(Module(name, ast.parse(path.read_text("utf-8"), str(path)), path))
    return tuple(found)


@cache
def tracked_files() -> tuple[Path, ...]:
    """Files that git has or would take; all text files below the root where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        out = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout: there is no list of tracked files")
    return tuple(path for name in out.split("\0") if name and (path := ROOT / name).is_file())


def text_of(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        return ""


def imported(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every dotted name that is imported anywhere in a file, also inside functions, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            yield from ((f"{source}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            yield f"torch.{node.attr}", node.lineno


def own_target(name: str) -> str | None:
    """Entry of LAYER_OF that an imported name belongs to; None if it is not ours."""
    first, _, rest = name.partition(".")
    if first != "sparseloco":
        return None
    top = rest.partition(".")[0]
    return top if top in LAYER_OF else "__init__"


def layer(module: Module) -> int:
    return LAYER_OF.get(module.top, 0)


def within(name: str, owner: str) -> bool:
    return name == owner or name.startswith(f"{owner}.")


def complain(broken: list[str], rule: str) -> None:
    assert not broken, rule + ":\n  " + "\n  ".join(broken)


def test_every_module_has_a_layer() -> None:
    unplaced = sorted({m.top for m in modules()} - set(LAYER_OF))
    complain(unplaced, "modules without a layer; add each to LAYERS in this file and to docs/architecture.md")


def test_every_entry_of_the_table_exists() -> None:
    gone = sorted(set(LAYER_OF) - {m.top for m in modules()})
    complain(gone, "LAYERS names modules that do not exist; take them out, here and in docs/architecture.md")


def test_architecture_page_has_the_same_table() -> None:
    page = text_of(ROOT / "docs" / "architecture.md")
    rows = {row: set(re.findall(r"\[`(\w+)`\]", text)) for row, text in re.findall(r"^\| (L\d) (.*)$", page, re.M)}
    assert rows == {name: entries - {"__init__"} for name, entries in LAYERS.items()}


def test_strict_types_cover_the_lower_layers() -> None:
    included = re.findall(r'"\.\./src/sparseloco/(\w+)', text_of(ROOT / "tools" / "pyright-strict.json"))
    assert set(included) == LAYERS["L0"] | LAYERS["L1"] | LAYERS["L2"]


def test_imports_go_downwards() -> None:
    upwards = [
        f"{m.path.relative_to(ROOT)}:{line}: L{layer(m)} imports {name} (L{LAYER_OF[target]})"
        for m in modules()
        for name, line in imported(m.tree)
        if (target := own_target(name)) is not None and LAYER_OF[target] > layer(m)
    ]
    complain(upwards, "imports go downwards only")


def test_torch_distributed_stays_at_the_edge() -> None:
    strays = [
        f"{m.path.relative_to(ROOT)}:{line}: {name}"
        for m in modules()
        if not any(within(m.name, owner) for owner in MAY_USE_TORCH_DISTRIBUTED)
        for name, line in imported(m.tree)
        if within(name, "torch.distributed")
    ]
    complain(strays, f"torch.distributed is for {sorted(MAY_USE_TORCH_DISTRIBUTED)} only")


def test_outside_world_stays_above_the_method() -> None:
    strays = [
        f"{m.path.relative_to(ROOT)}:{line}: {name}"
        for m in modules()
        if layer(m) < 3
        for name, line in imported(m.tree)
        if name.partition(".")[0] in OUTSIDE_WORLD | HIDDEN_RANDOMNESS
    ]
    complain(strays, "clocks, files, sockets, stores and hidden randomness belong to L3 and above")


def test_dtensor_stops_at_the_door() -> None:
    strays = [
        f"{m.path.relative_to(ROOT)}:{node.lineno}"
        for m in modules()
        if m.name not in MAY_NAME_DTENSOR
        for node in ast.walk(m.tree)
        if (isinstance(node, ast.Name) and node.id == "DTensor")
        or (isinstance(node, ast.Attribute) and node.attr == "DTensor")
        or (isinstance(node, ast.alias) and node.name == "DTensor")
    ]
    complain(strays, f"DTensor is for {sorted(MAY_NAME_DTENSOR)} only")


def test_import_loads_no_optional_package() -> None:
    probe = (
        "import sys, numpy, torch; before = set(sys.modules); import sparseloco;"
        "[getattr(sparseloco, name) for name in sparseloco.__all__];"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    loaded = set(run.stdout.split())
    assert "sparseloco" in loaded
    assert not loaded & LAZY, "`import sparseloco` must load these only when they are used"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each module is imported in a fork")
def test_every_module_can_be_imported_first() -> None:
    """No import works only after another one, as in a circle."""
    names = sorted(f"sparseloco.{m.name}" for m in modules() if layer(m) < 4 and "triton_" not in m.name)
    probe = (
        "import importlib, os, sys, torch\n"
        "for name in sys.argv[1:]:\n"
        "    if not (child := os.fork()):\n"
        "        importlib.import_module(name)\n"
        "        os._exit(0)\n"
        "    if os.waitpid(child, 0)[1]: print(name)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", probe, *names], capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == 0, run.stderr
    complain(sorted(set(run.stdout.split())), "modules can be imported first\n" + run.stderr)


def test_files_fit_the_eye() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {count} lines"
        for path in tracked_files()
        if (count := text_of(path).count("\n")) > MAX_LINES
    ]
    complain(long, f"files have at most {MAX_LINES} lines")


@pytest.mark.parametrize(
    ("pattern", "what"),
    [(MACHINE_PATH, "paths of one machine"), (INDEX_HOST, "names of package index hosts")],
    ids=["path", "host"],
)
def test_files_name_no_machine_and_no_index(pattern: re.Pattern[str], what: str) -> None:
    named = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in tracked_files()
        for number, line in enumerate(text_of(path).splitlines(), start=1)
        if pattern.search(line)
    ]
    complain(named, f"{what} are in the repository")


def test_patterns_find_what_they_are_for() -> None:
    assert MACHINE_PATH.search("see " + "/".join(["", "work", "x"]))
    assert MACHINE_PATH.search('"' + "/".join(["", "home", "me", "x"]))
    assert not MACHINE_PATH.search("https://example.org/work/x and src/root/x")
    assert INDEX_HOST.search(".".join(["files", "pythonhosted", "org"]))
    assert not INDEX_HOST.search("pytorch.org")
