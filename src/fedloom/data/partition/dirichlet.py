"""Dirichlet label priors per client (Acar et al., FedDyn), with log-normal sizes (AdaBest).

    q_k ~ Dir(alpha * 1);  s_k = floor(n / N), or s_k ~ LogNormal(log(n / N), sigma) rescaled to sum n and truncated

Until all quotas s_k are filled: pick a client uniformly among the unfilled, draw a class from its q_k, redraw while
that class is exhausted, and take the class's next sample. alpha is the concentration per class.

Departures: near the end a client's whole prior may sit on exhausted classes, where the released loop redraws
practically for ever; a redraw here is one draw from q_k renormalised over the classes that are left (the same
distribution), or, if less than 1e-12 of q_k is left, a draw in proportion to the remaining counts. No size is below 1.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from fedloom.data.partition import draws
from fedloom.data.partition.base import REGISTRY, Deal, Partitioner, Pool, need
from fedloom.errors import DataError


@REGISTRY.add("dirichlet", paper="Acar et al. (FedDyn)")
@dataclass(frozen=True)
class Dirichlet(Partitioner):
    """Labels from a Dirichlet prior per client with concentration alpha per class; sizes equal or log-normal."""

    alpha: float = 0.3
    sigma: float = 0.0

    def __post_init__(self) -> None:
        draws.check_positive("dirichlet", "alpha", self.alpha)
        if not (math.isfinite(self.sigma) and self.sigma >= 0):
            raise DataError(f"dirichlet: sigma must be a number of at least 0, not {self.sigma}")

    def deal(self, pool: Pool, clients: int | None, rng: Generator) -> Deal:
        clients = need(clients)
        names, counts = np.unique(pool.labels, return_counts=True)
        sizes, remarks = self._sizes(len(pool), clients, rng)
        q = draws.dirichlet(np.full(len(names), self.alpha), clients, rng)
        owner, drawn = _draw(q, sizes, counts, rng)
        # the m-th draw of a class takes the m-th sample of its shuffled queue
        by_label = np.lexsort((rng.random(len(pool)), pool.labels))
        starts = np.cumsum(counts) - counts
        by_class = np.argsort(drawn, kind="stable")
        times = np.bincount(drawn, minlength=len(names))
        place = np.arange(len(drawn)) - np.repeat(np.cumsum(times) - times, times)
        sample = np.empty(len(drawn), dtype=np.int64)
        sample[by_class] = by_label[starts[drawn[by_class]] + place]
        index = sample[np.argsort(owner, kind="stable")]
        return Deal(index, np.concatenate(([0], np.cumsum(sizes))), remarks=tuple(remarks))

    def _sizes(self, samples: int, clients: int, rng: Generator) -> tuple[np.ndarray, list[str]]:
        if self.sigma == 0:
            left_out = samples % clients
            remark = f"{left_out} samples were left out, so that every client has {samples // clients}"
            return np.full(clients, samples // clients), [remark] if left_out else []
        z = rng.standard_normal(clients)
        share = np.exp(self.sigma * (z - z.max()))  # the median n / N cancels in the rescaling
        sizes = np.floor(share / share.sum() * samples).astype(np.int64)
        small = int(np.sum(sizes == 0))
        sizes = np.maximum(sizes, 1)
        return _balance(sizes, samples), [f"{small} clients of size 0 got a sample"] if small else []


def _balance(sizes: np.ndarray, samples: int) -> np.ndarray:
    """Put the difference to `samples` on the first client that can bear it, else on the largest ones."""
    while (difference := samples - int(sizes.sum())) != 0:
        able = np.flatnonzero(sizes + difference >= 1)
        k = able[0] if len(able) else np.argmax(sizes)
        sizes[k] = max(1, sizes[k] + difference)
    return sizes


def _draw(q: np.ndarray, sizes: np.ndarray, counts: np.ndarray, rng: Generator) -> tuple[np.ndarray, np.ndarray]:
    """Client and class of every draw, in the order of the draws."""
    cumulative = np.cumsum(q, axis=1)
    quota, left = sizes.tolist(), counts.copy()
    unfilled = list(range(len(quota)))
    owner, drawn = np.empty(sizes.sum(), dtype=np.int64), np.empty(sizes.sum(), dtype=np.int64)
    for m, (u, v, w) in enumerate(_uniforms(len(owner), rng)):
        at = int(u * len(unfilled))
        k = unfilled[at]
        c = cumulative[k].searchsorted(v * cumulative[k, -1], side="right")
        if left[c] == 0:
            c = _redraw(q[k], left, w)
        left[c] -= 1
        owner[m], drawn[m] = k, c
        quota[k] -= 1
        if quota[k] == 0:
            unfilled[at] = unfilled[-1]
            unfilled.pop()
    return owner, drawn


def _uniforms(count: int, rng: Generator) -> Iterator[list[float]]:
    """Three uniform numbers at a time, drawn in blocks."""
    for begin in range(0, count, 100_000):
        yield from rng.random((min(100_000, count - begin), 3)).tolist()


def _redraw(q: np.ndarray, left: np.ndarray, w: float) -> int:
    """A class by q among those that are left, or by their counts where next to nothing of q is left."""
    weights = np.where(left > 0, q, 0.0)
    if weights.sum() < 1e-12:
        weights = left.astype(float)
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, w * cumulative[-1], side="right"))
