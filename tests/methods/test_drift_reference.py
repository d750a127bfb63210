"""The problem that the tests of drift, travelling, asynchrony and rates share, how they drive `fit` through it, and the
reference itself: it is the judge, so it is judged first, by what the papers prove.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from tests import reference
from tests.methods import drift_reference as judge
from tests.methods.drift_reference import Problem
from tests.reference import Array

ROUNDS = 20
FEATURES = 3
SIZES = (5, 12, 23, 9, 16, 7)
CLIENTS = reference.make_clients(SIZES, FEATURES, seed=21)
EVERYBODY = [list(range(len(SIZES)))]
# Gaps of one Work to seven, a single client, cohorts of one to four, and client 5, who is never seen.
COHORTS = [[0, 1, 2], [1, 3], [4], [2, 1, 4, 3], [1], [3, 2], [2], [4, 1]]
TOLERANCE = 1e-9

LOCALS: dict[str, dict[str, Any]] = {
    "full batch": {"batch_size": None, "epochs": 3, "lr": 0.02},
    "minibatches": {"batch_size": 4, "lr": 0.04},  # two to six steps
    "steps": {"batch_size": 4, "steps": 3, "lr": 0.04, "last_batch": "bootstrap"},
}
OTHER_LOCALS: dict[str, dict[str, Any]] = {
    "momentum": {"batch_size": 4, "lr": 0.01, "momentum": 0.7, "nesterov": True},
    "clip and decay": {"batch_size": 4, "lr": 0.04, "clip_norm": 1.5, "weight_decay": 0.1},
    "adam": {"batch_size": 4, "lr": 0.02, "optimizer": "adam"},
}


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs.squeeze(1) - targets) ** 2


def linear_start() -> Array:
    return np.random.default_rng(13).normal(size=FEATURES + 1)


def linear_model() -> nn.Linear:
    model = nn.Linear(FEATURES, 1).double()
    nn.utils.vector_to_parameters(torch.from_numpy(linear_start()), model.parameters())
    return model


@dataclass
class Probe:
    """A metric that reads the parameters of the linear model that it measures off its outputs at 0 and at the axes."""

    seen: list[Array] = field(default_factory=list)
    __name__ = "probe"

    data = (np.concatenate([np.zeros((1, FEATURES)), np.eye(FEATURES)]), np.zeros(FEATURES + 1))

    def __call__(self, outputs: Tensor, targets: Tensor) -> float:
        values = outputs.squeeze(1).numpy()
        self.seen.append(np.append(values[1:] - values[0], values[0]))
        return 0.0


@dataclass
class Run:
    """A run of the library, round by round."""

    result: fl.Result
    events: list[fl.Event]
    path: list[Tensor]  # the cloud model
    measured: list[Array]  # what was evaluated, in order

    @property
    def rows(self) -> list[Tensor]:
        """[K, P] each: what was averaged."""
        return [event.updates.rows.matrix for event in self.events if event.updates is not None]

    @property
    def evaluated(self) -> list[tuple[Array, Array | None]]:
        """The deployable model of each round, and the cloud model where it was evaluated beside it."""
        measured = iter(self.measured)
        return [
            (next(measured), next(measured) if "cloud_loss" in row else None)
            for row in self.result.history
            if "test_loss" in row
        ]

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.result.history]


def with_cohorts(method: str, cohorts: Sequence[Sequence[int]]) -> str:
    return f"{method}+fixed(cohorts={[list(cohort) for cohort in cohorts]})"


def play(
    method: str,
    cohorts: Sequence[Sequence[int]] | None = COHORTS,
    local: Mapping[str, Any] = LOCALS["minibatches"],
    *,
    rounds: int = ROUNDS,
    clients: Sequence[reference.Client] = CLIENTS,
    model: nn.Module | None = None,
    probe: bool = False,
    loss: Callable[[Tensor, Tensor], Tensor] = squared_error,
    callbacks: Sequence[Callable[[fl.Event], Any]] = (),
    **settings: Any,
) -> Run:
    """A run of the library on the shared problem; `cohorts` None leaves the sampler to the method."""
    events: list[fl.Event] = []
    path: list[Tensor] = []

    def listen(event: fl.Event) -> None:
        events.append(event)
        path.append(event.params.clone())

    measure = Probe()
    result = fl.fit(
        linear_model() if model is None else model,
        fl.Federation.from_arrays(clients, test=measure.data if probe else None),
        method if cohorts is None else with_cohorts(method, cohorts),
        rounds=rounds,
        local=fl.Local(**local),
        loss=loss,
        engine="loop",
        device="cpu",
        metric=measure if probe else "accuracy",
        callbacks=[listen, *callbacks],
        **settings,
    )
    return Run(result, events, path, measure.seen)


def problem(
    cohorts: Sequence[Sequence[int]] = COHORTS, local: Mapping[str, Any] = LOCALS["minibatches"], **settings: Any
) -> Problem:
    """The same problem for the reference."""
    chosen: dict[str, Any] = {"clients": CLIENTS, "start": linear_start(), **settings}
    return Problem(local=reference.Local(**local), cohorts=cohorts, **chosen)


def error(found: Tensor | Array, expected: Array) -> float:
    """Relative."""
    found = found.numpy() if isinstance(found, Tensor) else found
    assert found.shape == expected.shape
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def model_params(result: fl.Result) -> Tensor:
    return nn.utils.parameters_to_vector(result.model.parameters()).detach()


def assert_follows(path: Sequence[Tensor], expected: Sequence[Array], tolerance: float = TOLERANCE) -> None:
    assert len(path) == len(expected)
    for number, (found, wanted) in enumerate(zip(path, expected, strict=True), start=1):
        assert error(found, wanted) < tolerance, f"round {number}"


def norms(vectors: Sequence[Array | float]) -> list[float]:
    return [float(np.linalg.norm(v)) for v in vectors]


DEPLOY = ["aggregate", "cloud", "latest_of_all", "running_mean"]
WAYS = [("full batch", "latest_of_all"), ("steps", "aggregate"), *(("minibatches", deploy) for deploy in DEPLOY)]


def assert_agrees(run: Run, expected: Sequence[judge.Point], deploy: str, name: str) -> None:
    """The cloud model, the deployed model and the norm of h after each round."""
    assert_follows(run.path, [point.cloud for point in expected])
    found = run.column(f"{name}.h_norm")
    assert found == pytest.approx(norms([point.h for point in expected]), rel=1e-9, abs=1e-13)
    assert len(run.evaluated) == len(expected)
    answered = False
    for number, (event, point) in enumerate(zip(run.events, expected, strict=True)):
        deployed, cloud = run.evaluated[number]
        assert error(deployed, point.deployed(deploy)) < TOLERANCE, f"round {number + 1}"
        answered = answered or event.updates is not None
        if answered:  # before the first answer all four are the start
            assert (cloud is not None) is (deploy != "cloud")
        if cloud is not None:
            assert error(cloud, point.cloud) < TOLERANCE, f"round {number + 1}"
    assert error(run.result.params, expected[-1].cloud) < TOLERANCE
    assert error(model_params(run.result), expected[-1].deployed(deploy)) < TOLERANCE


def without_seconds(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in history]


def assert_same_run(one: fl.Result, other: fl.Result) -> None:
    """Bit for bit: parameters, the deployable model, and the history apart from the clock."""
    assert torch.equal(one.params, other.params)
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name
    assert repr(without_seconds(one.history)) == repr(without_seconds(other.history))


class InterruptionError(Exception):
    """What ends a run in the middle."""


def assert_resumes(method: str, folder: Path, **settings: Any) -> None:
    """A run that is lost in round 8 and resumed from the checkpoint of round 6 equals the uninterrupted one."""
    settings = {"rounds": 14, "cohorts": None, "clients_per_round": 3, "probe": True, **settings}
    whole = play(method, **settings)

    def interrupt(event: fl.Event) -> None:
        if event.round == 8:
            raise InterruptionError

    kept: dict[str, Any] = {"checkpoint": folder, "checkpoint_every": 3}
    with pytest.raises(InterruptionError):
        play(method, callbacks=[interrupt], **kept, **settings)
    resumed = play(method, resume=True, **kept, **settings)
    assert [event.round for event in resumed.events] == list(range(7, 15))
    assert_same_run(whole.result, resumed.result)
    assert np.array_equal(whole.measured[-1], resumed.measured[-1])


def constant_slope(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose gradient is the mean of y x, wherever the model is."""
    return outputs.squeeze(1) * targets


