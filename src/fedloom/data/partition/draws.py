"""Draws from Dirichlet distributions that stay proper distributions however small the concentration is."""

import math

import numpy as np
from numpy.random import Generator

from fedloom.errors import DataError


def check_positive(where: str, name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise DataError(f"{where}: {name} must be a number above 0, not {value}")


def dirichlet(concentration: np.ndarray, draws: int, rng: Generator) -> np.ndarray:
    """`draws` rows of Dir(concentration).

    Where a row underflows to zeros or overflows, it is drawn from the limit instead: for a small concentration a single
    entry, chosen with probability proportional to it; for a large one its mean.
    """
    concentration = np.maximum(concentration, np.finfo(float).tiny)
    with np.errstate(all="ignore"):
        q = rng.dirichlet(concentration, draws)
    failed = np.flatnonzero(~(np.abs(q.sum(axis=1) - 1) < 1e-6))
    if len(failed):
        mean = concentration / concentration.max()
        mean /= mean.sum()
        q[failed] = mean if concentration.max() > 1 else rng.multinomial(1, mean, len(failed))
    return q
