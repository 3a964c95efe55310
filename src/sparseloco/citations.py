"""Which papers a method and its parts come from."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from sparseloco.algorithm import Algorithm
from sparseloco.compress import LowRank, ScaledSign, Statistical, Stochastic, TopK
from sparseloco.errors import check_choice
from sparseloco.outer import Sgd
from sparseloco.presets import PRESETS


@dataclass(frozen=True)
class Reference:
    """One paper.

    Attributes:
        key: Its BibTeX key.
        authors: In BibTeX's way, joined by ``and``; ``others`` where the list is longer.
        arxiv: Its number there, or "" where it has none.
        venue: Where it appeared, if it is not on arXiv.
    """

    key: str
    title: str
    authors: str
    year: int
    arxiv: str = ""
    venue: str = ""

    def fields(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)

    def bibtex(self) -> str:
        """The entry for a ``.bib`` file."""
        if self.arxiv:
            kind, place = "misc", {"eprint": self.arxiv, "archivePrefix": "arXiv"}
        else:
            kind, place = "inproceedings", {"booktitle": self.venue}
        rows = {"title": f"{{{self.title}}}", "author": self.authors, "year": str(self.year), **place}
        body = ",\n".join(f"  {name} = {{{value}}}" for name, value in rows.items())
        return f"@{kind}{{{self.key},\n{body}\n}}"


_ALL = (
    Reference(
        "sarfi2025sparseloco",
        "Communication Efficient LLM Pre-training with SparseLoCo",
        "Sarfi, Amir and Th{\\'e}rien, Benjamin and Lidin, Joel and Belilovsky, Eugene",
        2025,
        "2508.15706",
    ),
    Reference(
        "douillard2023diloco",
        "DiLoCo: Distributed Low-Communication Training of Language Models",
        "Douillard, Arthur and others",
        2023,
        "2311.08105",
    ),
    Reference(
        "douillard2025streaming",
        "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch",
        "Douillard, Arthur and others",
        2025,
        "2501.18512",
    ),
    Reference(
        "peng2024demo",
        "DeMo: Decoupled Momentum Optimization",
        "Peng, Bowen and Quesnelle, Jeffrey and Kingma, Diederik P.",
        2024,
        "2411.19870",
    ),
    Reference(
        "karimireddy2019error",
        "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
        "Karimireddy, Sai Praneeth and Rebjock, Quentin and Stich, Sebastian U. and Jaggi, Martin",
        2019,
        "1901.09847",
    ),
    Reference(
        "vogels2019powersgd",
        "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
        "Vogels, Thijs and Karimireddy, Sai Praneeth and Jaggi, Martin",
        2019,
        "1905.13727",
    ),
    Reference(
        "basu2019qsparse",
        "Qsparse-local-SGD: Distributed SGD with Quantization, Sparsification, and Local Computations",
        "Basu, Debraj and Data, Deepesh and Karakus, Can and Diggavi, Suhas",
        2019,
        "1906.02367",
    ),
    Reference(
        "stich2018local",
        "Local SGD Converges Fast and Communicates Little",
        "Stich, Sebastian U.",
        2018,
        "1805.09767",
    ),
    Reference(
        "mcmahan2016communication",
        "Communication-Efficient Learning of Deep Networks from Decentralized Data",
        "McMahan, H. Brendan and others",
        2016,
        "1602.05629",
    ),
    Reference(
        "li2020pytorch",
        "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
        "Li, Shen and others",
        2020,
        "2006.15704",
    ),
    Reference(
        "loshchilov2017decoupled",
        "Decoupled Weight Decay Regularization",
        "Loshchilov, Ilya and Hutter, Frank",
        2017,
        "1711.05101",
    ),
    Reference(
        "seide2014onebit",
        "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech DNNs",
        "Seide, Frank and Fu, Hao and Droppo, Jasha and Li, Gang and Yu, Dong",
        2014,
        venue="Interspeech",
    ),
    Reference(
        "aji2017sparse",
        "Sparse Communication for Distributed Gradient Descent",
        "Aji, Alham Fikri and Heafield, Kenneth",
        2017,
        "1704.05021",
    ),
    Reference(
        "alistarh2016qsgd",
        "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
        "Alistarh, Dan and Grubic, Demjan and Li, Jerry and Tomioka, Ryota and Vojnovic, Milan",
        2016,
        "1610.02132",
    ),
    Reference(
        "sutskever2013importance",
        "On the importance of initialization and momentum in deep learning",
        "Sutskever, Ilya and Martens, James and Dahl, George and Hinton, Geoffrey",
        2013,
        venue="International Conference on Machine Learning",
    ),
)
REFERENCES = {reference.key: reference for reference in _ALL}
"""Key -> reference; every one is named by a preset or by a part."""

METHODS: dict[str, tuple[str, ...]] = {
    "ddp": ("li2020pytorch",),
    "local_sgd": ("stich2018local", "mcmahan2016communication"),
    "diloco": ("douillard2023diloco",),
    "streaming_diloco": ("douillard2025streaming", "douillard2023diloco"),
    "sparseloco": ("sarfi2025sparseloco",),
    "demo": ("peng2024demo",),
    "ef_signsgd": ("karimireddy2019error",),
    "powersgd": ("vogels2019powersgd",),
    "qsparse_local_sgd": ("basu2019qsparse",),
}
"""Preset -> the papers that it is the method of, the main one first."""

_PARTS: dict[type, tuple[str, str]] = {
    TopK: ("top-k selection of what is sent", "aji2017sparse"),
    ScaledSign: ("scaled signs", "karimireddy2019error"),
    LowRank: ("low-rank factors", "vogels2019powersgd"),
    Stochastic: ("stochastic rounding of values", "alistarh2016qsgd"),
    Statistical: ("statistical value code, from the released code", "sarfi2025sparseloco"),
}


def cite(preset: str, **settings: Any) -> list[tuple[str, Reference]]:
    """References of a preset and of its parts, each once, as role and paper.

    Args:
        preset: A name in ``PRESETS``.
        **settings: Keywords of the preset, since they choose its parts.

    Raises:
        ConfigError: if there is no such preset.

    Example:
        >>> [(role, reference.arxiv) for role, reference in cite("diloco")][0]
        ('method', '2311.08105')
    """
    check_choice("preset", preset, PRESETS)
    takes_inner = "inner" in inspect.signature(PRESETS[preset]).parameters
    found = dict.fromkeys(METHODS[preset], "method")
    for role, key in _of_parts(PRESETS[preset](**settings)):
        found.setdefault(key, role)
    if takes_inner:
        found.setdefault("loshchilov2017decoupled", "AdamW, unless you choose another inner optimizer")
    return [(role, REFERENCES[key]) for key, role in found.items()]


def _of_parts(algorithm: Algorithm) -> Iterator[tuple[str, str]]:
    channel, outer = algorithm.channel, algorithm.outer
    if channel.feedback is not None:
        yield "error feedback", "seide2014onebit"
        yield "error feedback, analysed", "karimireddy2019error"
    for part in (channel.compressor, getattr(channel.compressor, "values", None)):
        if type(part) in _PARTS:
            yield _PARTS[type(part)]
    if isinstance(outer, Sgd) and outer.nesterov:
        yield "Nesterov momentum in this form", "sutskever2013importance"


__all__ = ["METHODS", "REFERENCES", "Reference", "cite"]
