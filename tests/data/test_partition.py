"""Partitioners: exact cover, no empty client, the same for the same seed."""

import numpy as np
import pytest

from fedloom.data.partition import Pool
from fedloom.data.partition import partition as deal_out


def partition(text: str, y: np.ndarray, clients: int, seed: int) -> list[np.ndarray]:
    deal = deal_out(text, Pool(y), clients, seed)
    return [deal.client(k) for k in range(len(deal))]


def labels(samples: int = 1000, classes: int = 10) -> np.ndarray:
    return np.random.default_rng(1).integers(0, classes, samples)


@pytest.mark.parametrize("text", ["iid", "classes(per_client=2)", "classes(per_client=1)", "classes(per_client=10)"])
@pytest.mark.parametrize("clients", [10, 33])
def test_exact_cover(text: str, clients: int) -> None:
    dealt = partition(text, labels(), clients, seed=3)
    assert len(dealt) == clients
    assert min(len(mine) for mine in dealt) > 0
    assert sorted(np.concatenate(dealt).tolist()) == list(range(1000))


@pytest.mark.parametrize("text", ["iid", "classes(per_client=2)"])
def test_seeded(text: str) -> None:
    first, again, other = (partition(text, labels(), 20, seed) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_iid_sizes_differ_by_one_at_most() -> None:
    sizes = [len(mine) for mine in partition("iid", labels(), 33, seed=0)]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("clients", "per_client"), [(20, 2), (5, 2), (7, 3), (100, 1), (13, 9)])
def test_classes_per_client(clients: int, per_client: int) -> None:
    y = labels(5000)
    dealt = partition(f"classes(per_client={per_client})", y, clients, seed=0)
    owners = np.zeros(10, dtype=int)
    for mine in dealt:
        present = np.unique(y[mine])
        assert len(present) == per_client
        owners[present] += 1
    assert owners.max() - owners.min() <= 1
    for c in range(10):  # a class is split evenly among its owners
        shares = [np.sum(y[mine] == c) for mine in dealt if np.any(y[mine] == c)]
        assert max(shares) - min(shares) <= 1


def test_which_classes_go_together_is_random() -> None:
    y = labels()
    pairs = {tuple(np.unique(y[mine])) for seed in range(20) for mine in partition("classes(2)", y, 20, seed)}
    assert len(pairs) > 30  # of 45
