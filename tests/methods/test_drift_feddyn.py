"""FedDyn: against the NumPy reference, by what AdaBest's paper proves of it, and at its edges (specification 2.5)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom as fl
from tests.methods import drift_reference as judge
from tests.methods.test_drift_reference import (
    CLIENTS,
    COHORTS,
    DEPLOY,
    EVERYBODY,
    FEATURES,
    LOCALS,
    MARK,
    OTHER_LOCALS,
    ROUNDS,
    SIZES,
    TOLERANCE,
    WAYS,
    Run,
    assert_agrees,
    assert_resumes,
    constant_slope,
    error,
    linear_start,
    model_params,
    play,
    poisoned,
    poisoned_error,
    problem,
    row_of,
    slope,
)
from tests.reference import Array

N = len(SIZES)


def expected_run(setting: judge.Problem, mu: float, rounds: int = ROUNDS) -> list[judge.Point]:
    clients = len(setting.clients)
    return judge.synchronous(setting, rounds, judge.FedDynClients(setting, mu), judge.FedDynServer(clients))


@pytest.mark.parametrize(("local", "deploy"), WAYS)
def test_unequal_gaps_and_sizes(local: str, deploy: str) -> None:
    run = play(f"feddyn(mu=0.1, deploy='{deploy}')", local=LOCALS[local], probe=True)
    assert_agrees(run, expected_run(problem(local=LOCALS[local]), 0.1), deploy, "feddyn")


@pytest.mark.parametrize("mu", [1e-6, 0.02, 1.0])
@pytest.mark.parametrize("cohorts", [COHORTS, EVERYBODY], ids=["some", "all"])
def test_parameters(cohorts: list[list[int]], mu: float) -> None:
    run = play(f"feddyn(mu={mu})", cohorts, probe=True)
    assert_agrees(run, expected_run(problem(cohorts), mu), "aggregate", "feddyn")


def test_defaults() -> None:
    assert fl.Method("feddyn").fills == ["client", "server"]
    run = play("feddyn", EVERYBODY, probe=True)
    assert_agrees(run, expected_run(problem(EVERYBODY), 0.02), "aggregate", "feddyn")


@pytest.mark.parametrize("local", OTHER_LOCALS)
def test_other_local_optimisers(local: str) -> None:
    run = play("feddyn(mu=0.1)", local=OTHER_LOCALS[local], probe=True)
    assert_agrees(run, expected_run(problem(local=OTHER_LOCALS[local]), 0.1), "aggregate", "feddyn")


class _Halved(judge.FedDynClients):
    """A public simulator's proximal term."""

    def correction(self, work: int, k: int) -> tuple[float, Array | float]:
        pull, drift = super().correction(work, k)
        return pull / 2, drift


class _Unscaled(judge.FedDynClients):
    """mu for everybody, whatever its size."""

    def correction(self, work: int, k: int) -> tuple[float, Array | float]:
        return self.mu, -self.mu * self.h[k]


def test_factors_matter() -> None:
    """The run could not pass for one with half the proximal term, or with one mu for all sizes."""
    run = play("feddyn(mu=0.1)")
    for variant in (_Halved(problem(), 0.1), _Unscaled(problem(), 0.1)):
        other = judge.synchronous(problem(), ROUNDS, variant, judge.FedDynServer(N))
        assert error(run.path[-1], other[-1].cloud) > 1e-4


def test_small_mu_is_not_fedavg() -> None:
    """The server still subtracts h."""
    run, plain = play("feddyn(mu=1e-300)"), play("fedavg(weights='equal')")
    assert error(run.path[-1], plain.path[-1].numpy()) > 1e-2


# ---------------------------------------------------------------------------------------------------------------------
# What is proved of it
# ---------------------------------------------------------------------------------------------------------------------


