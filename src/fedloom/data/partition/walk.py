"""RADFed's Algorithm 3: a random table near the optimum, by moves of a random rectangle.

A move picks rows i, i' and columns j, j' uniformly, eps ~ Uniform(0, xi * min(a_ij, a_i'j')), and

    a_ij -= eps,  a_i'j' -= eps,  a_ij' += eps,  a_i'j += eps

so that both margins stay and no cell falls below 0. P moves of burn-in, which end early once the loss lies between 1.1
and 1.2 times the optimum; then Q moves, of which the table with the lowest loss is kept.

Departures from the print, all as in the released code: the cap is relative, xi * min(a_ij, a_i'j'), not min(a_ij,
a_i'j', xi); the third case of the move is "m = i, n = j'" (the printed "n = j" breaks the column sums); line 9 keeps a
copy of the table, and the walk goes on from the current one. With an optimal loss of 0 the burn-in runs in full.
"""

import copy
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.random import Generator

from fedloom.data.partition.programme import Programme

BLOCK = 20_000  # moves drawn at once


def walk(programme: Programme, a: np.ndarray, burn_in: int, moves: int, xi: float, rng: Generator) -> np.ndarray:
    """From the optimal table to a random one."""
    optimal = programme.loss(a)
    low, high = (1.1 * optimal) ** 2, (1.2 * optimal) ** 2
    first = Walk(programme, a, xi, rng)
    for loss in first.steps(burn_in):
        if low < loss < high:
            break
    start, again = first.table(), copy.deepcopy(rng)
    second = Walk(programme, start, xi, rng)
    best, at = second.loss, 0
    for m, loss in enumerate(second.steps(moves), start=1):
        if loss < best:
            best, at = loss, m
    replayed = Walk(programme, start, xi, again)  # a copy at every improvement would cost more
    for _ in replayed.steps(at):
        pass
    return replayed.table()


class Walk:
    """A table that moves, with its residuals and squared loss kept up to date."""

    def __init__(self, programme: Programme, a: np.ndarray, xi: float, rng: Generator) -> None:
        self.a: list[list[float]] = a.tolist()
        self.residuals: list[list[float]] = programme.residuals(a).tolist()
        self.loss = float(np.sum(np.square(self.residuals)))
        self.xi, self.rng = xi, rng
        groups = programme.groups.T.tolist()  # [U][attributes]

        @lru_cache(maxsize=1 << 16)
        def exchanged(j: int, h: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
            """The groups that j is in and h is not, and the other way round."""
            pairs = [(less, more) for less, more in zip(groups[j], groups[h], strict=True) if less != more]
            return tuple(less for less, _ in pairs), tuple(more for _, more in pairs)

        self.exchanged = exchanged

    def table(self) -> np.ndarray:
        return np.array(self.a)

    def steps(self, moves: int) -> Iterator[float]:
        """The squared loss after each move."""
        a, residuals, exchanged = self.a, self.residuals, self.exchanged
        for i, k, j, h, u in self._draws(moves):  # k and h are i' and j'
            if i != k and j != h:
                a_i, a_k = a[i], a[k]
                eps = self.xi * min(a_i[j], a_k[h]) * u
                a_i[j] -= eps
                a_k[h] -= eps
                a_i[h] += eps
                a_k[j] += eps
                less, more = exchanged(j, h)
                r_i, r_k = residuals[i], residuals[k]
                slope = 2 * eps * len(less)
                for g in less:
                    slope -= r_i[g] - r_k[g]
                    r_i[g] -= eps
                    r_k[g] += eps
                for g in more:
                    slope += r_i[g] - r_k[g]
                    r_i[g] += eps
                    r_k[g] -= eps
                self.loss += 2 * eps * slope
            yield self.loss

    def _draws(self, moves: int) -> Iterator[tuple[int, int, int, int, float]]:
        T, U = len(self.a), len(self.a[0])
        for begin in range(0, moves, BLOCK):
            block = min(BLOCK, moves - begin)
            rows = self.rng.integers(T, size=(2, BLOCK))[:, :block].tolist()
            columns = self.rng.integers(U, size=(2, BLOCK))[:, :block].tolist()
            yield from zip(*rows, *columns, self.rng.random(BLOCK)[:block].tolist(), strict=True)
