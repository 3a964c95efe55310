"""A replica's state for loops that checkpoint with ``torch.distributed.checkpoint`` (DCP), as torchtitan's do.

Blocks become tensors in the parameters' own shapes again, placed as the parameters are. So DCP writes each shard from
where it lies, and gives a run with another number of shards its part. Nothing here communicates or touches a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sparseloco.errors import CheckpointError
from sparseloco.lane import StateDict
from sparseloco.layout import Layout
from sparseloco.panels import piece_of
from sparseloco.replica import Replica
from sparseloco.sharding import place_of, placed_like, plain

_BLOCKWISE = ("anchor", "residual")
"""What a replica keeps in blocks; the outer optimizer's state too, under names of its own."""

_OF_THE_PROCESS = ("rng", "rng_devices", "optimizer", "fingerprint", "shard", "blocks")
"""What is left out: it belongs to a process or to the loop, or follows from the rest."""
