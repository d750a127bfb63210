"""RADFed's partition: the programme against SciPy, the walk's invariants, exact margins, Table I's C-scores."""

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, minimize, nnls

from fedloom.data.partition import PartitionReport, Pool, partition
from fedloom.data.partition.programme import Programme, repair
from fedloom.data.partition.quadratic import Quadratic, configurations, draw_sizes
from fedloom.data.partition.rounding import round_table
from fedloom.data.partition.walk import Walk, walk
from fedloom.errors import DataError

MNIST = np.repeat(np.arange(10), [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958])
CIFAR10 = np.repeat(np.arange(10), 6000)


def by_classes(clients: int, classes: int, seed: int, lam: float = 0.3) -> Programme:
    rng = np.random.default_rng(seed)
    n, _ = draw_sizes(1.0, 100 * clients, clients, rng)
    B = rng.multinomial(100 * clients - classes, np.full(classes, 1 / classes)) + 1
    return Quadratic(lam=lam)._programme(n, B, np.arange(classes)[:, None], rng)


def by_features(clients: int, seed: int, theta: float = 0.2) -> Programme:
    """Two classes, a feature with three values and a binary one; some combinations do not occur."""
    rng = np.random.default_rng(seed)
    samples = 60 * clients
    columns = [rng.integers(0, d, samples) for d in (2, 3, 2)]
    columns[2][columns[1] == 1] = 0
    configuration, values = configurations(columns)
    n, _ = draw_sizes(1.0, samples, clients, rng)
    return Quadratic(theta=theta)._programme(n, np.bincount(configuration), values, rng)


def margins(programme: Programme) -> tuple[np.ndarray, np.ndarray]:
    """A a = m for the flattened table, without the redundant column."""
    T, U = len(programme.n), len(programme.B)
    A = np.vstack([np.kron(np.eye(T), np.ones(U)), np.kron(np.ones(T), np.eye(U))[:-1]])
    return A, np.concatenate([programme.n, programme.B[:-1]]).astype(float)


@pytest.mark.parametrize("seed", range(4))
def test_classes_against_an_active_set_method(seed: int) -> None:
    """The projection as non-negative least squares, with the margins as heavy rows (Lawson and Hanson)."""
    programme = by_classes(6, 4, seed)
    A, m = margins(programme)
    heavy, scale = 1e5, float(programme.n.max())
    system = np.vstack([np.eye(programme.b.size), heavy * A])
    expected, _ = nnls(system, np.concatenate([programme.b.ravel(), heavy * m]) / scale)
    a, solved = programme.solve()
    assert solved
    assert np.abs(a.ravel() / scale - expected).max() < 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_classes_satisfy_the_optimality_conditions(seed: int) -> None:
    """a = max(0, b + u_t + v_k): u and v fitted on the positive cells explain these, and no other cell is above 0."""
    programme = by_classes(30, 10, seed, lam=0.1)
    a, _ = programme.solve()
    A, _ = margins(programme)
    positive = a.ravel() > 1e-7
    gap = (a - programme.b).ravel()
    multipliers = np.linalg.lstsq(A.T[positive], gap[positive], rcond=None)[0]
    assert np.abs(A.T[positive] @ multipliers - gap[positive]).max() < 1e-6
    assert (programme.b.ravel() + A.T @ multipliers)[~positive].max() < 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_features_against_trust_constr(seed: int) -> None:
    programme = by_features(4, seed)
    A, m = margins(programme)
    T, U = len(programme.n), len(programme.B)
    G, s = programme.G.toarray(), float(programme.n.max())

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        r = x.reshape(T, U) @ G.T - programme.b / s
        return float(np.sum(r**2)), (2 * r @ G).ravel()

    setting: dict[str, Any] = {
        "hess": lambda _: 2 * np.kron(np.eye(T), G.T @ G),
        "constraints": LinearConstraint(A, m / s, m / s),
        "bounds": [(0, None)] * (T * U),
        "options": {"gtol": 1e-12, "xtol": 1e-14, "barrier_tol": 1e-12, "maxiter": 5000},
    }
    start = np.outer(programme.n, programme.B / programme.B.sum()).ravel() / s
    found = minimize(objective, start, jac=True, method="trust-constr", **setting)
    a, solved = programme.solve()
    assert solved
    assert abs((programme.loss(a) / s) ** 2 - found.fun) < 1e-6
    z, expected = a @ G.T / s, found.x.reshape(T, U) @ G.T  # the sums are unique, the table is not
    assert np.abs(z - expected).max() < 1e-6


