"""IDA, inverse distance aggregation. Yeganeh, Farshad, Navab, Albarqouni: Inverse Distance Aggregation for Federated
Learning with Non-IID Data. MICCAI workshop DCL 2020.

With M the plain mean of the clients' models:

    d_k = |theta_k - M|        (norm 1 or 2)
    alpha_k = (1 / d_k) / sum_j (1 / d_j)
    theta <- sum_k alpha_k theta_k

What it does: outlying models count less.
When it helps: a few clients are broken or very unlike the rest.
What it costs: nothing on the wire; one more pass over the updates.

Departures: the norm is not stated everywhere; 1 is the default. Code that weighs by the distance instead of its inverse
is not followed.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedloom.method import register
from fedloom.stages import Aggregator, State, Updates

NEVER_ZERO = 1e-12


@register("ida", paper="Yeganeh et al., DCL 2020")
@dataclass(frozen=True)
class Ida(Aggregator):
    """Weigh models by how near they are to their mean."""

    norm: Literal[1, 2] = 1
    breaks_privacy = "weighs single updates by their distances, and averages without noise"

    def combine(self, state: State, updates: Updates) -> tuple[Updates, Tensor]:
        mean = updates.rows.weighted_sum(torch.full((len(updates),), 1 / len(updates), dtype=torch.float64))
        d = updates.rows.distances(mean, self.norm)
        rounding = 64 * torch.finfo(mean.dtype).eps * updates.rows.distances(torch.zeros_like(mean), self.norm).max()
        closeness = 1 / (torch.where(d > rounding, d, 0.0) + NEVER_ZERO)
        weighed = replace(updates, weights=closeness / closeness.sum())
        return weighed, weighed.rows.weighted_sum(weighed.weights)
