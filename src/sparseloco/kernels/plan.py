"""What the kernels need to know of a channel and of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from sparseloco.compress.topk import TopK
from sparseloco.compress.values import SignTwoLevel
from sparseloco.sections import specs_by_block
from sparseloco.types import Envelope, FixedMerge, FixedStep, PartSpec

if TYPE_CHECKING:
    from sparseloco.channel import Channel, ChannelState


@dataclass(frozen=True)
class Codec:
    """Tiles or chunks, top-k and two levels: how a channel codes, and the state of its fragment."""

    channel: Channel
    state: ChannelState
    top_k: TopK
    values: SignTwoLevel

    @cached_property
    def specs(self) -> Mapping[int, tuple[PartSpec, ...]]:
        """Rows of the payload's table by block."""
        return specs_by_block(self.channel.part_specs(self.state))

    def velocity(self, block: int, like: Tensor) -> Tensor:
        """Outer momentum of a block, zero before the first step."""
        return self.state.outer[block].setdefault("velocity", like.new_zeros(like.shape))


class Round(NamedTuple):
    """An inbox, the tensors it moves, and how: the mean, the outer step and the merge."""

    inbox: Sequence[Envelope]
    live: Sequence[Tensor]
    snapshot: Sequence[Tensor] | None
    over: str
    outer: FixedStep
    merge: FixedMerge

    def snapshot_of(self, number: int) -> Tensor | None:
        """Live values of one tensor at the time of the post, if the merge asked for them."""
        return None if self.snapshot is None else self.snapshot[number]


class Settled(NamedTuple):
    """What the kernels made of a round.

    Attributes:
        tensors: Numbers of the tensors that are done, their live values included.
        square: Square of the update's 2-norm over these tensors.
        failed: Block whose anchor would have left the range of numbers, or None.
    """

    tensors: frozenset[int] = frozenset()
    square: float = 0.0
    failed: int | None = None
