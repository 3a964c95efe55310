"""Norm clipping: a payload that is much longer than the median of its round is scaled down, alike at every peer.

Every number here is the same on every IEEE machine: sums are exact, and everything else is one rounding at a time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from sparseloco.channel import Channel, ChannelState, on_device
from sparseloco.compress.base import exact_mean
from sparseloco.types import Envelope, Payload, Section


def payload_norm(channel: Channel, state: ChannelState, payload: Payload) -> float:
    """2-norm of what a payload decodes to, worked out where the state is.

    Cost: each block is decoded into float64, one at a time, and its squares are added up; so time goes with the
    parameters of the fragment, not with the values that were kept.
    """
    total: list[float] = []
    for j, parts in payload.blocks.items():
        block = torch.zeros_like(state.anchor[j], dtype=torch.float64)
        channel.compressor.accumulate_(block, on_device(parts, block.device), 1, state.codec[j])
        total += (exact_mean(block.square_()) * block.shape[-1]).tolist()
    return math.sqrt(math.fsum(total))


class Clipped(NamedTuple):
    """A round after clipping.

    Attributes:
        inbox: The envelopes; those that were too long, scaled.
        norms: 2-norm of each payload as it was sent, by number of its peer; none if nothing is clipped.
        most: Length that none has exceeded since.
    """

    inbox: list[Envelope]
    norms: dict[int, float]
    most: float


def clip_to_median(inbox: Sequence[Envelope], norm: Callable[[Payload], float], ratio: float) -> Clipped:
    """Scale payloads down to ``ratio`` times the median norm of the round.

    Args:
        inbox: Checked envelopes of one round.
        norm: Of a payload.
        ratio: At least 1; 0 leaves all as they are.
    """
    if not ratio or len(inbox) < 3:  # of two, nobody knows which is the long one
        return Clipped(list(inbox), {}, math.inf)
    norms = {envelope.peer: norm(envelope.payload) for envelope in inbox}
    most = ratio * statistics.median(norms.values())
    clipped = [
        replace(one, payload=scaled(one.payload, most / norms[one.peer])) if norms[one.peer] > most else one
        for one in inbox
    ]
    return Clipped(clipped, norms, most)


def scaled(payload: Payload, factor: float) -> Payload:
    """A payload that decodes to ``factor`` times as much; decoding is linear in its float parts, whatever the codes."""
    sections: dict[int, Section] = {
        j: {
            name: (part.to(torch.float64) * factor).to(part.dtype) if part.is_floating_point() else part
            for name, part in parts.items()
        }
        for j, parts in payload.blocks.items()
    }
    return replace(payload, sections=sections)
