"""How far labels differ, against FedGLAD's Eq. 16-18 and RADFed's C-score."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedloom as fl
from fedloom.diagnose import c_score, label_counts, pearson, sim_score
from fedloom.errors import DataError

labels = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=8), min_size=1, max_size=6)


def federation_of(clients: list[list[int]], classes: int = 5) -> fl.Federation:
    pairs = [(np.zeros((len(own), 1), dtype=np.float32), np.array(own)) for own in clients]
    return fl.Federation.from_arrays(pairs, classes=classes)


def shuffled(federation: fl.Federation, seed: int) -> fl.Federation:
    """The same clients, with their samples all over the shared tensors."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(federation.y)))
    return replace(federation, x=federation.x[order], y=federation.y[order], index=torch.argsort(order))


def counted(clients: list[list[int]], classes: int = 5) -> list[int]:
    found = Counter(label for own in clients for label in own)
    return [found[c] for c in range(classes)]


@given(clients=labels, seed=st.integers(0, 100))
def test_label_counts(clients: list[list[int]], seed: int) -> None:
    federation = shuffled(federation_of(clients), seed)
    found = label_counts(federation)
    assert found.dtype == torch.float64
    assert found.tolist() == counted(clients)
    chosen = [int(k) for k in np.random.default_rng(seed).integers(0, len(clients), 3)]
    expected = counted([clients[k] for k in chosen])  # a client drawn twice counts twice
    assert label_counts(federation, torch.tensor(chosen)).tolist() == expected
    assert label_counts(federation, chosen).tolist() == expected


def test_no_clients_have_no_labels() -> None:
    federation = federation_of([[0, 1], [2]])
    assert label_counts(federation, []).tolist() == [0] * 5
    assert math.isnan(sim_score(federation, []))


def test_named_clients_and_parts_of_a_federation() -> None:
    federation = replace(federation_of([[0, 1], [2], [2, 3]]), names=np.array(["a", "b", "c"]))
    assert label_counts(federation, [2]).tolist() == [0, 0, 1, 1, 0]
    part = federation.only(torch.tensor([2, 1]))
    assert label_counts(part).tolist() == [0, 0, 2, 1, 0]
    assert c_score(part) == pytest.approx(c_score(federation_of([[2, 3], [2]])))  # of the part, not of the whole


def test_sequences_count_every_place_that_has_a_target() -> None:
    y = torch.tensor([[0, 1, -100], [1, -100, -100], [2, 2, 2]])
    federation = fl.Federation.from_tensor(torch.zeros(3, 3), y, offsets=[0, 2, 3])
    assert label_counts(federation).tolist() == [1, 2, 3]
    assert label_counts(federation, [0]).tolist() == [1, 2, 0]
    R = np.array([1, 2, 3]) / 6
    expected = (np.abs(np.array([1, 2, 0]) / 3 - R).sum() + np.abs(np.array([0, 0, 1]) - R).sum()) / 2
    assert c_score(federation) == pytest.approx(expected)


@given(clients=labels, seed=st.integers(0, 100))
def test_sim_score(clients: list[list[int]], seed: int) -> None:
    chosen = [int(k) for k in np.random.default_rng(seed).integers(0, len(clients), 2)]
    d = np.array(counted([clients[k] for k in chosen]), dtype=float)
    d_c = np.array(counted(clients), dtype=float)
    d, d_c = d / d.sum(), d_c / d_c.sum()
    expected = float(np.sum(d * d_c) / math.sqrt(np.sum(d**2) * np.sum(d_c**2)))
    found = sim_score(shuffled(federation_of(clients), seed), torch.tensor(chosen))
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert found <= 1


@pytest.mark.parametrize("classes", [2, 5, 10])
def test_sim_score_of_one_label_among_uniform_ones(classes: int) -> None:
    federation = federation_of([[c] * 7 for c in range(classes)], classes)
    for client in range(classes):
        assert sim_score(federation, [client]) == pytest.approx(1 / math.sqrt(classes), rel=1e-15)
    assert sim_score(federation, range(classes)) == pytest.approx(1.0, rel=1e-15)


