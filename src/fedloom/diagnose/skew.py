"""How far do the labels of some clients differ from those of all?

FedGLAD. Yang, Lin, Zhao, Li, Zhou, Sun: When to Trust Aggregated Gradients: Addressing Negative Client Sampling in
Federated Learning. TMLR 2023 (`sim_score`, and its `pearson` correlation with GSI over rounds).
RADFed. Xue, Klabjan, Luo: Aggregation Delayed Federated Learning. 2021 (`c_score`).
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedloom.data.partition.base import Deal
from fedloom.data.partition.report import PartitionReport
from fedloom.diagnose.vectors import Values, cosine, numbers
from fedloom.errors import DataError
from fedloom.federation import Federation, has_target

Clients = Tensor | Sequence[int]


def label_counts(federation: Federation, clients: Clients | None = None) -> Tensor:
    """How many samples of each label these clients have together (None: all): [classes].

    A client that stands there twice counts twice. In sequences every place that has a target counts.

    >>> federation = Federation.from_arrays([([[0.0], [1.0]], [0, 1]), ([[2.0]], [1])])
    >>> label_counts(federation).tolist()
    [1.0, 2.0]
    """
    labels, _ = _labels(federation if clients is None else federation.only(_known(federation, clients)))
    return torch.bincount(labels, minlength=federation.classes or 0).double()


def sim_score(federation: Federation, clients: Clients) -> float:
    """cos(d, d_c), with d the label shares of these clients together and d_c those of all. FedGLAD, Eq. 16-18.

    1: they have the labels of all. 1 / sqrt(L): they have one of L labels that are equally frequent.
    """
    return cosine(label_counts(federation, clients), label_counts(federation))


def worst_cohort(federation: Federation, number: int) -> list[int]:
    """The clients of an unlucky round: so many that have the largest shares of one same label, most of it first. The
    label is the one of which that many clients have most.

    >>> federation = Federation.from_arrays([([[0.0], [1.0]], [0, 1]), ([[2.0]], [1]), ([[3.0], [4.0]], [1, 1])])
    >>> worst_cohort(federation, 2)
    [1, 2]
    """
    labels, offsets = _labels(federation)
    clients = torch.repeat_interleave(torch.arange(len(federation)), offsets[1:] - offsets[:-1])
    counts = torch.zeros(len(federation), federation.classes or 0, dtype=torch.float64)
    counts.index_put_((clients, labels), torch.ones(len(labels), dtype=torch.float64), accumulate=True)
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    order = shares.argsort(dim=0, descending=True, stable=True)[:number]  # [number, classes]
    label = shares.gather(0, order).sum(0).argmax()
    return [int(k) for k in order[:, label]]


def c_score(federation: Federation) -> float:
    """(1/N) sum_k sum_c |r_c^k - R_c|, with r^k the label shares of client k and R those of all. RADFed, Section V-C.

    0: all clients are alike. 2 - 2/L: each has one of L labels that are equally frequent.
    """
    labels, offsets = _labels(federation)
    deal = Deal(np.arange(len(labels)), offsets.numpy())
    return PartitionReport(federation.name, deal, labels.numpy()).c_score


def pearson(a: Values, b: Values) -> float:
    """The correlation of two series; nan where one of them is constant, or has fewer than two numbers.

    >>> round(pearson([1, 2, 3], [3, 2, 1]), 6)
    -1.0
    """
    a, b = numbers(a), numbers(b)
    if len(a) != len(b):
        raise DataError(f"two series are compared number by number, so they can't have {len(a)} and {len(b)}")
    if len(a) < 2 or a.min() == a.max() or b.min() == b.max():
        return math.nan
    return cosine(_centred(a), _centred(b))


def _centred(series: Tensor) -> Tensor:
    off = series - series.mean()
    return off / off.abs().max()  # so that squares stay in range


def _known(federation: Federation, clients: Clients) -> Tensor:
    chosen = torch.as_tensor(clients, dtype=torch.int64, device="cpu")
    for k in chosen[(chosen < 0) | (chosen >= len(federation))].tolist():
        raise DataError(f"there is no client {k}: the clients are 0 to {len(federation) - 1}")
    return chosen


def _labels(federation: Federation) -> tuple[Tensor, Tensor]:
    """All labels, one client after the other, and where each client begins."""
    if federation.classes is None:
        raise DataError(f"the targets of {federation.name} are no class labels to count")
    if federation.shards is not None:
        raise DataError("the labels can't be counted: they stay on disk (lazy=True); leave lazy out")
    targets = federation.y[federation.index.to(federation.y.device)].cpu().long()
    told = has_target(targets)
    before = torch.cat([torch.zeros(1, dtype=torch.int64), told.unsqueeze(-1).flatten(1).sum(1).cumsum(0)])
    return targets[told], before[federation.offsets]