def server_path(run: Run) -> tuple[Array, Array, Array]:
    """bar^1.., h^1.. and gbar^1.., from what was averaged and where the server went."""
    theta = np.stack([linear_start(), *(params.numpy() for params in run.path)])
    gbar = np.stack([rows.mean(0).numpy() for rows in run.rows])
    bar = theta[:-1] - gbar
    return bar, bar - theta[1:], gbar


@pytest.mark.parametrize("cohorts", [COHORTS, EVERYBODY, [[0], [1, 2]]], ids=["some", "all", "one or two"])
def test_theorem_one(cohorts: list[list[int]]) -> None:
    """|h^t| <= |h^{t-1}| if and only if cos(h^{t-1}, gbar^t) <= -(r/2N) |gbar^t| / |h^{t-1}|."""
    run = play("feddyn(mu=0.1)", cohorts, rounds=40)
    _, h, gbar = server_path(run)
    recorded = run.column("feddyn.h_norm")
    np.testing.assert_allclose(recorded, np.linalg.norm(h, axis=1), rtol=1e-8)
    shrank = []
    for t in range(1, 40):
        r = len(run.rows[t])
        bound = -r / (2 * N) * np.linalg.norm(gbar[t]) / recorded[t - 1]
        cosine = h[t - 1] @ gbar[t] / (recorded[t - 1] * np.linalg.norm(gbar[t]))
        if abs(cosine - bound) > 1e-9:
            assert (recorded[t] <= recorded[t - 1]) == (cosine <= bound), f"round {t + 1}"
            shrank.append(cosine <= bound)
    assert 3 < sum(shrank) < len(shrank) - 3


@pytest.mark.parametrize("local", LOCALS)
def test_released_code(local: str) -> None:
    """theta^{t+1} = bar + mean over all N of the accumulated theta_k - theta_sent."""
    run = play("feddyn(mu=0.1)", local=LOCALS[local])
    bar, _, _ = server_path(run)
    drift = np.zeros((N, FEATURES + 1))
    for t, event in enumerate(run.events):
        assert event.updates is not None
        for k in event.updates.clients.tolist():
            drift[k] -= row_of(event, k)
        assert error(run.path[t], bar[t] + drift.mean(0)) < TOLERANCE, f"round {t + 1}"


def memory_of(run: Run, mu: float, lr: float) -> Array:
    """[N, P]: the h_k with which everybody began the last round, in which a single step moved by
    lr (slope - mu_k h_k): the proximal term is zero at the start.
    """
    mu_k = mu * np.mean(SIZES) / np.array(SIZES)
    return np.array([(slope(k) - row_of(run.events[-1], k) / lr) / mu_k[k] for k in range(N)])


