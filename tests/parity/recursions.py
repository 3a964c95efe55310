"""Methods written from their papers, with torch alone: what the presets must equal.

Each takes the start, the number of peers and of rounds, and returns the parameters that all peers agree on.
Lists run over the tensors of the toy model; ``t`` counts steps from 1, ``r`` peers from 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tests.toy import Params, gradients

AdamW = torch.optim.AdamW
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "foreach": False}


def leaves(params: Params) -> Params:
    return [p.detach().clone() for p in params]


def mean(tensors: Sequence[Tensor], weights: Sequence[int] | None = None) -> Tensor:
    """Weighted mean; summed in float64 so that it is the nearest number of the tensors' type."""
    weights = weights or [1] * len(tensors)
    total = sum(t.double() * w for t, w in zip(tensors, weights, strict=True))
    return (total / sum(weights)).to(tensors[0].dtype)


def inner(live: Params, optimizer: torch.optim.Optimizer, steps: range, r: int) -> None:
    """Plain optimizer steps of peer r."""
    for t in steps:
        for p, g in zip(live, gradients(live, t, r), strict=True):
            p.grad = g
        optimizer.step()


def steps_of(k: int, H: int) -> range:
    """Inner steps of round k, which starts at 0."""
    return range(k * H + 1, (k + 1) * H + 1)


def overwrite(live: Params, values: Params) -> None:
    for p, value in zip(live, values, strict=True):
        p.copy_(value)


def ddp(theta: Params, R: int, steps: int, clip: float | None = None) -> Params:
    theta = leaves(theta)
    optimizer = AdamW(theta, **ADAMW)
    for t in range(1, steps + 1):
        grads = [gradients(theta, t, r) for r in range(R)]
        for p, *g in zip(theta, *grads, strict=True):
            p.grad = mean(g)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(theta, clip, foreach=False)
        optimizer.step()
    return theta


def local_sgd(theta: Params, R: int, rounds: int, H: int, lr: float, weights: Sequence[int] | None = None) -> Params:
    for k in range(rounds):
        ends = []
        for r in range(R):
            live = leaves(theta)
            for t in steps_of(k, H):
                live = [p - lr * g for p, g in zip(live, gradients(live, t, r), strict=True)]
            ends.append(live)
        theta = [mean(tensors, weights) for tensors in zip(*ends, strict=True)]
    return theta


def diloco(theta: Params, R: int, rounds: int, H: int, lr: float, mu: float) -> Params:
    lives = [leaves(theta) for _ in range(R)]
    optimizers = [AdamW(live, **ADAMW) for live in lives]
    m = [torch.zeros_like(p) for p in theta]
    for k in range(rounds):
        for r, live in enumerate(lives):
            overwrite(live, theta)
            inner(live, optimizers[r], steps_of(k, H), r)
        for i, p in enumerate(theta):
            d = mean([p - live[i] for live in lives])
            m[i] = mu * m[i] + d
            theta[i] = p - lr * (d + mu * m[i])
    return theta


def e3m0(x: Tensor) -> Tensor:
    """Nearest of 0, 1/64, ..., 1/2, 1 times the largest magnitude, with x's sign."""
    levels = torch.tensor([0.0, *(2.0**-e for e in range(6, -1, -1))])
    scale = x.abs().max().float()
    code = ((x.abs() / scale).float()[..., None] - levels).abs().argmin(dim=-1)
    return (levels[code] * scale).to(x.dtype) * x.sign()


