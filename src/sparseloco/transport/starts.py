"""What replicas must have in common: before the first round, and whenever their digests say that they differ.

Plain values by dotted name are compared before any tensor is, so that a difference is named by the thing that someone
typed. Knows no transport.
"""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from sparseloco.errors import DivergenceError
from sparseloco.replica import Replica

_MOST_NAMED = 4
_NONE = "missing"


class Start(NamedTuple):
    """What a replica must have in common with its peers before the first round.

    Attributes:
        peer: Its number.
        fingerprint: Of algorithm and tensor table.
        facts: Plain values by dotted name.
        digests: Of the values of every tensor.
    """

    peer: int
    fingerprint: str
    facts: Mapping[str, str]
    digests: Mapping[str, str]

    @classmethod
    def of(cls, replica: Replica, further: Mapping[str, str] | None = None) -> Start:
        """Read it off a replica.

        Args:
            replica: Before its first step.
            further: More facts; with some of ``algorithm`` among them, its parts need not be told apart.
        """
        told, parts = further or {}, flat("algorithm", replica.algorithm.shared())
        digests = replica.tensor_digests()
        facts = {
            "sparseloco.version": _installed(),
            "sparseloco.source": source_hash(),
            "torch.version": ".".join(torch.__version__.split(".")[:2]),
            **told,
            **({} if any(name.startswith("algorithm.") for name in told) else parts),
            **{f"tensor.{name}": "frozen" for name in digests},
            **{f"tensor.{spec.name}": f"{spec.dtype} {list(spec.shape)}" for spec in replica.table},
        }
        return cls(replica.peer, replica.fingerprint, facts, digests)


def compare_starts(first: Start, other: Start) -> None:
    """Check that two replicas begin alike.

    Raises:
        DivergenceError: naming the facts, the algorithm, or the first tensor whose values differ.
    """
    compare_facts((first.peer, first.facts), (other.peer, other.facts))
    if first.fingerprint != other.fingerprint:
        raise DivergenceError(
            f"peer {other.peer}: says algorithm {other.fingerprint}, peer {first.peer} says {first.fingerprint}; "
            "all peers need the same [algorithm] and model"
        )
    for name, digest in first.digests.items():
        if other.digests[name] != digest:
            raise DivergenceError(
                f"peer {other.peer}, tensor {name}: starts from other values than at peer {first.peer}; "
                "initialise all replicas from the same seed or the same file"
            )


def compare_facts(first: tuple[int, Mapping[str, str]], other: tuple[int, Mapping[str, str]]) -> None:
    """Check that two peers, each with its number, say the same of themselves.

    Raises:
        DivergenceError: naming what differs.
    """
    (here, mine), (there, theirs) = first, other
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    if not names:
        return
    told = [
        f"{name} is {mine.get(name, _NONE)} at peer {here} and {theirs.get(name, _NONE)} at peer {there}"
        for name in names[:_MOST_NAMED]
    ]
    more = f", and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    raise DivergenceError(
        f"peer {there}: must start like peer {here}, but {', '.join(told)}{more}; "
        "give all of them the same settings, text, model and version"
    )


def name_divergence(round_: int, digests: Sequence[Mapping[str, str]]) -> str:
    """One sentence about peers whose shared state differs.

    Args:
        round_: In which that was found.
        digests: By peer: of the values of every tensor.
    """
    for name in digests[0]:
        counts = Counter(each[name] for each in digests)
        if len(counts) == 1:
            continue
        ((digest, count), *_) = counts.most_common()
        odd = [peer for peer, each in enumerate(digests) if each[name] != digest]
        others = [peer for peer in range(len(digests)) if peer not in odd]
        if 2 * count > len(digests):
            return (
                f"{name}={_peers(odd)} and {_peers(others)} differ in round {round_}: must be equal at all peers, "
                f"and {len(others)} of {len(digests)} agree; restart {_peers(odd)} from a checkpoint of the others"
            )
        return (
            f"{name}={_peers(range(len(digests)))} differ in round {round_}: must be equal at all peers, and most do "
            "not agree; restart all of them from a checkpoint"
        )
    return (
        f"shared state={_peers(range(len(digests)))} differ in round {round_}, though in no tensor: must be equal at "
        "all peers, with the state of outer optimizer and compressor; restart all of them from a checkpoint"
    )


def flat(prefix: str, part: Any) -> dict[str, str]:
    """Nested plain values as text, by dotted name.

    Example:
        >>> flat("train", {"seed": 0, "betas": [0.9, 0.95]})
        {'train.seed': '0', 'train.betas': '[0.9, 0.95]'}
    """
    if isinstance(part, Mapping):
        return {name: text for key, item in part.items() for name, text in flat(f"{prefix}.{key}", item).items()}
    return {prefix: repr(part)}


@cache
def source_hash() -> str:
    """16 hex digits over the Python files of this package, by name."""
    root, digest = Path(__file__).parents[1], xxhash.xxh3_64()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _installed() -> str:
    try:
        return importlib.metadata.version("sparseloco")
    except importlib.metadata.PackageNotFoundError:
        return "a source tree"


def _peers(numbers: Sequence[int]) -> str:
    *first, last = [str(number) for number in numbers]
    return f"peers {', '.join(first)} and {last}" if first else f"peer {last}"
