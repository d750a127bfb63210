"""How one model serves many clients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.diagnose import fairness
from fedloom.errors import DataError

scores = st.lists(st.floats(0, 1), min_size=1, max_size=30)


def tenth(values: list[float]) -> float:
    """The place a tenth of the way along the sorted values, on the line between its neighbours."""
    values, place = sorted(values), 0.1 * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


@given(values=scores)
def test_fairness(values: list[float]) -> None:
    found = fairness(values)
    mean = math.fsum(values) / len(values)
    assert found.mean == pytest.approx(mean, rel=1e-12)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
    assert found.std == pytest.approx(deviation, rel=1e-9, abs=1e-12)
    assert found.min == min(values)
    assert found.p10 == pytest.approx(tenth(values), rel=1e-12)
    assert found.gains is None


def test_by_hand() -> None:
    found = fairness(torch.arange(11) / 10, torch.full((11,), 0.5))
    assert found[:4] == pytest.approx((0.5, math.sqrt(0.1), 0.0, 0.1))
    assert found.gains is not None
    assert found.gains.dtype == torch.float64
    np.testing.assert_allclose(found.gains.numpy(), np.linspace(-0.5, 0.5, 11), atol=1e-7)


def test_one_client() -> None:
    assert fairness([0.25], [0.5])[:4] == (0.25, 0.0, 0.25, 0.25)


def test_a_client_without_a_score_does_not_count() -> None:
    found = fairness([0.2, math.nan, 0.4], [0.1, 0.1, math.nan])
    assert found[:4] == pytest.approx(fairness([0.2, 0.4])[:4])
    assert found.gains is not None
    assert found.gains.tolist() == pytest.approx([0.1, math.nan, math.nan], nan_ok=True)


@pytest.mark.parametrize("values", [[], [math.nan, math.nan]])
def test_nobody_has_a_score(values: list[float]) -> None:
    assert all(math.isnan(number) for number in fairness(values)[:4])


def test_a_baseline_of_other_clients_is_refused() -> None:
    with pytest.raises(DataError, match="2 and 1"):
        fairness([0.1, 0.2], [0.1])
