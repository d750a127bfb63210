"""How far updates agree: every measure against its equation, its identities, and what happens at the edges."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedloom as fl
from fedloom import rows as rows_module
from fedloom.diagnose import conflicts, cosines, gsi, gsi_universal, mean_cosine, norm_ratio, vectors
from fedloom.methods.fedglad import Fedglad
from fedloom.rows import Rows
from fedloom.space import GroupBy
from fedloom.stages import Round, Updates
from tests.diagnose.reference import CUTS, SIZE, Array, cosine, matrices, mean, pairs, rows_of

BY: list[GroupBy] = ["tensor", "layer", "model"]
NAN = math.nan


def some(clients: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=(clients, SIZE))


def equal(clients: int) -> torch.Tensor:
    return torch.full((clients,), 1 / clients, dtype=torch.float64)


def close(found: float, expected: float, tolerance: float = 1e-12) -> bool:
    return math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance) or (
        math.isnan(found) and math.isnan(expected)
    )


# ---------------------------------------------------------------------------------------------------------------------
# GSI
# ---------------------------------------------------------------------------------------------------------------------


def expected_gsi(matrix: Array, weights: Array, by: str) -> list[float]:
    """Eq. 9 with weights, in the form of Eq. 10: 1 + sum_k w_k |g_k - g|^2 / |g|^2 under the root."""
    w = weights / weights.sum()
    found = []
    for cut in CUTS[by]:
        part = matrix[:, cut]
        g = sum(w_k * g_k for w_k, g_k in zip(w, part, strict=True))
        if not np.any(part):
            found.append(1.0)
            continue
        off = sum(w_k * np.sum((g_k - g) ** 2) for w_k, g_k in zip(w, part, strict=True))
        found.append(math.sqrt(1 + off / np.sum(g**2)))
    return found


@pytest.mark.parametrize("by", BY)
@given(clients=st.integers(1, 6), seed=st.integers(0, 2**32))
def test_gsi(by: GroupBy, clients: int, seed: int) -> None:
    matrix = some(clients, seed)
    weights = np.random.default_rng(seed + 1).uniform(0.1, 30, clients)
    found = gsi(rows_of(matrix), torch.from_numpy(weights), by)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), expected_gsi(matrix, weights, by), rtol=1e-9)


def test_gsi_goes_by_tensor_and_the_universal_one_is_of_all() -> None:
    rows, weights = rows_of(some(4)), torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert torch.equal(gsi(rows, weights), gsi(rows, weights, "tensor"))
    assert gsi_universal(rows, weights) == gsi(rows, weights, "model").item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clients", [1, 2, 9])
def test_gsi_of_identical_clients_is_1(clients: int, dtype: torch.dtype) -> None:
    rows = rows_of(np.repeat(some(1), clients, 0), dtype)
    weights = torch.arange(1.0, clients + 1)
    assert torch.allclose(gsi(rows, weights), torch.ones(4, dtype=torch.float64), rtol=4 * torch.finfo(dtype).eps)


def test_gsi_of_orthonormal_clients_is_the_root_of_their_number() -> None:
    assert close(gsi_universal(rows_of(np.eye(SIZE)), equal(SIZE)), math.sqrt(SIZE))


def test_gsi_is_infinite_where_updates_cancel_and_1_where_there_are_none() -> None:
    matrix = np.zeros((2, SIZE))
    matrix[:, 6:8] = [[0.1, 0.3], [-0.1, -0.3]]
    matrix[:, 8] = [1.0, 3.0]
    assert gsi(rows_of(matrix), equal(2)).tolist() == [1.0, math.inf, math.sqrt(5 / 4), 1.0]


def test_gsi_of_updates_that_cancel_up_to_rounding_is_infinite() -> None:
    matrix = some(3)
    matrix[2] = -matrix[:2].sum(0)
    assert gsi(rows_of(matrix, torch.float32), equal(3)).tolist() == [math.inf, math.inf, math.inf, 1.0]


def test_gsi_of_no_clients_is_1() -> None:
    assert gsi(rows_of(np.zeros((0, SIZE))), torch.empty(0)).tolist() == [1.0] * 4


def test_gsi_of_a_broken_update_is_nan_in_its_group_only() -> None:
    matrix = some(3)
    matrix[1, 7] = NAN
    assert gsi(rows_of(matrix), equal(3)).isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("by", BY)
def test_gsi_is_what_fedglad_reports(by: GroupBy) -> None:
    rows, weights = rows_of(some(5)), torch.tensor([0.1, 0.3, 0.2, 0.25, 0.15], dtype=torch.float64)
    ones, none = torch.ones(5), torch.zeros(SIZE, dtype=torch.float64)
    updates = Updates(ones, ones, ones, ones, ones, ones, ones, rows, {}, weights=weights)
    average = rows.weighted_sum(weights)
    stage = Fedglad(groups=by)
    groups = len(rows.space.groups(by))
    state = {"B": torch.full((groups,), NAN, dtype=torch.float64), "scale": torch.ones(groups), "t": torch.tensor(0.0)}
    state, _ = stage.rescale(state, Round(0, none, updates, updates, average, average, none))
    assert torch.equal(state["gsi"], gsi(rows, weights, by))


# ---------------------------------------------------------------------------------------------------------------------
# Cosines and conflicts
# ---------------------------------------------------------------------------------------------------------------------


@given(matrix=matrices())
def test_cosines(matrix: Array) -> None:
    found = cosines(rows_of(matrix))
    assert found.shape == (len(matrix), len(matrix))
    assert found.dtype == torch.float64
    for i, a in enumerate(matrix):
        for j, b in enumerate(matrix):
            expected = cosine(a, b) if np.any(a) and np.any(b) else NAN
            assert close(float(found[i, j]), expected)
    assert not bool((found.abs() > 1).any())


@given(matrix=matrices())
def test_mean_cosine(matrix: Array) -> None:
    assert close(mean_cosine(rows_of(matrix)), mean([cosine(a, b) for a, b in pairs(matrix)]))


@given(matrix=matrices(least=2))
def test_mean_over_all_ordered_pairs_is_the_squared_norm_of_the_mean_unit_vector(matrix: Array) -> None:
    units = np.array([row / np.linalg.norm(row) for row in matrix if np.any(row)]).reshape(-1, SIZE)
    if not len(units):
        return
    expected = float(np.sum(units.mean(0) ** 2))
    assert close(float(cosines(rows_of(units)).mean()), expected)
    r = len(units)
    if r > 1:
        assert close((r * (r - 1) * mean_cosine(rows_of(matrix)) + r) / r**2, expected)


@given(matrix=matrices())
def test_conflicts(matrix: Array) -> None:
    products = [float(np.sum(a * b)) for a, b in pairs(matrix)]
    assert close(conflicts(rows_of(matrix)), mean([float(product < 0) for product in products]))


def test_conflicts_are_counted_not_weighed() -> None:
    matrix = np.zeros((4, SIZE))
    matrix[:, 0] = [1.0, 1e-9, -1e-6, 0.0]
    matrix[:, 1] = [1.0, 1.0, 0.0, 0.0]
    assert conflicts(rows_of(matrix)) == 2 / 3  # the last is zero: three pairs are left


def test_orthogonal_updates_do_not_conflict() -> None:
    assert conflicts(rows_of(np.eye(SIZE))) == 0.0
    assert mean_cosine(rows_of(np.eye(SIZE))) == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_identical_and_opposite_updates(dtype: torch.dtype, scale: float) -> None:
    one = some(1) * scale
    for seed in range(20):
        alike = np.random.default_rng(seed).integers(1, 5, (6, 1)) * one
        opposite = np.concatenate([one, -one])
        assert mean_cosine(rows_of(np.repeat(one, 6, 0), dtype)) == pytest.approx(1.0, abs=1e-15)
        assert conflicts(rows_of(alike, dtype)) == 0.0
        found = cosines(rows_of(opposite, dtype))
        assert torch.allclose(found, torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64), atol=1e-15)
        assert mean_cosine(rows_of(opposite, dtype)) == pytest.approx(-1.0, abs=1e-15)
        assert conflicts(rows_of(opposite, dtype)) == 1.0


@given(seed=st.integers(0, 2**32), turned=st.sampled_from([1.0, -1.0]))
def test_rounding_takes_no_cosine_beyond_1(seed: int, turned: float) -> None:
    one = some(1, seed)
    matrix = np.concatenate([one, turned * one * 3, one / 7])
    assert bool((cosines(rows_of(matrix)).abs() <= 1).all())
    assert abs(mean_cosine(rows_of(matrix))) <= 1


@pytest.mark.parametrize("matrix", [some(0), some(1), 0 * some(3), np.concatenate([some(1), 0 * some(2)])])
def test_fewer_than_two_updates_have_no_pairs(matrix: Array) -> None:
    assert math.isnan(mean_cosine(rows_of(matrix)))
    assert math.isnan(conflicts(rows_of(matrix)))


def test_a_broken_update_is_not_passed_over() -> None:
    matrix = some(4)
    matrix[2, 5] = NAN
    found = cosines(rows_of(matrix)).isnan()
    assert found[2].all()
    assert found[:, 2].all()
    assert int(found.sum()) == 7
    for measure in (mean_cosine, conflicts, norm_ratio):
        assert math.isnan(measure(rows_of(matrix))), measure.__name__


# ---------------------------------------------------------------------------------------------------------------------
# Norms
# ---------------------------------------------------------------------------------------------------------------------


@given(matrix=matrices(least=1))
def test_norm_ratio(matrix: Array) -> None:
    squares = [math.fsum(row**2) for row in matrix]
    middle = math.fsum(squares) / len(squares)
    spread = math.sqrt(math.fsum((s - middle) ** 2 for s in squares) / len(squares))
    assert close(norm_ratio(rows_of(matrix)), spread / middle if middle else NAN, 1e-9)


def test_norm_ratio_by_hand() -> None:
    matrix = np.zeros((2, SIZE))
    matrix[:, 3] = [1.0, 3.0]
    assert norm_ratio(rows_of(matrix)) == 4 / 5  # squares 1 and 9: mean 5, deviation 4
    assert norm_ratio(rows_of(matrix[:1])) == 0.0
    assert math.isnan(norm_ratio(rows_of(matrix[:0])))
    assert math.isnan(norm_ratio(rows_of(0 * matrix)))


def test_norm_ratio_counts_clients_that_did_not_move() -> None:
    matrix = np.zeros((2, SIZE))
    matrix[0, 0] = 2.0
    assert norm_ratio(rows_of(matrix)) == 1.0


# ---------------------------------------------------------------------------------------------------------------------
# Size
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [1, 7, 23])
def test_parts_make_no_difference(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weights = rows_of(some(5)), equal(5)
    measures: tuple[Callable[[Rows], Any], ...] = (
        cosines,
        lambda r: gsi(r, weights),
        mean_cosine,
        conflicts,
        norm_ratio,
    )
    whole = [torch.as_tensor(measure(rows)) for measure in measures]
    monkeypatch.setattr(vectors, "PART", part)
    monkeypatch.setattr(rows_module, "PART", part)
    for measure, expected in zip(measures, whole, strict=True):
        assert torch.allclose(torch.as_tensor(measure(rows)), expected, rtol=1e-13)


def test_a_plain_matrix_will_do() -> None:
    rows: Rows = rows_of(some(3))
    assert torch.equal(cosines(rows.matrix), cosines(rows))
    for measure in (mean_cosine, conflicts, norm_ratio):
        assert measure(rows.matrix) == measure(rows)


def test_inputs_are_left_as_they_were() -> None:
    rows, weights = rows_of(some(4)), torch.tensor([1.0, 2.0, 3.0, 4.0])
    before = rows.matrix.clone()
    gsi(rows, weights)
    cosines(rows)
    conflicts(rows)
    mean_cosine(rows)
    norm_ratio(rows)
    assert torch.equal(rows.matrix, before)
    assert weights.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_everything_is_in_the_package() -> None:
    assert fl.diagnose.gsi is gsi
    assert all(hasattr(fl.diagnose, name) for name in fl.diagnose.__all__)
