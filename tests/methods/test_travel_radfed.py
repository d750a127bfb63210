"""RADFed and its variants: against the NumPy reference, with clients that are away, and with client memory
(specification 2.12, 11.8).
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from tests import reference
from tests.methods import drift_reference as judge
from tests.methods.test_drift_reference import (
    DEPLOY,
    FEATURES,
    LOCALS,
    MARK,
    OTHER_LOCALS,
    SIZES,
    TOLERANCE,
    Run,
    assert_agrees,
    assert_follows,
    assert_resumes,
    error,
    linear_start,
    model_params,
    play,
    poisoned,
    poisoned_error,
    problem,
    squared_error,
)
from tests.reference import Array

N = len(SIZES)
# Cohorts of three, five of them, so that rounds of 3 Works begin at each in turn.
COHORTS = [[0, 1, 2], [3, 1, 4], [2, 0, 3], [4, 5, 1], [1, 2, 0]]
ROUNDS = 20
SHORT = 8
Away = Literal["even", "fewer"]


def travel(
    setting: judge.Problem,
    redistributions: int = 3,
    *,
    rounds: int = SHORT,
    drift: judge.Drift | None = None,
    server: judge.Server | None = None,
    **settings: Any,
) -> list[judge.Point]:
    drift, server = drift or judge.Nothing(), server or judge.Averaging()
    return judge.radfed(setting, rounds, redistributions, drift, server, **settings)


def send(method: str, cohorts: Sequence[Sequence[int]] = COHORTS, rounds: int = SHORT, **settings: Any) -> Run:
    return play(method, cohorts, rounds=rounds, **{"clients_per_round": 3, **settings})


@pytest.mark.parametrize("redistributions", [1, 3])
@pytest.mark.parametrize("local", LOCALS)
def test_models_travel(local: str, redistributions: int) -> None:
    run = send(f"radfed(redistributions={redistributions})", local=LOCALS[local], rounds=ROUNDS)
    expected = travel(problem(COHORTS, LOCALS[local]), redistributions, rounds=ROUNDS)
    assert_follows(run.path, [point.cloud for point in expected])
    assert error(model_params(run.result), expected[-1].cloud) < TOLERANCE


@pytest.mark.parametrize("local", OTHER_LOCALS)
def test_other_local_optimisers(local: str) -> None:
    """Momentum and Adam's moments do not travel: they are new with every client."""
    run = send("radfed(redistributions=3)", local=OTHER_LOCALS[local])
    assert_follows(run.path, [point.cloud for point in travel(problem(COHORTS, OTHER_LOCALS[local]))])


def test_defaults() -> None:
    assert fl.Method("radfed").fills == ["schedule"]
    run = send("radfed", rounds=2)
    assert_follows(run.path, [point.cloud for point in travel(problem(COHORTS), 15, rounds=2)])
    assert run.column("works") == [15, 30]


@pytest.mark.parametrize("away", ["even", "fewer"])
def test_one_redistribution_is_fedavg(away: str) -> None:
    """With equal weights, bit for bit: the same reduction of the same rows."""
    run = send(f"radfed(redistributions=1, away='{away}')")
    plain = send("fedavg(weights='equal')")
    assert all(torch.equal(a, b) for a, b in zip(run.path, plain.path, strict=True))
    assert not torch.allclose(run.path[-1], send("fedavg(weights='samples')").path[-1], rtol=1e-4)


