"""Shuffle and cut: every client sees the same distribution.

`equal_classes=True` is AdaBest's balanced IID for CIFAR-100 (App. D.3): every client gets exactly as many samples of a
class as any other; the samples of a class that can't be divided so are left out.
"""

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from fedloom.data.partition.base import REGISTRY, Deal, Partitioner, Pool, need
from fedloom.errors import DataError


@REGISTRY.add("iid")
@dataclass(frozen=True)
class Iid(Partitioner):
    """Samples at random, sizes equal up to one."""

    equal_classes: bool = False

    def deal(self, pool: Pool, clients: int | None, rng: Generator) -> Deal:
        clients = need(clients)
        if not self.equal_classes:
            return Deal.of(np.array_split(rng.permutation(len(pool)), clients))
        share = np.unique_counts(pool.labels).counts // clients  # of each class, for each client
        if not share.any():
            raise DataError(f"iid(equal_classes=True): no class has a sample for each of {clients} clients")
        parts = []
        for name, each in zip(np.unique(pool.labels), share, strict=True):
            samples = rng.permutation(np.flatnonzero(pool.labels == name))
            parts.append(samples[: each * clients].reshape(clients, each))
        index = np.concatenate(parts, axis=1)
        left_out = len(pool) - index.size
        remark = f"{left_out} samples were left out: their classes can't be divided equally by {clients} clients"
        return Deal.of(list(index), [remark] if left_out else [])
