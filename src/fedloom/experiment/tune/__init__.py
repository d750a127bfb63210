"""Tuning: the search in the text form, the papers' grids, the study that is behind `fedloom tune`."""

from fedloom.experiment.tune.outcome import Row, Tuning
from fedloom.experiment.tune.tuning import tune

__all__ = ["Row", "Tuning", "tune"]