@given(clients=labels, seed=st.integers(0, 100))
def test_c_score(clients: list[list[int]], seed: int) -> None:
    R = np.array(counted(clients)) / sum(map(len, clients))
    expected = sum(float(np.abs(np.array(counted([own])) / len(own) - R).sum()) for own in clients) / len(clients)
    assert c_score(shuffled(federation_of(clients), seed)) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_c_score_of_one_class_of_ten_and_of_iid() -> None:
    assert c_score(federation_of([[c] * 3 for c in range(10)] * 2, 10)) == pytest.approx(1.8)
    assert c_score(federation_of([[0, 1, 2]] * 4)) == pytest.approx(0.0, abs=1e-15)
    assert c_score(federation_of([[0, 3]])) == 0.0


def test_c_score_is_that_of_the_report() -> None:
    federation = fl.load("digits", partition="classes(per_client=2)", clients=20)
    assert federation.report is not None
    assert c_score(federation) == federation.report.c_score


def test_targets_that_are_no_labels_are_refused() -> None:
    federation = fl.Federation.from_arrays([([[0.0]], [0.5]), ([[1.0]], [1.5])])
    for measure in (label_counts, c_score, lambda f: sim_score(f, [0])):
        with pytest.raises(DataError, match="no class labels"):
            measure(federation)


@pytest.mark.parametrize("client", [-1, 2])
def test_clients_that_do_not_exist_are_refused(client: int) -> None:
    with pytest.raises(DataError, match=f"no client {client}: the clients are 0 to 1"):
        label_counts(federation_of([[0], [1]]), [0, client])


# ---------------------------------------------------------------------------------------------------------------------
# Pearson
# ---------------------------------------------------------------------------------------------------------------------

columns = st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)), min_size=2, max_size=20)


@given(seed=st.integers(0, 2**32), rounds=st.integers(2, 30), scale=st.sampled_from([1e-170, 1e-9, 1.0, 1e170]))
def test_pearson(seed: int, rounds: int, scale: float) -> None:
    a, b = np.random.default_rng(seed).normal(size=(2, rounds))
    expected = np.mean(a * b) - np.mean(a) * np.mean(b)
    expected /= math.sqrt((np.mean(a**2) - np.mean(a) ** 2) * (np.mean(b**2) - np.mean(b) ** 2))
    assert pearson(torch.from_numpy(scale * a), (b / 2).tolist()) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(rows=columns)
def test_pearson_stays_within_1(rows: list[tuple[float, float]]) -> None:
    a, b = [row[0] for row in rows], [row[1] for row in rows]
    found = pearson(a, b)
    assert math.isnan(found) == (len(set(a)) == 1 or len(set(b)) == 1)
    assert math.isnan(found) or abs(found) <= 1


def test_pearson_of_lines() -> None:
    a = [0.1, 0.2, 0.7, 0.4]
    assert pearson(a, [3 * x + 1 for x in a]) == pytest.approx(1.0)
    assert pearson(a, [1 - x for x in a]) == pytest.approx(-1.0)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([], []),
        ([1.0], [2.0]),
        ([0.1, 0.1, 0.1], [1.0, 2.0, 3.0]),  # their mean is not 0.1 in floating point
        ([1.0, 2.0, 4.0], [0.1, 0.1, 0.1]),
        ([1.0, math.nan], [1.0, 2.0]),
        ([1.0, math.inf, 2.0], [1.0, 2.0, 3.0]),
    ],
)
def test_pearson_is_nan_where_it_is_undefined(a: list[float], b: list[float]) -> None:
    assert math.isnan(pearson(a, b))


def test_pearson_refuses_unequal_lengths() -> None:
    with pytest.raises(DataError, match="2 and 3"):
        pearson([1.0, 2.0], [1.0, 2.0, 3.0])
