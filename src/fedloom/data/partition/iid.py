"""Shuffle and cut: every client sees the same distribution."""

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from fedloom.data.partition.base import REGISTRY, Deal, Labels, Partitioner


@REGISTRY.add("iid")
@dataclass(frozen=True)
class Iid(Partitioner):
    """Samples at random, sizes equal up to one."""

    def deal(self, labels: Labels, clients: int, rng: Generator) -> Deal:
        return np.array_split(rng.permutation(len(labels)), clients)
