"""Around a training loop that exists already: one context manager that counts the optimizer's steps."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sparseloco.algorithm import Algorithm
from sparseloco.errors import ConfigError
from sparseloco.local import InnerSteps
from sparseloco.replica import Replica
from sparseloco.transport.base import Transport, drain, post_due, settle

_SCALER_MODULE = "torch.amp.grad_scaler"
_SCALER_DEPTH = 8


@contextmanager
def synchronize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    algorithm: Algorithm,
    transport: Transport,
    *,
    peer: int | None = None,
    seed: int = 0,
    nonfinite: str = "abstain",
) -> Iterator[Replica]:
    """Synchronize ``model`` with its peers while the caller's own loop trains it.

    Every ``optimizer.step()`` inside the block counts as one inner step; when a round is due, it is posted and settled
    before ``step`` returns. Schedulers, clipping and accumulation stay the caller's. At the end of the block, messages
    still in flight are settled; steps made since the last round stay in the live parameters only.

    Args:
        model: The model as it is trained; starts from the same values at every peer.
        optimizer: The inner optimizer; it keeps its state across rounds.
        algorithm: Its local phase must name no optimizer: ``presets.sparseloco(inner_steps=30)``.
        transport: Way to the peers.
        peer: This peer's number; None asks the transport.
        seed: Equal at all peers.
        nonfinite: What a delta that is not finite does: ``abstain`` leaves this peer out of the round, with a warning,
            and it starts over from the anchor with ``optimizer``'s state anew; ``stop`` raises.

    Yields:
        The replica, for its anchor, digest and norms.

    Raises:
        ConfigError: if the algorithm sends gradients or names an optimizer, or a step is made with a closure or
            through an enabled ``GradScaler``.
        DivergenceError: if nobody contributes to a round, or with ``stop``.
    """
    _check_local_phase(algorithm)
    number = peer if peer is not None else transport.rank or 0
    replica = Replica(model, algorithm, peer=number, seed=seed, nonfinite=nonfinite, stepped_by=optimizer)
    transport.connect(replica)

    def before(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # args[0] is the optimizer itself.
        if any(argument is not None for argument in (*args[1:], *kwargs.values())):
            raise ConfigError(
                "optimizer.step(closure)=a closure: must be called without one, since it may run many times; "
                "use the loop of advance() and settle() with an optimizer that needs none"
            )
        if _inside_grad_scaler():
            raise ConfigError(
                "scaler.step(optimizer)=GradScaler: must not decide about steps, since it skips some and the peers' "
                "counts would differ; train in bfloat16, which needs no scaling"
            )

    def after(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch.no_grad():
            replica.stepped()
            post_due(replica, transport)
            settle(replica, transport)

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    try:
        yield replica
        drain(replica, transport)
    finally:
        for handle in handles:
            handle.remove()


def _check_local_phase(algorithm: Algorithm) -> None:
    local = algorithm.local
    if not isinstance(local, InnerSteps):
        raise ConfigError(
            f"algorithm.local={local.name!r}: must be inner_steps here, since this method replaces the optimizer; "
            "use the loop of advance() and settle()"
        )
    if local.optimizer is not None or local.clip_norm is not None:
        raise ConfigError(
            "algorithm.local.optimizer=set: must be None here, since the optimizer and clipping are those of the loop; "
            "leave inner and clip_norm out of the preset"
        )


def _inside_grad_scaler() -> bool:
    """Whether an enabled ``GradScaler`` made this call; it calls the optimizer only when it likes."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    for _ in range(_SCALER_DEPTH):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == _SCALER_MODULE:
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back
    return False