def slope(k: int) -> Array:
    """The gradient of client k under `constant_slope`."""
    x, y = CLIENTS[k]
    gradient: Array = np.append(x.T @ y, y.sum()) / len(y)
    return gradient


def row_of(event: fl.Event, k: int) -> Array:
    """What client k moved in this round, start minus end."""
    assert event.updates is not None
    row: Array = event.updates.rows.matrix[event.updates.clients.tolist().index(k)].numpy()
    return row


MARK = 777.0  # a target at which `poisoned_error` is nan


def poisoned_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.where(targets == MARK, torch.nan, squared_error(outputs, targets))


def poisoned(k: int, mark: float) -> list[reference.Client]:
    """The clients, of whom k holds one bad sample: it diverges in those Works whose batches meet it."""
    clients = [(x, y.copy()) for x, y in CLIENTS]
    clients[k][1][-1] = mark
    return clients


# ---------------------------------------------------------------------------------------------------------------------
# The reference
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", LOCALS)
def test_without_drift_it_is_the_reference_of_fedavg(local: str) -> None:
    setting = problem(local=LOCALS[local])
    points = judge.synchronous(setting, ROUNDS, judge.Nothing(), judge.Averaging())
    rule = reference.Rule(weights="equal")
    expected = reference.federate(
        reference.Linear(), linear_start(), CLIENTS, COHORTS, ROUNDS, reference.Local(**LOCALS[local]), rule
    )
    for point, state in zip(points, expected, strict=True):
        np.testing.assert_allclose(point.cloud, state.params, rtol=1e-13)
        np.testing.assert_allclose(point.aggregate, state.params, rtol=1e-13)


