"""MD, clustered, AdaFL and importance sampling: who is drawn, how it is weighed, what is learned from the round."""

import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import fedloom as fl
from fedloom.stages import Sampler, Setup, State
from fedloom.training import Training
from tests.methods.server_reference import final_score, urns
from tests.methods.test_updates import (
    CLIENTS,
    LOCAL,
    MODEL,
    SIZES,
    Given,
    Played,
    output_is_loss,
    play,
    random_rows,
    two_layer_start,
    with_cohorts,
)
from tests.reference import Array

SAMPLERS = ["md", "clustered", "adafl", "importance"]
DRAWS = 20_000


@dataclass(frozen=True)
class Urn:
    """A sampler that can be drawn from without a run."""

    stage: Sampler
    setup: Setup
    state: State

    @classmethod
    def of(cls, method: str, sizes: Sequence[int], per_round: int) -> "Urn":
        clients = [(np.zeros((n, 2)), np.zeros(n)) for n in sizes]
        training = Training(
            Given((1, 1)),
            fl.Federation.from_arrays(clients),
            method,
            rounds=1,
            clients_per_round=per_round,
            local=fl.Local(),
            loss=output_is_loss,
            metric="accuracy",
            engine="loop",
            device="cpu",
            precision="auto",
            seed=0,
            availability=None,
            dropout_rate=0.0,
        )
        part = training.simulation.pipeline.sampler
        return cls(part.stage, training.simulation.setup, training.state.stages[part.key])

    def with_scores(self, scores: Sequence[float]) -> "Urn":
        """The same with other scores: the float vector of length N in the state."""
        (name,) = (n for n, v in self.state.items() if v.shape == (len(scores),) and v.is_floating_point())
        known = {n: torch.ones_like(v) if v.dtype == torch.bool else v for n, v in self.state.items()}
        return Urn(self.stage, self.setup, {**known, name: torch.tensor(scores, dtype=torch.float64)})

    def draws(self, number: int, times: int = DRAWS) -> NDArray[np.int64]:
        """[times, number], each from the documented key of its Work."""
        keys = (np.random.default_rng(np.random.SeedSequence(0, spawn_key=(w,))) for w in range(times))
        return np.array([self.stage.draw(self.state, self.setup, number, w, rng) for w, rng in enumerate(keys)])


def counts_of(draws: NDArray[np.int64], clients: int) -> Array:
    """[times, N] how often each client was drawn."""
    return np.stack([(draws == k).sum(1) for k in range(clients)], axis=1).astype(np.float64)


@pytest.mark.parametrize("method", SAMPLERS)
def test_sampler_fills_one_stage(method: str) -> None:
    assert fl.Method(method).fills == ["sampler"]
    assert method == "importance" or fl.Method(method).text == method


@pytest.mark.parametrize("method", SAMPLERS)
def test_run_draws_by_the_key(method: str) -> None:
    """The first Work of a run draws what the stage draws from the key (0,), and the order is random."""
    played = play(method, rounds=1, clients_per_round=3)
    urn = Urn.of(method, SIZES, 3)
    assert played.clients[0] == urn.draws(3, 1)[0].tolist()
    first = urn.draws(3, 2000)[:, 0]
    assert len(set(first.tolist())) == len(SIZES)


# ---------------------------------------------------------------------------------------------------------------------
# MD and clustered
# ---------------------------------------------------------------------------------------------------------------------

UNEQUAL = (3, 9, 1, 5, 2)  # not in order: the urns are filled by size


@pytest.mark.parametrize("method", ["md", "clustered"])
@pytest.mark.parametrize("r", [1, 2, 4])
def test_by_size_is_unbiased(method: str, r: int) -> None:
    """E[multiplicity/r] = n_k/n. Error bar: 4 standard errors of independent draws, sqrt(p (1 - p)/(r draws))."""
    p = np.array(UNEQUAL) / sum(UNEQUAL)
    share = counts_of(Urn.of(method, UNEQUAL, r).draws(r), 5).mean(0) / r
    assert (np.abs(share - p) < 4 * np.sqrt(p * (1 - p) / (r * DRAWS))).all()