def test_one_model_walks_from_client_to_client() -> None:
    """m = 1: sequential descent over the cohorts."""
    cohorts = [[0], [3], [1], [4], [2]]
    run = send("radfed(redistributions=5)", cohorts, rounds=4, clients_per_round=1)
    setting = problem(cohorts)
    theta = linear_start()
    for w in range(20):
        trained = setting.train(w, setting.cohort(w)[0], theta, {})
        assert trained is not None
        theta = trained.end
        if w % 5 == 4:
            assert error(run.path[w // 5], theta) < TOLERANCE


def test_zero_rate() -> None:
    run = send("radfed(redistributions=3)", local={"lr": 0.0, "batch_size": 4}, rounds=3)
    assert all(torch.equal(params, torch.from_numpy(linear_start())) for params in run.path)


def test_cohort_in_which_a_client_stands_twice() -> None:
    """Two models at the same client train with its two batch orders."""
    cohorts = [[0, 1, 0], [3, 3, 3], [2, 0, 3], [4, 5, 4]]
    run = send("radfed(redistributions=3)", cohorts)
    assert_follows(run.path, [point.cloud for point in travel(problem(cohorts))])


def test_counts() -> None:
    """Works, steps and bytes are those of every Work; what is averaged carries the sums over its travel."""
    run = send("radfed(redistributions=3)", rounds=2)
    works = [COHORTS[w % 5] for w in range(6)]
    steps_of = [math.ceil(size / 4) for size in SIZES]
    steps = [sum(steps_of[k] for cohort in works[: 3 * r] for k in cohort) for r in (1, 2)]
    assert run.column("works") == [3, 6]
    assert run.column("local_steps") == steps
    assert run.column("asked") == run.column("answered") == [9, 9]
    assert run.column("downlink_bytes") == run.column("uplink_bytes") == [9 * 32, 18 * 32]
    updates = run.events[0].updates
    assert updates is not None
    assert updates.samples.tolist() == [sum(SIZES[cohort[i]] for cohort in works[:3]) for i in range(3)]
    assert updates.steps.tolist() == [sum(steps_of[cohort[i]] for cohort in works[:3]) for i in range(3)]
    np.testing.assert_allclose(updates.weights, [1 / 3] * 3, rtol=1e-12)


def test_weights_by_samples_add_up_over_the_travel() -> None:
    run = send("radfed(redistributions=3)+fedavg(weights='samples')")
    assert_follows(run.path, [point.cloud for point in travel(problem(COHORTS), weights="samples")])
    assert run.column("uplink_bytes")[0] == 9 * 40  # the number of samples goes up


def test_random_cohorts() -> None:
    """Drawn by the sampler for every Work anew; the reference follows whom it drew."""
    seen: list[list[int]] = []

    def note(client: int, work: int) -> bool:
        while len(seen) <= work:
            seen.append([])
        seen[work].append(client)
        return True

    run = send("radfed(redistributions=3)", None, availability=note)  # type: ignore[arg-type]
    assert len(seen) == 3 * SHORT
    assert all(len(set(cohort)) == 3 for cohort in seen)
    assert len({tuple(cohort) for cohort in seen}) > 10
    assert_follows(run.path, [point.cloud for point in travel(problem(seen))])


def test_rate_decays_by_work() -> None:
    run = send("radfed(redistributions=3)+exponential(decay=0.95)")
    setting = problem(COHORTS, rate=reference.exponential(0.95))
    assert_follows(run.path, [point.cloud for point in travel(setting)])


# ---------------------------------------------------------------------------------------------------------------------
# Variants
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "union", "drift", "server"),
    [
        ("radfedp(redistributions=3, mu=0.5)", "fedprox(mu=0.5)", judge.Proximal(0.5), judge.Averaging),
        ("radfedp(redistributions=3)", "fedprox(mu=0.01)", judge.Proximal(0.01), judge.Averaging),
        ("radfedm(redistributions=3, alpha=0.4)", "mixing(alpha=0.4)", judge.Nothing(), lambda: judge.Mixing(0.4)),
        ("radfedm(redistributions=3)", "mixing", judge.Nothing(), lambda: judge.Mixing(0.9)),
        (
            "radfeda(redistributions=3)",
            "fedadam(lr=0.01, beta1=0.9, beta2=0.99, tau=1e-3)",
            judge.Nothing(),
            lambda: judge.Stepping(reference.Adaptive("adam")),
        ),
        (
            "radfeda(redistributions=3, lr=0.05, beta1=0.5, beta2=0.9, tau=0.01)",
            "fedadam(lr=0.05, beta1=0.5, beta2=0.9, tau=0.01)",
            judge.Nothing(),
            lambda: judge.Stepping(reference.Adaptive("adam", lr=0.05, beta1=0.5, beta2=0.9, tau=0.01)),
        ),
    ],
    ids=["p", "p default", "m", "m default", "a default", "a"],
)
def test_variants(method: str, union: str, drift: judge.Drift, server: Callable[[], judge.Server]) -> None:
    """Each is a union, and follows the reference. RADFed-p is anchored at the model just received."""
    run = send(method)
    assert_follows(run.path, [point.cloud for point in travel(problem(COHORTS), drift=drift, server=server())])
    joined = send(f"radfed(redistributions=3)+{union}")
    assert all(torch.equal(a, b) for a, b in zip(run.path, joined.path, strict=True))


