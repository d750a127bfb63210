"""FedNLP's Dirichlet partition with dynamic reassigning (Lin et al., FedNLP, 2021), as FedGLAD uses it.

Each client in order, of size floor(n / N), draws q ~ Dir(alpha * p), p being the label frequencies of all data: alpha
is the TOTAL concentration, so alpha = 0.1 with 10 classes is as skewed as 0.01 per class elsewhere. Class by class it
takes round(q_c * size) samples, the last class all that are still missing. Where a class runs dry, its shortfall is
taken from the other classes in proportion to what they have left, those with the fewest first. The last client takes
every sample that is left over.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from fedloom.data.partition.base import REGISTRY, Deal, Partitioner, Pool, need
from fedloom.data.partition.draws import check_positive, dirichlet


@REGISTRY.add("fednlp", paper="Lin et al. (FedNLP)")
@dataclass(frozen=True)
class FedNLP(Partitioner):
    """Equal sizes, labels from a Dirichlet with total concentration alpha; dry classes are replaced."""

    alpha: float = 0.1

    def __post_init__(self) -> None:
        check_positive("fednlp", "alpha", self.alpha)

    def deal(self, pool: Pool, clients: int | None, rng: Generator) -> Deal:
        clients = need(clients)
        names, counts = np.unique(pool.labels, return_counts=True)
        queues = [rng.permutation(np.flatnonzero(pool.labels == name)) for name in names]
        size = len(pool) // clients
        left: list[int] = counts.tolist()
        parts = []
        for q in dirichlet(self.alpha * (counts / len(pool)), clients - 1, rng):
            before = list(left)
            _fill(q.tolist(), size, left)
            parts.append(_next(queues, before, left))
        parts.append(_next(queues, left, [0] * len(left)))
        return Deal.of(parts)


def _fill(q: list[float], size: int, left: list[int]) -> None:
    """Take one client's samples from the counts `left` of each class."""
    missing = size
    for c, q_c in enumerate(q):
        want = missing if c == len(q) - 1 else min(round(q_c * size), missing)
        missing -= want
        taken = min(want, left[c])
        left[c] -= taken
        _reassign(want - taken, c, left)


def _reassign(miss: int, dry: int, left: list[int]) -> None:
    """Take `miss` samples from the classes other than the dry one, in proportion to what they have left."""
    while miss > 0:
        others = sorted((left[c], c) for c in range(len(left)) if c != dry and left[c] > 0)
        total, want = sum(count for count, _ in others), miss
        for count, c in others:
            taken = min(math.ceil(count / total * want), count, miss)
            left[c] -= taken
            miss -= taken


def _next(queues: list[np.ndarray], before: list[int], after: list[int]) -> np.ndarray:
    """What a client took from each queue whose remainder went from `before` to `after`."""
    taken = [queue[len(queue) - b : len(queue) - a] for queue, b, a in zip(queues, before, after, strict=True) if a < b]
    return np.concatenate(taken)
