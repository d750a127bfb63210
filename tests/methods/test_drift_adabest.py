"""AdaBest: against the NumPy reference, by the remarks of its paper, and at its edges (specification 2.6)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom as fl
from tests import reference
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
    assert_follows,
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


def expected_run(setting: judge.Problem, beta: float, mu: float, rounds: int = ROUNDS) -> list[judge.Point]:
    drift = judge.AdaBestClients(setting, mu)
    return judge.synchronous(setting, rounds, drift, judge.AdaBestServer(beta, setting.start))


@pytest.mark.parametrize(("local", "deploy"), WAYS)
def test_unequal_gaps_and_sizes(local: str, deploy: str) -> None:
    run = play(f"adabest(beta=0.9, mu=0.3, deploy='{deploy}')", local=LOCALS[local], probe=True)
    assert_agrees(run, expected_run(problem(local=LOCALS[local]), 0.9, 0.3), deploy, "adabest")


@pytest.mark.parametrize(("beta", "mu"), [(0.96, 0.02), (0.5, 1.0), (0.0, 0.3), (1.0, 0.0), (0.2, 0.0)])
def test_parameters(beta: float, mu: float) -> None:
    run = play(f"adabest(beta={beta}, mu={mu})", probe=True)
    assert_agrees(run, expected_run(problem(), beta, mu), "aggregate", "adabest")


def test_defaults() -> None:
    method = fl.Method("adabest")
    assert method.fills == ["client", "server"]
    run = play("adabest", EVERYBODY, probe=True)
    assert_agrees(run, expected_run(problem(EVERYBODY), 0.96, 0.02), "aggregate", "adabest")


@pytest.mark.parametrize("local", OTHER_LOCALS)
def test_other_local_optimisers(local: str) -> None:
    """The drift stands before the clip, the decay and the momentum; h_k is what the client moved, whatever moved it."""
    run = play("adabest(beta=0.9, mu=0.3)", local=OTHER_LOCALS[local], probe=True)
    assert_agrees(run, expected_run(problem(local=OTHER_LOCALS[local]), 0.9, 0.3), "aggregate", "adabest")


def test_decaying_rate() -> None:
    setting = problem(rate=reference.exponential(0.9))
    run = play("adabest(beta=0.9, mu=0.3)+exponential(decay=0.9)", probe=True)
    assert_agrees(run, expected_run(setting, 0.9, 0.3), "aggregate", "adabest")


@pytest.mark.parametrize("other", ["fedprox(mu=0.5)", "scaffold"])
def test_with_another_correction(other: str) -> None:
    """What two methods add to the gradient adds up, and each remembers its own."""
    setting = problem()
    second: judge.Drift = judge.Scaffold(setting) if other == "scaffold" else judge.Proximal(0.5)
    drift = judge.Both(judge.AdaBestClients(setting, 0.3), second)
    expected = judge.synchronous(setting, ROUNDS, drift, judge.AdaBestServer(0.9, setting.start))
    assert_agrees(play(f"{other}+adabest(beta=0.9, mu=0.3)", probe=True), expected, "aggregate", "adabest")


def test_another_seed() -> None:
    run = play("adabest(beta=0.9, mu=0.3)", probe=True, seed=77)
    assert_agrees(run, expected_run(problem(seed=77), 0.9, 0.3), "aggregate", "adabest")


def test_mean_size_is_that_of_the_reports_so_far() -> None:
    """Neither that of all clients, as the first version of the authors' simulator has it, nor that of this Work."""
    expected = expected_run(problem(), 0.9, 0.3)[-1].cloud
    seen = [k for cohort in COHORTS for k in cohort]
    assert np.mean([SIZES[k] for k in seen]) != pytest.approx(np.mean(SIZES), rel=1e-2)
    for variant in (_Oracle(problem(), 0.3), _ThisWork(problem(), 0.3)):
        other = judge.synchronous(problem(), ROUNDS, variant, judge.AdaBestServer(0.9, linear_start()))[-1].cloud
        assert error(other, expected) > 1e-4
    assert error(play("adabest(beta=0.9, mu=0.3)").path[-1], expected) < TOLERANCE


class _Oracle(judge.AdaBestClients):
    """nbar over all N clients."""

    def heard(self, work: int, answers: Sequence[judge.Answer]) -> None:
        super().heard(work, answers)
        self.reported = self.problem.sizes.tolist()


class _ThisWork(judge.AdaBestClients):
    """nbar over the clients of the last Work."""

    def heard(self, work: int, answers: Sequence[judge.Answer]) -> None:
        self.reported = []
        super().heard(work, answers)


