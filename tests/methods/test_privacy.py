"""noise: the mechanism against float64 NumPy, what one client can change, and what a run does with its key."""

import itertools
import logging
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, chisquare, kstest
from torch import Tensor, nn

import fedloom as fl
from fedloom.keys import noise_key
from fedloom.methods.clip import Clip
from fedloom.methods.noise import Noise
from fedloom.privacy import epsilon
from fedloom.result import Signal
from fedloom.rows import Rows
from fedloom.space import Space
from fedloom.stages import State, Updates
from fedloom.training import Training
from tests import reference
from tests.reference import Array, Client

SIZES = (5, 12, 23, 9, 16, 7)
CLIENTS = reference.make_clients(SIZES, 3, seed=4)
START = np.array([0.3, -0.2, 0.5, 0.1])
STEPS, LR = 3, 0.05
C, Z, SEED = 0.2, 0.7, 11
POISSON = f"bernoulli(rate=0.25)+clip(norm={C})+noise(multiplier={Z}, seed=5)"


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs.squeeze(1) - targets) ** 2


def training(method: str, clients: Sequence[Client] = CLIENTS, rounds: int = 12, **more: Any) -> Training:
    model = nn.Linear(3, 1).double()
    nn.utils.vector_to_parameters(torch.from_numpy(START), model.parameters())
    options: dict[str, Any] = {
        "local": fl.Local(steps=STEPS, batch_size=None, lr=LR),
        "loss": squared_error,
        "engine": "loop",
        "device": "cpu",
        "seed": SEED,
    }
    return Training(model, fl.Federation.from_arrays(clients), method, rounds=rounds, **{**options, **more})


def played(run: Training) -> list[Array]:
    """The model after every round."""
    params: list[Array] = []
    run.run([lambda event: params.append(event.params.numpy().copy())])
    return params


# ---------------------------------------------------------------------------------------------------------------------
# The mechanism, outside of Fedloom
# ---------------------------------------------------------------------------------------------------------------------


def local_update(theta: Array, client: Client) -> tuple[Array, bool]:
    x, y = client
    now = theta.copy()
    finite = True
    for _ in range(STEPS):
        with np.errstate(over="ignore"):
            losses, gradient, _ = reference.Linear().forward_backward(now, {}, x, y)
        finite = finite and bool(np.isfinite(losses).all())
        now = now - LR * gradient
    return theta - now, finite


def noise_of(words: Sequence[int], round: int) -> Array:
    sequence = np.random.SeedSequence(list(words), spawn_key=(round,), pool_size=8)
    return np.random.default_rng(sequence).standard_normal(len(START))


def poisson_cohorts(rate: float, rounds: int, clients: int) -> list[list[int]]:
    cohorts = []
    for w in range(rounds):
        rng = np.random.default_rng(np.random.SeedSequence(SEED, spawn_key=(w,)))
        number = int(binom.ppf(rng.random(), clients, rate))
        cohorts.append(rng.choice(clients, number, replace=False).tolist())
    return cohorts


def expected(
    cohorts: Sequence[Sequence[int]],
    m: float,
    words: Sequence[int],
    clients: Sequence[Client] = CLIENTS,
    answers: Callable[[int, int], bool] = lambda client, w: True,
) -> list[Array]:
    theta, found = START, []
    for w, cohort in enumerate(cohorts):
        total = np.zeros(len(START))
        for k in cohort:
            g, finite = local_update(theta, clients[k])
            if finite and answers(k, w):
                total += g * min(1.0, C / float(np.linalg.norm(g)))
        theta = theta - (total + Z * C * noise_of(words, w)) / m
        found.append(theta)
    return found


def words_of(seed: int) -> list[int]:
    return [int(word) for word in np.random.SeedSequence(seed).generate_state(8)]


