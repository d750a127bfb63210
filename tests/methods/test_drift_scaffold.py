"""SCAFFOLD and SCAFFOLD/m: against option II and each other, with other servers, and at their edges (specification 2.3,
2.4, 11.3, 11.4).
"""

from collections.abc import Callable
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
    EVERYBODY,
    FEATURES,
    LOCALS,
    MARK,
    OTHER_LOCALS,
    ROUNDS,
    SIZES,
    Run,
    assert_follows,
    assert_resumes,
    constant_slope,
    error,
    linear_start,
    play,
    poisoned,
    poisoned_error,
    problem,
    row_of,
    slope,
)
from tests.reference import Array

N = len(SIZES)
EQUAL_STEPS = {name: LOCALS[name] for name in ("full batch", "steps")}


def expected_run(
    drift: judge.Scaffold, rounds: int = ROUNDS, server: judge.Server | None = None
) -> tuple[list[Array], list[float]]:
    """The cloud model and the norm of c after each round."""
    norms: list[float] = []
    heard = drift.heard

    def listen(work: int, answers: Any) -> None:
        heard(work, answers)
        norms.append(float(np.linalg.norm(drift.c)))

    drift.heard = listen  # type: ignore[method-assign]
    points = judge.synchronous(drift.problem, rounds, drift, server or judge.Averaging())
    return [point.cloud for point in points], norms


def assert_agrees(run: Run, expected: tuple[list[Array], list[float]], name: str = "scaffold") -> None:
    path, norms = expected
    assert_follows(run.path, path)
    assert run.column(f"{name}.c_norm") == pytest.approx(norms, rel=1e-9)


@pytest.mark.parametrize("cohorts", [COHORTS, EVERYBODY], ids=["some", "all"])
@pytest.mark.parametrize("local", LOCALS)
def test_option_two(local: str, cohorts: list[list[int]]) -> None:
    """The mean raw gradient is (theta - x_K)/(K lr) + c_k - c, here with unequal numbers of steps."""
    run = play("scaffold", cohorts, LOCALS[local])
    expected = reference.scaffold(
        reference.Linear(), linear_start(), CLIENTS, cohorts, ROUNDS, reference.Local(**LOCALS[local])
    )
    assert_follows(run.path, [state.params for state in expected])
    assert run.column("scaffold.c_norm") == pytest.approx([np.linalg.norm(state.c) for state in expected], rel=1e-9)
    assert error(play("fedavg(weights='equal')", cohorts, LOCALS[local]).path[-1], expected[-1].params) > 1e-4


@pytest.mark.parametrize("local", OTHER_LOCALS)
def test_other_local_optimisers(local: str) -> None:
    """c_k is the mean of the raw gradients: before the correction, the clip, the decay and the momentum."""
    run = play("scaffold", local=OTHER_LOCALS[local])
    assert_agrees(run, expected_run(judge.Scaffold(problem(local=OTHER_LOCALS[local]))))


def test_fills_the_client_stage_only() -> None:
    assert fl.Method("scaffold").fills == fl.Method("scaffold-m").fills == ["client"]


@pytest.mark.parametrize("method", ["scaffold", "scaffold-m"])
@pytest.mark.parametrize(
    ("server", "rule"),
    [
        ("fedadam(lr=0.05)", lambda: reference.Adaptive("adam", lr=0.05)),
        ("fedavgm(lr=0.3, momentum=0.6)", lambda: reference.Momentum(lr=0.3, beta=0.6)),
        ("fedavg(lr=0.5)", lambda: reference.Averaging(lr=0.5)),
    ],
    ids=["fedadam", "fedavgm", "fedavg"],
)
def test_with_another_server(method: str, server: str, rule: Callable[[], reference.Server]) -> None:
    local = LOCALS["steps"]
    drift = judge.Scaffold(problem(local=local))
    expected = expected_run(drift, server=judge.Stepping(rule()))
    assert_agrees(play(f"{method}+{server}", local=local), expected, method)


@pytest.mark.parametrize("method", ["scaffold", "scaffold-m"])
def test_decaying_rate(method: str) -> None:
    """The rate that was used, not the first one, turns a model's change into a gradient."""
    setting = problem(local=LOCALS["steps"], rate=reference.exponential(0.8))
    run = play(f"{method}+exponential(decay=0.8)", local=LOCALS["steps"])
    assert_agrees(run, expected_run(judge.Scaffold(setting)), method)


# ---------------------------------------------------------------------------------------------------------------------
# SCAFFOLD/m
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cohorts", [COHORTS, EVERYBODY], ids=["some", "all"])
@pytest.mark.parametrize("local", EQUAL_STEPS)
def test_rebuilt_from_models(local: str, cohorts: list[list[int]]) -> None:
    """The same run, to rounding, as SCAFFOLD and as the recursion with (N - r)/N; not as that with (N - 1)/N."""
    run, full = (play(method, cohorts, EQUAL_STEPS[local]) for method in ("scaffold-m", "scaffold"))
    assert_follows(run.path, [params.numpy() for params in full.path])
    assert run.column("scaffold-m.c_norm") == pytest.approx(full.column("scaffold.c_norm"), rel=1e-9)
    setting = problem(cohorts, EQUAL_STEPS[local])
    assert_agrees(run, expected_run(judge.ScaffoldM(setting)), "scaffold-m")
    printed, _ = expected_run(judge.ScaffoldM(setting, printed=True))
    assert error(run.path[-1], printed[-1]) > 1e-3


