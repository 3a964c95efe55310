"""Documentation in English out of packages: dictionaries, an FAQ, manuals; what is prose of it, each paragraph once.

The packages are those that gave the most of the known file. It held about 50, whose names and versions were not all
written down, so what is made here is of the same kind and not the same.
"""

from __future__ import annotations

import gzip
import html
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

_DICTIONARIES = ("dict-gcide", "dict-foldoc", "dict-jargon")
_ESSAYS = ("anarchism",)
_MANUALS = (
    "erlang-doc", "ghc-doc", "git-doc", "linux-doc-6.1", "manpages", "manpages-dev", "octave-doc", "openjdk-17-doc",
    "perl-doc", "postgresql-doc-15", "python-django-doc", "python-sklearn-doc", "python3.11-doc", "racket-doc",
    "rust-doc", "sqlite3-doc", "vim-doc",
)  # fmt: skip
PACKAGES = (*_DICTIONARIES, *_ESSAYS, *_MANUALS)

_PROSE = 0.45
"""Share of prose that a document of a manual must have; essays need less."""
_LITTLE = """
the of and to a in is that it for as with be by on not or this are from at an was his he have you which but if can will
all one has when they there so what your we use used any may its no more into other such than only new then these must
also been were would who their them him her she i my me had do did about out up some could should our
"""
_STOP_WORDS = frozenset(_LITTLE.split())
_LEFT_OUT = re.compile(
    r"changelog|copyright|genindex|searchindex|index-all|alphaindex|allclasses|-use\.html|package-tree|overview-tree"
    r"|/class-use/|/src-html/|/_static/|/locale/"
)
_BLOCK = re.compile(r"(?i)</?(p|div|br|li|tr|h[1-6]|dt|dd|table|ul|ol|dl|section|blockquote|title|article|hr)\b[^>]*>")
_PARAGRAPHS = {"p", "h1", "h2", "h3", "h4", "h5", "h6", "table", "blockquote", "section", "title", "article"}
_DROPPED = (
    "script,style,nav,footer,head,svg,noscript,header,.navigation,.navheader,.navfooter,.sphinxsidebar,.related,"
    ".footer,.sidebar,.headerlink,#nav,#sidebar,#footer,#header,form,button"
)
_TROFF = {r"\-": "-", r"\&": "", r"\e": "\\", r"\(aq": "'", r"\(dq": '"', r"\(em": "--", r"\(bu": "*"}


def texts(work: Path) -> Iterator[str]:
    """Documents, in the order in which they are cut."""
    packages = work / "packages"
    seen: set[int] = set()
    for name in _DICTIONARIES:
        yield dictionary(packages / name)
    for name in (*_ESSAYS, *_MANUALS):
        share = 0.3 if name in _ESSAYS else _PROSE
        kept = list(prose_of("\n\n\n".join(files_of(packages / name)), share, seen))
        yield from ["\n\n\n".join(kept)] if name in _ESSAYS else kept
        print(f"{name}: {sum(map(len, kept)) / 1e6:.1f} million characters", flush=True)


def dictionary(package: Path) -> str:
    """A dictionary of the dict protocol as plain text."""
    (file,) = sorted(package.rglob("*.dict.dz"))[:1]
    text = gzip.decompress(file.read_bytes()).decode("utf-8", "replace")
    return re.sub(r" *\[1913 Webster\]", "", text)


def files_of(package: Path) -> Iterator[str]:
    """Text of every file of a package, its repeated paragraphs left out."""
    seen: set[int] = set()
    for path in sorted(package.rglob("*")):
        name = str(path.relative_to(package)).lower()
        reader = None if _LEFT_OUT.search(f"/{name}") else _reader_of(name)
        if reader is None or path.is_symlink() or not path.is_file():
            continue
        text = _once(reader(_content(path)), seen)
        if len(text) > 400:
            yield text


def _reader_of(name: str) -> Callable[[bytes], str] | None:
    if "/man/" in name:
        return manual_page if re.search(r"share/man/man\d/", name) else None
    plain = name.removesuffix(".gz")
    if plain.endswith((".html", ".htm", ".xhtml")):
        return web_page
    if plain.endswith(".pod"):
        return perl_page
    if "/info/" in name and "info" in name.rpartition("/")[2]:
        return info_page
    if plain.endswith((".rst", ".rst.txt", ".txt", ".md", ".adoc", ".org")):
        return lambda raw: raw.decode("utf-8", "replace")
    return None


def _content(path: Path) -> bytes:
    raw = path.read_bytes()
    try:
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error):
        return b""


def _once(text: str, seen: set[int]) -> str:
    kept: list[str] = []
    for paragraph in re.split(r"\n{2,}", text):
        bare = paragraph.strip()
        if len(bare) < 2 or (len(bare) >= 40 and _is_repeated(bare, seen)):
            continue
        kept.append(paragraph.rstrip())
    return "\n\n".join(kept)