@pytest.mark.parametrize("programme", [by_classes(20, 5, 0), by_features(8, 0)], ids=["classes", "features"])
def test_margins_before_and_after_the_walk(programme: Programme) -> None:
    a, _ = programme.solve()
    walked = walk(programme, a, 3000, 3000, 0.05, np.random.default_rng(0))
    for table in (a, walked):
        assert table.min() >= 0
        assert np.abs(table.sum(axis=1) - programme.n).max() < 1e-9
        assert np.abs(table.sum(axis=0) - programme.B).max() < 1e-9
    assert np.abs(walked - a).max() > 0.1
    assert programme.loss(walked) >= programme.loss(a) - 1e-9


@pytest.mark.parametrize("programme", [by_classes(20, 5, 1), by_features(8, 1)], ids=["classes", "features"])
def test_the_walk_knows_its_loss(programme: Programme) -> None:
    moving = Walk(programme, programme.solve()[0], 0.1, np.random.default_rng(0))
    *_, loss = moving.steps(20_000)
    assert loss == pytest.approx(programme.loss(moving.table()) ** 2, rel=1e-9)
    assert np.allclose(moving.residuals, programme.residuals(moving.table()), atol=1e-9)


def test_the_walk_keeps_the_best_table() -> None:
    """Against a walk that copies the table at every improvement."""
    programme = by_classes(20, 5, 2)
    a, _ = programme.solve()
    optimal, rng = programme.loss(a), np.random.default_rng(7)
    first = Walk(programme, a, 0.05, rng)
    for loss in first.steps(50_000):
        if 1.1 * optimal < loss**0.5 < 1.2 * optimal:
            break
    else:
        pytest.fail("the burn-in did not come to its window")
    second = Walk(programme, first.table(), 0.05, rng)
    best, kept = second.loss, second.table()
    for loss in second.steps(5000):
        if loss < best:
            best, kept = loss, second.table()
    assert np.array_equal(walk(programme, a, 50_000, 5000, 0.05, np.random.default_rng(7)), kept)


def test_a_move_is_a_rectangle() -> None:
    programme = by_classes(6, 4, 0, lam=5.0)
    a, _ = programme.solve()
    moving = Walk(programme, a, 0.5, np.random.default_rng(1))
    before = moving.table()
    for _ in moving.steps(200):
        after = moving.table()
        i, j = np.nonzero(after != before)
        assert len(i) in (0, 4)
        if len(i):
            assert len(set(i)) == len(set(j)) == 2
            changes = (after - before)[i, j]
            assert changes.sum() == pytest.approx(0, abs=1e-9)
            lost = -changes.min()
            assert lost <= 0.5 * before[i, j][changes < 0].min() + 1e-12
        before = after


def test_the_walk_from_a_loss_of_zero() -> None:
    n, B = np.array([30, 70]), np.array([50, 50])
    programme = Programme(n, B, np.arange(2)[None], np.outer(n, B / 100))
    a, _ = programme.solve()
    assert programme.loss(a) < 1e-6
    walked = walk(programme, a, 500, 500, 0.1, np.random.default_rng(0))
    assert np.allclose(walked.sum(axis=1), n)


def test_repair() -> None:
    rng = np.random.default_rng(0)
    n, B = np.array([1, 40, 59]), np.array([60, 30, 10])
    a = np.outer(n, B) / 100 + 1e-3 * rng.standard_normal((3, 3))
    a[0, 2] = -1e-3
    clipped = np.maximum(a, 0)
    violation = np.abs(clipped.sum(axis=1) - n).sum() + np.abs(clipped.sum(axis=0) - B).sum()
    fixed = repair(a, n, B)
    assert fixed.min() >= 0
    assert np.abs(fixed.sum(axis=1) - n).max() < 1e-12
    assert np.abs(fixed.sum(axis=0) - B).max() < 1e-12
    assert np.abs(fixed - clipped).sum() <= 2 * violation  # Lemma 7 of Altschuler et al.


