"""The data set's own clients, filtered and picked."""

import time

import numpy as np
import pytest

from fedloom.data.partition import Pool, partition
from fedloom.errors import DataError

OWNER = np.array([2, 0, 2, 1, 2, 0, 3, 3, 3, 3])
LABELS = np.array([1, 0, 0, 1, 0, 0, 1, 1, 1, 0])
POOL = Pool(LABELS, OWNER, np.array(["ann", "bob", "cy", "di", "eve"]))  # eve has no sample


def names(text: str, clients: int | None = None, seed: int = 0) -> list[str]:
    deal = partition(text, POOL, clients, seed)
    assert deal.names is not None
    for name, k in zip(deal.names, range(len(deal)), strict=True):
        position = ["ann", "bob", "cy", "di", "eve"].index(name)
        assert deal.client(k).tolist() == np.flatnonzero(position == OWNER).tolist()
    return list(deal.names)


def test_all() -> None:
    assert names("natural") == ["ann", "bob", "cy", "di"]
    assert partition("natural", POOL, None, 0).remarks == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("natural(min_samples=2)", ["ann", "cy", "di"]),
        ("natural(max_samples=3)", ["ann", "bob", "cy"]),
        ("natural(max_rate=0.4)", ["ann", "cy"]),
        ("natural(max_rate=0.75)", ["ann", "cy", "di"]),  # at most
        ("natural(min_samples=3, max_samples=3)", ["cy"]),
    ],
)
def test_filters(text: str, expected: list[str]) -> None:
    assert names(text) == expected


def test_remarks() -> None:
    deal = partition("natural(min_samples=2)", POOL, 1, 0)
    assert deal.remarks == (
        "1 of 4 owners with 1 of 10 samples were left out by the filters",
        f"2 of 3 owners with {9 - len(deal.index)} of 9 samples were left out because fewer clients were asked for",
    )


def test_picks() -> None:
    assert names('natural(pick="largest")', 2) == ["cy", "di"]
    picked = [names("natural", 2, seed) for seed in range(60)]
    assert len({tuple(pair) for pair in picked}) == 6
    assert all(pair == sorted(pair) for pair in picked)
    assert names("natural", 2, 5) == names("natural", 2, 5)


def test_too_few() -> None:
    with pytest.raises(
        DataError, match=r"^natural: 3 of the data set's 4 clients pass the filters, and 4 clients were"
    ):
        names("natural(2)", 4)
    with pytest.raises(DataError, match=r"^natural: 0 of the data set's 4 clients pass the filters$"):
        names("natural(50)")


def test_a_million_owners() -> None:
    rng = np.random.default_rng(0)
    owner = rng.integers(0, 1_000_000, 3_000_000)
    pool = Pool(rng.integers(0, 2, len(owner)), owner, np.arange(1_000_000).astype(str))
    start = time.perf_counter()
    deal = partition("natural(min_samples=2, max_rate=0.6)", pool, 100_000, 0)
    assert time.perf_counter() - start < 20  # a second, on an idle machine
    assert deal.names is not None
    for k in rng.integers(0, len(deal), 20):
        assert set(owner[deal.client(int(k))]) == {int(deal.names[k])}