def test_md_draws_are_independent() -> None:
    """The pair (first, second) has the probability p_i p_j; 25 cells, each within 4.5 standard errors."""
    p = np.array(UNEQUAL) / sum(UNEQUAL)
    draws = Urn.of("md", UNEQUAL, 2).draws(2)
    for i, j in itertools.product(range(5), repeat=2):
        found = ((draws[:, 0] == i) & (draws[:, 1] == j)).mean()
        assert abs(found - p[i] * p[j]) < 4.5 * math.sqrt(p[i] * p[j] / DRAWS)


@pytest.mark.parametrize("r", [2, 4])
def test_clustered_urns(r: int) -> None:
    """Means and variances of the counts are those of r urns; the variance of the average falls below MD's."""
    table = urns(UNEQUAL, r)
    np.testing.assert_allclose(table.sum(1), 1.0)
    np.testing.assert_allclose(table.sum(0), r * np.array(UNEQUAL) / sum(UNEQUAL))
    counts = counts_of(Urn.of("clustered", UNEQUAL, r).draws(r), 5)
    variance = (table * (1 - table)).sum(0)
    for k in range(5):
        squares = (counts[:, k] - table[:, k].sum()) ** 2
        assert abs(squares.mean() - variance[k]) < 4.5 * squares.std() / math.sqrt(DRAWS) + 1e-12

    g = np.random.default_rng(0).normal(size=(5, 3))
    other = counts_of(Urn.of("md", UNEQUAL, r).draws(r), 5)
    assert (counts @ g / r).var(0).sum() < 0.9 * (other @ g / r).var(0).sum()


def test_clustered_never_leaves_its_urns() -> None:
    """Of the largest clients, with mass M together, floor(M) or ceil(M) are drawn in every single Work."""
    r = 4
    counts = counts_of(Urn.of("clustered", UNEQUAL, r).draws(r, 3000), 5)
    order = sorted(range(5), key=lambda k: -UNEQUAL[k])
    for i in range(1, 6):
        mass = r * sum(UNEQUAL[k] for k in order[:i]) / sum(UNEQUAL)
        drawn = counts[:, order[:i]].sum(1)
        assert (drawn >= math.floor(mass + 1e-9)).all()
        assert (drawn <= math.ceil(mass - 1e-9)).all()


def test_clustered_of_equal_sizes_that_divide() -> None:
    """4 of 8 equal clients: each urn holds two, so nobody is drawn twice."""
    draws = Urn.of("clustered", (3,) * 8, 4).draws(4, 2000)
    assert all(len(set(row.tolist())) == 4 for row in draws)


@pytest.mark.parametrize("method", ["md", "clustered"])
@pytest.mark.parametrize("weights", ["", "+fedavg(weights='equal')"])
def test_by_size_weighs_by_multiplicity(method: str, weights: str) -> None:
    """Every draw is a row of its own with the weight 1/r."""
    played = play(method + weights, rounds=10, clients_per_round=4)
    assert any(len(set(cohort)) < 4 for cohort in played.clients)
    for cohort, found in zip(played.clients, played.weights, strict=True):
        assert len(cohort) == 4
        np.testing.assert_allclose(found, np.full(4, 0.25), rtol=1e-15)
    replayed = play(with_cohorts("fedavg(weights='equal')", played.clients), rounds=10)
    assert all(np.array_equal(a, b) for a, b in zip(played.params, replayed.params, strict=True))


def test_md_trains_each_occurrence_on_its_own_batches() -> None:
    """Section 11.9, stateless: as many rows as draws, and two rows of one client differ."""
    played = play("md", rounds=10, clients_per_round=5)
    twice = 0
    for cohort, rows in zip(played.clients, played.rows, strict=True):
        for i, j in itertools.combinations(range(5), 2):
            if cohort[i] == cohort[j]:
                twice += 1
                assert not np.array_equal(rows[i], rows[j])
    assert twice > 3


