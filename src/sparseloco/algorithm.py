"""The algorithm: a frozen value that is its own configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch

from sparseloco.channel import Channel, ErrorFeedback
from sparseloco.compress import Dense
from sparseloco.errors import ConfigError
from sparseloco.fragments import FragmentRule, Whole
from sparseloco.layout import Flat
from sparseloco.local import Gradients, LocalPhase, OptimizerSpec
from sparseloco.merge import Replace
from sparseloco.outer import Sgd
from sparseloco.reduce import Mean
from sparseloco.schedule import SyncSchedule
from sparseloco.sections import section_bytes
from sparseloco.types import Merge, OuterOptimizer, TensorSpec, state_dtype

FORMAT = 1
"""Version of everything that peers must compute alike; part of each fingerprint."""

BUFFER_CHANNEL = Channel(layout=Flat(), compressor=Dense(), reducer=Mean(over="peers"))
"""How floating-point buffers travel under ``sync_buffers``: their plain mean."""


@dataclass(frozen=True)
class Recipe:
    """The preset call an algorithm came from."""

    preset: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A training method, composed of parts. Two equal algorithms do the same thing.

    Args:
        local: What a replica does between rounds.
        channel: What a fragment sends and makes of what it receives.
        outer: Step on the anchor.
        schedule: When fragments are posted and collected.
        merge: What live parameters become after a round.
        fragments: Which tensors are synced together.
        sync_buffers: Average floating-point buffers with every round instead of keeping them private.
        recipe: Preset and settings it was made from, for TOML; not part of equality.

    Raises:
        ConfigError: if parts contradict each other.
    """

    local: LocalPhase
    channel: Channel
    outer: OuterOptimizer = Sgd()
    schedule: SyncSchedule
    merge: Merge = Replace()
    fragments: FragmentRule = Whole()
    sync_buffers: bool = False
    recipe: Recipe | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.local, Gradients) and self.schedule != SyncSchedule(every=1):
            raise ConfigError(
                f"schedule={self.schedule!r}: must be SyncSchedule(every=1) for methods that send gradients; "
                "use InnerSteps to train between rounds"
            )

    @property
    def portable(self) -> bool:
        """Whether anchors have the same bits on every IEEE machine."""
        return self.channel.portable and self.outer.portable

    def fingerprint(self, specs: Sequence[TensorSpec]) -> str:
        """16 hex digits over everything peers must share: :meth:`shared` and the tensor table."""
        shared = {
            **self.shared(),
            "tensors": [(spec.name, list(spec.shape), str(spec.dtype)) for spec in specs],
        }
        canonical = json.dumps(shared, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def shared(self) -> dict[str, Any]:
        """Parts and settings that peers must have in common, as JSON values.

        Inner optimizer and clipping are left out: each replica may choose its own.
        """
        return {
            "format": FORMAT,
            "local": _plain(self.local.shared, shared=True),
            "channel": _plain(self.channel, shared=True),
            "outer": _plain(self.outer, shared=True),
            "schedule": _plain(self.schedule, shared=True),
            "merge": _plain(self.merge, shared=True),
            "fragments": _plain(self.fragments, shared=True),
            "sync_buffers": self.sync_buffers,
        }

    def describe(self, specs: Sequence[TensorSpec]) -> Description:
        """What this method costs on a model with these tensors, computed without allocating any."""
        sent = 0
        for rows in self.fragments.assign(specs):
            chosen = [specs[row] for row in rows]
            meta = [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in chosen]
            state = self.channel.init(chosen, meta)
            sent += section_bytes(self.channel.part_specs(state))
        parameters = sum(spec.numel for spec in specs)
        stored = sum(spec.numel * state_dtype(spec.dtype).itemsize for spec in specs)
        return Description(
            name=self.recipe.preset if self.recipe else "custom",
            parameters=parameters,
            num_fragments=len(self.fragments.assign(specs)),
            inner_steps=self.schedule.every,
            payload_bytes_per_round=sent,
            dense_bytes_per_round=4 * parameters,
            portable=self.portable,
            state_bytes={
                "anchor": stored,
                "residual": stored if self.channel.feedback else 0,
            },
            fingerprint=self.fingerprint(specs),
            parts=_plain(self),
        )


@dataclass(frozen=True, kw_only=True)
class Description:
    """Figures and parts of an algorithm on one model; bytes are without frame headers.

    Attributes:
        payload_bytes_per_round: What one replica sends per round, all fragments, in FIXED coding.
        dense_bytes_per_round: The same as dense float32.
        state_bytes: Memory beside parameters and inner optimizer, by kind.
    """

    name: str
    parameters: int
    num_fragments: int
    inner_steps: int
    payload_bytes_per_round: int
    dense_bytes_per_round: int
    portable: bool
    state_bytes: Mapping[str, int]
    fingerprint: str
    parts: Mapping[str, Any]

    @property
    def compression(self) -> float:
        """Dense float32 bytes over payload bytes; larger is better."""
        return self.dense_bytes_per_round / max(1, self.payload_bytes_per_round)


def _plain(part: Any, *, shared: bool = False) -> Any:
    """A part as JSON values, with its stable name; functions by their qualified name.

    Raises:
        ConfigError: if it must be comparable between peers (``shared``) and holds a function that is not.
    """
    if isinstance(part, OptimizerSpec):
        settings = {key: _plain(value, shared=shared) for key, value in part.settings}
        return {"name": part.cls.__name__, "lr": _plain(part.lr, shared=shared), **settings}
    if is_dataclass(part) and not isinstance(part, type):
        own = [f.name for f in fields(part) if f.name != "recipe"]
        values = {name: _plain(getattr(part, name), shared=shared) for name in own}
        return {"part": getattr(part, "name", type(part).__name__), **values}
    if isinstance(part, (tuple, list)):
        return [_plain(item, shared=shared) for item in part]
    if isinstance(part, (str, int, float, bool)) or part is None:
        return part
    name = getattr(part, "__qualname__", repr(part))
    if shared and not name.replace(".", "").isidentifier():
        raise ConfigError(
            f"setting={name}: must be a frozen dataclass or a function at the top of a module, so that peers can "
            "compare it; use WarmupCosine or write one of these"
        )
    return name


__all__ = ["BUFFER_CHANNEL", "FORMAT", "Algorithm", "Description", "ErrorFeedback", "Recipe"]