@settings(max_examples=60, deadline=None)
@given(T=st.integers(1, 12), U=st.integers(1, 9), density=st.floats(0.1, 4), seed=st.integers(0, 10_000))
def test_rounding_keeps_both_margins(T: int, U: int, density: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = rng.poisson(density, (5, T, U))
    rows, columns = tables[0].sum(axis=1), tables[0].sum(axis=0)
    a = tables[0].astype(float)
    for _ in range(50):
        i, k, j, h = rng.integers(T), rng.integers(T), rng.integers(U), rng.integers(U)
        eps = rng.random() * min(a[i, j], a[k, h])
        if i != k and j != h:
            a[[i, k], [j, h]] -= eps
            a[[i, k], [h, j]] += eps
    table = round_table(a, rows, columns, rng)
    assert np.array_equal(table.sum(axis=1), rows)
    assert np.array_equal(table.sum(axis=0), columns)
    assert table.min() >= 0
    assert np.abs(table - a).max() < 1 + 1e-9


def test_rounding_is_random_by_the_fractions() -> None:
    rng = np.random.default_rng(0)
    a = np.full((20, 20), 0.05)
    mean = np.mean([round_table(a, np.ones(20, int), np.ones(20, int), rng) for _ in range(2000)], axis=0)
    assert np.abs(mean - 0.05).max() < 0.03


@pytest.mark.parametrize("mu", [0.001, 0.1, 1.0, 100.0])
@pytest.mark.parametrize(("samples", "clients"), [(70_000, 100), (150, 100), (100, 100)])
def test_sizes(mu: float, samples: int, clients: int) -> None:
    n, remarks = draw_sizes(mu, samples, clients, np.random.default_rng(0))
    assert n.sum() == samples
    assert n.min() >= 1
    if mu < 0.01:  # nearly all in one client, at every draw
        assert remarks[0].endswith("clients of size 0 got a sample, after 100 draws of the sizes")
    elif mu == 100:
        assert not remarks


def test_configurations() -> None:
    rng = np.random.default_rng(0)
    columns = [rng.integers(0, d, 300) * 7 - 3 for d in (2, 3, 1, 4)]
    configuration, values = configurations(columns)
    expected, inverse = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    assert np.array_equal(configuration, inverse.ravel())
    assert np.array_equal(values, np.stack([np.unique(c, return_inverse=True)[1] for c in expected.T], axis=1))


@pytest.mark.parametrize(
    ("data", "lam", "score", "seeds"), [(MNIST, 1, 0.70, 1), (MNIST, 0.1, 1.29, 3), (CIFAR10, 0.1, 1.29, 1)]
)
def test_c_scores_of_table_1(data: np.ndarray, lam: float, score: float, seeds: int) -> None:
    for seed in range(seeds):
        report = PartitionReport("", partition(f"quadratic(lam={lam})", Pool(data), 100, seed), data)
        assert abs(report.c_score - score) < 0.1
        assert np.array_equal(report.histogram.sum(axis=0), np.bincount(data))


@pytest.mark.long
def test_ends_with_5000_clients_of_100_classes() -> None:
    deal = partition("quadratic(lam=0.001)", Pool(np.repeat(np.arange(100), 500)), 5000, 0)
    assert sorted(deal.index.tolist()) == list(range(50_000))
    assert deal.sizes.min() >= 1


@pytest.mark.parametrize("walking", [True, False])
def test_features(walking: bool) -> None:
    """Clients differ in a feature that has nothing to do with the class, and by theta alone."""
    rng = np.random.default_rng(0)
    y, feature = rng.integers(0, 2, 4000), rng.integers(0, 3, 4000)
    pool = Pool(y, features=np.stack([feature, np.zeros(4000, int)], axis=1))
    by_theta = partition(f"quadratic(theta=0.1, lam=100, walk={walking}, moves=2000)", pool, 20, 0)
    without = partition(f"quadratic(lam=100, walk={walking}, moves=2000)", pool, 20, 0)
    assert sorted(by_theta.index.tolist()) == list(range(4000))
    assert PartitionReport("", by_theta, feature).c_score > 0.5 > 0.3 > PartitionReport("", without, feature).c_score
    assert PartitionReport("", by_theta, y).c_score < 0.3


@pytest.mark.parametrize("features", [np.zeros((100, 2)), np.zeros(100, int), np.zeros((99, 2), int)])
def test_bad_features(features: np.ndarray) -> None:
    with pytest.raises(DataError, match="features must be whole numbers, one row per sample"):
        partition("quadratic(theta=1)", Pool(np.arange(100) % 5, features=features), 10, 0)


def test_too_large() -> None:
    y = np.arange(60_000) % 600
    with pytest.raises(DataError, match=r"^quadratic: 1000 clients x 600 classes make a table of more than 500,000"):
        partition("quadratic", Pool(y), 1000, 0)


def test_without_osqp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "osqp", None)
    with pytest.raises(DataError, match=r"^quadratic needs the package osqp, as in pip install osqp$"):
        partition("quadratic", Pool(np.arange(100) % 5), 10, 0)
