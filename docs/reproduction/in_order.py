"""COVFEAT as RADFed's code stores it: what a client has is sorted, by categorical features and last by class.

Its training goes through the samples in that order (`shuffle: false`). It adds the partition `quadratic-in-order`:

    python docs/reproduction/in_order.py reproduce docs/reproduction/radfed-covfeat-in-order.yaml --processes 2
"""

from dataclasses import dataclass

import numpy as np

from fedloom.cli import main
from fedloom.data.partition.base import REGISTRY, Deal, Pool
from fedloom.data.partition.quadratic import Quadratic


@REGISTRY.add("quadratic-in-order")
@dataclass(frozen=True)
class InOrder(Quadratic):
    """RADFed's partition with features; what a client has lies in the order of its configurations."""

    def deal(self, pool: Pool, clients: int | None, rng: np.random.Generator) -> Deal:
        deal = super().deal(pool, clients, rng)
        assert pool.features is not None
        place = np.empty(len(pool), dtype=np.int64)
        place[np.lexsort([pool.labels, *pool.features.T[::-1]])] = np.arange(len(pool))  # the first feature counts most
        owner = np.repeat(np.arange(len(deal.offsets) - 1), np.diff(deal.offsets))
        return Deal(deal.index[np.lexsort([place[deal.index], owner])], deal.offsets, deal.names, deal.remarks)


if __name__ == "__main__":
    main()