def _is_repeated(paragraph: str, seen: set[int]) -> bool:
    import xxhash

    digest = xxhash.xxh64_intdigest(paragraph.encode("utf-8", "replace"))
    repeated = digest in seen
    seen.add(digest)
    return repeated


def web_page(raw: bytes) -> str:
    """Text of an HTML page without what stands around it; preformatted text stays as it is."""
    from selectolax.lexbor import LexborHTMLParser

    text = raw.decode("utf-8", "replace")
    if text.count("\ufffd") > 5:
        text = raw.decode("latin-1")
    tree = LexborHTMLParser(text)
    if tree.body is None:
        return ""
    for node in tree.css(_DROPPED):
        node.decompose()
    parts = [_web_part(part) for part in re.split(r"(?is)(<pre\b.*?</pre>)", tree.body.html or "")]
    text = html.unescape("".join(parts)).replace("\xa0", " ").replace("\u200b", "").replace("\u00b6", "")
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip()


def _web_part(part: str) -> str:
    if part[:4].lower() == "<pre":
        return "\n\n" + re.sub(r"<[^>]+>", "", part).strip("\n") + "\n\n"
    part = _BLOCK.sub(lambda m: "\n\n" if m[1].lower() in _PARAGRAPHS else "\n", re.sub(r"\s+", " ", part))
    return re.sub(r"\n[ \t]+", "\n", re.sub(r"<[^>]+>", "", part))


def manual_page(raw: bytes) -> str:
    """Text of a manual page: headings, paragraphs, and arguments of the other macros."""
    lines = (_manual_line(line) for line in raw.decode("utf-8", "replace").split("\n"))
    return "\n".join(line for line in lines if line is not None)


def _manual_line(line: str) -> str | None:
    if line.startswith(('.\\"', "'\\\"", ".TH", ".if", ".ie", ".el", ".nr", ".ds", ".de", ".so")):
        return None
    before = ""
    if heading := re.match(r"\.(SH|SS)\s+(.*)", line):
        return f"\n{heading[2].strip(chr(34))}\n"
    if line.startswith((".PP", ".P", ".LP", ".TP", ".IP", ".HP")):
        before, line = "\n\n", re.sub(r"^\.\w+", "", line).strip().strip('"')
    elif re.match(r"\.[A-Z]{1,3}\b", line):
        line = re.sub(r"^\.\w+\s*", "", line).replace('"', "")
    elif line[:1] in (".", "'"):
        return None
    line = re.sub(r"\\f[A-Z]|\\f\(..|\\f\[[^\]]*\]", "", line)
    for code, character in _TROFF.items():
        line = line.replace(code, character)
    return before + line if line.strip() else before or None


def perl_page(raw: bytes) -> str:
    """Text of Perl's plain old documentation."""
    kept: list[str] = []
    inside = False
    for line in raw.decode("utf-8", "replace").split("\n"):
        if line.startswith("="):
            inside = not line.startswith("=cut")
            line = re.sub(r"^=\w+\s*", "", line)
        if inside:
            kept.append(re.sub(r"[A-Z]<([^<>|]*\|)?([^<>]*)>", r"\2", line))
    return "\n".join(kept)


def info_page(raw: bytes) -> str:
    """Text of an Info file without the marks between its nodes."""
    return re.sub(r"\x1f[^\n]*\n(?:File:[^\n]*\n)?", "\n", raw.decode("utf-8", "replace"))


def prose_of(text: str, least: float, seen: set[int]) -> Iterator[str]:
    """Documents of which prose has a share of at least ``least``, their repeated paragraphs left out."""
    for document in re.split(r"\n{3,}", text):
        kept: list[str] = []
        size = prose = 0
        for paragraph in re.split(r"\n\s*\n", document):
            bare = paragraph.strip()
            if not bare or (len(bare) >= 60 and _is_repeated(re.sub(r"\s+", " ", bare), seen)):
                continue
            kept.append(paragraph.rstrip())
            size += len(bare)
            prose += len(bare) * is_prose(bare)
        if size >= 300 and prose / size >= least:
            yield "\n\n".join(kept)


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph has the little words and letters of English sentences."""
    words = paragraph.split()
    if len(paragraph) < 60 or len(words) < 9:
        return False
    little = sum(word.lower().strip(".,;:!?()\"'") in _STOP_WORDS for word in words) / len(words)
    letters = sum(c.isalpha() or c == " " for c in paragraph) / len(paragraph)
    return little >= 0.22 and letters >= 0.82 and sum(map(str.isascii, paragraph)) / len(paragraph) > 0.97
