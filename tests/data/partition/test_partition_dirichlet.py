"""The Dirichlet partitions against their definitions, written again; and that they end."""

import math
import time

import numpy as np
import pytest

from fedloom.data.partition import PartitionReport, Pool, partition
from fedloom.data.partition.dirichlet import _redraw
from fedloom.data.partition.draws import dirichlet

CIFAR10 = np.repeat(np.arange(10), 5000)


def fednlp_again(y: np.ndarray, N: int, alpha: float, seed: int) -> list[list[int]]:
    """Section 4.1 of the specification, sentence by sentence, on queues of samples."""
    rng = np.random.default_rng(seed)
    n, L = len(y), int(y.max()) + 1
    p = np.array([np.sum(y == c) / n for c in range(L)])
    queues = [rng.permutation(np.flatnonzero(y == c)).tolist() for c in range(L)]
    size, dealt = n // N, []
    for _ in range(N - 1):
        q, mine, missing = rng.dirichlet(alpha * p), [], size
        for c in range(L):
            want = missing if c == L - 1 else min(round(float(q[c]) * size), missing)
            missing -= want
            while want and queues[c]:
                mine.append(queues[c].pop(0))
                want -= 1
            while want:  # the class ran dry
                miss = want
                remaining = sorted((len(queues[o]), o) for o in range(L) if o != c)
                total = sum(count for count, _ in remaining)
                for count, o in remaining:
                    for _ in range(min(math.ceil(count / total * miss), count, want)):
                        mine.append(queues[o].pop(0))
                        want -= 1
        dealt.append(mine)
    return [*dealt, [sample for queue in queues for sample in queue]]


@pytest.mark.parametrize("alpha", [0.05, 1.0, 20.0])
@pytest.mark.parametrize(("samples", "classes", "clients"), [(500, 4, 10), (503, 7, 25), (60, 3, 1), (997, 10, 90)])
def test_fednlp_is_the_specification(alpha: float, samples: int, classes: int, clients: int) -> None:
    y = np.random.default_rng(5).integers(0, classes, samples)
    deal = partition(f"fednlp({alpha})", Pool(y), clients, seed=3)
    expected = fednlp_again(y, clients, alpha, seed=3)
    assert [sorted(deal.client(k).tolist()) for k in range(clients)] == [sorted(mine) for mine in expected]
    assert deal.sizes[:-1].tolist() == [samples // clients] * (clients - 1)


@pytest.mark.parametrize(("alpha", "classes", "score"), [(0.1, 2.2, 1.64), (1, 4.2, 1.36), (10, 8.8, 0.73)])
def test_fednlp_on_cifar10(alpha: float, classes: float, score: float) -> None:
    deals = [partition(f"fednlp({alpha})", Pool(CIFAR10), 100, seed) for seed in range(3)]
    reports = [PartitionReport("", deal, CIFAR10) for deal in deals]
    assert all(deal.sizes.tolist() == [500] * 100 for deal in deals)
    assert abs(np.mean([report.classes_per_client() for report in reports]) - classes) < 0.1
    assert all(abs(report.c_score - score) < 0.1 for report in reports)


@pytest.mark.parametrize("alpha", [0.001, 1e-5, 1e-300, 1e308])
@pytest.mark.parametrize("text", ["dirichlet({})", "dirichlet({}, sigma=0.3)", "fednlp({})"])
def test_ends_with_5000_clients_of_100_classes(text: str, alpha: float) -> None:
    y, start = np.repeat(np.arange(100), 500), time.perf_counter()
    deal = partition(text.format(alpha), Pool(y), 5000, 0)
    assert time.perf_counter() - start < 30  # a second, on an idle machine
    assert sorted(deal.index.tolist()) == list(range(50_000))
    assert deal.sizes.min() >= 1


def test_dirichlet_draws_from_the_priors() -> None:
    """Classes last almost to the end, so that a client's shares vary as Dir(alpha) and the draws from it do."""
    L, alpha, size = 4, 0.5, 50
    y = np.repeat(np.arange(L), 50_000)
    shares = PartitionReport("", partition(f"dirichlet({alpha})", Pool(y), 4000, 0), y).histogram / size
    mean, variance = 1 / L, (1 / L) * (1 - 1 / L) / (L * alpha + 1)
    assert np.allclose(shares.mean(axis=0), mean, atol=1e-12)  # all samples are dealt out
    assert abs(shares.var() / (variance + (mean - mean**2 - variance) / size) - 1) < 0.05


def test_a_redraw_is_by_the_prior_of_what_is_left() -> None:
    q, left = np.array([0.7, 0.2, 0.1, 0.0]), np.array([0, 5, 5, 90])
    w = np.random.default_rng(0).random(20_000)
    drawn = np.bincount([_redraw(q, left, u) for u in w], minlength=4) / len(w)
    assert np.abs(drawn - [0, 2 / 3, 1 / 3, 0]).max() < 0.01
    only = np.array([1 - 1e-13, 1e-13, 0, 0])  # nothing to speak of is left of it: by the remaining counts
    drawn = np.bincount([_redraw(only, left, u) for u in w], minlength=4) / len(w)
    assert np.abs(drawn - [0, 0.05, 0.05, 0.9]).max() < 0.01


def test_dirichlet_sizes() -> None:
    equal = partition("dirichlet", Pool(np.arange(1003) % 7), 100, 0)
    assert equal.sizes.tolist() == [10] * 100
    assert equal.remarks == ("3 samples were left out, so that every client has 10",)
    y = np.arange(200_000) % 10
    deal = partition("dirichlet(0.3, sigma=0.3)", Pool(y), 1000, 0)
    logarithms = np.log(deal.sizes[1:])  # the first bears what truncation left
    assert abs(logarithms.std() - 0.3) < 0.03
    assert deal.sizes.sum() == 200_000


def test_dirichlet_says_which_sizes_were_repaired() -> None:
    deal = partition("dirichlet(0.3, sigma=4.0)", Pool(np.arange(500) % 5), 100, 0)
    assert deal.sizes.min() == 1
    assert deal.sizes.sum() == 500
    assert deal.remarks[0].endswith("clients of size 0 got a sample")


@pytest.mark.parametrize("alpha", [1e-320, 1e-200, 1e-5, 0.05, 3.0, 1e200, 1e308])
def test_dirichlet_rows_are_distributions(alpha: float) -> None:
    q = dirichlet(np.full(7, alpha), 500, np.random.default_rng(0))
    assert np.isfinite(q).all()
    assert np.allclose(q.sum(axis=1), 1)
    assert np.abs(q.mean(axis=0) - 1 / 7).max() < 0.06
    if alpha < 1e-3:
        assert np.mean(q.max(axis=1) > 0.999) > 0.98
