"""The proof that a checkpoint is of this run: settings, text, tensors and all that training does not change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sparseloco.algorithm import Algorithm
from sparseloco.checkpoint import Checkpoint
from sparseloco.data import Dataset
from sparseloco.errors import CheckpointError
from sparseloco.model import known_by_content
from sparseloco.replica import Replica
from sparseloco.settings import RunConfig, to_table
from sparseloco.transport.starts import flat

_MUST_EQUAL = ("algorithm", "model", "data", "train", "optimizer")
_MAY_DIFFER = {
    *("train.workers", "train.shards", "train.processes", "train.log_every", "train.evaluate_every"),
    *("train.nonfinite", "data.path"),
}
"""Settings that a resumed run may change; a corpus is known by its hash, not by its place."""
_PLACES = {"data.path", "data.sources", "data.tokenizer", "transport.interface"}
"""Settings that may differ between the machines of one run: the text is compared by its hash."""
_MOST_NAMED = 4


def whole_identity(config: RunConfig, algorithm: Algorithm, dataset: Dataset, replica: Replica) -> dict[str, Any]:
    """:func:`identity`, and the tensors of a replica; all its shards must ask."""
    return {
        **identity(config, dataset),
        "tensors": {spec.name: f"{spec.dtype} {list(spec.shape)}" for spec in replica.specs},
        "fixed": replica.fixed_digests(),
        "parts": _flat("algorithm", algorithm.describe(replica.specs).parts),
    }


def identity(config: RunConfig, dataset: Dataset) -> dict[str, dict[str, Any]]:
    """Settings and text that a resumed run must have in common with what it was."""
    table = to_table(config)
    settings = {f"{section}.{key}": value for section in _MUST_EQUAL for key, value in table[section].items()}
    settings |= known_by_content(config)
    return {
        "settings": {
            **{name: value for name, value in settings.items() if name not in _MAY_DIFFER},
            "corpus.sha256": dataset.corpus_sha256,
            "corpus.vocab_size": dataset.vocab_size,
        }
    }


def common_facts(config: RunConfig, dataset: Dataset, resume: Checkpoint | None) -> dict[str, str]:
    """What all processes of a run must say alike at its start, by dotted name; places on their disks may differ."""
    table = {section: values for section, values in to_table(config).items() if section != "logging"}
    facts = {name: text for section, values in table.items() for name, text in flat(section, values).items()}
    facts |= {name: repr(text) for name, text in known_by_content(config).items()}
    return {
        **{name: text for name, text in facts.items() if name not in _PLACES},
        "data.weights": repr([source.weight for source in config.data.all_sources]),
        "corpus.sha256": dataset.corpus_sha256,
        "corpus.vocab_size": str(dataset.vocab_size),
        "resume.step": str(resume.step) if resume is not None else "none",
    }


def check_identity(checkpoint: Checkpoint, mine: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a checkpoint of another run.

    Args:
        checkpoint: Where to continue.
        mine: What the run is now, in groups; of the groups that differ only the first is named.

    Raises:
        CheckpointError: naming what differs.
    """
    theirs = checkpoint.facts["identity"]
    for group, now in json.loads(json.dumps(mine)).items():
        told = _differences(theirs.get(group, now), now)  # an earlier version saved fewer groups
        if told:
            more = f", and {len(told) - _MOST_NAMED} more" if len(told) > _MOST_NAMED else ""
            raise CheckpointError(
                f"{checkpoint.path}: must come from this run, but {', '.join(told[:_MOST_NAMED])}{more}; "
                "resume with the same settings, text and model, or start anew in another folder"
            )


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    if "algorithm.preset" in names:  # other presets have other keywords
        names = [name for name in names if name == "algorithm.preset" or not name.startswith("algorithm.")]
    return [f"{name} is {there.get(name)!r} there and {here.get(name)!r} here" for name in names]


def _flat(prefix: str, part: Any) -> dict[str, Any]:
    """Nested settings of an algorithm by dotted name."""
    if isinstance(part, Mapping):
        return {name: value for key, item in part.items() for name, value in _flat(f"{prefix}.{key}", item).items()}
    return {prefix: part}