def streaming(
    theta: Params, R: int, steps: int, H: int, parts: Sequence[Sequence[int]], tau: int, alpha: float,
    lr: float, mu: float, bits: int,
) -> Params:  # fmt: skip
    lives = [leaves(theta) for _ in range(R)]
    optimizers = [AdamW(live, **ADAMW) for live in lives]
    m, flying = [torch.zeros_like(p) for p in theta], {}
    code = e3m0 if bits == 4 else (lambda x: x)
    for t in range(1, steps + 1):
        for r, live in enumerate(lives):
            inner(live, optimizers[r], range(t, t + 1), r)
        for f, part in enumerate(parts):
            if (t - f * H // len(parts)) % H == 0:
                flying[f, t + tau] = [mean([code(theta[i] - live[i]) for live in lives]) for i in part]
            for i, d in zip(part, flying.pop((f, t), ()), strict=False):
                m[i] = mu * m[i] + d
                theta[i] = theta[i] - lr * (d + mu * m[i])
                for live in lives:
                    live[i].copy_((1 - alpha) * theta[i] + alpha * live[i])
    return theta


def tiles(shape: Sequence[int], side: int, run: int) -> Iterator[tuple[slice, ...]]:
    """Squares of ``side`` in a matrix, runs of ``run`` values in a vector; smaller ones at the edges."""
    cuts = [range(0, n, side if len(shape) > 1 else run) for n in shape]
    step = side if len(shape) > 1 else run
    if len(shape) == 1:
        yield from ((slice(i, i + step),) for i in cuts[0])
    else:
        yield from ((slice(i, i + step), slice(j, j + step)) for i in cuts[0] for j in cuts[1])


def keep_largest(x: Tensor, k: int, C: int) -> Tensor:
    """Mask of the ``max(1, round(n k / C))`` largest magnitudes of a tile of n values."""
    count = max(1, math.floor(x.numel() * k / C + 0.5))
    order = x.abs().flatten().argsort(descending=True, stable=True)
    mask = torch.zeros(x.numel(), dtype=torch.bool)
    mask[order[:count]] = True
    return mask.reshape(x.shape)


def cosines(n: int) -> Tensor:
    """DCT-II, orthonormal: row u is ``sqrt(2/n) cos(pi (2x + 1) u / 2n)``, row 0 divided by sqrt 2."""
    rows = [[math.cos(math.pi * (2 * x + 1) * u / (2 * n)) for x in range(n)] for u in range(n)]
    matrix = torch.tensor(rows, dtype=torch.float64) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix


def dct(x: Tensor) -> Tensor:
    return cosines(len(x)) @ x if x.dim() == 1 else cosines(len(x)) @ x @ cosines(x.shape[1]).T


def inverse_dct(x: Tensor) -> Tensor:
    return cosines(len(x)).T @ x if x.dim() == 1 else cosines(len(x)).T @ x @ cosines(x.shape[1])


def demo(theta: Params, R: int, steps: int, lr: float, k: int, side: int, decay: float, wd: float) -> Params:
    delta = [[torch.zeros_like(p) for p in theta] for _ in range(R)]
    for t in range(1, steps + 1):
        grads = [gradients(theta, t, r) for r in range(R)]
        for i, p in enumerate(theta):
            for r in range(R):
                delta[r][i] = decay * delta[r][i] + lr * grads[r][i]
            for tile in tiles(p.shape, side, side):
                total, senders = torch.zeros_like(p[tile]), torch.zeros_like(p[tile])
                for r in range(R):
                    coded = dct(delta[r][i][tile])
                    mask = keep_largest(coded, k, side * side)
                    sent = torch.where(mask, coded, 0).float().double()  # values travel as float32
                    delta[r][i][tile] -= inverse_dct(sent)
                    total, senders = total + sent, senders + mask
                p[tile] = p[tile] * (1 - lr * wd) - lr * inverse_dct(total / senders.clamp(min=1)).sign()
    return theta


def ef_signsgd(theta: Params, R: int, steps: int, lr: float) -> Params:
    e = [[torch.zeros_like(p) for p in theta] for _ in range(R)]
    for t in range(1, steps + 1):
        grads = [gradients(theta, t, r) for r in range(R)]
        for i, x in enumerate(theta):
            sent = []
            for r in range(R):
                p = lr * grads[r][i] + e[r][i]
                sent.append(p.sign() * p.abs().mean().float())  # the scale travels as float32
                e[r][i] = p - sent[r]
            theta[i] = x - mean(sent)
    return theta


def orthonormal(matrix: Tensor) -> Tensor:
    """Gram-Schmidt on columns."""
    columns: list[Tensor] = []
    for column in matrix.T:
        for done in columns:
            column = column - (done @ column) * done
        columns.append(column / column.norm())
    return torch.stack(columns, dim=1)


def powersgd(
    theta: Params, R: int, steps: int, lr: float, mu: float, bases: Sequence[Tensor | None]
) -> Params:  # fmt: skip
    """``bases`` holds the first basis of each matrix; None where a tensor travels whole."""
    e = [[torch.zeros_like(p) for p in theta] for _ in range(R)]
    m, Q = [torch.zeros_like(p) for p in theta], list(bases)
    for t in range(1, steps + 1):
        grads = [gradients(theta, t, r) for r in range(R)]
        for i, x in enumerate(theta):
            M = [e[r][i] + grads[r][i] for r in range(R)]
            update = mean(M)
            if Q[i] is not None:
                odd = t % 2 == 0
                P = [(A.T if odd else A) @ Q[i] for A in M]
                sent = [F @ Q[i].T for F in P]
                e = [[*row[:i], A - (S.T if odd else S), *row[i + 1 :]] for row, A, S in zip(e, M, sent, strict=True)]
                update = mean(sent).T if odd else mean(sent)
                Q[i] = orthonormal(mean(P))
            m[i] = mu * m[i] + update
            theta[i] = x - lr * m[i]
    return theta


def qsparse(
    theta: Params, R: int, rounds: int, H: int, lr: float, k: int, C: int, s: int, xi: Iterator[Tensor]
) -> Params:
    """``xi`` gives the uniform numbers of each chunk, in the order in which chunks are sent."""
    memory = [[torch.zeros_like(p) for p in theta] for _ in range(R)]
    for n in range(rounds):
        sent = []
        for r in range(R):
            live = leaves(theta)
            for t in steps_of(n, H):
                live = [p - lr * g for p, g in zip(live, gradients(live, t, r), strict=True)]
            u = [(e + (x - p)).flatten() for e, x, p in zip(memory[r], theta, live, strict=True)]
            sent.append([torch.zeros_like(v) for v in u])
            for v, g in zip(u, sent[r], strict=True):
                for chunk in tiles(v.shape, C, C):
                    mask = keep_largest(v[chunk], k, C)
                    kept = v[chunk][mask].float()
                    level = torch.floor(s * kept.abs() / kept.norm() + next(xi)).clamp(max=s)
                    g[chunk][mask] = (kept.sign() * level * (kept.norm() / s)).double()
            memory[r] = [(v - g).view_as(p) for v, g, p in zip(u, sent[r], theta, strict=True)]
        theta = [p - mean(g).view_as(p) for p, *g in zip(theta, *sent, strict=True)]
    return theta


def two_levels(kept: Tensor, low: float, high: float) -> Tensor:
    """Sign and one of two levels, parted in their middle, times the mean magnitude in bf16."""
    scale = kept.abs().mean().float().bfloat16().to(kept.dtype)
    large = kept.abs() > scale * (low + high) / 2
    return torch.where(large, high, low).to(kept.dtype) * scale * kept.sign()


def sparseloco(
    theta: Params, R: int, rounds: int, H: int, k: int, side: int, decay: float, lr: float, over: str,
    levels: tuple[float, float],
) -> tuple[Params, list[Params]]:  # fmt: skip
    """Algorithm 1, with the two-level code; ``over`` says by whom the mean divides. Also returns the residuals."""
    theta, C = leaves(theta), side * side
    lives = [leaves(theta) for _ in range(R)]
    optimizers = [AdamW(live, **ADAMW) for live in lives]
    error = [[torch.zeros_like(p) for p in theta] for _ in range(R)]
    for n in range(rounds):
        for r, live in enumerate(lives):
            overwrite(live, theta)  # 1. H inner steps from the anchor; moments are kept
            inner(live, optimizers[r], steps_of(n, H), r)
        for i, p in enumerate(theta):
            total, senders = torch.zeros_like(p), torch.zeros_like(p)
            for r, live in enumerate(lives):
                e = error[r][i]
                e.mul_(decay).add_(p - live[i])  # 2., 3. delta into the residual
                for tile in tiles(p.shape, side, C):
                    mask = keep_largest(e[tile], k, C)  # 4. top-k, two bits
                    sent = torch.zeros_like(e[tile])
                    sent[mask] = two_levels(e[tile][mask], *levels)
                    e[tile] -= sent  # 5. the quantized values leave the residual
                    total[tile] += sent
                    senders[tile] += mask
            update = total / (senders.clamp(min=1) if over == "contributors" else R)  # 6., 7. reduce
            p.sub_(lr * update)  # 8. plain SGD
    return theta, error