@pytest.mark.parametrize("method", ["scaffold", "adabest", "feddyn", "scaffold-m"])
@pytest.mark.parametrize("sampler", ["md", "clustered"])
def test_by_size_trains_once_where_clients_remember(sampler: str, method: str) -> None:
    """Section 11.9, stateful: one row per client, weighed by its count."""
    local = {"batch_size": 4, "steps": 3, "lr": 0.02}
    played = play(f"{method}+{sampler}", rounds=10, clients_per_round=5, local=local)
    assert any(max(counts) > 1 for counts in played.counts)
    for cohort, counts, found in zip(played.clients, played.counts, played.weights, strict=True):
        assert len(set(cohort)) == len(cohort)
        assert sum(counts) == 5
        np.testing.assert_allclose(found, np.array(counts) / 5, rtol=1e-15)
    assert all(np.isfinite(params).all() for params in played.params)


def test_md_of_one_client() -> None:
    played = play("md", clients=CLIENTS[:1], rounds=3, clients_per_round=1)
    plain = play(with_cohorts("fedavg", [[0]]), clients=CLIENTS[:1], rounds=3)
    assert all(np.array_equal(a, b) for a, b in zip(played.params, plain.params, strict=True))


@pytest.mark.parametrize("method", ["md", "clustered"])
def test_by_size_with_one_huge_client(method: str) -> None:
    """It has 99.9% of the data and is drawn almost always; the small ones still can be."""
    draws = Urn.of(method, (9990, 5, 5), 3).draws(3)
    share = counts_of(draws, 3).mean(0) / 3
    assert share[0] > 0.997
    assert share[1:].min() > 0


