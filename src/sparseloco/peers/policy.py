"""The rules of a run that its owner sets and may amend, with their ranges."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from sparseloco.errors import ConfigError, check_choice, check_whole
from sparseloco.peers.canonical import Hex64
from sparseloco.peers.identity import peer_id_of
from sparseloco.reduce import MAX_WEIGHT

MAX_PEERS = 4096
_DAY_S = 86400
_RANGES: dict[str, tuple[float, float, str]] = {
    "min_peers": (1, MAX_PEERS, "2, or 1 to let a peer train alone"),
    "deadline_s": (1, 7 * _DAY_S, "600"),
    "lease_s": (1, _DAY_S, "120"),
    "max_tokens_per_round": (1, MAX_WEIGHT - 1, "a little more than the fastest peer sees in a round"),
    "max_frame_bytes": (256, 2**40, "the size of a frame that `describe` names"),
    "max_peers": (1, MAX_PEERS, "64"),
    "anchor_every": (1, 10**6, "16"),
    "slots": (1, 10**6, "the value of max_peers or more"),
    "rejoin_warmup_steps": (0, 10**6, "0 for none, or the inner steps of one round"),
}
_CHOICES = {
    "admission": ("open", "allow-list"),
    "deadline": ("fixed", "adaptive"),
    "no_quorum": ("wait", "train"),
}


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may take part, and when a round closes.

    Attributes:
        admission: "open": whoever can write to the store; "allow-list": ``members`` alone.
        members: Public keys, sorted.
        writers: Public keys of those who may write manifests, sorted; none means every admitted member may.
        min_peers: Peers that a round needs to change anything. A quorum of one must be asked for.
        deadline_s: Seconds from a reader's first sight of a round's frames to its closing; the cap if adaptive.
        deadline: "fixed", or "adaptive": from past arrivals.
        lease_s: Seconds without a new lease until a peer counts as gone.
        no_quorum: "wait" for more peers, or "train": close with an empty manifest; either is said aloud.
        max_tokens_per_round: Largest weight of a frame.
        max_frame_bytes: Largest object that is downloaded as a frame.
        max_peers: Frames in a manifest at most.
        anchor_every: Rounds between anchors.
        slots: Data slots.
        clip_norm_ratio: Largest norm of a payload, in medians of its round; longer ones are scaled down. 0 for none.
        rejoin_warmup_steps: Steps over which the inner learning rate of a peer that joins, or missed steps, rises.
    """

    admission: Literal["open", "allow-list"] = "open"
    members: tuple[Hex64, ...] = ()
    writers: tuple[Hex64, ...] = ()
    min_peers: int = 2
    deadline_s: float = 600.0
    deadline: Literal["fixed", "adaptive"] = "fixed"
    lease_s: float = 120.0
    no_quorum: Literal["wait", "train"] = "wait"
    max_tokens_per_round: int = 2**24
    max_frame_bytes: int = 2**30
    max_peers: int = 64
    anchor_every: int = 16
    slots: int = 1024
    clip_norm_ratio: float = 0.0
    rejoin_warmup_steps: int = 0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            check_choice(f"policy.{name}", getattr(self, name), choices)
        for name, (low, high, remedy) in _RANGES.items():
            value = getattr(self, name)
            if not name.endswith("_s"):
                check_whole(f"policy.{name}", value)
            if not (math.isfinite(value) and low <= value <= high):
                raise ConfigError(f"policy.{name}={value!r}: must be from {low} to {high}; use {remedy}")
            if name.endswith("_s"):
                msgspec.structs.force_setattr(self, name, float(value))  # 600 and 600.0 are the same bytes
        if self.clip_norm_ratio and not 1 <= self.clip_norm_ratio <= 1e6:
            raise ConfigError(
                f"policy.clip_norm_ratio={self.clip_norm_ratio!r}: must be 0 for no clipping or at least 1, the median "
                "itself; use 3"
            )
        msgspec.structs.force_setattr(self, "clip_norm_ratio", float(self.clip_norm_ratio))
        if self.min_peers > self.max_peers:
            raise ConfigError(
                f"policy.min_peers={self.min_peers}: must be at most max_peers={self.max_peers}; lower it or raise "
                "max_peers"
            )
        self._check_keys()

    def _check_keys(self) -> None:
        for name in ("members", "writers"):
            keys = getattr(self, name)
            if list(keys) != sorted(set(keys)):
                raise ConfigError(f"policy.{name}: must be sorted and name each key once; sort them")
        if self.admission == "open" and self.members:
            raise ConfigError(
                "policy.members: is for admission='allow-list' only, since an open run admits everybody; set admission "
                "or leave the members out"
            )
        if self.admission == "allow-list" and len(self.members) < self.min_peers:
            raise ConfigError(
                f"policy.members={len(self.members)} keys: must be at least min_peers={self.min_peers}, or no round "
                "ever closes; name all members"
            )

    @property
    def member_ids(self) -> frozenset[str] | None:
        """Peer ids of the members; None if everybody is admitted."""
        return None if self.admission == "open" else frozenset(map(peer_id_of, self.members))

    def admits(self, peer: str) -> bool:
        """Whether frames of this peer may be listed."""
        ids = self.member_ids
        return ids is None or peer in ids

    def may_write(self, public: str) -> bool:
        """Whether manifests of the owner of this public key count."""
        return public in self.writers if self.writers else self.admits(peer_id_of(public))
