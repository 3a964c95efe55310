"""A replica's state for loops that checkpoint with ``torch.distributed.checkpoint`` (DCP), as torchtitan's do.

Blocks become tensors in the parameters' own shapes again, placed as the parameters are. So DCP writes each shard from
where it lies, and gives a run with another number of shards its part. Nothing here communicates or touches a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseloco.errors import CheckpointError, ConfigError
from sparseloco.lane import StateDict
from sparseloco.layout import Layout
from sparseloco.panels import piece_of
from sparseloco.replica import Replica
from sparseloco.sharding import place_of, placed_like, plain

_NOT_SAVED = {"rng", "rng_devices", "optimizer", "shard", "blocks"}
"""What belongs to a process or to the loop, or follows from the rest."""

_STARTED = "outer_started"
_CAUSE_BYTES = 256
"""Room for what was not finite at a replica that abstains, since DCP loads into shapes that are known."""


class ReplicaState:
    """What ``dcp.save`` and ``dcp.load`` take: the shared part under ``shared``, the private one under ``peer-0003``.

    Shared are anchor, outer state and counters, which are written once however many peers save into one folder. Private
    are live parameters, residual, buffers (those of one process) and the weight. The inner optimizer is the loop's, and
    so is random state. All processes of the run save together, or those of one replica with their ``process_group``
    into a folder of their own.

    Args:
        replica: Made anew before a load, of the same model and algorithm; its number of shards may differ.
        private: False for a peer that joins: it takes the shared part alone, and starts from the anchor.

    Raises:
        ConfigError: if the replica has an inner optimizer of its own.

    Example:
        ``dcp.save({"model": model_state, "replica": ReplicaState(replica)}, checkpoint_id=folder)``
    """

    def __init__(self, replica: Replica, *, private: bool = True) -> None:
        if replica.optimizer is not None:
            raise ConfigError(
                "algorithm.local.optimizer=set: must be None here, since an optimizer that has made no step yet has "
                "nothing for DCP to load into; make the optimizer in the loop and save it with the model"
            )
        self._replica = replica
        self._private = f"peer-{replica.peer:04d}" if private else None

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the state; training may go on while they are written.

        Raises:
            CheckpointError: if messages are in flight, or were not delivered and wait without error feedback, or if the
                compressor has state (PowerSGD).
        """
        replica = self._replica
        if messages := replica.in_flight():
            raise CheckpointError(
                f"in_flight={len(messages)} messages: must be none when DCP saves; call "
                "sparseloco.drain(replica, transport) first, or save at a step at which nothing is under way"
            )
        if replica.algorithm.channel.feedback is None and replica.residual_norm():
            raise CheckpointError(
                "residual=an undelivered message: must have been sent before DCP saves; save after the next round"
            )
        shared = replica.shared_state()
        if any(path.startswith("codec/") for path in shared):
            raise CheckpointError(
                f"compressor={replica.algorithm.channel.compressor.name!r}: must keep no state of its own, since its "
                "shape changes from round to round and DCP loads into shapes that are known; save with "
                "sparseloco.checkpoint"
            )
        started = self._fill_outer(shared)
        private = self._private_state(shared) if self._private else {}
        state = {"shared": self._opened(shared)}
        if started is not None:
            state["shared"][_STARTED] = started
        if self._private:
            state[self._private] = self._opened(private)
        return state

    def load_state_dict(self, state_dict: dict[str, dict[str, Any]]) -> None:
        """Go on from what DCP has read.

        Raises:
            CheckpointError: if it belongs to another algorithm or model; nothing has changed then.
        """
        replica = self._replica
        like = replica.shared_state()
        self._fill_outer(like)
        found = dict(state_dict["shared"])
        started = found.pop(_STARTED, None)
        shared = self._closed(found, like)
        if started is not None:
            idle = [name for name, flag in zip(replica.params, started.tolist(), strict=True) if not flag]
            prefixes = tuple(f"outer/{name}/" for name in idle)
            shared = {path: value for path, value in shared.items() if not path.startswith(prefixes)}
        shared["blocks"] = sum(path.startswith(("anchor/", "outer/")) for path in shared)
        replica.load_shared_state(shared)
        if self._private:
            private = self._closed(state_dict[self._private], self._private_state(like))
            causes = {path: value.rstrip() for path, value in private.items() if path.startswith("abstains/")}
            replica.load_private_state(private | causes)

    def _private_state(self, shared: StateDict) -> StateDict:
        """With a cause for every fragment, empty where it does not abstain, of one length in bytes."""
        private = self._replica.private_state()
        fragments = [path.partition("/")[2] for path in shared if path.startswith("round/")]
        for path in (f"abstains/{fragment}" for fragment in fragments):
            cause = private.get(path, "").encode()[:_CAUSE_BYTES].decode(errors="ignore")
            private[path] = cause + " " * (_CAUSE_BYTES - len(cause.encode()))
        return private

    def _fill_outer(self, shared: StateDict) -> Tensor | None:
        """Give each block the outer state that it will have after its first step, as DCP loads into what is there.

        Returns:
            Which tensors had theirs already; None if the outer optimizer keeps none.
        """
        owners = {path.rpartition("/")[0] for path in shared if path.startswith("outer/")}
        started: list[bool] = []
        stateful = bool(owners)
        for tensor in self._tensors():
            started.append(f"outer/{tensor.name}/0" in owners)
            for j in range(0 if started[-1] else tensor.num_blocks):
                zeros = torch.zeros_like(shared[f"anchor/{tensor.name}/{j}"])
                made: StateDict = {}
                self._replica.algorithm.outer.step_(zeros.clone(), zeros, made, 1)
                shared |= {f"outer/{tensor.name}/{j}/{leaf}": value for leaf, value in made.items()}
                stateful |= bool(made)
        return torch.tensor(started, dtype=torch.uint8) if stateful else None

    def _tensors(self) -> Iterator[_Tensor]:
        layout = self._replica.algorithm.channel.layout
        for name, param in self._replica.params.items():
            here, shape = piece_of(layout, place_of(name, param)), tuple(plain(param).shape)
            yield _Tensor(name, param, here, shape, len(here.block_shapes(shape)))

    def _opened(self, flat: StateDict) -> dict[str, Tensor]:
        """Blocks joined to tensors, and numbers as tensors; ``flat`` is used up on the way."""
        state: dict[str, Tensor] = {}
        for tensor in self._tensors():
            for path, parts in list(tensor.groups(flat)):
                blocks = tuple(flat.pop(part) for part in parts)
                state[path] = placed_like(tensor.layout.join(blocks, tensor.shape), tensor.param)
            if (path := f"live/{tensor.name}") in flat:
                state[path] = placed_like(flat.pop(path), tensor.param)
        return state | {path: _as_tensor(value) for path, value in flat.items() if path not in _NOT_SAVED}

    def _closed(self, state: dict[str, Any], like: StateDict) -> StateDict:
        """Undo :meth:`_opened`, for the paths and types of ``like``."""
        flat = dict(like)
        for tensor in self._tensors():
            for path, parts in tensor.groups(like):
                flat |= zip(parts, (b.clone() for b in tensor.layout.split(plain(state[path]))), strict=True)
                state = {key: value for key, value in state.items() if key != path}
        return flat | {path: _as_value(plain(value), like[path]) for path, value in state.items()}