def test_default_redistributions_of_the_variants() -> None:
    for method in ("radfedp", "radfedm", "radfeda", "radfedi"):
        cohorts = None if method == "radfedi" else COHORTS
        assert play(method, cohorts, rounds=1, clients_per_round=3).column("works") == [15], method


def test_mixing_with_alpha_one_is_radfed() -> None:
    runs = [send(method) for method in ("radfedm(redistributions=3, alpha=1)", "radfed(redistributions=3)")]
    assert all(torch.equal(a, b) for a, b in zip(runs[0].path, runs[1].path, strict=True))


def test_radfedi_draws_by_importance() -> None:
    """The union with the importance sampler, which hears the scores of every Work; one more number goes up."""
    settings: dict[str, Any] = {"rounds": 8, "clients_per_round": 3}
    run = play("radfedi(redistributions=3, gamma=0.7)", None, **settings)
    joined = play("radfed(redistributions=3)+importance(gamma=0.7)", None, **settings)
    assert all(torch.equal(a, b) for a, b in zip(run.path, joined.path, strict=True))
    default = play("radfedi(redistributions=3)", None, **settings)
    joined = play("radfed(redistributions=3)+importance(gamma=0.9)", None, **settings)
    assert torch.equal(default.path[-1], joined.path[-1])
    assert not torch.equal(default.path[-1], run.path[-1])
    assert run.column("uplink_bytes")[0] == 9 * 40
    assert run.column("downlink_bytes")[0] == 9 * 32


def test_fills() -> None:
    fills = {name: fl.Method(name).fills for name in ("radfedp", "radfedm", "radfeda", "radfedi")}
    assert {name: set(stages) for name, stages in fills.items()} == {
        "radfedp": {"schedule", "client"},
        "radfedm": {"schedule", "server"},
        "radfeda": {"schedule", "server"},
        "radfedi": {"schedule", "sampler"},
    }


# ---------------------------------------------------------------------------------------------------------------------
# Clients that are away
# ---------------------------------------------------------------------------------------------------------------------


def patchy(client: int, work: int) -> bool:
    """About two thirds of all answers."""
    return (3 * client + 5 * work + client * work) % 7 not in (0, 3)


def blackout(client: int, work: int) -> bool:
    """As `patchy`, with Works in which nobody answers."""
    return work % 5 != 2 and patchy(client, work)


@pytest.mark.parametrize("answers", [patchy, blackout])
@pytest.mark.parametrize("away", ["even", "fewer"])
@pytest.mark.parametrize("redistributions", [1, 3])
def test_clients_that_are_away(redistributions: int, away: Away, answers: judge.Presence) -> None:
    """Also the number of Works: under "even" a round is longer when models are behind."""
    method = f"radfed(redistributions={redistributions}, away='{away}')"
    run = send(method, availability=answers, rounds=12)
    expected = travel(problem(COHORTS, answers=answers), redistributions, rounds=12, away=away)
    assert_follows(run.path, [point.cloud for point in expected])
    other: Away = "fewer" if away == "even" else "even"
    others = travel(problem(COHORTS, answers=answers), redistributions, rounds=12, away=other)
    assert error(run.path[-1], others[-1].cloud) > 1e-3
    works = [point.works for point in expected]
    longer = [w for w, before in zip(works, [0, *works], strict=False) if w - before > redistributions]
    assert bool(longer) is (away == "even")


