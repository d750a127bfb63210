"""Distance from a central model, and dissimilarity among clients, against RADFed's equations."""

import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.diagnose import dissimilarity, distance, mean_cosine, vectors
from tests.diagnose.reference import SIZE, Array, cosine, matrices, mean, pairs, rows_of

numbers = st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=4, max_size=4)


@given(theta=numbers, central=numbers)
def test_distance(theta: list[float], central: list[float]) -> None:
    length = math.hypot(*central)
    if length < 1e-100:
        return
    expected = math.hypot(*(a - b for a, b in zip(theta, central, strict=True))) / length
    found = distance(torch.tensor(theta, dtype=torch.float64), torch.tensor(central, dtype=torch.float64))
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-100)


def test_distance_is_relative_to_the_central_model() -> None:
    assert distance(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])) == 1.25
    assert distance(torch.tensor([0.0, 4.0]), torch.tensor([0.0, 4.0])) == 0.0


def test_distance_is_taken_in_float64() -> None:
    small, big = torch.tensor([1e-25]), torch.tensor([3e25])
    assert distance(2 * small, small) == pytest.approx(1.0)  # whose squares are 0 and infinity in float32
    assert distance(2 * big, big) == pytest.approx(1.0)
    half = torch.tensor([6e4], dtype=torch.float16)
    assert distance(half, -half) == 2.0  # whose difference is infinity in float16


def test_distance_from_nothing() -> None:
    assert distance(torch.ones(3), torch.zeros(3)) == math.inf
    assert math.isnan(distance(torch.zeros(3), torch.zeros(3)))
    assert math.isnan(distance(torch.tensor([1.0, math.nan]), torch.ones(2)))


@given(matrix=matrices())
def test_dissimilarity(matrix: Array) -> None:
    expected = mean([1 - cosine(a, b) for a, b in pairs(matrix)])
    for given_as in (rows_of(matrix), rows_of(matrix).matrix):
        assert dissimilarity(given_as) == pytest.approx(expected, rel=1e-12, abs=1e-12, nan_ok=True)


def test_dissimilarity_by_hand() -> None:
    east, north = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 5.0])
    assert dissimilarity(torch.stack([east, north])) == pytest.approx(1.0, rel=1e-15)
    assert dissimilarity(torch.stack([east, -2 * east])) == pytest.approx(2.0, rel=1e-15)
    assert dissimilarity(torch.stack([east, 3 * east, north])) == pytest.approx(2 / 3, rel=1e-15)
    assert dissimilarity(torch.stack([east, 3 * east])) == 0.0
    assert dissimilarity(torch.stack([east, torch.zeros(2), north])) == pytest.approx(1.0, rel=1e-15)


@given(matrix=matrices(least=1))
def test_rounding_takes_no_dissimilarity_beyond_2(matrix: Array) -> None:
    for row in matrix[np.any(matrix != 0, 1)]:
        assert dissimilarity(rows_of(np.stack([row, -row / 3]))) <= 2


def exact_dissimilarity(matrix: Array) -> float:
    """In fifty digits."""
    getcontext().prec = 50
    rows = [[Decimal(float(x)) for x in row] for row in matrix]
    total, count = Decimal(0), 0
    for i, a in enumerate(rows):
        for b in rows[:i]:
            inner = sum((x * y for x, y in zip(a, b, strict=True)), Decimal(0))
            squares = sum((x * x for x in a), Decimal(0)) * sum((x * x for x in b), Decimal(0))
            total, count = total + 1 - inner / squares.sqrt(), count + 1
    return float(total / count)


@pytest.mark.parametrize("apart", [1e-2, 1e-5, 1e-8, 1e-10])
def test_models_that_hardly_differ_keep_their_digits(apart: float) -> None:
    """1 - cosine would leave nothing but rounding from 1e-8 on."""
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=SIZE) + apart * rng.normal(size=(5, SIZE))
    assert dissimilarity(rows_of(matrix)) == pytest.approx(exact_dissimilarity(matrix), rel=1e-4)


@pytest.mark.parametrize("clients", [0, 1])
def test_fewer_than_two_have_no_dissimilarity(clients: int) -> None:
    assert math.isnan(dissimilarity(torch.ones(clients, 3)))
    assert math.isnan(dissimilarity(torch.cat([torch.ones(clients, 3), torch.zeros(2, 3)])))


def test_a_broken_model_is_not_passed_over() -> None:
    matrix = torch.ones(3, 4)
    matrix[1, 2] = math.nan
    assert math.isnan(dissimilarity(matrix))


@given(matrix=matrices(least=2))
def test_dissimilarity_is_1_less_the_mean_cosine(matrix: Array) -> None:
    assert dissimilarity(rows_of(matrix)) == pytest.approx(1 - mean_cosine(rows_of(matrix)), abs=1e-15, nan_ok=True)


def test_parts_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 31)))
    whole = dissimilarity(matrix)
    monkeypatch.setattr(vectors, "PART", 11)
    assert dissimilarity(matrix) == pytest.approx(whole, rel=1e-14)
