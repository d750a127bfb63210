"""FedDyn's margin against AdaBest's Theorem 1 played out, and norms."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.diagnose import feddyn_margin, norms


@given(
    seed=st.integers(0, 2**32),
    towards=st.floats(-3, 0.5),
    scale=st.floats(-3, 3),
    per_round=st.integers(1, 20),
    absent=st.integers(0, 200),
)
def test_h_shrinks_if_and_only_if_the_margin_is_not_positive(
    seed: int, towards: float, scale: float, per_round: int, absent: int
) -> None:
    rng = np.random.default_rng(seed)
    h = rng.normal(size=5)
    g = 10**scale * (towards * h + rng.normal(size=5))
    clients = per_round + absent
    cosine = float(np.sum(h * g)) / math.sqrt(float(np.sum(h * h)) * float(np.sum(g * g)))
    expected = cosine + per_round / (2 * clients) * float(np.linalg.norm(g) / np.linalg.norm(h))
    found = feddyn_margin(torch.from_numpy(h), torch.from_numpy(g), per_round, clients)
    assert found == pytest.approx(expected, rel=1e-10, abs=1e-12)
    if abs(found) > 1e-9:
        after = h + per_round / clients * g
        assert (found < 0) == bool(np.linalg.norm(after) < np.linalg.norm(h))


def test_margin_at_the_bound() -> None:
    """h + (r/N) g is h mirrored at the origin: just as long."""
    h = torch.tensor([1.0, 2.0, 2.0])
    assert feddyn_margin(h, -2 * (10 / 4) * h, 4, 10) == pytest.approx(0.0, abs=1e-15)
    assert feddyn_margin(h, h, 4, 10) == pytest.approx(1.2)
    assert feddyn_margin(h, -h, 4, 10) == pytest.approx(-0.8)


def test_margin_without_h_or_update() -> None:
    h, none = torch.tensor([1.0, 2.0]), torch.zeros(2)
    assert math.isnan(feddyn_margin(none, h, 1, 2))
    assert math.isnan(feddyn_margin(none, none, 1, 2))
    assert feddyn_margin(h, none, 1, 2) == 0.0  # h stays as it is
    assert math.isnan(feddyn_margin(h, torch.tensor([1.0, math.nan]), 1, 2))
    assert math.isnan(feddyn_margin(torch.tensor([1.0, math.nan]), h, 1, 2))


def test_norms() -> None:
    theta = torch.tensor([3.0, 4.0])
    found = norms(h=torch.zeros(4), theta=theta, bar=theta[:, None].expand(2, 4))
    assert found == {"h": 0.0, "theta": 5.0, "bar": 10.0}
    assert all(type(value) is float for value in found.values())
    assert norms() == {}
    assert math.isnan(norms(h=torch.tensor([math.nan]))["h"])


def test_norms_are_taken_in_float64() -> None:
    assert norms(big=torch.tensor([3e30, 4e30]))["big"] == pytest.approx(5e30)
    assert norms(small=torch.tensor([3e-30, 4e-30]))["small"] == pytest.approx(5e-30)
    many = torch.full((1 << 20,), 0.1)
    assert norms(many=many)["many"] == pytest.approx(1024 * float(many[0].double()), rel=1e-14)
