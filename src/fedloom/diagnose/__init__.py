"""What updates, labels and models say about each other: plain functions of tensors, in float64.

>>> import torch
>>> import fedloom as fl
>>> updates = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, -1.0]])
>>> round(fl.diagnose.mean_cosine(updates), 4), round(fl.diagnose.conflicts(updates), 4)
(-0.3333, 0.3333)

Tensors may lie on any device; results are numbers, or tensors on the CPU. What is undefined is nan, as is what was
measured on a NaN.
"""

from fedloom.diagnose.agreement import conflicts, cosines, gsi, gsi_universal, mean_cosine, norm_ratio
from fedloom.diagnose.divergence import dissimilarity, distance
from fedloom.diagnose.drift import feddyn_margin, norms
from fedloom.diagnose.fairness import Fairness, fairness
from fedloom.diagnose.skew import c_score, label_counts, pearson, sim_score, worst_cohort

__all__ = [
    "Fairness",
    "c_score",
    "conflicts",
    "cosines",
    "dissimilarity",
    "distance",
    "fairness",
    "feddyn_margin",
    "gsi",
    "gsi_universal",
    "label_counts",
    "mean_cosine",
    "norm_ratio",
    "norms",
    "pearson",
    "sim_score",
    "worst_cohort",
]
