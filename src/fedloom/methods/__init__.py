"""One file per method; importing the package registers them all."""

from fedloom.methods import (
    bernoulli,
    exponential,
    fedadagrad,
    fedadam,
    fedavg,
    fedavgm,
    fedprox,
    fedyogi,
    fixed,
    linear,
    uniform,
)

__all__ = [
    "bernoulli",
    "exponential",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedavgm",
    "fedprox",
    "fedyogi",
    "fixed",
    "linear",
    "uniform",
]
