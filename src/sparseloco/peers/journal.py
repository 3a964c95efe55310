"""What a peer must not forget when it is killed: its last frame of each fragment, and the residual it left behind.

Written before the frame is put. A peer that starts again puts the same bytes again, and knows afterwards, from the
manifest of that round, whether they are in the residual or with the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparseloco.checkpoint import write_durably
from sparseloco.errors import CheckpointError
from sparseloco.peers.tensors import pack, unpack
from sparseloco.types import Key

_HASH_BYTES = 32


@dataclass(frozen=True)
class Posted:
    """A frame as it was put, and what a peer must know to go on from there.

    Attributes:
        key: Round and fragment.
        frame: The whole object, signature included.
        weight: Of the message; 0: it abstained.
        residual: Blocks after encoding; empty where there was none.
    """

    key: Key
    frame: bytes
    weight: int
    residual: list[Tensor]

    @property
    def hash(self) -> str:
        """Hash of the object, as manifests list it."""
        return hashlib.sha256(self.frame).hexdigest()


@dataclass(frozen=True)
class Journal:
    """The last post of each fragment, one file per fragment.

    Args:
        folder: Of one peer of one run, on a local disk; it is made when the first post is written.
        run: Run id, 16 hex digits.
    """

    folder: Path
    run: str

    def write(self, posted: Posted) -> None:
        """Replace what is known of that fragment; it is on the disk when this returns.

        Raises:
            CheckpointError: if it cannot be written; the frame must not leave this peer then.
        """
        state = {f"residual/{j:08}": block for j, block in enumerate(posted.residual)}
        state["frame"] = torch.frombuffer(bytearray(posted.frame), dtype=torch.uint8)
        facts = {"run": self.run, "round": posted.key.round, "fragment": posted.key.fragment, "weight": posted.weight}
        data = pack(state, facts)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_durably(self._path(posted.key.fragment), hashlib.sha256(data).digest() + data)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: what this peer sends cannot be saved first ({error.strerror or error}); free space "
                "there or make it writable"
            ) from error

    def read(self, fragment: int) -> Posted | None:
        """The last post of a fragment; None if there was none.

        Raises:
            CheckpointError: if the file is damaged or of another run.
        """
        path = self._path(fragment)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{path}: must be readable ({error.strerror or error}); make it so") from error
        if hashlib.sha256(data[_HASH_BYTES:]).digest() != data[:_HASH_BYTES]:
            raise CheckpointError(f"{path}: content does not match its hash; remove it, which costs its residual only")
        state, facts = unpack(data[_HASH_BYTES:])
        if facts["run"] != self.run or facts["fragment"] != fragment:
            raise CheckpointError(f"{path}: is of run {facts['run']}, this is {self.run}; use one folder per run")
        residual: Sequence[str] = sorted(path for path in state if path.startswith("residual/"))
        return Posted(
            Key(facts["round"], fragment),
            bytes(state["frame"].numpy()),
            facts["weight"],
            [state[path] for path in residual],
        )

    def _path(self, fragment: int) -> Path:
        return self.folder / f"fragment-{fragment:04}.state"
