"""What a peer made, kept and sent, seen from outside: computed beside the library, and closed against the manifests.

Before each post: the delta (anchor as given minus live), the residual of that moment and what the payload decodes to.
Such an entry counts once the peer's journal has its round, since before that nothing of it can leave the peer.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.chaos.task import DECAY
from sparseloco.replica import Replica
from sparseloco.types import Payload

_END = "end.json"


def flat(blocks: Sequence[Tensor]) -> Tensor:
    """All numbers of some blocks, as one float64 vector."""
    return torch.cat([block.detach().reshape(-1).double() for block in blocks])


def delta_of(replica: Replica) -> Tensor:
    """Anchor as it was given minus live parameters, in the order of the blocks."""
    (lane,) = replica.lanes
    state = lane.state
    blocks: list[Tensor] = []
    for anchor, live, layout in zip(lane.anchors(), lane.live(), state.layouts, strict=True):
        blocks += layout.split(anchor.to(live.dtype) - live)
    return flat([block.reshape(state.anchor[j].shape) for j, block in enumerate(blocks)])


def decoded(replica: Replica, payload: Payload) -> Tensor:
    """What a payload adds up to."""
    (lane,) = replica.lanes
    blocks = [torch.zeros_like(anchor) for anchor in lane.state.anchor]
    for j, block in enumerate(blocks):
        lane.channel.compressor.accumulate_(block, payload.blocks[j], 1, lane.state.codec[j])
    return flat(blocks)


@dataclass(frozen=True)
class Ledger:
    """The entries of one peer, a file each, that outlive it."""

    folder: Path

    def begin(self, journal: tuple[int, str] | None) -> None:
        """Go on with what counts: entries up to the round, and with the frame, that the journal has."""
        self.folder.mkdir(parents=True, exist_ok=True)
        last, hash_ = journal or (-1, "")
        for path in self.folder.glob("[0-9]*.npy"):
            round_, name = _place(path)
            if round_ > last or (round_ == last and name != hash_):
                path.unlink()

    def write(self, round_: int, hash_: str, *, delta: Tensor, residual: Tensor, sent: Tensor) -> None:
        """One post."""
        path = self.folder / f"{round_:08}-{hash_}.npy"
        half = path.with_suffix(".half")
        with half.open("wb") as file:
            np.save(file, torch.stack([delta, residual, sent]).numpy())
        half.rename(path)

    def say(self, kind: str, round_: int, digest: str) -> None:
        """What a peer said; with "closed" comes its shared state before the round that has its manifest."""
        with (self.folder / "said").open("a") as file:
            file.write(f"{kind} {round_} {digest}\n")

    def end(self, residual: Tensor, digest: str, loss: float) -> None:
        """What is left when the run is over."""
        np.save(self.folder / "residual.end", residual.numpy())
        half = self.folder / f"{_END}.half"
        half.write_text(json.dumps({"digest": digest, "loss": loss}))
        half.rename(self.folder / _END)

    @property
    def has_ended(self) -> bool:
        """Whether the peer came to the end of the run."""
        return (self.folder / _END).exists()


@dataclass(frozen=True)
class Balance:
    """A ledger that was closed.

    Attributes:
        error: 2-norm of what does not add up, over that of the sum of all deltas.
        posts: Payloads that were made.
        accepted: Of these, listed by manifests.
        strangers: Frames that manifests list of this peer and that it did not make.
        digests: Shared state before each round that this peer went through; more than one where it changed its mind.
        digest: Of the last one.
        loss: Held out, in the end.
        told: How often this peer said what, over all its lives.
    """

    error: float
    posts: int
    accepted: int
    strangers: int
    digests: dict[int, set[str]]
    digest: str
    loss: float
    told: dict[str, int]


def close(folder: Path, listed: Mapping[int, str]) -> Balance:
    """Close the ledger of a peer whose frames ``listed`` are in the accepted manifests, by round."""
    made = {_place(path): torch.from_numpy(np.load(path)) for path in sorted(folder.glob("[0-9]*.npy"))}
    left = torch.from_numpy(np.load(folder / "residual.end.npy"))
    deltas, shed, accepted = (torch.zeros_like(left) for _ in range(3))
    for (round_, hash_), (delta, residual, sent) in made.items():
        deltas += delta
        shed += (1 - DECAY) * residual
        if listed.get(round_) == hash_:
            accepted += sent
    gap = deltas - (accepted + left + shed)
    digests: dict[int, set[str]] = {}
    told: Counter[str] = Counter()
    for line in (folder / "said").read_text().splitlines():
        kind, round_text, digest = line.split(" ")
        told[kind] += 1
        if kind == "closed":
            digests.setdefault(int(round_text), set()).add(digest)
    end = json.loads((folder / _END).read_text())
    return Balance(
        error=float(gap.norm() / deltas.norm()),
        posts=len(made),
        accepted=sum(listed.get(round_) == hash_ for round_, hash_ in made),
        strangers=sum((round_, hash_) not in made for round_, hash_ in listed.items()),
        digests=digests,
        digest=end["digest"],
        loss=end["loss"],
        told=dict(told),
    )


def _place(path: Path) -> tuple[int, str]:
    round_, _, hash_ = path.stem.partition("-")
    return int(round_), hash_
