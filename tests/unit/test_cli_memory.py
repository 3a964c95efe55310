"""The memory that a run may use: limits of control groups of both versions, from files as Linux shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparseloco.cli import memory
from sparseloco.cli.memory import control_group_limit
from tests.cli import Call, run_file

NO_LIMIT_V1 = "9223372036854771712\n"


def tree(root: Path, **files: str) -> Path:
    """Files of groups; the name's double underscores stand for slashes, ``max`` and ``v1`` for the file."""
    for name, content in files.items():
        *groups, kind = name.split("__")
        folder = root.joinpath(*(["memory"] if kind == "v1" else []), *groups)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ("memory.limit_in_bytes" if kind == "v1" else "memory.max")).write_text(content)
    return root


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/\n", {"max": "2000000\n"}, 2_000_000),  # a container with a name space of its own
        ("0::/jobs/mine\n", {"jobs__mine__max": "max\n", "jobs__max": "3000\n"}, 3000),
        ("0::/jobs/mine\n", {"jobs__mine__max": "2000\n", "jobs__max": "3000\n"}, 2000),
        ("0::/jobs/mine\n", {"jobs__mine__max": "4000\n", "jobs__max": "3000\n"}, 3000),
        ("0::/jobs/mine\n", {"jobs__yours__max": "10\n", "jobs__mine__max": "max\n"}, None),
        ("0::/\n", {}, None),
        ("", {"max": "5\n"}, None),
        ("5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n", {"a__v1": "7000\n", "v1": NO_LIMIT_V1}, 7000),
        ("4:memory:/docker/0a1b\n", {"v1": "8000\n"}, 8000),  # the host's path, the container's files
        ("4:hugetlb,memory:/\n1:name=systemd:/\n", {"v1": "9000\n"}, 9000),
        ("4:memory:/\n0::/\n", {"v1": "9000\n", "max": "6000\n"}, 6000),
        ("4:cpu:/\n", {"v1": "9000\n"}, None),
    ],
)
def test_the_smallest_limit_counts(tmp_path: Path, membership: str, files: dict[str, str], limit: int | None) -> None:
    assert control_group_limit(membership, tree(tmp_path, **files)) == limit


def limited(monkeypatch: pytest.MonkeyPatch, root: Path, limit: str) -> None:
    """This process as one of a container with that limit."""
    monkeypatch.setattr(memory, "_ROOT", tree(root, max=limit))
    (root / "membership").write_text("0::/\n")
    monkeypatch.setattr(memory, "_MEMBERSHIP", root / "membership")


def test_a_run_that_its_container_cannot_hold_is_refused(
    cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 250_000, "SC_PAGE_SIZE": 4096}.get)
    limited(monkeypatch, tmp_path / "groups", "1000000\n")
    Path("run.toml").write_text(run_file())
    ended = cli("train", "run.toml", "--workers", "100")
    assert (ended.code, ended.out) == (2, "")
    whose = "that the control group of this process may use (a container or batch system sets it)"
    assert ended.err.startswith(f"error: train.workers=100: must fit into the 1.00 MB of memory {whose}, but need ")


def test_a_limit_above_the_machine_s_memory_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}.get)
    limited(monkeypatch, tmp_path, "50000\n")
    assert memory.usable_memory() == (40_960, "of this machine")
