"""A few classes per client (DGT: 20 clients with 2 random classes each).

Each client owns `per_client` different classes, and every class is owned as often as any other, up to one: N clients
times `per_client` slots are filled from a repeated list of classes. A class's samples are split evenly, at random,
among its owners. `equal_sizes=True` cuts every client, at random, to the size of the smallest.

DGT prints only "two randomly assigned categories"; how the classes are assigned and split is ours.
"""

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from fedloom.data.partition.base import REGISTRY, Deal, Partitioner, Pool, need
from fedloom.errors import DataError


@REGISTRY.add("classes", paper="Li et al. (DGT)")
@dataclass(frozen=True)
class Classes(Partitioner):
    """Every client has samples of a few classes only."""

    per_client: int = 2
    equal_sizes: bool = False

    def __post_init__(self) -> None:
        if self.per_client < 1:
            raise DataError(f"classes: per_client must be at least 1, not {self.per_client}")

    def deal(self, pool: Pool, clients: int | None, rng: Generator) -> Deal:
        clients, labels = need(clients), pool.labels
        names = np.unique(labels)
        if self.per_client > len(names):
            raise DataError(f"classes(per_client={self.per_client}): the data have {len(names)} classes only")
        if clients * self.per_client < len(names):
            raise DataError(
                f"{clients} clients with {self.per_client} classes each can't hold all {len(names)} classes"
            )
        owned = self._owners(len(names), clients, rng)
        mine: list[list[np.ndarray]] = [[] for _ in range(clients)]
        for c, name in enumerate(names):
            owners = rng.permutation([k for k in range(clients) if c in owned[k]])
            samples = rng.permutation(np.flatnonzero(labels == name))
            for owner, part in zip(owners, np.array_split(samples, len(owners)), strict=True):
                mine[owner].append(part)
        parts = [np.concatenate(part) for part in mine]
        return self._cut(parts, rng) if self.equal_sizes else Deal.of(parts)

    def _owners(self, classes: int, clients: int, rng: Generator) -> list[set[int]]:
        """Each client in turn takes the classes with the most free slots; ties are broken at random."""
        slots = np.full(classes, clients * self.per_client // classes)
        slots[rng.permutation(classes)[: clients * self.per_client % classes]] += 1
        owned = []
        for _ in range(clients):
            chosen = np.lexsort((rng.random(classes), -slots))[: self.per_client]
            slots[chosen] -= 1
            owned.append(set(chosen.tolist()))
        return [owned[k] for k in rng.permutation(clients)]

    def _cut(self, parts: list[np.ndarray], rng: Generator) -> Deal:
        size = min(len(part) for part in parts)
        if size == 0:
            raise DataError("classes(equal_sizes=True): the smallest client has no sample, so nothing would be left")
        left_out = sum(len(part) for part in parts) - size * len(parts)
        remark = f"{left_out} samples were left out, so that every client has {size}"
        return Deal.of([rng.permutation(part)[:size] for part in parts], [remark] if left_out else [])
