"""FedAsync and mixing: against the NumPy reference, the staleness functions by value, the edges (specification 2.11 and
11.10).
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedloom as fl
from tests import reference
from tests.methods import drift_reference as judge
from tests.methods.test_drift_reference import (
    COHORTS,
    FEATURES,
    LOCALS,
    MARK,
    OTHER_LOCALS,
    TOLERANCE,
    Run,
    assert_follows,
    assert_resumes,
    error,
    linear_start,
    model_params,
    play,
    poisoned,
    poisoned_error,
    problem,
)

ONE_BY_ONE = [[0], [3], [1], [4], [2], [1], [5]]
ROUNDS = 30
ALL_LOCALS = {**LOCALS, **OTHER_LOCALS}

STALENESS: dict[str, Callable[[int], float]] = {
    "staleness='constant'": lambda u: 1.0,
    "staleness='poly'": judge.poly,
    "staleness='poly', a=2.0": partial(judge.poly, a=2.0),
    "staleness='hinge'": judge.hinge,
    "staleness='hinge', a=0.5, b=1.0": partial(judge.hinge, a=0.5, b=1.0),
    "staleness='hinge', a=3.0": partial(judge.hinge, a=3.0),
    "staleness='hinge', b=2.0": partial(judge.hinge, b=2.0),
}


def run_one_by_one(method: str, **settings: Any) -> Run:
    return play(method, **{"cohorts": ONE_BY_ONE, "rounds": ROUNDS, "clients_per_round": 2, **settings})


def assert_mixes(run: Run, expected: list[judge.Mixed]) -> None:
    assert_follows(run.path, [state.params for state in expected])
    answered = [event.updates is not None for event in run.events]
    found = [u for u, heard in zip(run.column("fedasync.staleness"), answered, strict=True) if heard]
    assert found == [state.staleness for state, heard in zip(expected, answered, strict=True) if heard]
    assert error(model_params(run.result), expected[-1].params) < TOLERANCE


@pytest.mark.parametrize("staleness", STALENESS)
def test_mixing_by_staleness(staleness: str) -> None:
    run = run_one_by_one(f"fedasync(alpha=0.7, {staleness}, max_staleness=7)")
    assert_mixes(run, judge.fedasync(problem(ONE_BY_ONE), ROUNDS, 0.7, STALENESS[staleness], 7))
    assert 6 <= max(run.column("fedasync.staleness")) <= 7


@pytest.mark.parametrize("local", ALL_LOCALS)
def test_local_settings(local: str) -> None:
    settings = ALL_LOCALS[local]
    run = run_one_by_one("fedasync(staleness='poly', max_staleness=5)", local=settings, seed=9)
    expected = judge.fedasync(problem(ONE_BY_ONE, settings, seed=9), ROUNDS, 0.6, judge.poly, 5)
    assert_mixes(run, expected)


def test_defaults() -> None:
    """alpha = 0.6, constant, and with 5 clients a round the last 9 models: staleness goes up to 8."""
    assert set(fl.Method("fedasync").fills) == {"schedule", "server"}
    run = run_one_by_one("fedasync", rounds=100, clients_per_round=5)
    assert_mixes(run, judge.fedasync(problem(ONE_BY_ONE), 100, 0.6, STALENESS["staleness='constant'"], 8))
    staleness = run.column("fedasync.staleness")
    assert staleness[0] == 0
    assert all(u <= number for number, u in enumerate(staleness))
    assert max(staleness) == 8
    assert len(set(staleness)) == 9


@pytest.mark.parametrize("staleness", STALENESS)
def test_share_of_the_new_model(staleness: str) -> None:
    """What theta moved, over theta - x_new: alpha s(u) for every u that was drawn; s(0) = 1."""
    run = run_one_by_one(f"fedasync(alpha=0.8, {staleness}, max_staleness=8)", rounds=60)
    thetas = [linear_start(), *(params.numpy() for params in run.path)]
    shares: dict[int, float] = {}
    for number, event in enumerate(run.events):
        assert event.updates is not None
        row = event.updates.rows.matrix[0].numpy()
        moved = thetas[number] - thetas[number + 1]
        share = float(moved @ row / (row @ row))
        np.testing.assert_allclose(moved, share * row, rtol=1e-9, atol=1e-12)
        shares.setdefault(int(event.metrics["fedasync.staleness"]), share)
    assert set(shares) == set(range(9))
    by_hand = {
        "staleness='constant'": [1.0] * 9,
        "staleness='poly'": [1, 2**-0.5, 3**-0.5, 0.5, 5**-0.5, 6**-0.5, 7**-0.5, 8**-0.5, 1 / 3],
        "staleness='poly', a=2.0": [1, 1 / 4, 1 / 9, 1 / 16, 1 / 25, 1 / 36, 1 / 49, 1 / 64, 1 / 81],
        "staleness='hinge'": [1, 1, 1, 1, 1, 1 / 11, 1 / 21, 1 / 31, 1 / 41],
        "staleness='hinge', a=0.5, b=1.0": [1, 1, 2 / 3, 1 / 2, 2 / 5, 1 / 3, 2 / 7, 1 / 4, 2 / 9],
        "staleness='hinge', a=3.0": [1, 1, 1, 1, 1, 1 / 4, 1 / 7, 1 / 10, 1 / 13],
        "staleness='hinge', b=2.0": [1, 1, 1, 1 / 11, 1 / 21, 1 / 31, 1 / 41, 1 / 51, 1 / 61],
    }[staleness]
    np.testing.assert_allclose([shares[u] / 0.8 for u in range(9)], by_hand, rtol=1e-8)


@pytest.mark.parametrize("local", LOCALS)
def test_sequential_training(local: str) -> None:
    """alpha = 1, constant, nothing stale: client after client."""
    run = run_one_by_one("fedasync(alpha=1, max_staleness=0)", local=LOCALS[local], rounds=20)
    setting = problem(ONE_BY_ONE, LOCALS[local])
    theta = linear_start()
    for w in range(20):
        trained = setting.train(w, setting.cohort(w)[0], theta, {})
        assert trained is not None
        theta = trained.end
        assert error(run.path[w], theta) < TOLERANCE
    assert run.column("fedasync.staleness") == [0] * 20


def test_pull_towards_the_model_that_was_pulled() -> None:
    """rho fills the client stage: rho (x - theta_old)."""
    run = run_one_by_one("fedasync(alpha=0.7, max_staleness=6, rho=0.5)")
    expected = judge.fedasync(problem(ONE_BY_ONE), ROUNDS, 0.7, lambda u: 1.0, 6, judge.Proximal(0.5))
    assert_mixes(run, expected)
    assert set(fl.Method("fedasync(rho=0.5)").fills) == {"schedule", "server", "client"}
    without = run_one_by_one("fedasync(alpha=0.7, max_staleness=6)")
    assert error(run.path[-1], without.path[-1].numpy()) > 1e-3


def test_scaffold_refers_to_the_model_that_was_pulled() -> None:
    setting = problem(ONE_BY_ONE)
    drift = judge.Scaffold(setting)
    run = run_one_by_one("scaffold+fedasync(alpha=0.7, max_staleness=6)")
    assert_mixes(run, judge.fedasync(setting, ROUNDS, 0.7, lambda u: 1.0, 6, drift))
    assert run.column("scaffold.c_norm")[-1] == pytest.approx(np.linalg.norm(drift.c), rel=1e-9)


@pytest.mark.parametrize("per_round", [1, 2, 4])
def test_works(per_round: int) -> None:
    """clients_per_round single clients are one Work of a full cohort; a rate that decays by Works follows that."""
    run = run_one_by_one("fedasync(max_staleness=3)+exponential(decay=0.7)", clients_per_round=per_round)
    np.testing.assert_allclose(run.column("works"), (1 + np.arange(ROUNDS)) / per_round, rtol=1e-12)
    assert run.column("asked") == run.column("answered") == [1] * ROUNDS
    setting = problem(ONE_BY_ONE, rate=lambda work, steps: np.full(steps, 0.7 ** (work // per_round)))
    assert_mixes(run, judge.fedasync(setting, ROUNDS, 0.6, lambda u: 1.0, 3))


def test_wire() -> None:
    """The model and its version each way, for one client a round."""
    run = run_one_by_one("fedasync", rounds=3)
    assert run.column("downlink_bytes") == [40, 80, 120]
    assert run.column("uplink_bytes") == [40, 80, 120]


@pytest.mark.parametrize("sampler", ["uniform", "bernoulli(rate=0.9)", "md", f"fixed(cohorts={COHORTS})"])
def test_one_client_a_round_whatever_the_sampler(sampler: str) -> None:
    run = play(f"fedasync+{sampler}", None, rounds=12, clients_per_round=3)
    for event in run.events:
        assert event.updates is not None
        assert len(event.updates) == 1
    assert run.column("asked") == [1] * 12


def test_uniform_clients() -> None:
    run = play("fedasync", None, rounds=60, clients_per_round=3)
    drawn = [int(event.updates.clients[0]) for event in run.events if event.updates is not None]
    assert len(drawn) == 60
    assert set(drawn) == set(range(6))
    expected = judge.fedasync(problem([[k] for k in drawn]), 60, 0.6, lambda u: 1.0, 4)
    assert_mixes(run, expected)


# ---------------------------------------------------------------------------------------------------------------------
# Edges
# ---------------------------------------------------------------------------------------------------------------------


def test_client_that_does_not_answer() -> None:
    """The model, its version and the queue stay as they were."""
    setting = problem(ONE_BY_ONE, answers=lambda client, work: work % 3 != 1 and work not in (0, 9, 11))
    run = run_one_by_one("fedasync(alpha=0.7, staleness='poly', max_staleness=4)", availability=setting.answers)
    assert_mixes(run, judge.fedasync(setting, ROUNDS, 0.7, judge.poly, 4))
    assert torch.equal(run.path[0], torch.from_numpy(linear_start()))
    assert torch.equal(run.path[9], run.path[8])


def test_client_that_diverges() -> None:
    local: dict[str, Any] = {"batch_size": 4, "steps": 2, "lr": 0.02}
    method = "fedasync(alpha=0.7, staleness='poly', max_staleness=4)"
    run = run_one_by_one(method, local=local, clients=poisoned(1, MARK), loss=poisoned_error)
    assert 2 < sum(run.column("diverged")) < 10
    setting = problem(ONE_BY_ONE, local, clients=poisoned(1, np.nan))
    assert_mixes(run, judge.fedasync(setting, ROUNDS, 0.7, judge.poly, 4))


def test_zero_rate() -> None:
    run = run_one_by_one("fedasync(max_staleness=3)", local={"lr": 0.0, "batch_size": 4}, rounds=6)
    assert_follows(run.path, [linear_start()] * 6, 1e-15)


def test_model_brings_its_own_buffers() -> None:
    """A client pulls a model as it was, statistics included; the authors' code leaves it somebody else's."""
    local: dict[str, Any] = {"batch_size": 5, "epochs": 2, "last_batch": "drop", "lr": 0.02}
    by_hand = reference.NormalisedLinear(FEATURES)
    model = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 1)).double()
    start = np.random.default_rng(5).normal(size=3 * FEATURES + 1)
    nn.utils.vector_to_parameters(torch.from_numpy(start), model.parameters())
    setting = problem(ONE_BY_ONE, local, start=start, model=by_hand, buffers=by_hand.start_buffers())
    run = run_one_by_one("fedasync(max_staleness=4)", local=local, model=model, rounds=20)
    expected = judge.fedasync(setting, 20, 0.6, lambda u: 1.0, 4)
    assert_follows(run.path, [state.params for state in expected])
    assert any(state.staleness for state in expected)
    for name, value in expected[-1].buffers.items():
        found = run.result.model.get_buffer(f"0.{name}").numpy()
        np.testing.assert_allclose(found, value, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("other", ["dgt", "krum", "fedglad"])
def test_methods_that_compare_clients_have_no_effect(other: str, caplog: pytest.LogCaptureFixture) -> None:
    """With one warning that says so."""
    plain = run_one_by_one("fedasync(max_staleness=3)", rounds=12)
    with caplog.at_level(logging.WARNING, logger="fedloom"):
        run = run_one_by_one(f"fedasync(max_staleness=3)+{other}", rounds=12)
    assert_follows(run.path, [params.numpy() for params in plain.path], 1e-12)
    said = [r.getMessage() for r in caplog.records if other in r.getMessage() and "fedasync" in r.getMessage()]
    assert len(said) == 1


def test_resume(tmp_path: Path) -> None:
    """The queue of old models is part of the checkpoint: 14 rounds, a queue of 5."""
    assert_resumes("fedasync(staleness='poly', max_staleness=4, rho=0.1)", tmp_path)


def test_resume_before_the_queue_is_full(tmp_path: Path) -> None:
    away = {"availability": lambda client, work: (client + work) % 5 != 0}
    assert_resumes("fedasync(staleness='hinge', a=1.0, b=1.0)", tmp_path, **away)


@pytest.mark.parametrize(
    "parameters",
    [
        "alpha=0",
        "alpha=1.5",
        "staleness='cubic'",
        "staleness='poly', a=-1",
        "staleness='hinge', a=-1",
        "staleness='hinge', b=-1",
        "max_staleness=-1",
        "rho=-1",
    ],
)
def test_refused_parameters(parameters: str) -> None:
    with pytest.raises(fl.FedloomError):
        run_one_by_one(f"fedasync({parameters})", rounds=1)


# ---------------------------------------------------------------------------------------------------------------------
# Mixing
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.9, 0.3])
@pytest.mark.parametrize("local", LOCALS)
def test_mixing(local: str, alpha: float) -> None:
    run = play(f"mixing(alpha={alpha})", local=LOCALS[local])
    rule = reference.Rule(server=lambda: reference.Averaging(lr=alpha))
    settings = reference.Local(**LOCALS[local])
    states = reference.federate(reference.Linear(), linear_start(), problem().clients, COHORTS, 20, settings, rule)
    assert_follows(run.path, [state.params for state in states])


def test_mixing_alpha() -> None:
    """All of the average is FedAvg; by default 0.9 of it."""
    assert fl.Method("mixing").fills == ["server"]
    runs = {method: play(method, rounds=6).path[-1] for method in ("mixing(alpha=1)", "fedavg", "mixing")}
    assert torch.equal(runs["mixing(alpha=1)"], runs["fedavg"])
    assert torch.equal(runs["mixing"], play("fedavg(lr=0.9)", rounds=6).path[-1])


@pytest.mark.parametrize("alpha", [0, -0.5, 1.1])
def test_mixing_refuses(alpha: float) -> None:
    with pytest.raises(fl.MethodError, match="alpha"):
        play(f"mixing(alpha={alpha})", rounds=1)


@pytest.mark.parametrize("per_round", [1, 2, 5])
def test_as_many_at_work_as_in_a_synchronous_round(per_round: int) -> None:
    """Without max_staleness: every update was at work from the model that it started from until it arrived."""
    run = run_one_by_one("fedasync", clients_per_round=per_round, rounds=400, local={"lr": 0.0, "batch_size": None})
    stale = [int(u) for u in run.column("fedasync.staleness")]
    at_work = np.zeros(len(stale))
    for arrived, u in enumerate(stale, 1):
        at_work[arrived - u - 1 : arrived] += 1
    assert max(stale) == 2 * (per_round - 1)
    assert at_work[50:-50].mean() == pytest.approx(per_round, rel=0.05)