@pytest.mark.parametrize("other", ["dgt", "fedglad"])
def test_rebuilt_from_what_was_received(other: str) -> None:
    """From the models as they came, before calibration and scaling: again the same run as SCAFFOLD's."""
    run, full = (play(f"{method}+{other}", local=LOCALS["steps"]) for method in ("scaffold-m", "scaffold"))
    assert_follows(run.path, [params.numpy() for params in full.path])
    assert run.column("scaffold-m.c_norm") == pytest.approx(full.column("scaffold.c_norm"), rel=1e-9)
    plain = play("scaffold", local=LOCALS["steps"])
    assert error(full.path[-1], plain.path[-1].numpy()) > 1e-6


def test_printed_factor_is_right_for_one_client() -> None:
    cohorts = [[0], [3], [1], [0]]
    printed = expected_run(judge.ScaffoldM(problem(cohorts, LOCALS["steps"]), printed=True))
    assert_agrees(play("scaffold-m", cohorts, LOCALS["steps"]), printed, "scaffold-m")


def test_rates_that_change_within_a_run() -> None:
    """K eta is the sum of the rates used, at the client and at the server: c stays the mean of the c_k."""
    setting = problem(local=LOCALS["steps"], rate=reference.linear(0.3))
    drift = judge.ScaffoldM(setting)
    run = play("scaffold-m+linear(warmup=0.3)", local=LOCALS["steps"])
    assert_agrees(run, expected_run(drift), "scaffold-m")
    np.testing.assert_allclose(drift.c, drift.c_k.mean(0), rtol=1e-10)


@pytest.mark.parametrize(
    ("local", "words"),
    [
        ({"momentum": 0.9}, "momentum"),
        ({"momentum": 0.9, "nesterov": True}, "momentum"),
        ({"optimizer": "adam"}, "(?i)adam"),
        ({"optimizer": "adamw"}, "(?i)adam"),
        ({"clip_norm": 1.0}, "clip"),
        ({"weight_decay": 0.1}, "weight.decay"),
        ({"steps": None, "epochs": 2}, "steps"),
    ],
    ids=["momentum", "nesterov", "adam", "adamw", "clip", "decay", "unequal steps"],
)
def test_what_cannot_be_rebuilt_is_refused(local: dict[str, Any], words: str) -> None:
    """With the name of the method, and before anything is trained."""
    settings = {**LOCALS["steps"], **local}
    with pytest.raises(fl.MethodError, match=words) as caught:
        play("scaffold-m", local=settings)
    assert "scaffold-m" in str(caught.value)
    play("scaffold", local=settings, rounds=1)


def test_equal_steps_by_epochs_are_welcome() -> None:
    """The full batch, or clients of one size: the numbers of steps are equal without `steps`."""
    play("scaffold-m", local={"batch_size": None, "epochs": 3}, rounds=1)
    clients = reference.make_clients([8, 8, 8], FEATURES)
    play("scaffold-m", [[0, 1, 2]], {"batch_size": 4, "epochs": 2}, clients=clients, rounds=1)


# ---------------------------------------------------------------------------------------------------------------------
# c and what the clients remember
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["scaffold", "scaffold-m"])
@pytest.mark.parametrize("before", [COHORTS, [[0, 1, 0], [2, 2], [3, 1, 3, 3]]], ids=["some", "drawn twice"])
def test_c_is_the_mean_of_what_the_clients_remember(method: str, before: list[list[int]]) -> None:
    """Under a constant slope c_k is that slope for whoever was seen; the last round's step shows c - c_k."""
    lr = 0.03
    rounds = len(before) + 1
    local = {"batch_size": None, "lr": lr}
    run = play(method, [*before, *EVERYBODY], local, rounds=rounds, loss=constant_slope)
    seen = {k for cohort in before for k in cohort}
    assert 0 < len(seen) < N
    c_k = np.array([slope(k) if k in seen else np.zeros(FEATURES + 1) for k in range(N)])
    for k in range(N):
        used = slope(k) + c_k.mean(0) - c_k[k]
        np.testing.assert_allclose(row_of(run.events[-1], k), lr * used, rtol=1e-9)
    assert run.column(f"{method}.c_norm")[-2] == pytest.approx(np.linalg.norm(c_k.mean(0)), rel=1e-9)


@pytest.mark.parametrize("method", ["scaffold", "scaffold-m"])
def test_client_drawn_twice_trains_once(method: str) -> None:
    cohorts = [[0, 1, 0], [2, 2], [1, 3, 4, 1, 1], [0, 2]]
    run = play(method, cohorts, LOCALS["steps"])
    assert_agrees(run, expected_run(judge.Scaffold(problem(cohorts, LOCALS["steps"]))), method)