# ---------------------------------------------------------------------------------------------------------------------
# The paper's remarks
# ---------------------------------------------------------------------------------------------------------------------


def server_path(run: Run) -> tuple[Array, Array, Array, Array]:
    """theta^0.., bar^1.., h^1.. and gbar^1.., from what was averaged and where the server went."""
    theta = np.stack([linear_start(), *(params.numpy() for params in run.path)])
    gbar = np.stack([rows.mean(0).numpy() for rows in run.rows])
    bar = theta[:-1] - gbar
    return theta, bar, bar - theta[1:], gbar


def test_remark_two() -> None:
    """bar^{t-1} - bar^t = h^{t-1} + gbar^t, where h^t is what the server is off the average by."""
    run = play("adabest(beta=0.8, mu=0.3)")
    _, bar, h, gbar = server_path(run)
    bars = np.stack([linear_start(), *bar])
    before = np.stack([np.zeros(FEATURES + 1), *h[:-1]])
    np.testing.assert_allclose(bars[:-1] - bars[1:], before + gbar, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(h, 0.8 * (before + gbar), rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(run.column("adabest.h_norm"), np.linalg.norm(h, axis=1), rtol=1e-10)


def test_remark_three() -> None:
    """h^t = sum over tau of beta^(t - tau + 1) gbar^tau; the power t - tau of the main text is off by 1/beta."""
    beta = 0.8
    _, _, h, gbar = server_path(play(f"adabest(beta={beta}, mu=0.3)"))
    for t in range(1, ROUNDS + 1):
        powers = beta ** (t - np.arange(1, t + 1) + 1.0)
        np.testing.assert_allclose(h[t - 1], powers @ gbar[:t], rtol=1e-9, atol=1e-12)
        assert error(h[t - 1], powers @ gbar[:t] / beta) > 0.1


@pytest.mark.parametrize("cohorts", [COHORTS, EVERYBODY], ids=["some", "all"])
def test_remark_four(cohorts: list[list[int]]) -> None:
    """Without beta and mu it is FedAvg with equal weights, bit for bit; not FedAvg by samples."""
    run = play("adabest(beta=0, mu=0)", cohorts)
    plain = play("fedavg(weights='equal')", cohorts)
    assert all(torch.equal(a, b) for a, b in zip(run.path, plain.path, strict=True))
    assert torch.equal(model_params(run.result), model_params(plain.result))
    assert not torch.allclose(run.path[-1], play("fedavg(weights='samples')", cohorts).path[-1], rtol=1e-4)


def test_without_beta_the_server_averages() -> None:
    theta, bar, h, _ = server_path(play("adabest(beta=0, mu=0.3)"))
    np.testing.assert_allclose(theta[1:], bar, rtol=1e-13)
    np.testing.assert_allclose(h, 0, atol=1e-15)


def test_remark_five() -> None:
    """beta = 1 and everybody takes part: the server's recursion is FedDyn's, h^t = h^{t-1} + gbar^t."""
    run = play("adabest(beta=1, mu=0.3)", EVERYBODY)
    _, _, h, gbar = server_path(run)
    np.testing.assert_allclose(h, np.cumsum(gbar, axis=0), rtol=1e-9, atol=1e-12)
    # Without the clients' parts the whole runs are the same.
    adabest, feddyn = (play(method, EVERYBODY) for method in ("adabest(beta=1, mu=0)", "feddyn(mu=1e-300)"))
    assert_follows(adabest.path, [params.numpy() for params in feddyn.path])
    partial = [play(method) for method in ("adabest(beta=1, mu=0)", "feddyn(mu=1e-300)")]
    assert error(partial[0].path[-1], partial[1].path[-1].numpy()) > 1e-3


def test_first_aggregate_is_the_start() -> None:
    """bar^0 = theta^0 makes h^1 = beta gbar^1; from bar^0 = 0 the run would go elsewhere at once."""
    run = play("adabest(beta=0.8, mu=0.3)", rounds=1)
    _, _, h, gbar = server_path(run)
    np.testing.assert_allclose(h[0], 0.8 * gbar[0], rtol=1e-12)
    server = judge.AdaBestServer(0.8, np.zeros(FEATURES + 1))
    wrong = judge.synchronous(problem(), 1, judge.AdaBestClients(problem(), 0.3), server)
    assert error(run.path[0], wrong[0].cloud) > 0.1


# ---------------------------------------------------------------------------------------------------------------------
# What a client remembers
# ---------------------------------------------------------------------------------------------------------------------


def test_memory_fades_with_the_gap() -> None:
    """Client 0 takes part in Works 0, 1, 4, 14 and 15: its memory keeps all, then a third, then a tenth. A single step
    moves by lr (slope - mu_k h_k), which shows h_k.
    """
    lr, mu, visits = 0.05, 0.4, (0, 1, 4, 14, 15)
    cohorts = [[0] if w in visits else [1] for w in range(16)]
    local = {"batch_size": None, "lr": lr}
    run = play(f"adabest(beta=0.5, mu={mu})", cohorts, local, rounds=16, loss=constant_slope)
    g = [row_of(run.events[w], 0) for w in visits]
    h = [np.zeros_like(g[0]), g[0]]
    h.append(h[1] / 1 + g[1])
    h.append(h[2] / 3 + g[2])
    h.append(h[3] / 10 + g[3])
    for w, moved, remembered in zip(visits[1:], g[1:], h[1:], strict=True):
        nbar = np.mean([SIZES[k] for cohort in cohorts[:w] for k in cohort])
        found = (slope(0) - moved / lr) / (mu * nbar / SIZES[0])
        np.testing.assert_allclose(found, remembered, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(g[0], lr * slope(0), rtol=1e-12)


def test_work_without_answers_counts_towards_the_gap() -> None:
    """t is the number of the Work; a round in which nobody answers keeps the model, h_k and bar."""
    setting = problem(answers=lambda client, work: work not in (2, 3, 9))
    run = play("adabest(beta=0.9, mu=0.3)", availability=setting.answers, probe=True)
    assert_agrees(run, expected_run(setting, 0.9, 0.3), "aggregate", "adabest")
    assert torch.equal(run.path[1], run.path[3])


@pytest.mark.parametrize("deploy", DEPLOY)
def test_first_rounds_without_answers(deploy: str) -> None:
    """Before the first answer every deployable model is the start."""
    setting = problem(answers=lambda client, work: work > 1)
    run = play(f"adabest(beta=0.9, mu=0.3, deploy='{deploy}')", availability=setting.answers, probe=True)
    for deployed, _ in run.evaluated[:2]:
        assert error(deployed, linear_start()) < 1e-12
    assert_agrees(run, expected_run(setting, 0.9, 0.3), deploy, "adabest")


@pytest.mark.parametrize("deploy", DEPLOY)
def test_client_that_diverges(deploy: str) -> None:
    """Client 1 meets a bad sample in some Works: it then is left out and keeps h_k and t'_k. It is alone in Work 4."""
    local: dict[str, Any] = {"batch_size": 4, "steps": 2, "lr": 0.02}
    run = play(
        f"adabest(beta=0.9, mu=0.3, deploy='{deploy}')",
        local=local,
        clients=poisoned(1, MARK),
        loss=poisoned_error,
        probe=True,
        rounds=40,
    )
    diverged = run.column("diverged")
    assert 4 < sum(diverged) < sum(1 in COHORTS[w % 8] for w in range(40)) - 4
    assert any(event.updates is None for event in run.events)
    expected = expected_run(problem(local=local, clients=poisoned(1, np.nan)), 0.9, 0.3, rounds=40)
    assert_agrees(run, expected, deploy, "adabest")


def test_everybody_always_diverges() -> None:
    clients = [(x, np.full_like(y, MARK)) for x, y in CLIENTS]
    run = play("adabest", clients=clients, loss=poisoned_error, rounds=3, probe=True)
    assert torch.equal(run.result.params, torch.from_numpy(linear_start()))
    assert torch.equal(model_params(run.result), torch.from_numpy(linear_start()))
    assert run.column("adabest.h_norm") == [0, 0, 0]


def test_zero_updates() -> None:
    run = play("adabest(beta=0.9, mu=0.3)", local={"lr": 0.0, "batch_size": 4}, rounds=4)
    assert all(torch.equal(params, torch.from_numpy(linear_start())) for params in run.path)
    assert run.column("adabest.h_norm") == [0] * 4


def test_a_single_client() -> None:
    run = play("adabest(beta=0.9, mu=0.3)", [[0]], clients=CLIENTS[:1], probe=True)
    assert_agrees(run, expected_run(problem([[0]], clients=CLIENTS[:1]), 0.9, 0.3), "aggregate", "adabest")


@pytest.mark.parametrize("deploy", DEPLOY)
def test_client_drawn_twice_trains_once(deploy: str) -> None:
    """It is weighed by its count, and its h_k and its size are reported once."""
    cohorts = [[0, 1, 0], [2, 2], [1, 3, 4, 1, 1], [0, 2]]
    run = play(f"adabest(beta=0.9, mu=0.3, deploy='{deploy}')", cohorts, probe=True)
    assert_agrees(run, expected_run(problem(cohorts), 0.9, 0.3), deploy, "adabest")
    updates = run.events[2].updates
    assert updates is not None
    assert updates.clients.tolist() == [1, 3, 4]
    assert updates.counts.tolist() == [3, 1, 1]
    np.testing.assert_allclose(updates.weights, [0.6, 0.2, 0.2], rtol=1e-12)


def test_client_drawn_twice_by_the_md_sampler() -> None:
    """Five draws with replacement among six clients: the reference follows whom it drew, and how often."""
    run = play("adabest(beta=0.9, mu=0.3)+md", None, clients_per_round=5, probe=True)
    cohorts = []
    for event in run.events:
        assert event.updates is not None
        pairs = zip(event.updates.clients.tolist(), event.updates.counts.tolist(), strict=True)
        cohorts.append([k for k, count in pairs for _ in range(count)])
    assert all(len(cohort) == 5 for cohort in cohorts)
    assert all(len(set(event.updates.clients.tolist())) == len(event.updates) for event in run.events if event.updates)
    assert sum(len(set(cohort)) < 5 for cohort in cohorts) > 5
    assert_agrees(run, expected_run(problem(cohorts), 0.9, 0.3), "aggregate", "adabest")


# ---------------------------------------------------------------------------------------------------------------------
# The decay of beta
# ---------------------------------------------------------------------------------------------------------------------


def betas(run: Run) -> Array:
    """The beta of each round, as |h^t| / |bar^{t-1} - bar^t|."""
    _, bar, h, _ = server_path(run)
    bars = np.stack([linear_start(), *bar])
    ratio: Array = np.linalg.norm(h, axis=1) / np.linalg.norm(bars[:-1] - bars[1:], axis=1)
    return ratio


def test_beta_decays_on_a_plateau_of_h() -> None:
    """Under a constant slope |h| grows from the first round on: no improvement, so beta falls after 50 rounds, and
    not again within the next 50.
    """
    method = "adabest(beta=0.5, mu=0, beta_decay=0.8)"
    local = {"batch_size": None, "lr": 0.001}
    found = betas(play(method, [[0]], local, rounds=230, loss=constant_slope))
    steps = np.flatnonzero(np.abs(np.diff(found)) > 1e-6) + 1
    assert 50 <= steps[0] <= 51
    assert len(steps) >= 2
    assert all(np.diff(steps) >= 50)
    for number, value in enumerate(found):
        assert value == pytest.approx(0.5 * 0.8 ** int(np.sum(steps <= number)), rel=1e-6)


def test_beta_does_not_decay_while_h_shrinks() -> None:
    """A single client on its way to its optimum: |h| halves every few rounds, for 120 rounds."""
    local = {"batch_size": None, "lr": 0.01}
    runs = [play(f"adabest(beta=0.5, mu=0{decay})", [[0]], local, rounds=120) for decay in (", beta_decay=0.8", "")]
    h = runs[1].column("adabest.h_norm")
    assert min(h[50:100]) < 0.98 * min(h[:50])
    assert min(h[100:]) < 0.98 * min(h[50:100])
    assert torch.equal(runs[0].path[-1], runs[1].path[-1])


# ---------------------------------------------------------------------------------------------------------------------
# Wire, checkpoints, refusals
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deploy", DEPLOY)
def test_wire(deploy: str) -> None:
    """Down the model and nbar, up the model and n_k: 5 numbers of 8 bytes, whatever is deployed."""
    run = play(f"adabest(deploy='{deploy}')", [[0, 1, 2], [3]], rounds=2)
    assert run.column("downlink_bytes") == [3 * 40, 4 * 40]
    assert run.column("uplink_bytes") == [3 * 40, 4 * 40]


@pytest.mark.parametrize(
    "method", ["adabest(mu=0.3, deploy='latest_of_all')", "adabest(deploy='running_mean', beta_decay=0.9)", "adabest"]
)
def test_resume(method: str, tmp_path: Path) -> None:
    assert_resumes(method, tmp_path, availability=lambda client, work: (client + work) % 5 != 0)


@pytest.mark.parametrize(
    "parameters",
    ["beta=-0.1", "beta=1.1", "mu=-1", "deploy='best'", "beta_decay=0", "beta_decay=1.5", "beta=float('nan')"],
)
def test_refused_parameters(parameters: str) -> None:
    with pytest.raises(fl.FedloomError):
        play(f"adabest({parameters})", rounds=1)
