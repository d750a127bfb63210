"""The clients that the data came with: one per writer, role, user or hospital (LEAF, FedGLAD, RADFed).

Filters leave owners out: RADFed's eICU keeps hospitals with more than 100 admissions and a mortality of at most 20%,
`natural(min_samples=101, max_rate=0.2)`. With a number of clients, that many of the owners left are picked, at random
or the largest, and kept in their order.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.random import Generator

from fedloom.data.partition.base import REGISTRY, Deal, Partitioner, Pool
from fedloom.errors import DataError


@REGISTRY.add("natural")
@dataclass(frozen=True)
class Natural(Partitioner):
    """The data set's own clients, without those that the filters leave out."""

    min_samples: int = 1
    max_samples: int | None = None
    max_rate: float | None = None  # the largest share of label 1
    pick: Literal["random", "largest"] = "random"

    def __post_init__(self) -> None:
        if self.min_samples < 1:
            raise DataError(f"natural: min_samples must be at least 1, not {self.min_samples}")
        if self.max_samples is not None and self.max_samples < self.min_samples:
            raise DataError(f"natural: max_samples must be at least min_samples, not {self.max_samples}")
        if self.max_rate is not None and not 0 <= self.max_rate <= 1:
            raise DataError(f"natural: max_rate is a share between 0 and 1, not {self.max_rate}")

    def deal(self, pool: Pool, clients: int | None, rng: Generator) -> Deal:
        if pool.owner is None:
            raise DataError("natural: this data set has no clients of its own; choose another partition, as in iid")
        sizes = np.bincount(pool.owner, minlength=0 if pool.owners is None else len(pool.owners))
        ones = None if self.max_rate is None else np.bincount(pool.owner[pool.labels == 1], minlength=len(sizes))
        chosen, remarks = self.choose(sizes, ones, clients, rng)
        index = _samples(pool.owner, chosen, sizes)
        names = None if pool.owners is None else pool.owners[chosen]
        return Deal(index, np.concatenate(([0], np.cumsum(sizes[chosen]))), names, tuple(remarks))

    def choose(
        self, sizes: np.ndarray, ones: np.ndarray | None, clients: int | None, rng: Generator
    ) -> tuple[np.ndarray, list[str]]:
        """The owners that take part, in order, by how many samples each has and how many of these have label 1."""
        left = self._filter(sizes, ones)
        remarks = _left_out("by the filters", sizes, np.flatnonzero(sizes), left)
        if not len(left) or (clients or 0) > len(left):
            wanted = "" if clients is None else f", and {clients} clients were asked for"
            raise DataError(
                f"natural: {len(left)} of the data set's {np.sum(sizes > 0)} clients pass the filters{wanted}"
            )
        chosen = left if clients is None else self._pick(left, sizes, clients, rng)
        return chosen, remarks + _left_out("because fewer clients were asked for", sizes, left, chosen)

    def _filter(self, sizes: np.ndarray, ones: np.ndarray | None) -> np.ndarray:
        """The owners that stay, in order."""
        stays = sizes >= self.min_samples
        if self.max_samples is not None:
            stays &= sizes <= self.max_samples
        if self.max_rate is not None and ones is not None:
            stays &= ones <= self.max_rate * sizes
        return np.flatnonzero(stays)

    def _pick(self, left: np.ndarray, sizes: np.ndarray, clients: int, rng: Generator) -> np.ndarray:
        if self.pick == "largest":
            chosen = np.argsort(-sizes[left], kind="stable")[:clients]
        else:
            chosen = rng.choice(len(left), clients, replace=False, shuffle=False)
        return left[np.sort(chosen)]


def _left_out(why: str, sizes: np.ndarray, before: np.ndarray, after: np.ndarray) -> list[str]:
    owners, samples = len(before) - len(after), sizes[before].sum() - sizes[after].sum()
    text = f"{owners} of {len(before)} owners with {samples} of {sizes[before].sum()} samples were left out {why}"
    return [text] if owners else []


def _samples(owner: np.ndarray, chosen: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The chosen owners' samples, owner after owner."""
    taken = np.zeros(len(sizes), dtype=bool)
    taken[chosen] = True
    by_owner = np.argsort(owner, kind="stable")
    mine: np.ndarray = by_owner[taken[owner[by_owner]]]
    return mine
