"""The coordinate-wise median, and the mean without the extremes. Yin, Chen, Kannan, Bartlett: Byzantine-Robust
Distributed Learning: Towards Optimal Statistical Rates. ICML 2018.

What they do: in every coordinate the most extreme clients do not count.
When they help: hostile or broken clients.
What they cost: every single update at the server, sorted in each coordinate; on skewed data a bias, for honest clients
are extreme there too.

Neither has weights: a rescaler takes 1/r and the plain mean.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedloom.method import register
from fedloom.stages import Aggregator, State, Updates, check

PAPER = "Yin et al., ICML 2018"
SORTS = "sorts single updates, and averages without noise"


@register("median", paper=PAPER)
@dataclass(frozen=True)
class Median(Aggregator):
    """The median of the updates in every coordinate."""

    breaks_privacy = SORTS
    reads_rows = True

    def combine(self, state: State, updates: Updates) -> tuple[Updates, Tensor]:
        ordered, r = updates.rows.matrix.sort(dim=0).values, len(updates)
        return _equal(updates), (ordered[(r - 1) // 2] + ordered[r // 2]) / 2


@register("trimmed-mean", paper=PAPER)
@dataclass(frozen=True)
class TrimmedMean(Aggregator):
    """The mean of the updates in every coordinate, the extremes left out."""

    fraction: float = 0.1
    breaks_privacy = SORTS
    reads_rows = True

    def __post_init__(self) -> None:
        check(0 <= self.fraction < 0.5, f"trimmed-mean: fraction must be at least 0 and below 0.5, not {self.fraction}")

    def combine(self, state: State, updates: Updates) -> tuple[Updates, Tensor]:
        r = len(updates)
        cut = int(self.fraction * r + 1e-9)
        return _equal(updates), updates.rows.matrix.sort(dim=0).values[cut : r - cut].mean(0)


def _equal(updates: Updates) -> Updates:
    return replace(updates, weights=torch.full_like(updates.weights, 1 / len(updates)))
