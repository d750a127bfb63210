"""How evenly does one model serve all clients? As in FedGLAD (Yang et al., TMLR 2023), Appendix R."""

from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.diagnose.vectors import Values, numbers
from fedloom.errors import DataError


class Fairness(NamedTuple):
    """One model's scores on every client's own data. Clients whose score is nan do not count."""

    mean: float
    std: float  # of these clients, not an estimate for others: divided by their number
    min: float
    p10: float  # 10th percentile, between two clients in proportion
    gains: Tensor | None  # [N] score less that of the baseline


def fairness(scores: Values, baseline: Values | None = None) -> Fairness:
    """What scores [N] come to, and the gain of each client over the scores of another model.

    >>> fairness([0.5, 0.75, 1.0]).min
    0.5
    """
    scores = numbers(scores)
    gains = None
    if baseline is not None:
        baseline = numbers(baseline)
        if len(baseline) != len(scores):
            raise DataError(f"scores and baseline must be of the same clients, not {len(scores)} and {len(baseline)}")
        gains = scores - baseline
    known = scores[~scores.isnan()]
    if not len(known):
        known = scores.new_tensor([float("nan")])
    spread = known.std(correction=0)
    return Fairness(float(known.mean()), float(spread), float(known.min()), float(torch.quantile(known, 0.1)), gains)
