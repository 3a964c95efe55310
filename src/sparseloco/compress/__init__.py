"""Compressors: one block in, its parts out. Each is a frozen value; a new one is a new file."""

from sparseloco.compress.base import Compressor
from sparseloco.compress.dense import Dense, Quantize, ScaledSign
from sparseloco.compress.lowrank import LowRank
from sparseloco.compress.topk import TopK
from sparseloco.compress.values import (
    Float32,
    SignOneLevel,
    SignTwoLevel,
    Statistical,
    Stochastic,
    ValueCode,
)

__all__ = [
    "Compressor",
    "Dense",
    "Float32",
    "LowRank",
    "Quantize",
    "ScaledSign",
    "SignOneLevel",
    "SignTwoLevel",
    "Statistical",
    "Stochastic",
    "TopK",
    "ValueCode",
]
