"""What partitioners share: a name, a seed, and the promise of no sample twice and no client empty."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.random import Generator

from fedloom.errors import DataError
from fedloom.keys import check_seed
from fedloom.registry import Entry, Registry
from fedloom.spec import parse_one


@dataclass(frozen=True)
class Pool:
    """The samples that are to be dealt out, as far as a partitioner may see them."""

    labels: np.ndarray  # [n] whole numbers
    owner: np.ndarray | None = None  # [n] natural client of each sample, a position in `owners`
    owners: np.ndarray | None = None  # their names
    features: np.ndarray | None = None  # [n, M] whole numbers: categorical columns, for quadratic(theta=...)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Deal:
    """Client k owns the samples `index[offsets[k] : offsets[k + 1]]`."""

    index: np.ndarray
    offsets: np.ndarray
    names: np.ndarray | None = None  # of the clients, where they have any
    remarks: tuple[str, ...] = field(default=())  # what was left out or had to be repaired

    @classmethod
    def of(cls, parts: Sequence[np.ndarray], remarks: Sequence[str] = ()) -> "Deal":
        """One array of positions per client."""
        sizes = [len(part) for part in parts]
        index = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
        return cls(index, np.cumsum([0, *sizes], dtype=np.int64), remarks=tuple(remarks))

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def client(self, k: int) -> np.ndarray:
        return self.index[self.offsets[k] : self.offsets[k + 1]]


REGISTRY: "Registry[Partitioner]" = Registry("partition", DataError)


@dataclass(frozen=True)
class Partitioner:
    """Deals samples out to clients."""

    def deal(self, pool: Pool, clients: int | None, rng: Generator) -> Deal:
        """`clients` is None only where the user left it open; most partitioners need it (see `need`)."""
        raise NotImplementedError


def need(clients: int | None) -> int:
    """The number of clients, for a partitioner that can't choose it."""
    if clients is None:
        raise DataError("this partition needs a number of clients, as in clients=100 (only natural brings its own)")
    return clients


def partition(text: str, pool: Pool, clients: int | None, seed: int) -> Deal:
    """Deal out by a partition's text form; clients that would be empty get a sample from the largest.

    >>> partition("iid", Pool(np.zeros(10, int)), clients=3, seed=0).sizes.tolist()
    [4, 3, 3]
    """
    load_partitioners()
    call = REGISTRY.complete(parse_one(text))
    partitioner = REGISTRY.make(call)
    if clients is not None:
        if not isinstance(clients, int) or isinstance(clients, bool) or clients < 1:
            raise DataError(f"the number of clients must be a whole number of at least 1, not {clients!r}")
        if clients > len(pool):
            raise DataError(f"{clients} clients can't share {len(pool)} samples: some would have none")
    check_seed(seed)
    return _fill_empty(partitioner.deal(pool, clients, np.random.default_rng(seed)))


def _fill_empty(deal: Deal) -> Deal:
    empty = np.flatnonzero(deal.sizes == 0)
    if not len(empty):
        return deal
    parts = [deal.client(k) for k in range(len(deal))]
    for k in empty:
        giver = int(np.argmax([len(part) for part in parts]))
        if len(parts[giver]) < 2:
            raise DataError(f"{len(deal)} clients can't share {len(deal.index)} samples: some would have none")
        parts[k], parts[giver] = parts[giver][-1:], parts[giver][:-1]
    remark = f"{len(empty)} clients would have had no sample and got one from the largest"
    return replace(Deal.of(parts, [*deal.remarks, remark]), names=deal.names)


def partitioners() -> list[Entry[Partitioner]]:
    load_partitioners()
    return REGISTRY.entries()


def load_partitioners() -> None:
    from fedloom.data.partition import classes, dirichlet, fednlp, iid, natural, quadratic, shards  # noqa: F401