def assert_same(found: Sequence[Array], wanted: Sequence[Array]) -> None:
    np.testing.assert_allclose(np.array(found), np.array(wanted), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_poisson_samples_with_rounds_of_nobody(engine: str) -> None:
    cohorts = poisson_cohorts(0.25, 12, len(CLIENTS))
    assert 0 < sum(not cohort for cohort in cohorts) < 12
    run = training(POISSON, engine=engine)
    assert_same(played(run), expected(cohorts, 0.25 * len(CLIENTS), words_of(5)))
    assert [row["answered"] for row in run.history] == [len(cohort) for cohort in cohorts]
    for row, cohort in zip(run.history, cohorts, strict=True):
        assert math.isnan(row["clip.clipped"]) == (not cohort)
        assert math.isnan(row["train_loss"]) == (not cohort)


def test_a_key_from_secrets() -> None:
    run = training(POISSON.replace(", seed=5", ""))
    words = run.state.stages["noise.aggregator"]["key"].tolist()
    assert len(words) == 8
    assert all(0 <= word < 1 << 32 for word in words)
    assert_same(played(run), expected(poisson_cohorts(0.25, 12, len(CLIENTS)), 0.25 * len(CLIENTS), words))


def test_given_cohorts() -> None:
    cohorts = [[0, 1, 2], [3, 1, 5], [4, 2, 0], [5, 4, 1]]
    run = training(f"fixed(cohorts={cohorts})+clip(norm={C})+noise(multiplier={Z}, seed=5)")
    assert_same(played(run), expected(cohorts * 3, 3.0, words_of(5)))


def test_clients_that_diverge_or_are_away() -> None:
    """The denominator stays, and where everybody is gone noise alone is left."""
    x, y = CLIENTS[1]
    clients = [*CLIENTS[:1], (x, 1e200 + y), *CLIENTS[2:]]
    cohorts = [[0, 1, 2], [1, 3, 4], [3, 4, 5], [5, 1, 0]]

    def there(client: int, w: int) -> bool:
        return w % 4 != 2 and not (w % 4 == 1 and client != 1)

    method = f"fixed(cohorts={cohorts})+clip(norm={C})+noise(multiplier={Z}, seed=5)"
    run = training(method, clients, rounds=8, availability=there)
    assert_same(played(run), expected(cohorts * 2, 3.0, words_of(5), clients, there))
    assert [row["answered"] for row in run.history[:4]] == [3, 1, 0, 3]
    assert [row["diverged"] for row in run.history[:4]] == [1, 1, 0, 1]


def test_no_noise_is_the_clipped_mean_over_m() -> None:
    run = training(f"clip(norm={C})+noise(multiplier=0)", clients_per_round=6)
    plain = training(f"clip(norm={C})+fedavg(weights=equal)", clients_per_round=6)
    assert_same(played(run), played(plain))
    assert all(row["noise.epsilon"] == math.inf for row in run.history)


# ---------------------------------------------------------------------------------------------------------------------
# What one client can change
# ---------------------------------------------------------------------------------------------------------------------

ONE_ROUND = f"fixed(cohorts=[[0, 1, 2, 3]])+clip(norm={C})+noise(multiplier={Z}, seed=5)"


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 3),
    st.lists(st.floats(-1e6, 1e6), min_size=8, max_size=8),
    st.floats(1e-3, 1e3),
)
def test_one_client_moves_the_sum_by_the_norm_at_most(who: int, numbers: list[float], scale: float) -> None:
    """Whatever it holds, beside the same round without it: the noise is the same, the difference is its own."""
    values = scale * np.array(numbers).reshape(2, 4)
    clients = list(CLIENTS[:4])
    clients[who] = (values[:, :3], values[:, 3])
    there = played(training(ONE_ROUND, clients, rounds=1))[0]
    away = played(training(ONE_ROUND, clients, rounds=1, availability=lambda client, w: client != who))[0]
    assert 4 * np.linalg.norm(there - away) <= C * (1 + 1e-9)


