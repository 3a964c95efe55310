"""Documents on disk: written once as a stream, read back in any order, never all in memory.

Of each document only its hash, place and size are held: 48 bytes. Knows nothing of where text comes from.
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple, overload

import numpy as np

_HASH_BYTES = 32


class Document(NamedTuple):
    """One unit of text: it is in one split as a whole, and an end token follows it.

    Attributes:
        doc_id: File name relative to the corpus, with the number of the piece where a file was cut.
        text: The text, with LF line ends.
    """

    doc_id: str
    text: str


class Texts(Sequence[str]):
    """Some documents of a corpus, in some order, read when they are asked for.

    Args:
        documents: All documents.
        chosen: Which of them, in order.
        sizes: UTF-8 bytes of all documents.
    """

    def __init__(self, documents: Sequence[Document], chosen: np.ndarray, sizes: np.ndarray) -> None:
        self._documents, self._chosen, self._sizes = documents, chosen, sizes

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all of them."""
        return int(self._sizes[self._chosen].sum())

    def __len__(self) -> int:
        return len(self._chosen)

    def __iter__(self) -> Iterator[str]:
        return (self._documents[number].text for number in self._chosen.tolist())

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Texts: ...
    def __getitem__(self, index: int | slice) -> str | Texts:
        if isinstance(index, slice):
            return Texts(self._documents, self._chosen[index], self._sizes)
        return self._documents[int(self._chosen[index])].text


class DocumentFile(Sequence[Document]):
    """Documents in a file, as ``DocumentWriter`` left them.

    Args:
        stream: The file, open for reading; it may have been deleted since.
        starts: Where each document begins.
        sizes: UTF-8 bytes of each.
        digests: SHA-256 of each, as four numbers ``[n, 4]``.
    """

    def __init__(self, stream: IO[bytes], starts: np.ndarray, sizes: np.ndarray, digests: np.ndarray) -> None:
        self._stream, self._starts = stream, starts
        self.sizes = sizes
        self.digests = digests

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | Sequence[Document]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        self._stream.seek(int(self._starts[index]))
        return Document(f"#{index}", self._stream.read(int(self.sizes[index])).decode())


class DocumentWriter:
    """Appends documents to a file; ``finish`` leaves out those that equal an earlier one.

    Args:
        path: The file; it is replaced.
    """

    def __init__(self, path: Path) -> None:
        self._stream = path.open("w+b")
        self._sizes = array.array("q")
        self._digests = bytearray()

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes so far."""
        return self._stream.tell()

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, text: str) -> None:
        """Append one document."""
        raw = text.encode()
        self._stream.write(raw)
        self._sizes.append(len(raw))
        self._digests += hashlib.sha256(raw).digest()

    def finish(self) -> tuple[DocumentFile, np.ndarray]:
        """All different documents, and the numbers that they had when they were added."""
        self._stream.flush()
        sizes = np.array(self._sizes, dtype=np.int64)
        starts = np.cumsum(sizes) - sizes
        digests = as_numbers(bytes(self._digests))
        kept = first_of_each(digests)
        return DocumentFile(self._stream, starts[kept], sizes[kept], digests[kept]), kept

    def close(self) -> None:
        """Close the file, also for the ``DocumentFile``."""
        self._stream.close()


def as_numbers(hashes: bytes) -> np.ndarray:
    """Concatenated SHA-256 hashes as numbers ``[n, 4]`` that are ordered as the hashes are."""
    return np.frombuffer(hashes, dtype=">u8").astype(np.uint64).reshape(-1, _HASH_BYTES // 8)


def as_bytes(digests: np.ndarray) -> bytes:
    """Back to concatenated hashes."""
    return digests.astype(">u8").tobytes()


def order_of(digests: np.ndarray) -> np.ndarray:
    """Numbers of the documents in the order of their hashes; equal ones stay in order."""
    return np.lexsort(tuple(digests.T[::-1]))


def first_of_each(digests: np.ndarray) -> np.ndarray:
    """Numbers, in order, of documents that do not equal an earlier one."""
    order = order_of(digests)
    ordered = digests[order]
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return np.sort(order[is_new])


def index_of(documents: Sequence[Document]) -> tuple[np.ndarray, np.ndarray]:
    """Hashes ``[n, 4]`` and UTF-8 sizes ``[n]`` of documents."""
    if isinstance(documents, DocumentFile):
        return documents.digests, documents.sizes
    raws = [document.text.encode() for document in documents]
    digests = as_numbers(b"".join(hashlib.sha256(raw).digest() for raw in raws))
    return digests, np.array([len(raw) for raw in raws], dtype=np.int64)
