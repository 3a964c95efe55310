"""Pre-train language models on machines joined by slow links.

The algorithm never communicates: a :class:`Replica` emits envelopes and is given envelopes, and a transport carries
them. Every published method is a value made of parts; see :mod:`sparseloco.presets`.

Public names are imported when they are first used, so that ``sparseloco --help`` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparseloco import presets
    from sparseloco.algorithm import Algorithm
    from sparseloco.channel import Channel, ErrorFeedback
    from sparseloco.errors import (
        CheckpointError,
        ConfigError,
        DivergenceError,
        PeerLostError,
        QuorumError,
        SparseLocoError,
        WireError,
    )
    from sparseloco.local import Gradients, InnerSteps, OptimizerSpec, adamw, sgd
    from sparseloco.muon_adamw import muon
    from sparseloco.replica import Replica
    from sparseloco.schedule import SyncSchedule, WarmupCosine
    from sparseloco.session import synchronize
    from sparseloco.transport import Loopback, ProcessGroup, Speaker, Transport, advance, drain, settle
    from sparseloco.transport.object_store import ObjectStore as ObjectStore

__version__ = "0.1.0"

_HOMES = {
    "algorithm": ("Algorithm",),
    "channel": ("Channel", "ErrorFeedback"),
    "errors": (
        "CheckpointError",
        "ConfigError",
        "DivergenceError",
        "PeerLostError",
        "QuorumError",
        "SparseLocoError",
        "WireError",
    ),
    "local": ("Gradients", "InnerSteps", "OptimizerSpec", "adamw", "sgd"),
    "muon_adamw": ("muon",),
    "replica": ("Replica",),
    "schedule": ("SyncSchedule", "WarmupCosine"),
    "session": ("synchronize",),
    "transport.object_store": ("ObjectStore",),  # not in __all__: it needs the extra `peers`
    "transport": ("Loopback", "ProcessGroup", "Speaker", "Transport", "advance", "drain", "settle"),
}
"""Module -> the public names that it defines."""


def __getattr__(name: str) -> Any:
    """Import a public name from its module, once."""
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"sparseloco.{home}"), name)
            globals()[name] = value
            return value
    if name == "presets":
        return importlib.import_module("sparseloco.presets")
    raise AttributeError(f"module 'sparseloco' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names too, whether they were used yet or not."""
    return sorted({*globals(), *__all__})


__all__ = [
    "Algorithm",
    "Channel",
    "CheckpointError",
    "ConfigError",
    "DivergenceError",
    "ErrorFeedback",
    "Gradients",
    "InnerSteps",
    "Loopback",
    "OptimizerSpec",
    "PeerLostError",
    "ProcessGroup",
    "QuorumError",
    "Replica",
    "SparseLocoError",
    "Speaker",
    "SyncSchedule",
    "Transport",
    "WarmupCosine",
    "WireError",
    "adamw",
    "advance",
    "drain",
    "muon",
    "presets",
    "settle",
    "sgd",
    "synchronize",
]