def test_md_weights_after_a_client_is_lost() -> None:
    """A draw that diverged does not leave a hole: the others share its weight."""
    rows = random_rows(np.random.default_rng(0), 3, 2)
    clients = [(row[None], np.array([777.0 if k == 1 else 0.0])) for k, row in enumerate(rows)]
    played = play(
        "md",
        model=Given((1, 1)),
        clients=clients,
        rounds=20,
        clients_per_round=3,
        local={"lr": 1.0},
        loss=output_is_loss,
    )
    assert any(0 < len(weights) < 3 for weights in played.weights)
    for weights in played.weights:
        assert weights.sum() == pytest.approx(1.0, rel=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# AdaFL
# ---------------------------------------------------------------------------------------------------------------------


def attention(played: Played, clients: int = len(SIZES)) -> list[Array]:
    """a after each round."""
    (name,) = (n for n, v in played.stages[0]["adafl.sampler"].items() if v.shape == (clients,))
    return [stages["adafl.sampler"][name].numpy() for stages in played.stages]


def attend(a: Array, clients: Sequence[int], rows: Array) -> Array:
    """3.3: distances from the mean of the models that were averaged."""
    d = np.linalg.norm(rows - rows.mean(0), axis=1)
    if not d.any():
        return a
    sampled = list(clients)
    after = a.copy()
    after[sampled] = 0.9 * a[sampled] + 0.1 * a[sampled].sum() * d / d.sum()
    return after


def assert_attends(played: Played, start: Array | None = None) -> None:
    a = np.full(len(SIZES), 1 / len(SIZES)) if start is None else start
    for found, clients, rows in zip(attention(played, len(a)), played.clients, played.rows, strict=True):
        a = attend(a, clients, rows)
        np.testing.assert_allclose(found, a, rtol=1e-9)
        assert found.sum() == pytest.approx(1.0, abs=1e-12)
        assert (found > 0).all()


@pytest.mark.parametrize("weights", ["equal", "samples"])
@pytest.mark.parametrize("extra", ["", "+dgt(alpha=0.5)", "+fedadam", "+fedglad(gamma=0.3)"])
def test_adafl_attention(extra: str, weights: str) -> None:
    """From the rows that were averaged, before the rescaler and the server: the sum is kept."""
    played = play(f"adafl+fedavg(weights='{weights}'){extra}", rounds=25, clients_per_round=3)
    assert_attends(played)
    assert len({tuple(sorted(cohort)) for cohort in played.clients}) > 5


@pytest.mark.parametrize("aggregator", ["median", "ida", "trimmed-mean(fraction=0.34)"])
def test_adafl_measures_from_the_mean_under_any_aggregator(aggregator: str) -> None:
    assert_attends(play(f"adafl+{aggregator}", rounds=10, clients_per_round=3))


def test_adafl_after_krum() -> None:
    """Who was dropped keeps its attention."""
    played = play("adafl+krum(byzantine=1)+fedavg(weights='equal')", rounds=15, clients_per_round=5)
    assert all(len(cohort) == 4 for cohort in played.clients)
    assert_attends(played)


def test_adafl_does_not_change_the_average() -> None:
    played = play("adafl", rounds=8, clients_per_round=3)
    replayed = play(with_cohorts("fedavg", played.clients), rounds=8)
    assert all(np.array_equal(a, b) for a, b in zip(played.params, replayed.params, strict=True))


@pytest.mark.parametrize("rows", [np.zeros((4, 3)), np.ones((4, 3))], ids=["zero", "identical"])
def test_adafl_without_distances_stays(rows: Array) -> None:
    settings: dict[str, Any] = {
        "model": Given((2, 1)),
        "clients": [(row[None], np.zeros(1)) for row in rows],
        "local": {"lr": 1.0},
        "loss": output_is_loss,
    }
    for r in (1, 2):  # a single client has no distance either
        played = play("adafl", rounds=3, clients_per_round=r, **settings)
        np.testing.assert_allclose(np.array(attention(played, 4)), 0.25, rtol=1e-12)


@pytest.mark.long
def test_adafl_draws_in_sequence() -> None:
    """Without replacement: P(i, then j) = a_i a_j/(1 - a_i), each pair within 4.5 standard errors."""
    a = [0.5, 0.3, 0.15, 0.05]
    draws = Urn.of("adafl", (2,) * 4, 2).with_scores(a).draws(2)
    for i, j in itertools.permutations(range(4), 2):
        expected = a[i] * a[j] / (1 - a[i])
        found = ((draws[:, 0] == i) & (draws[:, 1] == j)).mean()
        assert abs(found - expected) < 4.5 * math.sqrt(expected * (1 - expected) / DRAWS)


@pytest.mark.parametrize("method", ["adafl", "importance"])
def test_everybody_can_be_drawn(method: str) -> None:
    """r = N: all of them, once, although some have next to no probability."""
    draws = Urn.of(method, (2,) * 4, 4).with_scores([1 - 3e-14, 1e-14, 1e-14, 1e-14]).draws(4, 50)
    assert all(sorted(row.tolist()) == [0, 1, 2, 3] for row in draws)


def test_adafl_draws_strays_more_often() -> None:
    """Four alike and one apart: after 60 rounds of three it has the largest attention."""
    rows = [[1.0, 0.0], [1.1, 0.0], [0.9, 0.1], [1.0, 0.1], [-4.0, 3.0]]
    played = play(
        "adafl",
        model=Given((1, 1)),
        clients=[(np.array([row]), np.zeros(1)) for row in rows],
        rounds=60,
        clients_per_round=3,
        local={"lr": 1.0},
        loss=output_is_loss,
    )
    assert_attends(played, np.full(5, 0.2))
    assert attention(played, 5)[-1].argmax() == 4


def test_adafl_with_a_diverged_client() -> None:
    """It keeps its attention, and the others share theirs among themselves."""
    rows = random_rows(np.random.default_rng(0), 5, 2)
    played = play(
        "adafl+fedavg(weights='equal')",
        model=Given((1, 1)),
        clients=[(row[None], np.array([777.0 if k == 2 else 0.0])) for k, row in enumerate(rows)],
        rounds=20,
        clients_per_round=3,
        local={"lr": 1.0},
        loss=output_is_loss,
    )
    assert_attends(played, np.full(5, 0.2))
    assert attention(played, 5)[-1][2] == pytest.approx(0.2, rel=1e-9)
    assert sum(played.column("diverged")) > 3


# ---------------------------------------------------------------------------------------------------------------------
# Importance
# ---------------------------------------------------------------------------------------------------------------------


def scores(played: Played, clients: int = len(SIZES)) -> list[Array]:
    """p after each round."""
    key = next(key for key in played.stages[0] if key.endswith(".sampler"))
    (name,) = (n for n, v in played.stages[0][key].items() if v.shape == (clients,) and v.is_floating_point())
    return [stages[key][name].numpy() for stages in played.stages]


def assert_scores(played: Played, gamma: float, batch_size: int | None, full: bool) -> None:
    """2.12 and the brief: p_k <- (1 - gamma) p_k + gamma p_new; who was never seen has the mean of those who were."""
    theta = two_layer_start()
    p = np.ones(len(SIZES))
    seen: set[int] = set()
    if full:
        p = np.array([final_score(MODEL, theta, client, batch_size) for client in CLIENTS])
        seen = set(range(len(SIZES)))
    for found, cohort, rows, params in zip(scores(played), played.clients, played.rows, played.params, strict=True):
        for k, row in zip(cohort, rows, strict=True):
            p[k] = (1 - gamma) * p[k] + gamma * final_score(MODEL, theta - row, CLIENTS[k], batch_size)
        seen |= set(cohort)
        known = sorted(seen)
        p = np.array([p[k] if k in seen else p[known].mean() for k in range(len(SIZES))])
        np.testing.assert_allclose(found, p, rtol=1e-9)
        theta = params


@pytest.mark.parametrize("start", ["ones", "full"])
@pytest.mark.parametrize("gamma", [0.9, 0.3, 1.0])
@pytest.mark.parametrize("batch_size", [4, None, pytest.param(1, marks=pytest.mark.long)])
def test_importance_scores(batch_size: int | None, gamma: float, start: str) -> None:
    """Scores of clients whose samples do not divide into batches: every batch counts the same, the short one too."""
    local = {"batch_size": batch_size, "lr": 0.01}
    text = f"importance(gamma={gamma}, start='{start}')"
    played = play(text, rounds=20, clients_per_round=2, local=local)
    assert_scores(played, gamma, batch_size, start == "full")


def test_importance_defaults() -> None:
    played = play("importance", rounds=20, clients_per_round=2)
    assert_scores(played, 0.9, 4, full=False)


@pytest.mark.parametrize("method", ["md", "clustered"])
def test_written_weights_win(method: str) -> None:
    played = play(method + "+fedavg(weights='samples')", rounds=5, clients_per_round=4)
    replayed = play(with_cohorts("fedavg", played.clients), rounds=5)
    assert all(np.array_equal(a, b) for a, b in zip(played.params, replayed.params, strict=True))


@pytest.mark.parametrize("extra", ["", "+fedadam", "+fedprox(mu=0.5)"])
def test_importance_does_not_change_the_average(extra: str) -> None:
    """No correction for how likely a client was: the weights are equal (3.4)."""
    played = play(f"importance{extra}", rounds=8, clients_per_round=3)
    replayed = play(with_cohorts(f"fedavg(weights='equal'){extra}", played.clients), rounds=8)
    assert all(np.array_equal(a, b) for a, b in zip(played.params, replayed.params, strict=True))


@pytest.mark.parametrize("method", ["adabest", "scaffold", "feddyn"])
def test_importance_asks_everybody_without_leaving_a_trace(method: str) -> None:
    """start="full" costs no Work and no step, and no client remembers having been asked."""
    played = play(f"{method}+importance(start='full')", rounds=8, clients_per_round=3)
    replayed = play(with_cohorts(method, played.clients), rounds=8)
    assert all(np.array_equal(a, b) for a, b in zip(played.params, replayed.params, strict=True))
    for name in ("works", "local_steps", "asked", "answered"):
        assert played.column(name) == replayed.column(name)
    assert played.column("works") == list(range(1, 9))
    losses = played.column("train_loss"), replayed.column("train_loss")
    assert losses[0] == losses[1]


def test_importance_asks_everybody_before_the_first_draw() -> None:
    """The first cohort already follows the scores: one client has nearly all of the gradient."""
    rows = np.full((8, 2), 1e-6)
    rows[5] = 1e3
    settings: dict[str, Any] = {
        "model": Given((1, 1)),
        "clients": [(row[None], np.zeros(1)) for row in rows],
        "rounds": 1,
        "clients_per_round": 1,
        "local": {"lr": 1e-3},
        "loss": output_is_loss,
    }
    full = [play("importance(start='full')", seed=seed, **settings).clients[0] for seed in range(12)]
    ones = [play("importance(start='ones')", seed=seed, **settings).clients[0] for seed in range(12)]
    assert full == [[5]] * 12
    assert len({cohort[0] for cohort in ones}) > 3


@pytest.mark.long
def test_importance_draws_in_sequence() -> None:
    """Without replacement, proportional to p: P(i, then j) = p_i p_j/(1 - p_i); 4.5 standard errors."""
    p = [6.0, 3.0, 0.5, 0.5]
    share = np.array(p) / sum(p)
    draws = Urn.of("importance", (2,) * 4, 2).with_scores(p).draws(2)
    for i, j in itertools.permutations(range(4), 2):
        expected = share[i] * share[j] / (1 - share[i])
        found = ((draws[:, 0] == i) & (draws[:, 1] == j)).mean()
        assert abs(found - expected) < 4.5 * math.sqrt(expected * (1 - expected) / DRAWS)


def test_importance_follows_the_scores() -> None:
    """Gradients 3, 1, 1, 1, 1, 1 that never change: the first client's score is 9 times that of the others, so it
    stands in 200 Works of one client about 9/14 of the time (4 standard errors)."""
    rows = np.ones((6, 2))
    rows[0] = 3.0
    played = play(
        "importance(gamma=1.0, start='full')",
        model=Given((1, 1)),
        clients=[(row[None], np.zeros(1)) for row in rows],
        rounds=200,
        clients_per_round=1,
        local={"lr": 1e-3},
        loss=output_is_loss,
    )
    drawn = sum(cohort == [0] for cohort in played.clients) / 200
    assert abs(drawn - 9 / 14) < 4 * math.sqrt(9 / 14 * 5 / 14 / 200)


@pytest.mark.parametrize("start", ["ones", "full"])
def test_importance_where_nothing_is_left_to_learn(start: str) -> None:
    """All scores are 0: still a whole cohort, and finite scores."""
    clients = [(np.zeros((2, 2)), np.zeros(2))] * 5
    played = play(
        f"importance(gamma=1.0, start='{start}')",
        model=Given((1, 1)),
        clients=clients,
        rounds=6,
        clients_per_round=3,
        loss=output_is_loss,
    )
    assert all(len(set(cohort)) == 3 for cohort in played.clients)
    assert all(np.isfinite(p).all() for p in scores(played, 5))


@pytest.mark.parametrize("start", ["ones", "full"])
def test_importance_with_a_diverged_client(start: str, caplog: pytest.LogCaptureFixture) -> None:
    """A client without a finite loss has no score: the run goes on, and its probability stays a number."""
    rows = random_rows(np.random.default_rng(0), 5, 2)
    with caplog.at_level(logging.ERROR, logger="fedloom"):
        played = play(
            f"importance(start='{start}')",
            model=Given((1, 1)),
            clients=[(row[None], np.array([777.0 if k == 2 else 0.0])) for k, row in enumerate(rows)],
            rounds=12,
            clients_per_round=3,
            local={"lr": 1e-3},
            loss=output_is_loss,
        )
    assert all(np.isfinite(p).all() for p in scores(played, 5))
    others = [k for k in range(5) if k != 2]
    for p, cohorts in zip(scores(played, 5), itertools.accumulate(played.clients, lambda a, b: a + b), strict=True):
        observed = [k for k in others if start == "full" or k in cohorts]
        assert p[2] == pytest.approx(p[observed].mean(), rel=1e-9)


def test_importance_where_a_score_overflows() -> None:
    """A gradient of 1e200 is finite, its square is not: the sampler must not stop the run."""
    rows = np.ones((4, 2))
    rows[1] = 1e200
    played = play(
        "importance",
        model=Given((1, 1)),
        clients=[(row[None], np.zeros(1)) for row in rows],
        rounds=8,
        clients_per_round=2,
        local={"lr": 1e-210},
        loss=output_is_loss,
    )
    assert len(played.params) == 8
    assert all(np.isfinite(p).all() for p in scores(played, 4))


def test_importance_counts_with_availability() -> None:
    """Who is asked but away has no score; with start="full" too."""
    for start in ("ones", "full"):
        played = play(
            f"importance(start='{start}')", rounds=8, clients_per_round=3, availability=lambda client, work: client != 1
        )
        assert all(np.isfinite(p).all() and (p > 0).all() for p in scores(played))
        assert all(1 not in cohort for cohort in played.clients)


def batch_norm_model() -> torch.nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)).double()


