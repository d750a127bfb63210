"""Cohorts from a list: Work w takes the one after that of Work w - 1, in listed order, and the list repeats.

With `works`, the i-th cohort is that of Work works[i] (0 is the first), and all other Works draw uniformly, as they
would without it: `fixed(cohorts=[[3, 8]], works=[39])` forces the fortieth (FedGLAD, Fig. 4).

What it does: puts the choice of clients into your hands.
When it helps: tests, forced bad samples, comparisons on the same cohorts.
What it costs: nothing; `clients_per_round` has no effect.
"""

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator as Rng

from fedloom.method import register
from fedloom.methods.defaults import Uniform
from fedloom.stages import Sampler, Setup, State, check


@register("fixed")
@dataclass(frozen=True)
class Fixed(Sampler):
    """The cohorts are given."""

    cohorts: tuple[tuple[int, ...], ...]
    works: tuple[int, ...] | None = None
    breaks_privacy = None

    def __post_init__(self) -> None:
        check(len(self.cohorts) > 0, "fixed: cohorts is empty")
        for cohort in self.cohorts:
            check(len(cohort) > 0, "fixed: a cohort is empty")
            check(min(cohort) >= 0, f"fixed: there is no client {min(cohort)}")
        if self.works is not None:
            same = len(self.works) == len(self.cohorts) and len(set(self.works)) == len(self.works)
            check(same, f"fixed: works must name one Work for each of the {len(self.cohorts)} cohorts")
            check(min(self.works) >= 0, f"fixed: there is no Work {min(self.works)}")

    def init(self, setup: Setup) -> State:
        largest = max(max(cohort) for cohort in self.cohorts)
        check(largest < setup.clients, f"fixed: there is no client {largest} among {setup.clients} (0 is the first)")
        return {}

    def draw(self, state: State, setup: Setup, number: int, w: int, rng: Rng) -> np.ndarray:
        if self.works is None:
            return np.asarray(self.cohorts[w % len(self.cohorts)])
        if w in self.works:
            return np.asarray(self.cohorts[self.works.index(w)])
        return Uniform().draw(state, setup, number, w, rng)
