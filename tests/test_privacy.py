"""Epsilon: the same as dp-accounting's own, and as three settings that are in print."""

import math
import time

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from scipy.special import gammaln, logsumexp
from scipy.stats import norm

from fedloom.privacy import _divergences, epsilon

ORDERS = np.arange(2, 34)  # moments of order 1 to 32, as in Abadi et al. (2016)

# sampling rate, noise multiplier, rounds, delta, epsilon in print
PRINTED = {
    # TensorFlow Privacy's MNIST tutorial, first line of its table: batches of 256 of 60,000, 60 epochs.
    "tutorial": (256 / 60_000, 1.12, 60 * 60_000 // 256, 1e-5, "2.92"),
    # Abadi et al., CCS 2016: q = 0.01, sigma = 4, 100 epochs; by the moments accountant.
    "abadi": (0.01, 4.0, 10_000, 1e-5, "1.26"),
    # McMahan et al., ICLR 2018: 5,000 of 763,430 users in a round, 5,000 rounds; and of a hundred million.
    "mcmahan": (5_000 / 763_430, 1.0, 5_000, 1e-9, "4.634"),
    "mcmahan, more users": (5_000 / 1e8, 1.0, 5_000, 1e-9, "1.152"),
}


def divergence(q: float, z: float, order: int) -> float:
    """Mironov, Talwar, Zhang (2019), Section 3.3: the sampled Gaussian mechanism at a whole order."""
    k = np.arange(order + 1)
    choose = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    terms = choose + (order - k) * math.log1p(-q) + k * math.log(q) + (k * k - k) / (2 * z * z)
    return float(logsumexp(terms)) / (order - 1)


def own(q: float | None, z: float, times: int, delta: float) -> float:
    accountant = RdpAccountant()
    event: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(z)
    if q is not None:
        event = dp_accounting.PoissonSampledDpEvent(q, event)
    return float(accountant.compose(event, times).get_epsilon(delta))


@pytest.mark.parametrize(("q", "z", "times", "delta", "printed"), PRINTED.values(), ids=PRINTED)
def test_settings_in_print(q: float, z: float, times: int, delta: float, printed: str) -> None:
    """All were printed with the conversion of Mironov (2017), epsilon = min rdp + log(1/delta) / (order - 1), to which
    Canonne, Kamath and Steinke (2020) have found a better one: by the old one the print must come out, by ours less.
    """
    old = min(times * divergence(q, z, a) - math.log(delta) / (a - 1) for a in ORDERS.tolist())
    digits = len(printed.partition(".")[2])
    assert round(old, digits) == float(printed)
    found = epsilon(z, delta, times, q)
    assert found == own(q, z, times, delta)
    assert 0.75 * float(printed) < found < float(printed)


@pytest.mark.parametrize(("q", "z"), [(0.004, 1.1), (0.1, 0.7), (0.5, 3.0)])
def test_divergences(q: float, z: float) -> None:
    orders, once = _divergences(z, q)
    for order, found in zip(orders.tolist(), once.tolist(), strict=True):
        if order in ORDERS:
            assert found == pytest.approx(divergence(q, z, int(order)), rel=1e-9)


@pytest.mark.parametrize(("z", "times", "delta"), [(1.0, 1, 1e-5), (4.0, 30, 1e-6), (0.5, 7, 1e-3), (20.0, 1, 1e-2)])
def test_without_sampling(z: float, times: int, delta: float) -> None:
    """The Gaussian mechanism has the divergence order / (2 z^2), and no less than this epsilon (Balle, Wang, 2018)."""
    found = epsilon(z, delta, times)
    assert found == own(None, z, times, delta)
    orders, _ = _divergences(z, None)
    alpha = orders[orders > 1.01]
    converted = times * alpha / (2 * z * z) + np.log1p(-1 / alpha) - np.log(delta * alpha) / (alpha - 1)
    assert found == pytest.approx(max(0.0, float(converted.min())), rel=1e-9)
    mu = math.sqrt(times) / z  # of the exact curve: delta(eps) = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)
    exact = norm.cdf(mu / 2 - found / mu) - math.exp(found) * norm.cdf(-mu / 2 - found / mu)
    assert exact <= delta


def test_edges() -> None:
    assert epsilon(1.0, 1e-5, 0, 0.1) == 0
    assert epsilon(0.0, 1e-5, 1, 0.1) == math.inf
    assert epsilon(0.0, 1e-5, 0) == 0
    assert epsilon(1.0, 1e-5, 9, 1.0) == epsilon(1.0, 1e-5, 9)
    spent = [epsilon(1.0, 1e-5, times, 0.1) for times in range(1, 50)]
    assert spent == sorted(spent)
    assert spent[-1] < epsilon(1.0, 1e-5, 49)  # sampling helps
    assert epsilon(1.0, 1e-5, 49, 0.1) > epsilon(2.0, 1e-5, 49, 0.1)


def test_a_round_costs_little() -> None:
    epsilon(1.3, 1e-5, 1, 0.01)
    began = time.perf_counter()
    for times in range(100):
        epsilon(1.3, 1e-5, times, 0.01)
    assert time.perf_counter() - began < 0.5  # 5 ms each


def test_no_warnings_of_orders_left_out(caplog: pytest.LogCaptureFixture) -> None:
    assert epsilon(1.1234, 1e-5, 3, 0.1) > 0  # settings that no other test has
    assert not caplog.records
