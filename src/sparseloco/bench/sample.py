"""A stored sample of real pseudo-gradients: residual plus delta in the last rounds of the demo's run.

``benchmarks/make_sample.py`` wrote it and says how. It is part of the package, so the bench needs no training, no text
and no network.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

PATH = Path(__file__).with_name("sample.npz")


def kept_values() -> list[Tensor]:
    """Values that top-k kept at k = 64, one float32 ``[N, K]`` per block of four payloads."""
    with np.load(PATH, allow_pickle=False) as stored:
        flat = torch.from_numpy(stored["kept"].astype(np.float32))
        shapes, powers = stored["kept_shapes"].tolist(), stored["kept_powers"].tolist()
    pieces = flat.split([rows * kept for rows, kept in shapes])
    return [piece.view(shape) * power for piece, shape, power in zip(pieces, shapes, powers, strict=True)]


def chunks() -> Tensor:
    """Whole chunks, spread evenly over the matrices of one payload: float32 ``[N, 4096]``."""
    with np.load(PATH, allow_pickle=False) as stored:
        scale = torch.from_numpy(stored["chunk_powers"].astype(np.float32))
        return torch.from_numpy(stored["chunks"].astype(np.float32)) * scale[:, None]