@pytest.mark.parametrize("away", ["even", "fewer"])
def test_dropout_rate(away: Away) -> None:
    """Of the two numbers that a client's answer draws, the second is below the rate where it fails."""

    def answers(client: int, work: int) -> bool:
        key = np.random.SeedSequence(3, spawn_key=(work, client, 0, 0))
        return bool(np.random.default_rng(key).random(2)[1] >= 0.4)

    run = send(f"radfed(redistributions=4, away='{away}')", dropout_rate=0.4, seed=3)
    expected = travel(problem(COHORTS, answers=answers, seed=3), 4, away=away)
    assert_follows(run.path, [point.cloud for point in expected])
    assert sum(run.column("answered")) < sum(run.column("asked"))


def test_even_sends_on_only_what_is_behind() -> None:
    """S = 2. Model 1 misses both of its clients, model 2 one: Work 2 is for both, Work 3 for model 1 alone."""
    missing = {(1, 0), (1, 1), (4, 1)}
    asked: list[tuple[int, int]] = []

    def answers(client: int, work: int) -> bool:
        asked.append((work, client))
        return (client, work) not in missing

    run = send("radfed(redistributions=2)", rounds=1, availability=answers)
    assert asked == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 1), (1, 4), (2, 2), (2, 0), (3, 4)]
    assert run.column("asked") == [9]
    assert run.column("answered") == [6]
    assert run.column("works") == pytest.approx([2 + 2 / 3 + 1 / 3])
    assert run.column("downlink_bytes") == [9 * 32]
    assert run.column("uplink_bytes") == [6 * 32]
    updates = run.events[0].updates
    assert updates is not None
    np.testing.assert_allclose(updates.weights, [1 / 3] * 3, rtol=1e-12)
    assert updates.samples.tolist() == [SIZES[0] + SIZES[3], SIZES[2] + SIZES[4], SIZES[2] + SIZES[0]]


def test_even_gives_up_after_twice_the_works() -> None:
    """Model 1 never finds its client; it did not move, so it is no part of the average."""
    run = send(
        "radfed(redistributions=2)",
        [[0, 1, 2], [3, 1, 4], [1], [1]],
        rounds=1,
        availability=lambda client, work: client != 1,
    )
    assert run.column("asked") == [8]
    assert run.column("answered") == [4]
    updates = run.events[0].updates
    assert updates is not None
    assert updates.samples.tolist() == [SIZES[0] + SIZES[3], SIZES[2] + SIZES[4]]
    np.testing.assert_allclose(updates.weights, [0.5, 0.5], rtol=1e-12)


def test_fewer_drops_for_the_rest_of_the_round() -> None:
    """Model 0 is lost in the first Work: the second and third are for two models, which go to the first two clients."""
    asked: list[tuple[int, int]] = []

    def answers(client: int, work: int) -> bool:
        asked.append((work, client))
        return (client, work) != (0, 0)

    run = send("radfed(redistributions=3, away='fewer')", rounds=1, availability=answers)
    assert asked == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 1), (2, 2), (2, 0)]
    updates = run.events[0].updates
    assert updates is not None
    assert updates.samples.tolist() == [SIZES[1] + SIZES[3] + SIZES[2], SIZES[2] + SIZES[1] + SIZES[0]]
    np.testing.assert_allclose(updates.weights, [0.5, 0.5], rtol=1e-12)