class _Tensor(NamedTuple):
    """A parameter, and how the part of it that is here became blocks."""

    name: str
    param: Tensor
    layout: Layout
    shape: tuple[int, ...]
    num_blocks: int

    def groups(self, flat: StateDict) -> Iterator[tuple[str, list[str]]]:
        """Paths of states that are one tensor in the parameter's shape, each with the paths of its blocks."""
        leaves = sorted({f"/{path.rpartition('/')[2]}" for path in flat if path.startswith("outer/")})
        anchor = flat.get(f"anchor/{self.name}/0")
        for kind, leaf in [("anchor", ""), ("residual", ""), *(("outer", leaf) for leaf in leaves)]:
            first = flat.get(f"{kind}/{self.name}/0{leaf}")
            if isinstance(first, Tensor) and (anchor is None or first.shape == anchor.shape):
                yield f"{kind}/{self.name}{leaf}", [f"{kind}/{self.name}/{j}{leaf}" for j in range(self.num_blocks)]


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, str):
        return torch.tensor(list(value.encode()), dtype=torch.uint8)
    return value if isinstance(value, Tensor) else torch.tensor(value)


def _as_value(tensor: Tensor, like: Any) -> Any:
    if isinstance(like, str):
        return bytes(tensor.tolist()).decode(errors="replace")
    return tensor if isinstance(like, Tensor) else tensor.item()
