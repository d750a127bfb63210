"""How far are models apart? RADFed. Xue, Klabjan, Luo: Aggregation Delayed Federated Learning. 2021 (Section V-B)."""

import math

import torch
from torch import Tensor

from fedloom.diagnose.vectors import columns, norm, squares
from fedloom.rows import Rows


def distance(theta: Tensor, central: Tensor) -> float:
    """DC = |theta - central| / |central|: how far a federated model is from one trained on the pooled data.

    >>> import torch
    >>> distance(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0]))
    1.25
    """
    return float(norm(theta.double() - central.double()) / norm(central))


def dissimilarity(rows: Rows | Tensor) -> float:
    """DL, the mean over pairs i < j of 1 - <w_i, w_j> / (|w_i| |w_j|) (Eq. 3). Vectors of zeros are left out; nan if
    fewer than two are left.

    `rows` are the clients' updates, as in the paper's text, or their models, as in its released code. With unit vectors
    u_k = w_k / |w_k| and bar their mean, the same is

        DL = sum_k |u_k - bar|^2 / (K - 1)

    which needs no pairs and keeps its digits where models hardly differ.
    """
    lengths = squares(rows).sqrt()
    moved = lengths != 0
    K = int(moved.sum())
    if K < 2:
        return math.nan
    apart = []
    for part in columns(rows):
        u = part[moved] / lengths[moved, None]
        apart.append((u - u.mean(0)).square().sum())
    return float((torch.stack(apart).sum() / (K - 1)).clamp(max=2))
