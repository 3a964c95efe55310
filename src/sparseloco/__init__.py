"""Pre-train language models on machines joined by slow links.

The algorithm never communicates: a :class:`Replica` emits envelopes and is given envelopes, and a transport carries
them. Every published method is a value made of parts; see :mod:`sparseloco.presets`.
"""

from sparseloco import presets
from sparseloco.algorithm import Algorithm
from sparseloco.channel import Channel, ErrorFeedback
from sparseloco.errors import (
    CheckpointError,
    ConfigError,
    DivergenceError,
    QuorumError,
    SparseLocoError,
    WireError,
)
from sparseloco.local import Gradients, InnerSteps, OptimizerSpec, adamw, sgd
from sparseloco.replica import Replica
from sparseloco.schedule import SyncSchedule, WarmupCosine
from sparseloco.session import synchronize
from sparseloco.transport import Loopback, ProcessGroup, Transport, advance, settle

__version__ = "0.1.0"

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
    "ProcessGroup",
    "QuorumError",
    "Replica",
    "SparseLocoError",
    "SyncSchedule",
    "Transport",
    "WarmupCosine",
    "WireError",
    "adamw",
    "advance",
    "presets",
    "settle",
    "sgd",
    "synchronize",
]
