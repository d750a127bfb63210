"""Cohorts from a list: Work w takes the one after that of Work w - 1, in listed order, and the list repeats.

What it does: puts the choice of clients into your hands.
When it helps: tests, forced bad samples, comparisons on the same cohorts.
What it costs: nothing; `clients_per_round` has no effect.
"""

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator as Rng

from fedloom.method import register
from fedloom.stages import Sampler, Setup, State, check


@register("fixed")
@dataclass(frozen=True)
class Fixed(Sampler):
    """The cohorts are given."""

    cohorts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        check(len(self.cohorts) > 0, "fixed: cohorts is empty")
        for cohort in self.cohorts:
            check(len(cohort) > 0, "fixed: a cohort is empty")
            check(min(cohort) >= 0, f"fixed: there is no client {min(cohort)}")

    def init(self, setup: Setup) -> State:
        largest = max(max(cohort) for cohort in self.cohorts)
        check(largest < setup.clients, f"fixed: there is no client {largest} among {setup.clients} (0 is the first)")
        return {}

    def draw(self, state: State, setup: Setup, number: int, w: int, rng: Rng) -> np.ndarray:
        return np.asarray(self.cohorts[w % len(self.cohorts)])
