"""Rounds that a replica was not there for: shared state of one fragment in and out, and closed rounds applied later.

Shared state is a function of an older shared state and of the messages since, so a replica that was away, or is new,
takes over the first and applies the second; bit for bit it then has what all others have. Knows no store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from sparseloco.bits import hex_digest
from sparseloco.errors import CheckpointError
from sparseloco.inbox import check_same, contributions
from sparseloco.lane import Lane, StateDict, fitting
from sparseloco.merge import Replace
from sparseloco.outer import Sgd
from sparseloco.replica import Replica
from sparseloco.types import Envelope, Key, Payload

_KINDS = ("anchor", "outer", "codec")


def num_applied(replica: Replica, fragment: int) -> int:
    """Rounds of ``fragment`` that are in its shared state; the number of the next one to apply."""
    lane = replica.lanes[fragment]
    return min(lane.in_flight, default=lane.round)


def fragment_digest(replica: Replica, fragment: int) -> str:
    """32 hex digits over the shared state of one fragment, as its messages carry them."""
    return hex_digest(*replica.lanes[fragment].digest_lanes())


def fragment_state(replica: Replica, fragment: int) -> StateDict:
    """Shared state of one fragment: tensors, and plain numbers of outer optimizers, by path; sorted.

    A round that is in flight changes nothing of it. The tensors are those of the replica, not copies.
    """
    lane = replica.lanes[fragment]
    state: StateDict = {}
    for path, j in lane.block_paths():
        state[f"anchor/{path}"] = lane.state.anchor[j]
        state |= {f"outer/{path}/{name}": value for name, value in lane.state.outer[j].items()}
        state |= {f"codec/{path}/{name}": value for name, value in lane.state.codec[j].items()}
    return dict(sorted(state.items()))


def adopt(replica: Replica, fragment: int, state: StateDict, round_: int) -> None:
    """Take over the shared state that a fragment has before round ``round_`` is applied.

    Live tensors become the anchor. Residual and inner optimizer stay. A message in flight is kept if its round is
    still to be applied.

    Raises:
        CheckpointError: if a tensor is missing, too many, or of another shape or type; nothing has changed then.
    """
    lane = replica.lanes[fragment]
    _check_paths(lane, state)
    for path, j in lane.block_paths():
        lane.state.anchor[j].copy_(state[f"anchor/{path}"])
        lane.state.outer[j] = _below(state, f"outer/{path}/", lane.state.anchor[j])
        lane.state.codec[j] = {
            name: state[f"codec/{path}/{name}"].to(old.device, copy=True) for name, old in lane.state.codec[j].items()
        }
    lane.in_flight = {number: sent for number, sent in lane.in_flight.items() if number >= round_}
    lane.round = max(lane.in_flight, default=round_ - 1) + 1
    lane.restart()


def replay(replica: Replica, key: Key, inbox: Sequence[Envelope]) -> float:
    """Apply the next round of a fragment, which closed while this replica was away.

    The same as :meth:`Replica.apply` where the own message is in flight. Else nothing is credited, and live tensors
    follow the anchor. Learning rates are those of the step at which the others applied it.

    Returns:
        2-norm of the update.

    Raises:
        DivergenceError: if shared state or algorithm differs, or a payload is not finite; nothing has changed then.
    """
    lane = replica.lanes[key.fragment]
    assert key.round == num_applied(replica, key.fragment), f"{key} is not the next round"
    if key.round in lane.in_flight:
        lane.in_flight[key.round] = lane.in_flight[key.round]._replace(digest=fragment_digest(replica, key.fragment))
        norm = replica.apply(key, inbox)
        lane.restart()
        return norm
    check_same(inbox, replica.fingerprint, fragment_digest(replica, key.fragment))
    inbox, _ = contributions(inbox, key)
    lane.channel.check_finite(inbox, lane.state)
    norm = lane.channel.settle_(
        inbox,
        lane.state,
        lane.live(),
        outer=lane.outer,
        merge=Replace(),
        snapshot=None,
        step=replica.algorithm.schedule.collect_step(*key),
    )
    lane.round = key.round + 1
    return norm


def restore(replica: Replica, key: Key, payload: Payload | None, residual: Sequence[Tensor]) -> None:
    """Go on from what was saved when the message ``key`` had been encoded, and may or may not have been delivered.

    Args:
        replica: Its shared state is that before the round of ``key``.
        key: Of the message that is in flight again.
        payload: Its content.
        residual: What it left behind, one block after another.
    """
    lane = replica.lanes[key.fragment]
    assert key.round == num_applied(replica, key.fragment), f"{key} is not the next round"
    set_residual(replica, key.fragment, residual)
    lane.in_flight = {key.round: lane.awaited(payload)}
    lane.round = key.round + 1


def set_outer_lr(replica: Replica, fragment: int, lr: float | None) -> None:
    """Step the anchor of a fragment with this rate from its next round on.

    Replicas of a run must do so in the same round of the fragment. Synced buffers keep theirs.

    Args:
        replica: Its algorithm, and so its fingerprint, stays as it is.
        fragment: Which.
        lr: The rate, positive; None for the algorithm's own.
    """
    lane, outer = replica.lanes[fragment], replica.algorithm.outer
    if lane.channel is replica.algorithm.channel:
        lane.outer = replace(outer, lr=lr) if lr is not None and isinstance(outer, Sgd) else outer


def set_residual(replica: Replica, fragment: int, residual: Sequence[Tensor]) -> None:
    """Replace what a fragment has not sent yet; of nothing: forget it."""
    state = replica.lanes[fragment].state
    if not residual:
        for block in state.residual:
            block.zero_()
        return
    for block, anchor in zip(residual, state.anchor, strict=True):
        if block.shape != anchor.shape or block.dtype != anchor.dtype:
            raise CheckpointError(
                f"residual={block.dtype} {tuple(block.shape)}: must be {anchor.dtype} {tuple(anchor.shape)}; "
                "use the folder that belongs to this run and model"
            )
    state.residual = [block.to(anchor.device) for block, anchor in zip(residual, state.anchor, strict=True)]


def step_to_join(replica: Replica, closed: Sequence[int]) -> int:
    """The inner step at which a replica takes part again, when rounds below ``closed`` of each fragment are closed.

    It is the last step that ends a round and by which only closed rounds are applied; never before the present step,
    and never before the post of a message that is in flight here.
    """
    schedule = replica.algorithm.schedule
    last = min(schedule.collect_step(number, f) for f, number in enumerate(closed)) - 1
    applied = [schedule.num_collected(last, f) for f in range(len(closed))]
    ends = [schedule.collect_step(number - 1, f) for f, number in enumerate(applied) if number]
    posts = [schedule.post_step(number, f) for f, lane in enumerate(replica.lanes) for number in lane.in_flight]
    return max([*ends, *posts, replica.step])


def catch_up_to(replica: Replica, step: int) -> None:
    """Count as if this replica had made ``step`` inner steps, once the rounds that are applied by then are applied.

    What the others have posted by then and not applied is awaited from them. Fragments that are posted after this very
    step, together with one that is in flight here, are left to be posted by :meth:`Replica.outbox`.
    """
    schedule = replica.algorithm.schedule
    replica.step = step
    posting_now = any(lane.in_flight and schedule.posts(step, f) for f, lane in enumerate(replica.lanes))
    for fragment, lane in enumerate(replica.lanes):
        posted = schedule.num_posted(step, fragment)
        if posted > lane.round and not (posting_now and schedule.posts(step, fragment)):
            assert lane.round == schedule.num_collected(step, fragment), f"fragment {fragment} is not caught up"
            lane.in_flight = {lane.round: lane.awaited(None)}
            lane.round = posted


def _check_paths(lane: Lane, state: StateDict) -> None:
    """Raise unless ``state`` has all anchors of a fragment, and nothing of other blocks."""
    paths = lane.block_paths()
    for path, j in paths:
        fitting(f"anchor/{path}", state, lane.state.anchor[j])
        for name, value in lane.state.codec[j].items():
            found = state.get(f"codec/{path}/{name}")
            # Shapes of compressor state may change from round to round.
            fitting(
                f"codec/{path}/{name}", state, value if not isinstance(found, Tensor) else value.new_empty(found.shape)
            )
    known = {path for path, _ in paths}
    for path in state:
        kind, _, rest = path.partition("/")
        if (rest if kind == "anchor" else rest.rpartition("/")[0]) not in known or kind not in _KINDS:
            raise CheckpointError(f"{path}=present: must be of a block of this fragment; load it into its own model")


def _below(state: StateDict, prefix: str, like: Tensor) -> StateDict:
    """Copies of what lies below a path; what has the shape of its anchor goes to the device of that."""
    found: StateDict = {}
    for path, value in state.items():
        if path.startswith(prefix):
            there = like.device if isinstance(value, Tensor) and value.shape == like.shape else None
            found[path[len(prefix) :]] = value.to(there, copy=True) if isinstance(value, Tensor) else value
    return found
