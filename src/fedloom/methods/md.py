"""Multinomial sampling (MD), and its version of less variance. Fraboni, Vidal, Kameni, Lorenzi: Clustered Sampling:
Low-Variance and Improved Representativity for Clients Selection in Federated Learning. ICML 2021 (Algorithm 1).

    md:        r independent draws with probability p_k = n_k / n; each counts 1/r
    clustered: the clients, largest first, are poured by mass r p_k into r urns of mass 1; one is drawn from each urn

What they do: on average every client counts by its share of the data, although weights are equal.
When they help: sizes that differ much. Clustered draws big clients less often twice.
What they cost: the server must know all sizes; a client may be drawn twice, and then trains once per draw (with a
method that remembers: once, counted twice).
"""

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator as Rng

from fedloom.method import register
from fedloom.stages import Sampler, Setup, State

PAPER = "Fraboni et al., ICML 2021"
BY_SIZE = "draws clients by how many samples they have, and may draw one twice"


@register("md", paper=PAPER)
@dataclass(frozen=True)
class Md(Sampler):
    """Draw clients by their share of the data, with replacement."""

    weights = "equal"  # each draw counts the same
    breaks_privacy = BY_SIZE

    def init(self, setup: Setup) -> State:
        return {"mass": setup.sizes.double().cumsum(0)}

    def draw(self, state: State, setup: Setup, number: int, w: int, rng: Rng) -> np.ndarray:
        mass = state["mass"].cpu().numpy()
        return _at(mass, rng.random(number) * mass[-1])


@register("clustered", paper=PAPER)
@dataclass(frozen=True)
class Clustered(Sampler):
    """Draw one client from each of r groups of equal mass."""

    weights = "equal"
    breaks_privacy = BY_SIZE

    def init(self, setup: Setup) -> State:
        order = setup.sizes.sort(descending=True, stable=True).indices
        return {"order": order, "mass": setup.sizes[order].double().cumsum(0)}

    def draw(self, state: State, setup: Setup, number: int, w: int, rng: Rng) -> np.ndarray:
        mass = state["mass"].cpu().numpy()
        urns = (np.arange(number) + rng.random(number)) / number * mass[-1]
        return rng.permutation(state["order"].cpu().numpy()[_at(mass, urns)])


def _at(mass: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Whose piece of the mass each point lies in; rounding may put a point onto the very end."""
    return np.minimum(np.searchsorted(mass, points, side="right"), len(mass) - 1)
