"""How far do the clients of a round agree? g_k is the update of client k, a row of [K, P].

FedGLAD. Yang, Lin, Zhao, Li, Zhou, Sun: When to Trust Aggregated Gradients: Addressing Negative Client Sampling in
Federated Learning. TMLR 2023 (`gsi`, `norm_ratio`).
DGT. Li, Zhang, Li, Gong, Wang: Dynamic Gradient Tailor for Non-I.I.D. Federated Learning (`mean_cosine`, `conflicts`).
"""

import math

import torch
from torch import Tensor

from fedloom.diagnose.divergence import dissimilarity
from fedloom.diagnose.vectors import products, squares
from fedloom.rows import Rows
from fedloom.space import GroupBy


def gsi(rows: Rows, weights: Tensor, by: GroupBy = "tensor") -> Tensor:
    """The gradient similarity-aware indicator of each group P of parameters: [groups]. FedGLAD, Eq. 9.

        GSI = sqrt( sum_k w_k |g_kP|^2 / |g_P|^2 )        g = sum_k w_k g_k,  w = weights / sum(weights)

    1 for identical clients or a group without any update, infinite where updates cancel, above 1 otherwise.
    """
    w = weights.to(rows.device).double()
    w = w / w.sum()
    mean = rows.weighted_sum(w)
    spread = (w[:, None] * rows.squares(by)).sum(0)
    spread, length = torch.stack([spread, rows.space.groups(by).sums(mean.square())]).cpu()
    return gsi_of(spread, length, mean.dtype)


def gsi_of(spread: Tensor, length: Tensor, dtype: torch.dtype) -> Tensor:
    """`gsi` from sum_k w_k |g_kP|^2 and |g_P|^2, where g was computed in this dtype."""
    cancelled = length <= (64 * torch.finfo(dtype).eps) ** 2 * spread  # the average is nothing but rounding
    return torch.where(spread == 0, 1.0, torch.where(cancelled, math.inf, (spread / length).sqrt()))


def gsi_universal(rows: Rows, weights: Tensor) -> float:
    """`gsi` with all parameters as one group."""
    return float(gsi(rows, weights, "model"))


def cosines(rows: Rows | Tensor) -> Tensor:
    """<g_i, g_j> / (|g_i| |g_j|): [K, K], nan beside a vector of zeros."""
    inner = products(rows).cpu()
    length = inner.diagonal().sqrt()
    return (inner / length[:, None] / length).clamp(-1, 1)


def mean_cosine(rows: Rows | Tensor) -> float:
    """The mean of <g_i, g_j> / (|g_i| |g_j|) over pairs i < j (DGT, Fig. 4), vectors of zeros left out; nan if fewer
    than two are left."""
    return 1 - dissimilarity(rows)


def conflicts(rows: Rows | Tensor) -> float:
    """The share of pairs i < j with <g_i, g_j> < 0 (DGT, Fig. 5), vectors of zeros left out; nan if fewer than two
    are left."""
    inner = products(rows).cpu()
    moved = inner.diagonal() != 0
    inner = inner[moved][:, moved]
    i, j = torch.triu_indices(len(inner), len(inner), 1)
    pairs = inner[i, j]
    return float(torch.where(pairs.isnan(), math.nan, (pairs < 0).double()).mean())


def norm_ratio(rows: Rows | Tensor) -> float:
    """std_k |g_k|^2 / mean_k |g_k|^2. FedGLAD, Table 4, whose caption prints the inverse."""
    lengths = squares(rows)
    mean = lengths.mean()
    return float((lengths - mean).square().mean().sqrt() / mean)
