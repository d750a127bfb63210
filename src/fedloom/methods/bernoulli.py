"""Each client takes part independently with the same probability; a draw of nobody is redrawn.

The number of clients is drawn at once from the binomial distribution without its zero, so that a draw costs what the
cohort costs and ends however small the rate is. Under `noise` the zero stays: its account is that of a true Poisson
sample, and noise alone is then averaged.

What it does: participation as in FedDyn's code, and the only sampler here that privacy amplification by Poisson
sampling may be claimed for.
When it helps: where clients decide for themselves.
What it costs: nothing; `clients_per_round` has no effect, and cohorts vary in size.
"""

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator as Rng

from fedloom.method import register
from fedloom.stages import Aggregator, Sampler, Setup, State, check


@register("bernoulli", paper="Acar et al. (FedDyn), ICLR 2021")
@dataclass(frozen=True)
class Bernoulli(Sampler):
    """Every client takes part with the same probability; their number varies."""

    rate: float = 0.1
    breaks_privacy = None

    def __post_init__(self) -> None:
        check(0 < self.rate <= 1, f"bernoulli: rate must be above 0 and at most 1, not {self.rate}")

    def draw(self, state: State, setup: Setup, number: int, w: int, rng: Rng) -> np.ndarray:
        from scipy.stats import binom  # slow to import

        redrawn = all(stage.needs_updates for stage in setup.stages if isinstance(stage, Aggregator))
        nobody = binom.pmf(0, setup.clients, self.rate) if redrawn else 0.0
        number = int(binom.ppf(nobody + (1 - nobody) * rng.random(), setup.clients, self.rate))
        return rng.choice(setup.clients, min(max(number, int(redrawn)), setup.clients), replace=False)