@pytest.mark.parametrize(
    "before",
    [COHORTS, [[0, 1, 0], [2, 2], [3, 1, 3, 3]]],
    ids=["some", "drawn twice"],
)
def test_h_is_the_mean_of_what_the_clients_remember(before: list[list[int]]) -> None:
    """Also where a client is drawn twice: it trains once, and its h_k takes its update once."""
    mu, lr = 0.1, 0.03
    local = {"batch_size": None, "lr": lr}
    rounds = len(before) + 1
    run = play(f"feddyn(mu={mu})", [*before, *EVERYBODY], local, rounds=rounds, loss=constant_slope)
    h_k = memory_of(run, mu, lr)
    assert run.column("feddyn.h_norm")[-2] == pytest.approx(np.linalg.norm(h_k.mean(0)), rel=1e-8)
    never = [k for k in range(N) if not any(k in cohort for cohort in before)]
    assert never
    np.testing.assert_allclose(h_k[never], 0, atol=1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# Edges
# ---------------------------------------------------------------------------------------------------------------------


def test_rounds_without_answers() -> None:
    setting = problem(answers=lambda client, work: work not in (0, 3, 4) and (client + work) % 4 != 0)
    run = play("feddyn(mu=0.1)", availability=setting.answers, probe=True)
    assert 0 in run.column("answered")
    assert_agrees(run, expected_run(setting, 0.1), "aggregate", "feddyn")


@pytest.mark.parametrize("deploy", DEPLOY)
def test_first_rounds_without_answers(deploy: str) -> None:
    """Before the first answer every deployable model is the start."""
    setting = problem(answers=lambda client, work: work > 1)
    run = play(f"feddyn(mu=0.1, deploy='{deploy}')", availability=setting.answers, probe=True)
    for deployed, _ in run.evaluated[:2]:
        assert error(deployed, linear_start()) < 1e-12
    assert_agrees(run, expected_run(setting, 0.1), deploy, "feddyn")


@pytest.mark.parametrize("deploy", DEPLOY)
def test_client_that_diverges(deploy: str) -> None:
    """It is left out, keeps its h_k and its latest model, and r does not count it."""
    local: dict[str, Any] = {"batch_size": 4, "steps": 2, "lr": 0.02}
    run = play(
        f"feddyn(mu=0.1, deploy='{deploy}')",
        local=local,
        clients=poisoned(1, MARK),
        loss=poisoned_error,
        probe=True,
        rounds=40,
    )
    assert 4 < sum(run.column("diverged")) < 20
    assert any(event.updates is None for event in run.events)
    expected = expected_run(problem(local=local, clients=poisoned(1, np.nan)), 0.1, rounds=40)
    assert_agrees(run, expected, deploy, "feddyn")


def test_everybody_always_diverges() -> None:
    clients = [(x, np.full_like(y, MARK)) for x, y in CLIENTS]
    run = play("feddyn", clients=clients, loss=poisoned_error, rounds=3, probe=True)
    assert torch.equal(run.result.params, torch.from_numpy(linear_start()))
    assert torch.equal(model_params(run.result), torch.from_numpy(linear_start()))
    assert run.column("feddyn.h_norm") == [0, 0, 0]


def test_zero_updates() -> None:
    run = play("feddyn(mu=0.1)", local={"lr": 0.0, "batch_size": 4}, rounds=4)
    assert all(torch.equal(params, torch.from_numpy(linear_start())) for params in run.path)
    assert run.column("feddyn.h_norm") == [0] * 4


def test_a_single_client() -> None:
    run = play("feddyn(mu=0.1)", [[0]], clients=CLIENTS[:1], probe=True)
    assert_agrees(run, expected_run(problem([[0]], clients=CLIENTS[:1]), 0.1), "aggregate", "feddyn")


def test_client_drawn_twice_trains_once() -> None:
    """The average weighs it by its count; h takes its update once, or it would not be the mean of the h_k."""
    cohorts: Sequence[Sequence[int]] = [[0, 1, 0], [2, 2], [1, 3, 4, 1, 1], [0, 2]]
    run = play("feddyn(mu=0.1)", cohorts, probe=True)
    assert_agrees(run, expected_run(problem(cohorts), 0.1), "aggregate", "feddyn")


def test_wire() -> None:
    """Down the model and the mean number of samples, up the model."""
    run = play("feddyn", [[0, 1, 2], [3]], rounds=2)
    assert run.column("downlink_bytes") == [3 * 40, 4 * 40]
    assert run.column("uplink_bytes") == [3 * 32, 4 * 32]


@pytest.mark.parametrize("method", ["feddyn(mu=0.1, deploy='latest_of_all')", "feddyn"])
def test_resume(method: str, tmp_path: Path) -> None:
    assert_resumes(method, tmp_path, availability=lambda client, work: (client + work) % 5 != 0)


@pytest.mark.parametrize("parameters", ["mu=-1", "mu=0", "deploy='best'"])
def test_refused_parameters(parameters: str) -> None:
    """mu is above 0: without it the server would subtract an h that nothing bounds."""
    with pytest.raises(fl.FedloomError):
        play(f"feddyn({parameters})", rounds=1)