@pytest.mark.parametrize("method", ["scaffold", "scaffold-m"])
def test_client_that_diverges(method: str) -> None:
    """It keeps its c_k and adds nothing to c."""
    local: dict[str, Any] = {"batch_size": 4, "steps": 2, "lr": 0.02}
    run = play(method, local=local, clients=poisoned(1, MARK), loss=poisoned_error, rounds=40)
    assert 4 < sum(run.column("diverged")) < 20
    assert any(event.updates is None for event in run.events)
    drift = judge.Scaffold(problem(local=local, clients=poisoned(1, np.nan)))
    assert_agrees(run, expected_run(drift, rounds=40), method)


@pytest.mark.parametrize("method", ["scaffold", "scaffold-m"])
def test_rounds_without_answers(method: str) -> None:
    setting = problem(local=LOCALS["steps"], answers=lambda k, w: w not in (0, 3, 4) and (k + w) % 4 != 0)
    run = play(method, local=LOCALS["steps"], availability=setting.answers)
    assert 0 in run.column("answered")
    assert_agrees(run, expected_run(judge.Scaffold(setting)), method)


def test_change_of_a_client_that_krum_drops() -> None:
    """Its c_k stays as written, and c does not take it. One round of five clients, one of them far off."""
    clients = [(x, y) if k != 2 else (x, y + 1000) for k, (x, y) in enumerate(CLIENTS)]
    local = {"batch_size": None, "lr": 0.001}
    run = play("scaffold+krum(byzantine=1)", [[0, 1, 2, 3, 4]], local, clients=clients, rounds=1)
    updates = run.events[0].updates
    assert updates is not None
    kept = updates.clients.tolist()
    assert 2 not in kept
    gradients = [reference.Linear().forward_backward(linear_start(), {}, *clients[k])[1] for k in kept]
    assert run.column("scaffold.c_norm") == pytest.approx([np.linalg.norm(sum(gradients)) / N], rel=1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# Edges
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["scaffold", "scaffold-m"])
def test_a_single_client_is_plain_descent(method: str) -> None:
    """N = r = 1: the correction is zero."""
    run, plain = (play(m, [[0]], LOCALS["steps"], clients=CLIENTS[:1]) for m in (method, "fedavg"))
    assert_follows(run.path, [params.numpy() for params in plain.path], 1e-12)


@pytest.mark.parametrize("method", ["scaffold", "scaffold-m"])
def test_zero_rate(method: str) -> None:
    """Nothing moves, and no control variate becomes undefined."""
    run = play(method, local={**LOCALS["steps"], "lr": 0.0}, rounds=4)
    assert all(torch.equal(params, torch.from_numpy(linear_start())) for params in run.path)
    assert np.isfinite(run.column(f"{method}.c_norm")).all()


@pytest.mark.parametrize("method", ["scaffold", "scaffold-m"])
def test_everybody_always_diverges(method: str) -> None:
    clients = [(x, np.full_like(y, MARK)) for x, y in CLIENTS]
    run = play(method, clients=clients, loss=poisoned_error, rounds=3, local=LOCALS["steps"])
    assert torch.equal(run.result.params, torch.from_numpy(linear_start()))
    assert run.column(f"{method}.c_norm") == [0, 0, 0]


def test_first_round_is_fedavg() -> None:
    """All control variates are zero."""
    runs = [play(method, rounds=1) for method in ("scaffold", "fedavg(weights='equal')")]
    assert torch.equal(runs[0].path[0], runs[1].path[0])


@pytest.mark.parametrize(("method", "up"), [("scaffold", 64), ("scaffold-m", 32)])
def test_wire(method: str, up: int) -> None:
    """Down theta and c; up the model, and the change of c_k for SCAFFOLD only."""
    run = play(method, [[0, 1, 2], [3]], LOCALS["steps"], rounds=2)
    assert run.column("downlink_bytes") == [3 * 64, 4 * 64]
    assert run.column("uplink_bytes") == [3 * up, 4 * up]


@pytest.mark.parametrize("method", ["scaffold", "scaffold-m", "scaffold+fedadam(lr=0.05)"])
def test_resume(method: str, tmp_path: Path) -> None:
    assert_resumes(method, tmp_path, local=LOCALS["steps"], availability=lambda client, work: (client + work) % 5 != 0)


@pytest.mark.parametrize("method", ["scaffold", "scaffold-m"])
def test_single_precision(method: str) -> None:
    """In float32 it stays within its rounding, over 24 rounds."""
    local = LOCALS["steps"]
    model = torch.nn.Linear(FEATURES, 1)
    torch.nn.utils.vector_to_parameters(torch.from_numpy(linear_start()).float(), model.parameters())
    expected, _ = expected_run(judge.Scaffold(problem(local=local)))
    assert_follows([params.double() for params in play(method, local=local, model=model).path], expected, 1e-4)
