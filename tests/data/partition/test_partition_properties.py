"""What every partitioner promises: no sample twice, all dealt out or a stated remainder, no empty client, one seed."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data.partition import Deal, Pool, partition
from fedloom.errors import DataError

COVERING = ["iid", "dirichlet(0.3, sigma=0.5)", "fednlp(0.1)", "fednlp(5)", "classes(2)", "shards", "shards(2)",
            "quadratic(burn_in=200, moves=200)", "quadratic(lam=2, walk=False)"]  # fmt: skip
CUTTING = ["iid(equal_classes=True)", "dirichlet(0.3)", "dirichlet(0.01)", "classes(2, equal_sizes=True)"]


def labels(samples: int, classes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).choice(classes, samples, p=np.arange(1, classes + 1) / sum(range(classes + 1)))


def left_out(deal: Deal) -> int:
    stated = [re.match(r"(\d+) samples were left out", remark) for remark in deal.remarks]
    return sum(int(match[1]) for match in stated if match)


@settings(max_examples=60, deadline=None)
@given(
    text=st.sampled_from(COVERING + CUTTING),
    samples=st.integers(40, 400),
    classes=st.integers(2, 6),
    clients=st.integers(3, 20),
    seed=st.integers(0, 1000),
)
def test_cover_and_sizes(text: str, samples: int, classes: int, clients: int, seed: int) -> None:
    pool = Pool(labels(samples, classes, seed))
    try:
        deal = partition(text, pool, clients, seed)
    except DataError:
        assert text in CUTTING or text == "classes(2)"  # what some data can't give
        return
    assert len(deal) == clients
    assert deal.sizes.min() >= 1
    assert len(np.unique(deal.index)) == len(deal.index)
    assert len(deal.index) + left_out(deal) == samples
    assert text in CUTTING or not left_out(deal)
    again = partition(text, pool, clients, seed)
    assert np.array_equal(deal.index, again.index)
    assert np.array_equal(deal.offsets, again.offsets)


@pytest.mark.parametrize("text", COVERING + CUTTING)
def test_another_seed_is_another_partition(text: str) -> None:
    pool = Pool(labels(600, 5, 0))
    first, other = (partition(text, pool, 12, seed) for seed in (0, 1))
    assert not np.array_equal(first.index, other.index)


@pytest.mark.parametrize("text", [text for text in COVERING if "classes" not in text])
@pytest.mark.parametrize(("samples", "classes", "clients"), [(7, 1, 1), (7, 3, 1), (14, 3, 7), (9, 1, 4)])
def test_small(text: str, samples: int, classes: int, clients: int) -> None:
    deal = partition(text, Pool(np.arange(samples) % classes), clients, 0)
    assert sorted(deal.index.tolist()) == list(range(samples))
    assert deal.sizes.min() >= 1


@pytest.mark.parametrize(
    "text", ["iid", "dirichlet", "dirichlet(sigma=3.0)", "fednlp", "shards", "quadratic(moves=10)"]
)
def test_as_many_clients_as_samples(text: str) -> None:
    deal = partition(text, Pool(np.arange(30) % 3), 30, 0)
    assert deal.sizes.tolist() == [1] * 30


def test_iid_equal_classes() -> None:
    y = np.repeat(np.arange(4), [100, 205, 300, 7])
    deal = partition("iid(equal_classes=True)", Pool(y), 10, 0)
    assert all(np.bincount(y[deal.client(k)], minlength=4).tolist() == [10, 20, 30, 0] for k in range(10))
    assert deal.remarks == ("12 samples were left out: their classes can't be divided equally by 10 clients",)


def test_classes_equal_sizes() -> None:
    y = np.repeat(np.arange(5), [100, 200, 300, 400, 500])
    deal = partition("classes(2, equal_sizes=True)", Pool(y), 10, 0)
    assert np.ptp(deal.sizes) == 0
    assert all(len(np.unique(y[deal.client(k)])) == 2 for k in range(10))  # cut at random, not from the last class


def test_classes_with_fewer_samples_than_owners() -> None:
    deal = partition("classes(1)", Pool(np.repeat([0, 1], [3, 97])), 20, 0)
    assert deal.sizes.min() == 1
    assert deal.remarks == ("7 clients would have had no sample and got one from the largest",)


@pytest.mark.parametrize("per_client", [1, 2, 5])
def test_shards(per_client: int) -> None:
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 600))
    deal = partition(f"shards({per_client})", Pool(y), 100, 0)
    assert deal.sizes.tolist() == [60] * 100
    present = [len(np.unique(y[deal.client(k)])) for k in range(100)]
    assert max(present) <= per_client  # shards of 60 / per_client divide a class


@pytest.mark.parametrize(
    ("text", "clients", "sentence"),
    [
        ("dirichlet(-0.1)", 10, "dirichlet: alpha must be a number above 0, not -0.1"),
        ("dirichlet(0)", 10, "dirichlet: alpha must be a number above 0, not 0.0"),
        ("dirichlet(1, sigma=-1)", 10, "dirichlet: sigma must be a number of at least 0, not -1.0"),
        ("fednlp(-3)", 10, "fednlp: alpha must be a number above 0, not -3.0"),
        ("classes(0)", 10, "classes: per_client must be at least 1, not 0"),
        ("classes(6)", 10, "classes(per_client=6): the data have 5 classes only"),
        ("classes(1)", 3, "3 clients with 1 classes each can't hold all 5 classes"),
        ("shards(0)", 10, "shards: per_client must be at least 1, not 0"),
        ("shards(11)", 10, "shards(per_client=11): 100 samples can't be cut into 110 shards"),
        ("iid(equal_classes=True)", 50, "iid(equal_classes=True): no class has a sample for each of 50 clients"),
        ("quadratic(mu=0)", 10, "quadratic: mu must be a number above 0, not 0.0"),
        ("quadratic(lam=-1)", 10, "quadratic: lam must be a number above 0, not -1.0"),
        ("quadratic(theta=-1)", 10, "quadratic: theta must be a number above 0, not -1.0"),
        ("quadratic(moves=-1)", 10, "quadratic: burn_in and moves must be at least 0"),
        ("quadratic(xi=2)", 10, "quadratic: xi must be above 0 and at most 1, not 2.0"),
        ("quadratic(theta=1)", 10, "quadratic(theta=...): this data set has no categorical features; leave theta out"),
        ("natural(0)", 10, "natural: min_samples must be at least 1, not 0"),
        ("natural(5, max_samples=4)", 10, "natural: max_samples must be at least min_samples, not 4"),
        ("natural(max_rate=20)", 10, "natural: max_rate is a share between 0 and 1, not 20.0"),
        ("natural", 10, "natural: this data set has no clients of its own; choose another partition, as in iid"),
        ("iid", 101, "101 clients can't share 100 samples: some would have none"),
        ("iid", 0, "the number of clients must be a whole number of at least 1, not 0"),
        ("fednlp", None, "this partition needs a number of clients, as in clients=100 (only natural brings its own)"),
    ],
)
def test_bad_input_is_one_sentence(text: str, clients: Any, sentence: str) -> None:
    with pytest.raises(DataError) as caught:
        partition(text, Pool(np.arange(100) % 5), clients, 0)
    assert str(caught.value) == sentence
