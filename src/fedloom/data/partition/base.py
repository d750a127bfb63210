"""What partitioners share: a name, a seed, and the promise of an exact cover without empty clients."""

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from fedloom.errors import DataError
from fedloom.keys import check_seed
from fedloom.registry import Entry, Registry
from fedloom.spec import parse_one

Deal = list[np.ndarray]  # for each client the positions of its samples
Labels = np.ndarray

REGISTRY: "Registry[Partitioner]" = Registry("partition", DataError)


@dataclass(frozen=True)
class Partitioner:
    """Deals samples out by their labels."""

    def deal(self, labels: Labels, clients: int, rng: Generator) -> Deal:
        raise NotImplementedError


def partition(text: str, labels: Labels, clients: int, seed: int) -> Deal:
    """Deal out by a partition's text form, and check what came out.

    >>> [len(mine) for mine in partition("iid", np.zeros(10), clients=3, seed=0)]
    [4, 3, 3]
    """
    _load()
    call = REGISTRY.complete(parse_one(text))
    partitioner = REGISTRY.make(call)
    if not isinstance(clients, int) or isinstance(clients, bool) or clients < 1:
        raise DataError(f"the number of clients must be a whole number of at least 1, not {clients!r}")
    if clients > len(labels):
        raise DataError(f"{clients} clients can't share {len(labels)} samples: some would have none")
    check_seed(seed)
    dealt = partitioner.deal(labels, clients, np.random.default_rng(seed))
    empty = next((k for k, mine in enumerate(dealt) if not len(mine)), None)
    if empty is not None:
        raise DataError(f"partition {call} leaves client {empty} of {clients} without samples; choose fewer clients")
    return dealt


def partitioners() -> list[Entry[Partitioner]]:
    _load()
    return REGISTRY.entries()


def _load() -> None:
    from fedloom.data.partition import classes, iid  # noqa: F401