@pytest.mark.parametrize("start", ["ones", "full"])
def test_importance_score_leaves_batch_norm_alone(start: str) -> None:
    """The pass that measures the score must not move the buffers that are averaged."""
    local = {"batch_size": 7, "lr": 0.01}  # no batch of one sample, which batch norm refuses
    model = batch_norm_model()
    played = play(f"importance(start='{start}')", model=model, rounds=4, clients_per_round=2, local=local)
    replayed = play(with_cohorts("fedavg(weights='equal')", played.clients), model=model, rounds=4, local=local)
    for name, value in replayed.result.model.state_dict().items():
        assert torch.equal(value, played.result.model.state_dict()[name]), name


@pytest.mark.parametrize("last_batch", ["drop", "bootstrap"])
def test_importance_with_batch_norm_and_a_last_sample(last_batch: str) -> None:
    """5 and 9 samples in batches of 4 leave one: training drops it or fills it up, so the score has to bear it, too."""
    local = {"batch_size": 4, "last_batch": last_batch, "lr": 0.01}
    model = batch_norm_model()
    play(with_cohorts("fedavg", [[0, 3]]), model=model, rounds=2, local=local)
    played = play("importance(start='full')", model=model, rounds=2, clients_per_round=3, local=local)
    assert all(np.isfinite(p).all() for p in scores(played))