def test_fewer_keeps_what_would_be_the_last() -> None:
    """Nobody answers in the second of three Works: all models stay, and go on."""
    run = send("radfed(redistributions=3, away='fewer')", rounds=1, availability=lambda client, work: work != 1)
    updates = run.events[0].updates
    assert updates is not None
    assert updates.samples.tolist() == [SIZES[0] + SIZES[2], SIZES[1] + SIZES[0], SIZES[2] + SIZES[3]]


SHRINKING = [[0, 1, 2, 3], [4, 5], [1, 0, 2, 5], [3, 2, 1]]


@pytest.mark.parametrize("away", ["even", "fewer"])
@pytest.mark.parametrize("redistributions", [2, 4])
def test_cohort_with_fewer_clients_than_models(redistributions: int, away: Away) -> None:
    """Four models, and a second Work of two clients: two are dropped, or the least moved go first."""
    method = f"radfed(redistributions={redistributions}, away='{away}')"
    rounds = 6 if away == "fewer" else 1
    run = send(method, SHRINKING, rounds=rounds, clients_per_round=4)
    expected = travel(problem(SHRINKING), redistributions, rounds=rounds, away=away)
    assert_follows(run.path, [point.cloud for point in expected])
    if away == "fewer":
        updates = run.events[0].updates
        assert updates is not None
        assert len(updates) == 2


def test_fewer_clients_than_models_and_clients_away() -> None:
    """Two models answered in the first Work, so that the other two are the least moved in the second."""
    asked: list[tuple[int, int]] = []

    def answers(client: int, work: int) -> bool:
        asked.append((work, client))
        return (client, work) not in {(0, 0), (2, 0)}

    setting = problem(SHRINKING, answers=lambda client, work: (client, work) not in {(0, 0), (2, 0)})
    run = send("radfed(redistributions=2)", SHRINKING, rounds=1, availability=answers, clients_per_round=4)
    assert asked[4:6] == [(1, 4), (1, 5)]
    assert_follows(run.path, [point.cloud for point in travel(setting, 2, rounds=1)])
    updates = run.events[0].updates
    assert updates is not None
    # Models 0 and 2 went to clients 4 and 5; then all have moved once, and the third Work moves each to its client.
    sizes = [SIZES[4] + SIZES[1], SIZES[1] + SIZES[0], SIZES[5] + SIZES[2], SIZES[3] + SIZES[5]]
    assert updates.samples.tolist() == sizes


def test_cohort_with_more_clients_than_models() -> None:
    """The clients beyond are not asked."""
    cohorts = [[0, 1], [2, 3, 4], [5, 1, 0]]
    run = send("radfed(redistributions=3)", cohorts, clients_per_round=2)
    assert_follows(run.path, [point.cloud for point in travel(problem(cohorts))])
    assert run.column("asked") == [6] * SHORT


@pytest.mark.parametrize("away", ["even", "fewer"])
@pytest.mark.parametrize("server", ["fedadam(lr=0.05)", "fedavgm(lr=0.5)", "adabest(mu=0.3)"])
def test_round_without_answers_changes_nothing(server: str, away: Away) -> None:
    """Models that all stayed at home are no update: the server's moments stay, too."""
    setting = problem(COHORTS, answers=lambda client, work: not 4 <= work < 12)
    method = f"radfed(redistributions=2, away='{away}')+{server}"
    run = send(method, availability=setting.answers, rounds=10)
    silent = [event.round for event in run.events if event.updates is None]
    assert len(silent) == (2 if away == "even" else 4)
    rules: dict[str, Callable[[], judge.Server]] = {
        "fedadam(lr=0.05)": lambda: judge.Stepping(reference.Adaptive("adam", lr=0.05)),
        "fedavgm(lr=0.5)": lambda: judge.Stepping(reference.Momentum(lr=0.5)),
        "adabest(mu=0.3)": lambda: judge.AdaBestServer(0.96, linear_start()),
    }
    drift = judge.AdaBestClients(setting, 0.3) if "adabest" in server else judge.Nothing()
    expected = travel(setting, 2, rounds=10, drift=drift, server=rules[server](), away=away)
    assert_follows(run.path, [point.cloud for point in expected])
    number = silent[0]
    assert torch.equal(run.path[number - 1], run.path[number - 2])


