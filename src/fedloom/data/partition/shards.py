"""Shards of samples sorted by label (McMahan et al., FedAvg; Zhao et al.; 2D-LRD).

The samples are sorted by label, in random order within a label, and cut into N * per_client shards, equal up to one
sample; each client is dealt `per_client` of them at random. 2D-LRD cuts "similar to [Zhao]" and does not print the
number of shards: one, the default, gives a client one class where classes divide the clients.
"""

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from fedloom.data.partition.base import REGISTRY, Deal, Partitioner, Pool, need
from fedloom.errors import DataError


@REGISTRY.add("shards", paper="McMahan et al. (FedAvg)")
@dataclass(frozen=True)
class Shards(Partitioner):
    """Sorted by label, cut into shards, and each client gets a few of these."""

    per_client: int = 1

    def __post_init__(self) -> None:
        if self.per_client < 1:
            raise DataError(f"shards: per_client must be at least 1, not {self.per_client}")

    def deal(self, pool: Pool, clients: int | None, rng: Generator) -> Deal:
        clients = need(clients)
        count = clients * self.per_client
        if count > len(pool):
            raise DataError(
                f"shards(per_client={self.per_client}): {len(pool)} samples can't be cut into {count} shards"
            )
        by_label = np.lexsort((rng.random(len(pool)), pool.labels))
        shards = np.array_split(by_label, count)
        dealt = rng.permutation(count).reshape(clients, self.per_client)
        return Deal.of([np.concatenate([shards[s] for s in mine]) for mine in dealt])