@pytest.mark.parametrize("local", LOCALS)
def test_mean_raw_gradient_is_option_two(local: str) -> None:
    """c_k - c + (theta - x_K)/(K lr) for plain SGD, here with unequal numbers of steps."""
    drift = judge.Scaffold(problem(local=LOCALS[local]))
    points = judge.synchronous(drift.problem, ROUNDS, drift, judge.Averaging())
    expected = reference.scaffold(
        reference.Linear(), linear_start(), CLIENTS, COHORTS, ROUNDS, reference.Local(**LOCALS[local])
    )
    for point, state in zip(points, expected, strict=True):
        np.testing.assert_allclose(point.cloud, state.params, rtol=1e-11)
    np.testing.assert_allclose(drift.c, expected[-1].c, rtol=1e-11)
    np.testing.assert_allclose(drift.c, drift.c_k.mean(0), rtol=1e-11)
    assert np.linalg.norm(drift.c) > 1e-2


def test_feddyn_h_is_the_mean_of_the_clients() -> None:
    for cohorts in (COHORTS, EVERYBODY, [[0, 1, 0], [2, 2]]):
        drift = judge.FedDynClients(problem(cohorts), mu=0.1)
        points = judge.synchronous(drift.problem, ROUNDS, drift, judge.FedDynServer(len(CLIENTS)))
        np.testing.assert_allclose(points[-1].h, drift.h.mean(0), rtol=1e-12)


def test_adabest_with_and_without_travelling() -> None:
    """One redistribution is the synchronous round."""
    runs = []
    for _ in range(2):
        drift = judge.AdaBestClients(problem(EVERYBODY), mu=0.02)
        server = judge.AdaBestServer(0.9, linear_start())
        runs.append((drift, server))
    one = judge.synchronous(runs[0][0].problem, ROUNDS, *runs[0])
    other = judge.radfed(runs[1][0].problem, ROUNDS, 1, *runs[1])
    for a, b in zip(one, other, strict=True):
        assert np.array_equal(a.cloud, b.cloud)
        assert np.array_equal(a.latest_of_all, b.latest_of_all)


def test_pflug_by_hand() -> None:
    """Products +1, -2, -1 within a window of 3, then +1: the verdict is that of the first round after the window."""
    pflug = judge.Pflug(window=3)
    seen = []
    for u in (1.0, 1.0, -2.0, 0.5, 2.0, -1.0, 1.0, -1.0, 1.0, -1.0):
        pflug.see(np.array([u]))
        seen.append((pflug.d, pflug.total))
    assert seen == [
        (0, 0.0),
        (0, 1.0),
        (0, -1.0),  # negative, but the window is not over
        (1, 0.0),  # -2: round 4 is the first above 3
        (1, 1.0),  # the update before the reset still counts: 0.5 * 2
        (1, -1.0),
        (1, -2.0),  # round 7 is not above 3 + 4
        (2, 0.0),
        (2, -1.0),
        (2, -2.0),
    ]


def test_rates_by_hand() -> None:
    table = [judge.two_dimensional(0.2)(d, 0, 10).sum() for d in range(7)]
    np.testing.assert_allclose(table, [10, 4.46, 2.49, 1.67, 1.25, 1, 1], atol=0.006)
    assert judge.two_dimensional(0.2)(5, 0, 10).tolist() == [1.0]
    assert judge.additive(0.2, "switch")(5, 0, 10).tolist() == [1.0]
    np.testing.assert_allclose(judge.additive(0.2, "zero")(5, 0, 3), [1, 0, 0], atol=1e-15)
    np.testing.assert_allclose(judge.additive(0.25, "switch")(2, 0, 3), [1, 0.5, 0.5])
    np.testing.assert_allclose(judge.all_steps(0.8)(2, 0, 3), [0.64] * 3)
    assert judge.first_only(2)(0, 1, 3).tolist() == [1, 1, 1]
    assert judge.first_only(2)(0, 2, 3).tolist() == [1, 0, 0]


def test_staleness_by_hand() -> None:
    assert [judge.hinge(u) for u in (0, 4, 5, 6)] == [1, 1, 1 / 11, 1 / 21]
    assert [judge.poly(u) for u in (0, 3, 8)] == [1, 0.5, 1 / 3]