@pytest.mark.parametrize("away", ["even", "fewer"])
def test_diverged_client_did_not_answer(away: Away) -> None:
    """Its model goes on from where it was, or is dropped."""
    local: dict[str, Any] = {"batch_size": 4, "steps": 2, "lr": 0.02}
    method = f"radfed(redistributions=3, away='{away}')"
    run = send(method, local=local, clients=poisoned(1, MARK), loss=poisoned_error, rounds=ROUNDS)
    assert 4 < sum(run.column("diverged")) < 0.9 * 4 * 3 * ROUNDS / 5
    expected = travel(problem(COHORTS, local, clients=poisoned(1, np.nan)), rounds=ROUNDS, away=away)
    assert_follows(run.path, [point.cloud for point in expected])


# ---------------------------------------------------------------------------------------------------------------------
# With methods whose clients remember
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("deploy", "answers"), [("aggregate", judge.always), *((deploy, patchy) for deploy in DEPLOY)])
def test_adabest(deploy: str, answers: judge.Presence) -> None:
    """t is the number of the Work; h_k takes what the client made of the model that it received."""
    setting = problem(COHORTS, answers=answers)
    drift = judge.AdaBestClients(setting, 0.3)
    rounds = ROUNDS if deploy == "aggregate" else SHORT
    expected = travel(setting, drift=drift, server=judge.AdaBestServer(0.9, linear_start()), rounds=rounds)
    method = f"radfed(redistributions=3)+adabest(beta=0.9, mu=0.3, deploy='{deploy}')"
    run = send(method, availability=answers, probe=True, rounds=rounds)
    assert_agrees(run, expected, deploy, "adabest")
    assert run.column("downlink_bytes")[0] == run.column("asked")[0] * 40
    assert run.column("uplink_bytes")[0] == run.column("answered")[0] * 40


def test_adabest_counts_works_not_rounds() -> None:
    class ByRound(judge.AdaBestClients):
        def heard(self, work: int, answers: Sequence[judge.Answer]) -> None:
            super().heard(work // 3, answers) if work % 3 == 0 else None

    setting = problem(COHORTS)
    server = judge.AdaBestServer(0.9, linear_start())
    wrong = travel(setting, drift=ByRound(setting, 0.3), server=server)
    run = send("radfed(redistributions=3)+adabest(beta=0.9, mu=0.3)")
    assert error(run.path[-1], wrong[-1].cloud) > 1e-4


def test_feddyn() -> None:
    """h stays the mean of the h_k: the m travels hold every visit."""
    setting = problem(COHORTS)
    drift = judge.FedDynClients(setting, 0.1)
    expected = travel(setting, drift=drift, server=judge.FedDynServer(N))
    run = send("radfed(redistributions=3)+feddyn(mu=0.1)", probe=True)
    assert_agrees(run, expected, "aggregate", "feddyn")
    assert run.column("feddyn.h_norm")[-1] == pytest.approx(np.linalg.norm(drift.h.mean(0)), rel=1e-9)


@pytest.mark.parametrize("method", ["scaffold", "scaffold-m"])
@pytest.mark.parametrize("away", ["even", "fewer"])
def test_scaffold(method: str, away: Away) -> None:
    """c is renewed after every Work, by every client that answered, also one whose model is dropped later."""
    local = LOCALS["steps"]
    setting = problem(COHORTS, local, answers=patchy)
    drift = judge.Scaffold(setting)
    expected = travel(setting, drift=drift, away=away)
    run = send(f"radfed(redistributions=3, away='{away}')+{method}", local=local, availability=patchy)
    assert_follows(run.path, [point.cloud for point in expected])
    assert run.column(f"{method}.c_norm")[-1] == pytest.approx(np.linalg.norm(drift.c), rel=1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# Buffers, checkpoints, refusals
# ---------------------------------------------------------------------------------------------------------------------


def normalised_model() -> nn.Sequential:
    model = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 1)).double()
    start = np.random.default_rng(5).normal(size=3 * FEATURES + 1)
    nn.utils.vector_to_parameters(torch.from_numpy(start), model.parameters())
    return model