@pytest.mark.parametrize("text", ["importance(gamma=1.5)", "importance(gamma=-0.1)", "importance(start='zeros')"])
def test_importance_refuses(text: str) -> None:
    with pytest.raises(fl.MethodError, match="importance"):
        fl.Method(text)


@pytest.mark.parametrize("method", SAMPLERS)
def test_one_client_a_round(method: str) -> None:
    played = play(method, rounds=5, clients_per_round=1, local=LOCAL)
    assert all(len(cohort) == 1 for cohort in played.clients)
    assert all(np.isfinite(params).all() for params in played.params)


def test_one_cohort_is_forced_and_the_others_are_as_without_it() -> None:
    plain = play("fedavg", rounds=6, clients_per_round=2).clients
    forced = play("fixed(cohorts=[[0, 1, 2]], works=[3])", rounds=6, clients_per_round=2).clients
    assert forced[3] == [0, 1, 2]
    assert forced[:3] + forced[4:] == plain[:3] + plain[4:]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fixed(cohorts=[[0]], works=[1, 2])", "one Work for each of the 1 cohorts"),
        ("fixed(cohorts=[[0], [1]], works=[1, 1])", "one Work for each of the 2 cohorts"),
        ("fixed(cohorts=[[0]], works=[-1])", "no Work -1"),
    ],
)
def test_forced_cohorts_that_have_no_meaning(text: str, message: str) -> None:
    with pytest.raises(fl.MethodError, match=message):
        fl.Method(text)
