"""Checkpoints on a disk: tensors as safetensors, one JSON index written last, folders renamed into place.

Each part of a checkpoint is one file, written by whoever owns it, without any collective. Knows folders, parts and
hashes; must not know what a run, a model or an algorithm is. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sparseloco.bits import add_digests
from sparseloco.errors import CheckpointError
from sparseloco.part_file import Packed, as_bytes, metadata_of, packed, stored, unpacked

FORMAT = 1
INDEX = "index.json"
_STEP = re.compile(r"step-(\d{8,})")
_FAILED = "failed"


class Stored(msgspec.Struct, frozen=True):
    """Size and hash of one file of a checkpoint."""

    size: int
    sha256: str


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """``index.json``: without it a checkpoint does not exist.

    Attributes:
        format: Version of this layout.
        step: Inner steps made.
        facts: Plain values by name, to show and to compare before anything large is read.
        files: Every other file of the folder.
    """

    format: int
    step: int
    facts: dict[str, Any]
    files: dict[str, Stored]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint; its files are checked against the index whenever they are read."""

    path: Path
    index: Index

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Read the index and check every file.

        Raises:
            CheckpointError: naming the first file that is missing, cut off or changed.
        """
        try:
            index = msgspec.json.decode((path / INDEX).read_bytes(), type=Index)
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointError(
                f"{path / INDEX}: must be a readable index ({_reason(error)}); remove {path}"
            ) from error
        if index.format != FORMAT:
            raise CheckpointError(
                f"{path / INDEX}: format={index.format}: must be {FORMAT}; use the version that wrote it"
            )
        checkpoint = cls(path, index)
        for name in index.files:
            checkpoint.check(name)
        return checkpoint

    @property
    def step(self) -> int:
        """Inner steps made."""
        return self.index.step

    @property
    def facts(self) -> dict[str, Any]:
        """Plain values that were saved with it."""
        return self.index.facts

    def check(self, name: str) -> None:
        """Read one file through, a piece at a time.

        Raises:
            CheckpointError: if it is not what was written.
        """
        try:
            found = _stored(self.path / name)
        except OSError as error:
            raise CheckpointError(
                f"{self.path / name}: must be readable ({_reason(error)}); remove {self.path}"
            ) from error
        self._compare(name, found)

    def read(self, name: str) -> bytes:
        """Content of one file.

        Raises:
            CheckpointError: if it is not what was written.
        """
        try:
            data = (self.path / name).read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"{self.path / name}: must be readable ({_reason(error)}); remove {self.path}"
            ) from error
        self._compare(name, Stored(len(data), hashlib.sha256(data).hexdigest()))
        return data

    def part(self, name: str) -> Any:
        """State that was given to :meth:`CheckpointFolder.write_part`."""
        return unpacked(self.read(f"{name}.safetensors"))

    def stored_part(self, name: str) -> Any:
        """The same with every tensor still on the disk, as it was when this checkpoint was opened and checked."""
        return stored(self.path / f"{name}.safetensors")

    def _compare(self, name: str, found: Stored) -> None:
        path, stored = self.path / name, self.index.files[name]
        if found.size != stored.size:
            raise CheckpointError(f"{path}: size={found.size} bytes: must be {stored.size}; remove {self.path}")
        if found.sha256 != stored.sha256:
            raise CheckpointError(f"{path}: content does not match its hash in {INDEX}; remove {self.path}")


@dataclass(frozen=True)
class CheckpointFolder:
    """All checkpoints of one run.

    A checkpoint grows in a hidden folder and gets its name when it is complete and on the disk. Of the complete ones
    the newest ``keep`` stay; together with the one that grows, the disk never holds more than ``keep + 1``.

    Args:
        root: Folder for them; it is made when the first is written.
        keep: How many complete ones stay.
        patience_s: How long a process waits for what others write.
    """

    root: Path
    keep: int = 2
    patience_s: float = 300.0

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest complete checkpoint, and what is wrong with each newer one that was passed over."""
        refused: list[str] = []
        for _, path in reversed(self._complete()):
            try:
                return Checkpoint.open(path), refused
            except CheckpointError as error:
                refused.append(str(error))
        return None, refused

    def begin(self, step: int | None) -> None:
        """Remove what a killed process has left unfinished, and checkpoints that are not of this run's past.

        Args:
            step: Where the run continues; None if it starts anew.
        """
        for path in self.root.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)
        self._retain(-1 if step is None else step)

    def write_part(self, step: int, name: str, state: Any, *, in_turn: bool = False, digest: str = "") -> None:
        """Write one part of the checkpoint of ``step``; any process may write its own.

        Args:
            step: Inner steps made.
            name: Of the file, without suffix.
            state: Nested dictionaries and lists of tensors and plain values, or what :func:`packed` made of them.
            in_turn: Wait until the checkpoint before is complete, so that a process that runs ahead fills no disk.
            digest: Of what this part holds of the shared state; the index has the sum of all parts that have one.

        Raises:
            CheckpointError: if it cannot be written; nothing of an earlier checkpoint is touched.
        """
        part = state if isinstance(state, Packed) else packed(name, state)
        with self._growing(step) as folder:
            if in_turn:
                self._wait_until(lambda: not self._is_busy(folder), f"{self.root}: the checkpoint before step {step}")
            folder.mkdir(parents=True, exist_ok=True)
            write_durably(folder / f"{name}.safetensors", as_bytes(part, digest))

    def finish(self, step: int, *, parts: Sequence[str], facts: dict[str, Any], files: dict[str, bytes]) -> Path:
        """Wait for all parts, write the index, give the checkpoint its name, and remove old ones.

        Args:
            step: Inner steps made.
            parts: Names of the parts, whoever writes them.
            facts: Plain values for the index.
            files: Further small files by name.

        Raises:
            CheckpointError: if a part does not come or something cannot be written; the checkpoint is then removed.
        """
        place = self.root / f"step-{step:08}"
        with self._growing(step) as folder:
            for name, data in files.items():
                write_durably(folder / name, data)
            names = [f"{name}.safetensors" for name in parts]
            failed = folder / _FAILED
            self._wait_until(
                lambda: failed.exists() or all((folder / name).exists() for name in names),
                f"{folder}: {', '.join(parts)}",
            )
            if failed.exists():
                raise CheckpointError(f"{folder}: must be written by all processes; look at what the others say")
            hashes = {name: _stored(folder / name) for name in [*names, *files]}
            digests = [told for name in names if (told := metadata_of(folder / name).get("digest"))]
            shown = {**facts, **({"digest": add_digests(digests)} if digests else {})}
            index = Index(format=FORMAT, step=step, facts=shown, files=hashes)
            write_durably(folder / INDEX, msgspec.json.format(msgspec.json.encode(index)) + b"\n")
            self._remove(place)
            folder.rename(place)
            _sync_folder(self.root)
        self._retain(step)
        return place

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.patience_s
        while not condition():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{what}: must come within {self.patience_s:g} s; look at what the other processes say, or raise "
                    "transport.deadline_s, of which that is half"
                )
            time.sleep(0.02)

    def _complete(self) -> list[tuple[int, Path]]:
        """Steps and folders, oldest first."""
        found = [(match, path) for path in self.root.glob("step-*") if (match := _STEP.fullmatch(path.name))]
        return sorted((int(match[1]), path) for match, path in found)

    def _retain(self, step: int) -> None:
        """Keep the newest up to ``step``: later ones are damaged, or belong to a past that this run has left."""
        kept = [path for number, path in self._complete() if number <= step][-self.keep :]
        for _, path in self._complete():
            if path not in kept:
                self._remove(path)
        for path in self.root.glob(".step-*.partial"):
            if (path / _FAILED).exists():
                shutil.rmtree(path, ignore_errors=True)

    def _is_busy(self, own: Path) -> bool:
        """Whether an earlier checkpoint is still being written or an old one removed."""
        others = [path for path in self.root.glob(".step-*") if path != own and not (path / _FAILED).exists()]
        return bool(others) or len(self._complete()) > self.keep

    def _remove(self, path: Path) -> None:
        """Hide a folder before it is emptied, so that half of one is never taken for a checkpoint."""
        if path.exists():
            hidden = path.with_name(f".{path.name}.old")
            shutil.rmtree(hidden, ignore_errors=True)
            path.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)

    @contextlib.contextmanager
    def _growing(self, step: int) -> Iterator[Path]:
        """Folder of an unfinished checkpoint; an error inside is marked, for processes that wait, and named."""
        folder = self.root / f".step-{step:08}.partial"
        try:
            yield folder
        except (OSError, CheckpointError) as error:
            with contextlib.suppress(OSError):
                for path in folder.iterdir():
                    path.unlink()
                (folder / _FAILED).touch()
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{self.root}: checkpoint of step {step} cannot be written ({_reason(error)}); free space there or "
                "make it writable"
            ) from error


def write_durably(path: Path, data: bytes) -> None:
    """Write a file so that it is whole under its name, also after a power cut."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _stored(path: Path) -> Stored:
    with path.open("rb") as file:
        return Stored(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
