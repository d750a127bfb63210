"""2D-LRD and what it is compared with: against the NumPy reference, the rates by table, Pflug's window by hand
(specification 2.15, 3.6).
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from tests import reference
from tests.methods import drift_reference as judge
from tests.methods.test_drift_reference import (
    CLIENTS,
    EVERYBODY,
    FEATURES,
    LOCALS,
    Run,
    assert_follows,
    assert_resumes,
    constant_slope,
    play,
    problem,
)
from tests.reference import Array

# Two halves that want different models take turns, from where all of them together would stop: consecutive changes
# point against each other.
TURNS = [[0, 1, 2], [3, 4]]
ROUNDS = 24


def near_start() -> Array:
    """The least squares solution over all clients."""
    x, y = (np.concatenate(part) for part in zip(*CLIENTS, strict=True))
    solution: Array = np.linalg.lstsq(np.column_stack([x, np.ones(len(x))]), y, rcond=None)[0]
    return solution


def near_model() -> nn.Linear:
    model = nn.Linear(FEATURES, 1).double()
    nn.utils.vector_to_parameters(torch.from_numpy(near_start()), model.parameters())
    return model


def turn(method: str, local: Mapping[str, Any] = LOCALS["minibatches"], **settings: Any) -> Run:
    return play(method, local=local, **{"cohorts": TURNS, "model": near_model(), "rounds": ROUNDS, **settings})


def turning(local: Mapping[str, Any] = LOCALS["minibatches"], **settings: Any) -> judge.Problem:
    return problem(local=local, **{"cohorts": TURNS, "start": near_start(), **settings})


DECAYS: dict[str, tuple[judge.Decay, int]] = {
    "2dlrd(c=0.2, window=2)": (judge.two_dimensional(0.2), 2),
    "2dlrd(c=0.3, window=4)": (judge.two_dimensional(0.3), 4),
    "2dlrd(c=0.05, window=0)": (judge.two_dimensional(0.05), 0),
    "decay-all(factor=0.8, window=2)": (judge.all_steps(0.8), 2),
    "decay-all(factor=0.5, window=5)": (judge.all_steps(0.5), 5),
    "decay-additive(c=0.2, window=2)": (judge.additive(0.2, "switch"), 2),
    "decay-additive(c=0.2, window=2, at_end='zero')": (judge.additive(0.2, "zero"), 2),
    "first-only(after=7)": (judge.first_only(7), 0),
}


def name_of(method: str) -> str:
    return method.partition("(")[0]


def assert_decays(run: Run, expected: Sequence[judge.Decayed], method: str) -> None:
    assert_follows(run.path, [state.params for state in expected])
    assert run.column("local_steps") == np.cumsum([state.steps for state in expected]).tolist()
    name = name_of(method)
    if name != "first-only":
        assert run.column(f"{name}.d") == [state.d for state in expected]
        assert run.column(f"{name}.pflug") == pytest.approx([state.pflug for state in expected], rel=1e-7, abs=1e-10)


@pytest.mark.parametrize("local", ["full batch", "minibatches"])
@pytest.mark.parametrize("method", DECAYS)
def test_against_the_reference(method: str, local: str) -> None:
    decay, window = DECAYS[method]
    expected = judge.decayed(turning(LOCALS[local]), ROUNDS, decay, window)
    if name_of(method) != "first-only":
        assert expected[-1].d >= 3  # otherwise the run would show nothing
    assert_decays(turn(method, LOCALS[local]), expected, method)


@pytest.mark.parametrize("method", ["2dlrd(c=0.2, window=2)", "decay-additive(c=0.2, window=2, at_end='zero')"])
def test_everybody_takes_part(method: str) -> None:
    """As in the paper: full participation, plain mean."""
    decay, window = DECAYS[method]
    local: dict[str, Any] = {"batch_size": 4, "steps": 4, "lr": 0.1}
    expected = judge.decayed(turning(local, cohorts=EVERYBODY), ROUNDS, decay, window, "equal")
    run = turn(f"{method}+fedavg(weights='equal')", local, cohorts=EVERYBODY)
    assert expected[-1].d >= 1
    assert_decays(run, expected, method)


def test_rate_multiplies_the_step_of_momentum() -> None:
    local: dict[str, Any] = {"batch_size": 4, "steps": 4, "lr": 0.02, "momentum": 0.7}
    expected = judge.decayed(turning(local), ROUNDS, judge.two_dimensional(0.2), 2)
    assert_decays(turn("2dlrd(c=0.2, window=2)", local), expected, "2dlrd")


def test_pflug_watches_the_cloud_model() -> None:
    """The change that the server made, not the average that it was given."""
    server = judge.Stepping(reference.Momentum(lr=0.5, beta=0.2))
    expected = judge.decayed(turning(), ROUNDS, judge.two_dimensional(0.2), 2, server=server)
    run = turn("2dlrd(c=0.2, window=2)+fedavgm(lr=0.5, momentum=0.2)")
    assert expected[-1].d >= 1
    assert_decays(run, expected, "2dlrd")
    changes = np.diff([state.params for state in expected], axis=0)
    product = changes[-1] @ changes[-2]
    if expected[-1].d == expected[-2].d:
        pflug = run.column("2dlrd.pflug")
        assert pflug[-1] - pflug[-2] == pytest.approx(product, rel=1e-6, abs=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# The rates by table: constant slopes that change sign from round to round
# ---------------------------------------------------------------------------------------------------------------------

FORTH_AND_BACK = [CLIENTS[0], (CLIENTS[0][0], -CLIENTS[0][1])]


def zigzag(method: str, rounds: int, steps: int = 10) -> Run:
    """Two clients whose gradients are opposite and constant take turns: every product is negative."""
    return play(
        method,
        [[0], [1]],
        {"batch_size": None, "steps": steps, "lr": 0.01},
        clients=FORTH_AND_BACK,
        loss=constant_slope,
        rounds=rounds,
    )


def sums_of_rates(run: Run) -> list[float]:
    """Of each round, in units of the local rate: how far the client moved along its slope."""
    x, y = CLIENTS[0]
    slope = np.append(x.T @ y, y.sum()) / len(y)
    return [float(rows[0].norm()) / (0.01 * float(np.linalg.norm(slope))) for rows in run.rows]


TABLE = [10.0] + [sum((1 - 0.2 * d) ** j for j in range(10)) for d in range(1, 5)]


def test_table_of_2dlrd() -> None:
    """d = 0..4 at window 2: three rounds each. Then c d = 1: a single step at the full rate, to the end of the run."""
    np.testing.assert_allclose(TABLE, [10, 4.46, 2.49, 1.67, 1.25], atol=0.006)
    run = zigzag("2dlrd(window=2)", 24)
    np.testing.assert_allclose(sums_of_rates(run), np.repeat([*TABLE, 1, 1, 1], 3), rtol=1e-9)
    assert run.column("2dlrd.d") == [(r + 1) // 3 for r in range(24)]
    # After round 15 d is 5: the switch is told in that round's line and takes effect in the next round.
    assert run.column("2dlrd.switched") == [0] * 14 + [1] * 10
    assert np.diff([0, *run.column("local_steps")]).tolist() == [10] * 15 + [1] * 9


def test_table_of_decay_all() -> None:
    run = zigzag("decay-all(window=2)", 24)
    np.testing.assert_allclose(sums_of_rates(run), np.repeat([10 * 0.8**d for d in range(8)], 3), rtol=1e-9)
    assert run.column("decay-all.switched") == [0] * 24
    assert run.column("local_steps")[-1] == 240


@pytest.mark.parametrize("at_end", ["switch", "zero"])
def test_table_of_decay_additive(at_end: str) -> None:
    run = zigzag(f"decay-additive(window=2, at_end='{at_end}')", 24)
    table = [1 + 9 * (1 - 0.2 * d) for d in range(5)]
    np.testing.assert_allclose(sums_of_rates(run), np.repeat([*table, 1, 1, 1], 3), rtol=1e-9)
    steps = np.diff([0, *run.column("local_steps")]).tolist()
    assert steps == [10] * 15 + [1 if at_end == "switch" else 10] * 9
    assert run.column("decay-additive.switched") == [0] * 14 + [1 if at_end == "switch" else 0] * 10


def test_first_only() -> None:
    """After so many rounds the later steps have rate 0; they are still taken."""
    run = zigzag("first-only(after=5)", 9)
    np.testing.assert_allclose(sums_of_rates(run), [10] * 5 + [1] * 4, rtol=1e-9)
    assert run.column("local_steps")[-1] == 90
    at_once, single = zigzag("first-only(after=0)", 9), zigzag("fedavg", 9, steps=1)
    assert_follows(at_once.path, [params.numpy() for params in single.path], 1e-12)


def test_first_only_default() -> None:
    run = zigzag("first-only", 103, steps=2)
    np.testing.assert_allclose(sums_of_rates(run), [2] * 100 + [1] * 3, rtol=1e-9)


@pytest.mark.parametrize(
    ("c", "switch"), [(1.0, 1), (0.3, 4), (1 / 3, 3), (0.1, 10), (1 / 49, 49)], ids=["1", "0.3", "1/3", "0.1", "1/49"]
)
def test_switch_at_one(c: float, switch: int) -> None:
    """49 x 1/49 is a hair below 1 in floating point; it counts as 1."""
    assert 49 * (1 / 49) < 1
    for method in (f"2dlrd(c={c!r}, window=0)", f"decay-additive(c={c!r}, window=0)"):
        run = zigzag(method, switch + 3, steps=3)
        d, switched = (run.column(f"{name_of(method)}.{metric}") for metric in ("d", "switched"))
        assert d == list(range(switch + 3))
        assert switched == [0] * switch + [1] * 3
        assert np.diff([0, *run.column("local_steps")]).tolist() == [3] * (switch + 1) + [1] * 2


# ---------------------------------------------------------------------------------------------------------------------
# Pflug
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["2dlrd", "decay-all", "decay-additive"])
def test_default_window(method: str) -> None:
    """More than 50 rounds since the last time: rounds 51 and 102, though the sum is negative from round 2 on."""
    run = zigzag(method, 103, steps=2)
    assert run.column(f"{method}.d") == [0] * 50 + [1] * 51 + [2] * 2
    pflug = run.column(f"{method}.pflug")
    assert pflug[0] == 0
    assert all(value < 0 for value in pflug[1:50])
    assert pflug[50] == pflug[101] == 0


def test_sum_by_hand() -> None:
    """Every product is added, inside the window too; the reset does not forget the last change."""
    run = zigzag("decay-all(factor=1, window=3)", 8, steps=1)
    square = float(run.rows[0][0] @ run.rows[0][0])
    expected = [0, -square, -2 * square, 0, -square, -2 * square, -3 * square, 0]
    assert run.column("decay-all.pflug") == pytest.approx(expected, rel=1e-9)
    assert run.column("decay-all.d") == [0, 0, 0, 1, 1, 1, 1, 2]


def test_steady_descent_is_not_stationary() -> None:
    """One client under a constant slope: all products are positive."""
    local = {"batch_size": None, "steps": 2, "lr": 0.01}
    run = play("2dlrd(window=0)", [[0]], local, loss=constant_slope, rounds=12)
    assert run.column("2dlrd.d") == [0] * 12
    pflug = run.column("2dlrd.pflug")
    assert pflug == sorted(pflug)
    assert pflug[0] == 0 < pflug[1]


@cache
def plain_path() -> list[Tensor]:
    return turn("fedavg", rounds=20).path


@pytest.mark.parametrize(
    "method",
    [
        "2dlrd(c=0, window=2)",
        "2dlrd(window=1000)",
        "decay-all(factor=1, window=2)",
        "decay-all(window=1000)",
        "decay-additive(c=0, window=2)",
        "decay-additive(window=1000)",
        "first-only(after=1000)",
    ],
)
def test_without_decay_it_is_fedavg(method: str) -> None:
    """c = 0 whatever d is, and d = 0 whatever c is: bit for bit."""
    run = turn(method, rounds=20)
    assert all(torch.equal(a, b) for a, b in zip(run.path, plain_path(), strict=True))
    if "window=2" in method:
        assert run.column(f"{name_of(method)}.d")[-1] > 3


@pytest.mark.parametrize("method", ["2dlrd(window=0)", "decay-additive(window=0)"])
def test_single_local_step_is_not_touched(method: str) -> None:
    """With one step a round there is no second one to decay, before the switch and after it."""
    local = {"batch_size": 4, "steps": 1, "lr": 0.04}
    run, plain = turn(method, local), turn("fedavg", local)
    assert run.column(f"{name_of(method)}.switched")[-1] == 1
    assert all(torch.equal(a, b) for a, b in zip(run.path, plain.path, strict=True))


def test_round_without_answers() -> None:
    """The sum, d and the last change stay as they were."""
    setting = turning(answers=lambda client, work: work % 5 != 3)
    run = turn("2dlrd(window=2)", availability=setting.answers)
    assert_decays(run, judge.decayed(setting, ROUNDS, judge.two_dimensional(0.2), 2), "2dlrd")


def test_zero_rate() -> None:
    run = turn("2dlrd(window=0)", {"lr": 0.0, "batch_size": 4}, rounds=4)
    assert run.column("2dlrd.d") == run.column("2dlrd.pflug") == [0] * 4


def test_with_travelling_models() -> None:
    """d follows rounds, not Works: two Works a round, forth and back, are one round without change."""
    single, plain = (zigzag(f"2dlrd(window=2){other}", 18) for other in ("+radfed(redistributions=1)", ""))
    assert single.column("2dlrd.d") == plain.column("2dlrd.d")
    assert_follows(single.path, [params.numpy() for params in plain.path], 1e-12)
    double = zigzag("2dlrd(window=2)+radfed(redistributions=2)", 9)
    assert double.column("2dlrd.d") == [0] * 9
    assert double.column("works")[-1] == 18


# ---------------------------------------------------------------------------------------------------------------------
# Wire, checkpoints, refusals
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["2dlrd", "decay-all", "decay-additive"])
def test_wire(method: str) -> None:
    """Down the model and d, up the model, and the number of samples where weights go by it."""
    run = play(f"{method}+fedavg(weights='equal')", [[0, 1, 2], [3]], rounds=2)
    assert run.column("downlink_bytes") == [3 * 40, 4 * 40]
    assert run.column("uplink_bytes") == [3 * 32, 4 * 32]
    assert play(method, [[0, 1, 2], [3]], rounds=2).column("uplink_bytes") == [3 * 40, 4 * 40]


@pytest.mark.parametrize("method", DECAYS)
def test_fills(method: str) -> None:
    assert fl.Method(method).fills == ["rate"]
    with pytest.raises(fl.MethodError, match="rate"):
        fl.Method(f"{method}+exponential")


@pytest.mark.parametrize(
    "method", ["2dlrd(window=1)", "2dlrd(c=0.5, window=0)", "decay-additive(window=1)", "first-only(after=6)"]
)
def test_resume(method: str, tmp_path: Path) -> None:
    assert_resumes(method, tmp_path, cohorts=TURNS, model=near_model())


@pytest.mark.parametrize(
    "method",
    [
        "2dlrd(c=-0.1)",
        "2dlrd(window=-1)",
        "decay-all(factor=0)",
        "decay-all(factor=1.5)",
        "decay-additive(c=-0.1)",
        "decay-additive(at_end='stop')",
        "first-only(after=-1)",
    ],
)
def test_refused_parameters(method: str) -> None:
    with pytest.raises(fl.FedloomError):
        play(method, TURNS, rounds=1)
