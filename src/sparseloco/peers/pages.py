"""Folders in which anybody may fill a folder of one's own: read page by page, and of each no more than its share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sparseloco.peers.store import PAGE, Listed, Store, past

MAX_PAGES = 64
"""Pages of one look: so many folders that are full, or 64,000 objects in others."""


@dataclass
class Walk:
    """Which pages to ask for.

    It does no input or output::

        for folder, after in walk:
            page = store.page(folder, after=after)
            taken += [entry for entry in page.entries if walk.takes(entry.path)]
            walk.goes_on(page.rest)

    A folder that has had its share is jumped over, so who fills one costs the others a page. Who has many costs all of
    the pages; folders of a known name that were not reached are then looked into one by one, as where nothing is seen.

    Attributes:
        prefix: The folder, with the slash at its end.
        share: Objects that are taken of each folder directly below it.
        known: Names of folders that are looked into however many others there are; asked for only then.
        whole: Whether nothing was left out so far.
    """

    prefix: str
    share: int
    known: Iterable[str] = ()
    whole: bool = True
    _looked: dict[str, int] = field(default_factory=dict[str, int])
    _rest: str = ""

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """What to list next, and after which path."""
        after = ""
        for _ in range(MAX_PAGES):
            self._rest = ""
            yield self.prefix, after
            if not self._rest and self._looked:
                return
            if not self._rest:
                break  # a name that is no path may lie in it, which hides all that is there
            after = self._next(after)
        else:
            self.whole = False
        for name in sorted(self.known):
            folder = f"{self.prefix}{name}/"
            if past(folder) > after:
                yield folder, after

    def takes(self, path: str) -> bool:
        """Whether an object is within the share of its folder; those that lie in none always are."""
        folder = self._folder(path)
        self._looked[folder] = self._looked.get(folder, 0) + 1
        within = not folder or self._looked[folder] <= self.share
        self.whole = self.whole and within
        return within

    def goes_on(self, rest: str) -> None:
        """Where the page ended."""
        self._rest = rest

    def _next(self, after: str) -> str:
        folder = self._folder(self._rest)
        if folder and folder == self._folder(after):
            # A page of nothing but this folder; most of it may have been left out.
            self._looked[folder] = self._looked.get(folder, 0) + PAGE
        crowded = folder and self._looked.get(folder, 0) >= self.share
        self.whole = self.whole and not crowded
        return past(f"{self.prefix}{folder}") if crowded else self._rest

    def _folder(self, path: str) -> str:
        return path.removeprefix(self.prefix).partition("/")[0] if "/" in path.removeprefix(self.prefix) else ""


def listed(store: Store, prefix: str, *, share: int, known: Iterable[str] = ()) -> Iterator[Listed]:
    """Objects below a folder as :class:`Walk` reads it; a page is asked for when it is needed.

    Raises:
        StoreError: as :meth:`~sparseloco.peers.store.Store.page`.
    """
    return read(store, Walk(prefix, share, known))


def read(store: Store, walk: Walk) -> Iterator[Listed]:
    """The same for a walk that somebody wants to ask afterwards whether it was whole."""
    for folder, after in walk:
        page = store.page(folder, after=after)
        yield from (entry for entry in page.entries if walk.takes(entry.path))
        walk.goes_on(page.rest)