def test_the_bound_is_reached() -> None:
    there = played(training(ONE_ROUND, CLIENTS[:4], rounds=1))[0]
    away = played(training(ONE_ROUND, CLIENTS[:4], rounds=1, availability=lambda client, w: client != 2))[0]
    assert 4 * np.linalg.norm(there - away) == pytest.approx(C, rel=1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# The noise
# ---------------------------------------------------------------------------------------------------------------------


def updates_of(rows: Tensor) -> Updates:
    who = torch.arange(len(rows))
    return Updates(
        clients=who,
        slots=who,
        counts=torch.ones_like(who),
        samples=torch.ones_like(who),
        steps=torch.ones_like(who),
        loss=torch.ones(len(who)),
        finite=torch.ones(len(who), dtype=torch.bool),
        rows=Rows(rows, Space(("w",), (torch.Size([rows.shape[1]]),), rows.dtype)),
        buffers={},
        weights=torch.ones(len(who)),
    )


def test_single_precision_keeps_the_bound_to_rounding() -> None:
    rows = torch.randn(40, 5000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 40)[:, None]
    stage = Clip(C)
    _, clipped = stage.apply({}, updates_of(rows))
    lengths = clipped.rows.matrix.double().norm(dim=1)
    assert float(lengths.max()) < C * (1 + 1e-6)
    assert int((lengths > C * (1 - 1e-6)).sum()) > 10


def released(seed: int | None, rounds: int, rows: Tensor) -> Array:
    """Sums that the stage releases, [rounds, P]; m is 1."""
    stage = Noise(Z, seed=seed)
    state: State = {
        "key": torch.tensor(noise_key(seed)),
        "deviation": torch.tensor(Z * C, dtype=torch.float64),
        "m": torch.tensor(1.0),
    }
    updates = updates_of(rows)
    return np.array([stage.combine({**state, "round": torch.tensor(r)}, updates)[1].numpy() for r in range(rounds)])


def test_noise_is_normal_of_the_right_deviation() -> None:
    """40,000 numbers over 200 keys: their deviation is known to 0.35%, so 1.5% is more than four of those."""
    rows = torch.ones(3, 50, dtype=torch.float64)
    found = np.stack([released(seed, 4, rows) - 3.0 for seed in range(200)])
    assert found.std() == pytest.approx(Z * C, rel=0.015)
    assert abs(found.mean()) < 4.5 * Z * C / math.sqrt(found.size)
    assert kstest(found.ravel() / (Z * C), "norm").pvalue > 1e-3
    for i in range(4):
        for j in range(i):  # rounds don't know of each other
            assert abs(np.corrcoef(found[:, i].ravel(), found[:, j].ravel())[0, 1]) < 4.5 / math.sqrt(200 * 50)


def test_every_key_and_round_has_its_own_noise() -> None:
    rows = torch.zeros(0, 6, dtype=torch.float32)
    drawn = [released(seed, 3, rows) for seed in (None, None, 0, 1)]
    everything = np.concatenate(drawn)
    assert len(np.unique(everything, axis=0)) == len(everything) == 12
    assert np.array_equal(released(1, 3, rows), drawn[3])


# ---------------------------------------------------------------------------------------------------------------------
# Poisson samples
# ---------------------------------------------------------------------------------------------------------------------


def test_cohort_sizes_are_binomial_only_under_noise() -> None:
    rate, draws = 0.2, 4000

    def sizes(method: str) -> list[int]:
        run = training(method)
        stage, setup = run.simulation.pipeline.sampler.stage, run.simulation.setup
        rng = np.random.default_rng(3)
        drawn = [stage.draw({}, setup, 1, w, rng) for w in range(draws)]
        assert all(len(set(cohort.tolist())) == len(cohort) for cohort in drawn)
        lengths = [len(cohort) for cohort in drawn]
        return [lengths.count(n) for n in range(7)]

    found = sizes(f"bernoulli(rate={rate})+clip(norm=1)+noise(multiplier=1)")
    wanted = draws * binom.pmf(np.arange(7), 6, rate)
    merged = [*found[:4], sum(found[4:])], [*wanted[:4], wanted[4:].sum()]
    assert chisquare(*merged).pvalue > 1e-3
    assert sizes(f"bernoulli(rate={rate})+clip(norm=1)")[0] == 0


# ---------------------------------------------------------------------------------------------------------------------
# Runs: epsilon, remarks, resuming, learning
# ---------------------------------------------------------------------------------------------------------------------


def test_epsilon_of_poisson_samples() -> None:
    run = training(POISSON)
    run.run()
    assert [row["noise.epsilon"] for row in run.history] == [epsilon(Z, 1e-5, t, 0.25) for t in range(1, 13)]
    assert {row["noise.delta"] for row in run.history} == {1e-5}


@pytest.mark.parametrize("sampler", ["fixed(cohorts=[[0, 1], [2, 1], [3, 4], [1, 5]])", "uniform"])
def test_epsilon_of_whom_was_asked_most(sampler: str) -> None:
    """Asked, whether or not they answered."""
    method = f"{sampler}+clip(norm={C})+noise(multiplier=3, delta=1e-6)"
    run = training(method, clients_per_round=2, availability=lambda client, w: client != 1)
    asked, most = np.zeros(6, dtype=int), []
    stage, setup = run.simulation.pipeline.sampler.stage, run.simulation.setup
    for w in range(12):
        rng = np.random.default_rng(np.random.SeedSequence(SEED, spawn_key=(w,)))
        asked[stage.draw({}, setup, 2, w, rng)] += 1
        most.append(int(asked.max()))
    run.run()
    assert most[-1] < 12
    assert [row["noise.epsilon"] for row in run.history] == [epsilon(3, 1e-6, n) for n in most]


def test_remarks_when_a_run_begins(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedloom"):
        training(POISSON, rounds=2).run()
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("noise")]
    assert len(said) == 1
    for words in ("train_loss", "run's seed", "noise's seed"):
        assert words in said[0]
    assert "seed" not in fl.Method("clip(norm=1)+noise(multiplier=1)").remarks[0]


def test_runs_without_a_seed_differ() -> None:
    method = POISSON.replace(", seed=5", "")
    one, other = played(training(method)), played(training(method))
    assert not np.array_equal(one[0], other[0])
    assert np.array_equal(played(training(POISSON))[-1], played(training(POISSON))[-1])


def test_a_round_played_again_releases_the_same(tmp_path: Path) -> None:
    """A run stops in round 5; its last checkpoint is lost, so rounds 4 and 5 are played again; or it isn't."""
    method = f"bernoulli(rate=0.4)+clip(norm={C})+noise(multiplier={Z})+adabest(mu=0)+2dlrd(window=1)"

    def go(folder: Path, until: int, resume: bool) -> tuple[dict[int, Array], list[dict[str, Any]]]:
        seen: dict[int, Array] = {}

        def listen(event: fl.Event) -> Signal | None:
            seen[event.round] = event.params.numpy().copy()
            return fl.STOP if event.round == until else None

        run = training(method, rounds=9, checkpoint=folder, checkpoint_every=3, resume=resume)
        run.run([listen])
        return seen, [{n: v for n, v in row.items() if n != "seconds"} for row in run.history]

    models, first = go(tmp_path / "a", 5, resume=False)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert sorted(path.name for path in (tmp_path / "b").glob("round-*")) == ["round-00000003", "round-00000005"]
    shutil.rmtree(tmp_path / "b" / "round-00000005")
    again, replayed = go(tmp_path / "b", 9, resume=True)
    later, whole = go(tmp_path / "a", 9, resume=True)
    assert sorted(again) == [4, 5, 6, 7, 8, 9]
    assert all(np.array_equal(again[r], models[r]) for r in (4, 5))
    assert sorted(later) == [6, 7, 8, 9]
    assert all(np.array_equal(again[r], later[r]) for r in later)
    assert repr(replayed) == repr(whole)
    assert repr(whole[:5]) == repr(first)


def test_key_is_kept_before_anything_is_released(tmp_path: Path) -> None:
    """A run that crashes in round 3, before its first checkpoint is due, releases the same three models again."""
    seen: list[Array] = []

    def crash(event: fl.Event) -> None:
        seen.append(event.params.numpy().copy())
        if event.round == 3 and len(seen) == 3:
            raise ZeroDivisionError

    method = f"bernoulli(rate=0.4)+clip(norm={C})+noise(multiplier={Z})"
    with pytest.raises(ZeroDivisionError):
        training(method, rounds=4, checkpoint=tmp_path).run([crash])
    training(method, rounds=4, checkpoint=tmp_path, resume=True).run([crash])
    assert len(seen) == 7
    assert all(np.array_equal(first, again) for first, again in zip(seen[:3], seen[3:6], strict=True))


def test_diagnostics_bear_rounds_of_nobody() -> None:
    data = fl.load("digits", partition="iid", clients=40)
    result = fl.fit(
        fl.model("logistic", data),
        data,
        "bernoulli(rate=0.03)+clip(norm=1)+noise(multiplier=1, seed=1)",
        rounds=8,
        diagnose="gsi,similarity,labels,divergence,twin,fairness,probe",
        engine="loop",
        device="cpu",
    )
    assert 0 in [row["answered"] for row in result.history]


def test_digits_are_learned() -> None:
    data = fl.load("digits", partition="dirichlet(alpha=1)", clients=200)
    result = fl.fit(
        fl.model("logistic", data),
        data,
        "bernoulli(rate=0.25)+clip(norm=0.5)+noise(multiplier=1, seed=1)",
        rounds=40,
        local=fl.Local(epochs=5, batch_size=8, lr=0.3),
        device="cpu",
    )
    spent = [row["noise.epsilon"] for row in result.history]
    assert all(a < b for a, b in itertools.pairwise(spent))
    assert spent[-1] < 15
    assert result.history[-1]["test_accuracy"] > 0.75