@pytest.mark.parametrize("rounds", [1, 6])
@pytest.mark.parametrize("answers", [judge.always, patchy], ids=["always", "patchy"])
def test_buffers_travel_with_their_model(rounds: int, answers: judge.Presence) -> None:
    local: dict[str, Any] = {"batch_size": 5, "epochs": 2, "last_batch": "drop", "lr": 0.02}
    by_hand = reference.NormalisedLinear(FEATURES)
    model = normalised_model()
    start: Array = nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()
    setting = problem(COHORTS, local, start=start, model=by_hand, buffers=by_hand.start_buffers(), answers=answers)
    run = send("radfed(redistributions=3)", model=model, local=local, rounds=rounds, availability=answers)
    expected = travel(setting, rounds=rounds)
    assert_follows(run.path, [point.cloud for point in expected])
    for name, value in expected[-1].buffers.items():
        found = run.result.model.get_buffer(f"0.{name}").numpy()
        np.testing.assert_allclose(found, value, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(
    "method",
    [
        "radfed(redistributions=2)+adabest(mu=0.3)",
        "radfed(redistributions=2, away='fewer')+adabest(deploy='latest_of_all')",
        "radfedi(redistributions=2)",
    ],
)
def test_resume(method: str, tmp_path: Path) -> None:
    assert_resumes(method, tmp_path, availability=lambda client, work: (client + work) % 5 != 0)


@pytest.mark.parametrize("moment", ["a Work", "the evaluation"])
def test_interrupt_in_the_middle_of_a_round(moment: str, tmp_path: Path) -> None:
    """The clients remember Works of a round that the server never saw; when it is played again, they must not."""
    method = "radfed(redistributions=4)+adabest(mu=0.3)"
    settings: dict[str, Any] = {"cohorts": COHORTS, "rounds": 8, "clients_per_round": 3, "probe": True}
    last = 4 * 5 + 3  # the last Work of round 6
    now = 0

    def there(client: int, work: int) -> bool:
        return True

    def trip(client: int, work: int) -> bool:
        nonlocal now
        now = work
        if work == last and moment == "a Work":
            raise KeyboardInterrupt
        return True

    def trip_over_evaluation(outputs: Tensor, targets: Tensor) -> Tensor:
        if now == last and moment == "the evaluation" and not torch.is_grad_enabled():
            raise KeyboardInterrupt
        return squared_error(outputs, targets)

    trip_over_evaluation.__qualname__ = squared_error.__qualname__  # a checkpoint knows its loss by name
    whole = play(method, availability=there, **settings)
    with pytest.raises(KeyboardInterrupt):
        play(method, availability=trip, loss=trip_over_evaluation, checkpoint=tmp_path, **settings)
    resumed = play(method, availability=there, checkpoint=tmp_path, resume=True, **settings)
    assert [event.round for event in resumed.events] == [6, 7, 8]
    for number, event in enumerate(resumed.events, start=5):
        assert torch.equal(whole.path[number], event.params), f"round {event.round}"


@pytest.mark.parametrize(
    "method",
    ["radfed(redistributions=0)", "radfed(away='never')", "radfedm(alpha=0)", "radfedp(mu=-1)", "radfed+fedasync"],
)
def test_refused(method: str) -> None:
    with pytest.raises(fl.FedloomError):
        play(method, None, rounds=1)
