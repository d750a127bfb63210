"""What holds for a run whatever the method: seeds, who takes part, divergence, stopping, counting, resuming."""

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn import metrics as sklearn_metrics
from torch import Tensor, nn

import fedloom as fl
from fedloom.result import Callback
from fedloom.space import Space
from fedloom.stages import Client, Correction, Info, Setup, State, Updates, Weighting, Wire, Work, scalar, zeros
from tests import reference
from tests.reference import Array

FEATURES = 3
SIZES = (6, 11, 4, 9)
CLIENTS = reference.make_clients(SIZES, FEATURES, seed=3)
LOCAL = fl.Local(batch_size=4, epochs=2, lr=0.02)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs.squeeze(1) - targets) ** 2


def linear_start() -> Array:
    return np.random.default_rng(7).normal(size=FEATURES + 1)


def linear_model() -> nn.Linear:
    model = nn.Linear(FEATURES, 1).double()
    nn.utils.vector_to_parameters(torch.from_numpy(linear_start()), model.parameters())
    return model


def fit_linear(
    method: str,
    *,
    model: nn.Module | None = None,
    clients: Sequence[reference.Client] = CLIENTS,
    rounds: int = 6,
    local: fl.Local = LOCAL,
    loss: Callable[[Tensor, Tensor], Tensor] = squared_error,
    **settings: Any,
) -> fl.Result:
    return fl.fit(
        linear_model() if model is None else model,
        fl.Federation.from_arrays(clients),
        method,
        rounds=rounds,
        local=local,
        loss=loss,
        engine="loop",
        device="cpu",
        **settings,
    )


def without_seconds(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in history]


def assert_same_run(one: fl.Result, other: fl.Result) -> None:
    """Bit for bit: parameters, the model's whole state, and the history apart from the clock."""
    assert torch.equal(one.params, other.params)
    states = one.model.state_dict(), other.model.state_dict()
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name]), name
    # As text, so that a nan equals a nan; the text of a float is exact.
    assert repr(without_seconds(one.history)) == repr(without_seconds(other.history))
    assert one.stopped == other.stopped


def assert_close(found: Tensor, expected: Array, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(found.numpy(), expected, rtol=tolerance, atol=tolerance)


def dropout_model() -> nn.Sequential:
    """Dropout draws from torch's generator, batch norm keeps buffers: both must follow the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1)
        ).double()


STEADY = fl.Local(batch_size=4, epochs=2, lr=0.02, last_batch="drop")  # no batch of one, which batch norm refuses


# ---------------------------------------------------------------------------------------------------------------------
# Seeds and keys
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedprox(mu=0.1)+fedadam+exponential(decay=0.9)", "bernoulli(rate=0.5)"])
def test_one_seed_gives_one_run(method: str) -> None:
    def run() -> fl.Result:
        torch.rand(int(torch.randint(1, 9, ())))  # a run does not depend on what torch's generator did before
        test = CLIENTS[0]
        federation = fl.Federation.from_arrays(CLIENTS, test=test)
        return fl.fit(
            dropout_model(),
            federation,
            method,
            rounds=5,
            clients_per_round=2,
            local=STEADY,
            loss=squared_error,
            seed=4,
            availability=0.8,
            dropout_rate=0.2,
        )

    assert_same_run(run(), run())


def test_another_seed_draws_other_cohorts() -> None:
    full_batch = fl.Local(batch_size=None, lr=0.02)
    one, other = (fit_linear("uniform", local=full_batch, clients_per_round=1, seed=seed) for seed in (0, 1))
    assert not torch.equal(one.params, other.params)


def test_another_seed_draws_other_batches() -> None:
    one, other = (fit_linear("fixed(cohorts=[[0, 1]])", seed=seed) for seed in (0, 1))
    assert not torch.equal(one.params, other.params)


def test_another_seed_draws_other_absences() -> None:
    answered = [
        [row["answered"] for row in fit_linear("fixed(cohorts=[[0, 1, 2, 3]])", availability=0.5, seed=seed).history]
        for seed in (0, 1)
    ]
    assert answered[0] != answered[1]


def test_dropout_follows_the_key() -> None:
    """Full batches from two clients with the same data: only the masks can tell their rows apart, or two seeds."""
    clients = [CLIENTS[1]] * 2
    full_batch = fl.Local(batch_size=None, lr=0.02)
    matrices: list[Tensor] = []

    def listen(event: fl.Event) -> None:
        assert event.updates is not None
        matrices.append(event.updates.rows.matrix.clone())

    for seed in (0, 1):
        fit_linear(
            "fixed(cohorts=[[0, 0, 1]])",
            model=dropout_model(),
            clients=clients,
            rounds=1,
            local=full_batch,
            seed=seed,
            callbacks=[listen],
        )
    rows = torch.cat(matrices)
    assert len(rows) == len(torch.unique(rows, dim=0)) == 6


@dataclass
class Rows:
    """A callback that keeps each averaged row by Work and client, in order of occurrence."""

    by_place: dict[tuple[int, int], list[Tensor]]

    def __call__(self, event: fl.Event) -> None:
        assert event.updates is not None
        matrix = event.updates.rows.matrix
        for client, row in zip(event.updates.clients.tolist(), matrix, strict=True):
            self.by_place.setdefault((event.round - 1, client), []).append(row.clone())


def rows_of(cohorts: Sequence[Sequence[int]], model: nn.Module, **settings: Any) -> dict[tuple[int, int], list[Tensor]]:
    rows = Rows({})
    method = f"fixed(cohorts={[list(cohort) for cohort in cohorts]})"
    fit_linear(method, model=model, rounds=len(cohorts), local=STEADY, callbacks=[rows], seed=5, **settings)
    return rows.by_place


def test_batches_do_not_depend_on_who_else_takes_part() -> None:
    """Work 0 is the same for all, so that Work 1 starts from one model; there only the company of client 2 changes."""
    alone = rows_of([[0], [2]], dropout_model())[1, 2][0]
    for cohort in ([0, 2], [2, 0, 1, 3], [3, 1, 2]):
        assert torch.equal(rows_of([[0], cohort], dropout_model())[1, 2][0], alone)
    deserted = rows_of([[0], [1, 2, 3]], dropout_model(), availability=lambda client, work: work == 0 or client == 2)
    assert torch.equal(deserted[1, 2][0], alone)


def test_batches_depend_on_work_and_occurrence() -> None:
    """With a rate of 0.02 from one start, equal rows could only come from equal batches."""
    still = fl.Local(batch_size=4, lr=0.02)
    rows = Rows({})
    # A server rate this small leaves the model where it was, to within float64.
    method = "fixed(cohorts=[[1, 1], [1]])+fedavg(lr=1e-300)"
    fit_linear(method, rounds=2, local=still, callbacks=[rows])
    first, second = rows.by_place[0, 1]
    (later,) = rows.by_place[1, 1]
    assert not torch.equal(first, second)
    assert not torch.equal(first, later)
    assert not torch.equal(second, later)


# ---------------------------------------------------------------------------------------------------------------------
# Identities
# ---------------------------------------------------------------------------------------------------------------------


def centralised_descent(clients: Sequence[reference.Client], rate: float, steps: int) -> Array:
    """Gradient descent on the union of the clients' samples."""
    x, y = (np.concatenate(part) for part in zip(*clients, strict=True))
    w = linear_start()
    augmented = np.column_stack([x, np.ones(len(x))])
    for _ in range(steps):
        w = w - rate * augmented.T @ (augmented @ w - y) / len(y)
    return w


def test_one_client_with_one_full_batch_step_is_gradient_descent() -> None:
    result = fit_linear("fixed(cohorts=[[1]])", rounds=10, local=fl.Local(batch_size=None, lr=0.03))
    assert_close(result.params, centralised_descent(CLIENTS[1:2], 0.03, 10))


def test_full_participation_with_one_full_batch_step_is_gradient_descent() -> None:
    local = fl.Local(batch_size=None, lr=0.03)
    result = fit_linear("fedavg", rounds=10, clients_per_round=1.0, local=local)
    assert_close(result.params, centralised_descent(CLIENTS, 0.03, 10))
    equal = fit_linear("fedavg(weights='equal')", rounds=10, clients_per_round=1.0, local=local)
    assert not np.allclose(equal.params.numpy(), centralised_descent(CLIENTS, 0.03, 10), rtol=1e-6)


@pytest.mark.parametrize("method", ["fedprox(mu=0)", "fedprox(mu=0.0)", "fedavgm(momentum=0.0)", "fedavg(lr=1.0)"])
def test_parameters_that_switch_a_method_off(method: str) -> None:
    plain = fit_linear("fedavg", clients_per_round=2, rounds=8)
    switched_off = fit_linear(method, clients_per_round=2, rounds=8)
    assert torch.equal(plain.params, switched_off.params)


# ---------------------------------------------------------------------------------------------------------------------
# Callbacks
# ---------------------------------------------------------------------------------------------------------------------

SEEN: list[tuple[bool, Tensor]] = []  # outside the model, because a run works on a copy of it


class WitnessedLinear(nn.Linear):
    """Notes with which parameters, and in which mode, it was called."""

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append((self.training, torch.cat([self.weight.detach().reshape(-1), self.bias.detach()]).clone()))
        return super().forward(x)


@pytest.fixture
def seen() -> Iterator[list[tuple[bool, Tensor]]]:
    SEEN.clear()
    yield SEEN
    SEEN.clear()


def test_callback_hears_of_every_round_after_the_server_step(seen: list[tuple[bool, Tensor]]) -> None:
    """One client, one step: the model is called once a round to train and once to evaluate."""
    events: list[tuple[fl.Event, Tensor]] = []
    lengths: list[int] = []

    def listen(event: fl.Event) -> None:
        events.append((event, event.params.clone()))
        lengths.append(len(seen))

    model = WitnessedLinear(FEATURES, 1).double()
    result = fl.fit(
        model,
        fl.Federation.from_arrays(CLIENTS, test=CLIENTS[0]),
        "fixed(cohorts=[[0], [1]])+fedavgm(lr=0.5)",
        rounds=6,
        local=fl.Local(batch_size=None, lr=0.05),
        loss=squared_error,
        engine="loop",  # whose model sees plain tensors
        callbacks=[listen],
    )
    assert [event.round for event, _ in events] == [1, 2, 3, 4, 5, 6]
    assert all(event.rounds == 6 for event, _ in events)
    assert [dict(event.metrics) for event, _ in events] == result.history
    training, evaluating = [[p for mode, p in seen[-12:] if mode is wanted] for wanted in (True, False)]
    assert lengths == [len(seen) - 10 + 2 * r for r in range(6)]
    after = [params for _, params in events]
    assert len(training) == len(evaluating) == 6
    for r in range(6):
        assert torch.equal(evaluating[r], after[r])  # so the callback comes after the server step
        if r < 5:
            assert torch.equal(training[r + 1], after[r])
            assert not torch.equal(after[r + 1], after[r])
    assert torch.equal(training[0], nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.equal(result.params, after[-1])


def test_callback_sees_what_was_averaged() -> None:
    before = torch.from_numpy(linear_start())
    for number, weights in (("samples", SIZES), ("equal", (1, 1, 1, 1))):
        events: list[fl.Event] = []
        method = f"fixed(cohorts=[[3, 0, 1]])+fedavg(weights='{number}')"
        result = fit_linear(method, rounds=1, callbacks=[events.append])
        (event,) = events
        assert event.updates is not None
        assert event.updates.clients.tolist() == [3, 0, 1]
        assert event.updates.samples.tolist() == [9, 6, 11]
        assert event.updates.steps.tolist() == [6, 4, 6]
        share = torch.tensor([weights[k] for k in (3, 0, 1)], dtype=torch.float64)
        torch.testing.assert_close(event.updates.weights, share / share.sum())
        moved = before - (event.updates.weights[:, None] * event.updates.rows.matrix).sum(0)
        torch.testing.assert_close(result.params, moved)


def test_callback_can_stop_the_run() -> None:
    first: list[int] = []
    second: list[int] = []

    def stop_after_three(event: fl.Event) -> Any:
        first.append(event.round)
        return fl.STOP if event.round == 3 else None

    result = fit_linear("fedavg", rounds=9, callbacks=[stop_after_three, lambda event: second.append(event.round)])
    assert first == second == [1, 2, 3]
    assert [row["round"] for row in result.history] == [1, 2, 3]
    assert result.stopped == "callback"
    assert torch.equal(result.params, fit_linear("fedavg", rounds=3).params)
    assert fit_linear("fedavg", rounds=3).stopped == "rounds"


# ---------------------------------------------------------------------------------------------------------------------
# Clients that diverge
# ---------------------------------------------------------------------------------------------------------------------

MARK = 777.0  # a target that makes `poisoned_error` return nan


def poisoned_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.where(targets == MARK, torch.nan, squared_error(outputs, targets))


def with_bad_clients(how: str, bad: Sequence[int]) -> list[reference.Client]:
    clients = list(CLIENTS)
    for k in bad:
        x, y = (part.copy() for part in clients[k])
        if how == "data":
            x *= 1e200  # finite, but its squared error is not
        else:
            y[-1] = MARK
        clients[k] = (x, y)
    return clients


@pytest.mark.parametrize("method", ["fedavg", "fedadam", "fedavgm+fedavg(weights='equal')"])
@pytest.mark.parametrize("how", ["data", "loss"])
def test_diverged_client_is_left_out(how: str, method: str, caplog: pytest.LogCaptureFixture) -> None:
    averaged: list[list[int]] = []

    def listen(event: fl.Event) -> None:
        assert event.updates is not None
        averaged.append(event.updates.clients.tolist())

    with caplog.at_level(logging.WARNING, logger="fedloom"):
        result = fit_linear(
            f"{method}+fixed(cohorts=[[0, 2, 1], [1, 3]])",
            clients=with_bad_clients(how, [2]),
            loss=poisoned_error,
            rounds=4,
            callbacks=[listen],
        )
    assert averaged == [[0, 1], [1, 3]] * 2
    assert [row["diverged"] for row in result.history] == [1, 0, 1, 0]
    assert [row["answered"] for row in result.history] == [3, 2, 3, 2]
    named = [record.getMessage() for record in caplog.records if record.name == "fedloom"]
    assert len(named) == 2
    for message, number in zip(named, (1, 3), strict=True):
        assert "client 2" in message
        assert f"round {number}" in message

    clean = fit_linear(f"{method}+fixed(cohorts=[[0, 1], [1, 3]])", rounds=4)
    assert torch.equal(result.params, clean.params)
    losses = [[row["train_loss"] for row in run.history] for run in (result, clean)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("how", ["data", "loss"])
def test_round_in_which_all_diverge_changes_nothing(how: str, caplog: pytest.LogCaptureFixture) -> None:
    events: list[tuple[fl.Event, Tensor]] = []
    with caplog.at_level(logging.WARNING, logger="fedloom"):
        result = fit_linear(
            "fedavgm(lr=0.3)+fixed(cohorts=[[0], [1, 2], [3]])",
            clients=with_bad_clients(how, [1, 2]),
            loss=poisoned_error,
            rounds=3,
            callbacks=[lambda event: events.append((event, event.params.clone()))],
        )
    (_, first), (second_event, second), (_, third) = events
    assert second_event.updates is None
    assert torch.equal(first, second)
    assert not torch.equal(second, third)
    assert [row["round"] for row in result.history] == [1, 2, 3]
    assert [row["diverged"] for row in result.history] == [0, 2, 0]
    assert [row.get("diverged_clients") for row in result.history] == [None, [1, 2], None]
    assert math.isnan(result.history[1]["train_loss"])
    assert "round 2: clients 1, 2 diverged" in caplog.text

    # The server's momentum skipped the round, too: m <- 0.9 m + g happened twice, not three times.
    rule = reference.Rule(server=lambda: reference.Momentum(lr=0.3))
    local = reference.Local(batch_size=4, epochs=2, lr=0.02)
    momentum = rule.server()
    theta = linear_start()
    for work, client in ((0, 0), (2, 3)):
        batches = local.batches(len(CLIENTS[client][1]), 0, work, client, 0)
        trained = reference.train(reference.Linear(), theta, {}, CLIENTS[client], local, batches, np.ones(len(batches)))
        theta = momentum.step(theta, theta - trained.end)
    assert_close(result.params, theta)


def test_run_in_which_everybody_always_diverges_ends() -> None:
    result = fit_linear("fedadam", clients=with_bad_clients("loss", range(4)), loss=poisoned_error, rounds=3)
    assert torch.equal(result.params, torch.from_numpy(linear_start()))
    assert [row["diverged"] for row in result.history] == [4, 4, 4]


def normalised_model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 1)).double()


def test_diverged_client_leaves_the_buffers_alone() -> None:
    runs = [
        fit_linear(
            f"fixed(cohorts=[{cohort}])",
            model=normalised_model(),
            clients=with_bad_clients("loss", [2]),
            loss=poisoned_error,
            local=STEADY,
            rounds=3,
        )
        for cohort in ([0, 2, 1], [0, 1])
    ]
    for name, value in runs[0].model.state_dict().items():
        assert torch.equal(value, runs[1].model.state_dict()[name]), name


def test_client_with_infinite_buffers_is_left_out() -> None:
    """Batch norm hides data of size 1e200 from the loss, but its running variance becomes infinite."""
    result = fit_linear(
        "fixed(cohorts=[[0, 2, 1]])",
        model=normalised_model(),
        clients=with_bad_clients("data", [2]),
        local=STEADY,
        rounds=1,
    )
    for name, value in result.model.state_dict().items():
        assert bool(torch.isfinite(value).all()), name
    assert result.history[0]["diverged"] == 1


class Masked(nn.Module):
    """A linear model with a constant that holds infinities, as attention masks do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 1)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x)
        return outputs


def test_mask_of_infinities_is_no_divergence() -> None:
    model = Masked().double()
    nn.utils.vector_to_parameters(torch.from_numpy(linear_start()), model.parameters())
    masked, plain = (fit_linear("fixed(cohorts=[[0, 1, 2]])", model=m, rounds=3) for m in (model, None))
    assert [row["diverged"] for row in masked.history] == [0, 0, 0]
    assert torch.equal(masked.params, plain.params)
    assert torch.equal(masked.model.get_buffer("mask"), model.get_buffer("mask"))


# ---------------------------------------------------------------------------------------------------------------------
# Clients that do not answer
# ---------------------------------------------------------------------------------------------------------------------

EVERYBODY = "fixed(cohorts=[[0, 1, 2, 3]])"
TABLE = np.array([[1, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 1], [1, 0, 0, 1]])  # client x time


def answering(method: str, rounds: int, **settings: Any) -> tuple[fl.Result, list[list[int]]]:
    """A run, and the clients that were averaged in each round."""
    answered: list[list[int]] = []

    def listen(event: fl.Event) -> None:
        answered.append([] if event.updates is None else event.updates.clients.tolist())

    return fit_linear(method, rounds=rounds, callbacks=[listen], **settings), answered


def assert_as_if_asked(result: fl.Result, answered: Sequence[Sequence[int]], method: str = "fedavg") -> None:
    """The run equals one in which just the clients that answered were asked."""
    cohorts = [list(cohort) for cohort in answered]
    asked = fit_linear(f"{method}+fixed(cohorts={cohorts})", rounds=len(cohorts))
    assert torch.equal(result.params, asked.params)
    assert [row["train_loss"] for row in result.history] == [row["train_loss"] for row in asked.history]


def present(table: NDArray[np.int64], rounds: int) -> list[list[int]]:
    return [np.flatnonzero(table[:, w % table.shape[1]]).tolist() for w in range(rounds)]


def table_file(folder: Path, suffix: str) -> Path:
    path = folder / f"trace{suffix}"
    if suffix == ".npy":
        np.save(path, TABLE)
    else:
        np.savetxt(path, TABLE, fmt="%d", delimiter=",")
    return path


@pytest.mark.parametrize("form", ["table", "booleans", "function", ".csv", ".npy", "text path"])
@pytest.mark.parametrize("method", ["fedavg", "fedadam+fedavg(weights='equal')"])
def test_availability_by_client_and_work(form: str, method: str, tmp_path: Path) -> None:
    """More rounds than columns: the table repeats."""
    forms: dict[str, Callable[[], Any]] = {
        "table": lambda: TABLE,
        "booleans": lambda: TABLE.astype(bool),
        "function": lambda: lambda client, work: bool(TABLE[client, work % 4]),
        ".csv": lambda: table_file(tmp_path, ".csv"),
        ".npy": lambda: table_file(tmp_path, ".npy"),
        "text path": lambda: str(table_file(tmp_path, ".csv")),
    }
    result, answered = answering(f"{method}+{EVERYBODY}", 6, availability=forms[form]())
    assert answered == present(TABLE, 6)
    assert [row["asked"] for row in result.history] == [4] * 6
    assert [row["answered"] for row in result.history] == [len(cohort) for cohort in answered]
    assert_as_if_asked(result, answered, method)


def test_work_in_the_availability_table_is_counted_from_the_first() -> None:
    asked: list[tuple[int, int]] = []

    def note(client: int, work: int) -> bool:
        asked.append((client, work))
        return True

    fit_linear("fixed(cohorts=[[2, 0], [3]])", rounds=3, availability=note)
    assert asked == [(2, 0), (0, 0), (3, 1), (2, 2), (0, 2)]


@pytest.mark.parametrize(
    ("settings", "share"),
    [({"availability": 0.6}, 0.6), ({"dropout_rate": 0.3}, 0.7), ({"availability": 0.8, "dropout_rate": 0.25}, 0.6)],
)
def test_share_of_clients_that_answer(settings: dict[str, float], share: float) -> None:
    """With 50 clients nobody answers only by a miracle; 1000 draws lie within 4 standard deviations of the share."""
    clients = reference.make_clients([4] * 50, FEATURES)
    everybody = f"fixed(cohorts=[{list(range(50))}])"
    local = fl.Local(batch_size=None, lr=0.02)
    result, answered = answering(everybody, 20, clients=clients, local=local, **settings)
    total = sum(row["answered"] for row in result.history)
    assert abs(total - 1000 * share) < 4 * math.sqrt(1000 * share * (1 - share))
    assert len({tuple(cohort) for cohort in answered}) == 20
    asked = fit_linear(f"fixed(cohorts={answered})", rounds=20, clients=clients, local=local)
    assert torch.equal(result.params, asked.params)


def test_whether_a_client_answers_does_not_depend_on_the_others() -> None:
    _, all_asked = answering(EVERYBODY, 12, availability=0.5, dropout_rate=0.1)
    _, one_asked = answering("fixed(cohorts=[[2]])", 12, availability=0.5, dropout_rate=0.1)
    assert [2 in cohort for cohort in all_asked] == [cohort == [2] for cohort in one_asked]


@pytest.mark.parametrize("form", ["table", "function"])
def test_round_without_answers_changes_nothing(form: str, caplog: pytest.LogCaptureFixture) -> None:
    """Work 1 finds nobody; buffers and the server's moments stay, too."""
    table = TABLE.copy()
    table[:, 1] = 0
    availability: Any = table if form == "table" else lambda client, work: work != 1 and bool(table[client, work % 4])
    path: list[Tensor] = []
    with caplog.at_level(logging.WARNING, logger="fedloom"):
        result = fit_linear(
            f"fedadam+{EVERYBODY}",
            rounds=3,
            model=normalised_model(),
            local=STEADY,
            availability=availability,
            callbacks=[lambda event: path.append(event.params.clone())],
        )
    assert torch.equal(path[0], path[1])
    assert not torch.equal(path[1], path[2])
    assert [row["answered"] for row in result.history] == [3, 0, 2]
    assert [row["diverged"] for row in result.history] == [0, 0, 0]
    assert math.isnan(result.history[1]["train_loss"])
    assert "round 2" in caplog.text
    # Clients 0, 2, 3 took up to 4 steps in Work 0, clients 0 and 1 again 4 in Work 2.
    assert int(result.model.get_buffer("0.num_batches_tracked")) == 8


def test_nobody_ever_answers() -> None:
    result = fit_linear("fedavgm", rounds=3, availability=lambda client, work: False)
    assert torch.equal(result.params, torch.from_numpy(linear_start()))
    assert [row["answered"] for row in result.history] == [0, 0, 0]
    assert result.history[-1]["local_steps"] == result.history[-1]["uplink_bytes"] == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"availability": 0.0}, "availability"),
        ({"availability": 1.5}, "availability"),
        ({"availability": TABLE[:3]}, "4 clients"),
        ({"availability": TABLE[0]}, "availability"),
        ({"availability": TABLE * 0.5}, "0"),
        ({"availability": TABLE.tolist()}, "availability"),
        ({"availability": "no-such-file.csv"}, "no-such-file.csv"),
        ({"dropout_rate": 1.0}, "dropout_rate"),
        ({"dropout_rate": -0.1}, "dropout_rate"),
    ],
    ids=["zero", "above one", "too few lines", "one line", "not 0 or 1", "nested list", "no file", "all", "negative"],
)
def test_bad_availability_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(fl.FedloomError, match=words):
        fit_linear("fedavg", rounds=1, **settings)


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation and early stopping
# ---------------------------------------------------------------------------------------------------------------------


def classes_data(classes: int, samples: int, seed: int) -> tuple[Array, NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), rng.integers(0, classes, samples - classes)])
    return rng.normal(size=(samples, FEATURES)) + labels[:, None], labels


def classifier(outputs: int, scale: float = 1.0) -> nn.Linear:
    model = nn.Linear(FEATURES, outputs).double()
    weights = scale * np.random.default_rng(2).normal(size=(FEATURES + 1) * outputs)
    nn.utils.vector_to_parameters(torch.from_numpy(weights), model.parameters())
    return model


def scores_of(model: nn.Linear, x: Array) -> Array:
    scores: Array = x @ model.weight.detach().numpy().T + model.bias.detach().numpy()
    return scores


def evaluate(model: nn.Module, metric: Any, loss: Any = None, **held_out: Any) -> dict[str, Any]:
    """The history's line of a round that trains nothing, so that the model measured is the one given."""
    x, y = classes_data(2, 10, seed=0)
    train = y[:, None] if any(np.ndim(part[1]) == 2 for part in held_out.values() if isinstance(part, tuple)) else y
    federation = fl.Federation.from_arrays([(x, train)], **held_out)
    local = fl.Local(lr=0.0, batch_size=None)
    return fl.fit(model, federation, "fedavg", rounds=1, local=local, loss=loss, metric=metric).history[0]


def softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    probabilities: Array = powers / powers.sum(1, keepdims=True)
    return probabilities


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_metrics_agree_with_scikit_learn(classes: int) -> None:
    model = classifier(classes)
    x, y = classes_data(classes, 200, seed=classes)
    scores = scores_of(model, x)
    probabilities = softmax(scores)
    guesses = scores.argmax(1)
    area = (
        sklearn_metrics.roc_auc_score(y, probabilities[:, 1])
        if classes == 2
        else sklearn_metrics.roc_auc_score(y, probabilities, multi_class="ovr")
    )
    expected = {
        "accuracy": sklearn_metrics.accuracy_score(y, guesses),
        "f1": sklearn_metrics.f1_score(y, guesses, average="weighted"),
        "auc": area,
    }
    for metric, value in expected.items():
        row = evaluate(model, metric, test=(x, y))
        assert row[f"test_{metric}"] == pytest.approx(value, rel=1e-12), metric
        assert row["test_loss"] == pytest.approx(sklearn_metrics.log_loss(y, probabilities), rel=1e-9)
    assert len({round(value, 6) for value in expected.values()}) == 3


def test_f1_when_a_class_is_never_guessed_or_never_true() -> None:
    model = classifier(3)
    with torch.no_grad():
        model.bias[1] = -1e6
    x, _ = classes_data(3, 60, seed=8)
    y = np.random.default_rng(0).integers(0, 2, 60)  # class 2 is guessed, but never true
    guesses = scores_of(model, x).argmax(1)
    assert set(guesses.tolist()) == {0, 2}
    row = evaluate(model, "f1", test=(x, y))
    expected = sklearn_metrics.f1_score(y, guesses, average="weighted", zero_division=0)
    assert row["test_f1"] == pytest.approx(expected, rel=1e-12)


def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    flat = nn.functional.binary_cross_entropy_with_logits(
        outputs.reshape(-1), targets.reshape(-1).to(outputs.dtype), reduction="none"
    )
    return flat


@pytest.mark.parametrize("column", [False, True], ids=["labels [n]", "labels [n, 1]"])
@pytest.mark.parametrize("metric", ["accuracy", "f1", "auc"])
def test_metrics_of_a_model_with_one_output(metric: str, column: bool) -> None:
    model = classifier(1)
    x, y = classes_data(2, 100, seed=4)
    with torch.no_grad():
        model.bias.sub_(float(np.median(scores_of(model, x))))
    scores = scores_of(model, x)[:, 0]
    assert 40 < (scores > 0).sum() < 60  # otherwise labels in a column could be compared with the wrong guesses unseen
    expected = {
        "accuracy": lambda: sklearn_metrics.accuracy_score(y, scores > 0),
        "f1": lambda: sklearn_metrics.f1_score(y, scores > 0, average="weighted"),
        "auc": lambda: sklearn_metrics.roc_auc_score(y, scores),
    }[metric]()
    row = evaluate(model, metric, binary_cross_entropy, test=(x, y[:, None] if column else y))
    assert row[f"test_{metric}"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("classes", [2, 3])
def test_auc_counts_ties_by_half(classes: int) -> None:
    model = classifier(classes)
    x, y = classes_data(classes, 150, seed=6)
    x = np.round(x / 2) * 2
    scores = scores_of(model, x)
    assert len(np.unique(scores[:, 0])) < 100
    probabilities = softmax(scores)
    expected = (
        sklearn_metrics.roc_auc_score(y, probabilities[:, 1])
        if classes == 2
        else sklearn_metrics.roc_auc_score(y, probabilities, multi_class="ovr")
    )
    assert evaluate(model, "auc", test=(x, y))["test_auc"] == pytest.approx(expected, rel=1e-12)


def test_auc_of_a_confident_model() -> None:
    """Only the order counts: margins of hundreds must not melt into probabilities of exactly 1."""
    model = classifier(2, scale=100.0)
    x, y = classes_data(2, 200, seed=2)
    scores = scores_of(model, x)
    expected = sklearn_metrics.roc_auc_score(y, scores[:, 1] - scores[:, 0])
    assert evaluate(model, "auc", test=(x, y))["test_auc"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("metric", ["accuracy", "f1", "auc"])
def test_held_out_clients_count_equally(metric: str) -> None:
    """The mean over clients, however many samples each has; a client with one class has no area and does not count."""
    model = classifier(2)
    clients = [classes_data(2, samples, seed=samples) for samples in (7, 40, 13)]
    x, _ = classes_data(2, 5, seed=9)
    clients.append((x, np.ones(5, dtype=np.int64)))
    values = []
    for x, y in clients:
        scores = scores_of(model, x)
        if metric == "accuracy":
            values.append(sklearn_metrics.accuracy_score(y, scores.argmax(1)))
        elif metric == "f1":
            values.append(sklearn_metrics.f1_score(y, scores.argmax(1), average="weighted"))
        elif len(set(y.tolist())) == 2:
            values.append(sklearn_metrics.roc_auc_score(y, scores[:, 1] - scores[:, 0]))
    row = evaluate(model, metric, test=clients, validation=clients[:2])
    assert row[f"test_{metric}"] == pytest.approx(np.mean(values), rel=1e-12)
    assert row[f"validation_{metric}"] == pytest.approx(np.mean(values[:2]), rel=1e-12)
    losses = [sklearn_metrics.log_loss(y, softmax(scores_of(model, x)), labels=[0, 1]) for x, y in clients]
    assert row["test_loss"] == pytest.approx(np.mean(losses), rel=1e-9)


def test_regression_has_a_loss_and_no_accuracy() -> None:
    result = fl.fit(
        linear_model(),
        fl.Federation.from_arrays(CLIENTS, test=CLIENTS[0]),
        rounds=1,
        local=fl.Local(lr=0.0),
        loss=squared_error,
    )
    (row,) = result.history
    x, y = CLIENTS[0]
    expected = np.mean(0.5 * (x @ linear_start()[:-1] + linear_start()[-1] - y) ** 2)
    assert row["test_loss"] == pytest.approx(expected, rel=1e-12)
    assert "test_accuracy" not in row


def test_own_metric_and_eval_every() -> None:
    def largest(outputs: Tensor, targets: Tensor) -> float:
        return float(outputs.max())

    federation = fl.Federation.from_arrays(CLIENTS, test=CLIENTS[0])
    result = fl.fit(linear_model(), federation, rounds=5, loss=squared_error, metric=largest, eval_every=2)
    measured = ["test_largest" in row for row in result.history]
    assert measured == [False, True, False, True, True]  # the last round is always measured
    x, _ = CLIENTS[0]
    params = result.params.numpy()
    assert result.history[-1]["test_largest"] == pytest.approx((x @ params[:-1] + params[-1]).max(), rel=1e-12)


@pytest.mark.parametrize(
    ("last", "measured"), [(1, [3, 6, 7]), (3, [3, 5, 6, 7]), (7, [1, 2, 3, 4, 5, 6, 7]), (99, [1, 2, 3, 4, 5, 6, 7])]
)
def test_each_of_the_last_rounds_is_measured(last: int, measured: list[int], tmp_path: Path) -> None:
    """Also where the run was interrupted among them."""
    federation = fl.Federation.from_arrays(CLIENTS, test=CLIENTS[0])
    settings: dict[str, Any] = {"rounds": 7, "loss": squared_error, "eval_every": 3, "eval_last": last}

    def stop(event: fl.Event) -> Any:
        return fl.STOP if event.round == 6 else None

    fl.fit(linear_model(), federation, checkpoint=tmp_path, callbacks=[stop], **settings)
    result = fl.fit(linear_model(), federation, checkpoint=tmp_path, resume=True, **settings)
    assert [row["round"] for row in result.history if "test_loss" in row] == measured


def scripted(scores: Sequence[float]) -> Callable[[Tensor, Tensor], float]:
    """A metric that says what the script says, one score a call."""
    remaining = iter(scores)

    def script(outputs: Tensor, targets: Tensor) -> float:
        return next(remaining)

    return script


def stop_early(scores: Sequence[float], *, clients: bool = False, **settings: Any) -> tuple[fl.Result, list[Tensor]]:
    """A run with a scripted validation score, and its parameters round by round."""
    path: list[Tensor] = []
    validation = [CLIENTS[0], CLIENTS[1]] if clients else CLIENTS[0]
    result = fl.fit(
        normalised_model(),
        fl.Federation.from_arrays(CLIENTS, validation=validation),
        "fedavg",
        local=STEADY,
        loss=squared_error,
        metric=scripted(scores),
        callbacks=[lambda event: path.append(event.params.clone())],
        **{"rounds": 9, **settings},
    )
    return result, path


def model_params(result: fl.Result) -> Tensor:
    return nn.utils.parameters_to_vector(result.model.parameters()).detach()


def test_patience_ends_the_run_and_the_best_model_is_kept() -> None:
    """The best is round 3; rounds 4 and 5 bring no gain. An equal score is no gain."""
    result, path = stop_early([0.2, 0.1, 0.5, 0.5, 0.4, 0.9], patience=2)
    assert result.stopped == "patience"
    assert [row["validation_script"] for row in result.history] == [0.2, 0.1, 0.5, 0.5, 0.4]
    assert torch.equal(model_params(result), path[2])
    assert torch.equal(result.params, path[4])
    # Parameters and buffers belong together: the buffers, too, are those of round 3.
    third, _ = stop_early([0.0] * 3, rounds=3)
    for name, value in third.model.state_dict().items():
        assert torch.equal(result.model.state_dict()[name], value), name


def test_nothing_is_planned_behind_the_end_of_patience() -> None:
    heard: list[fl.Event] = []
    result = fl.fit(
        linear_model(),
        fl.Federation.from_arrays(CLIENTS, validation=CLIENTS[0]),
        rounds=9,
        local=STEADY,
        loss=squared_error,
        metric=scripted([0.2, 0.1, 0.5, 0.5, 0.4]),
        patience=2,
        callbacks=[heard.append],
    )
    assert result.stopped == "patience"
    assert [(event.round, event.rounds) for event in heard] == [(1, 9), (2, 9), (3, 9), (4, 9), (5, 5)]


def test_gain_starts_the_patience_anew() -> None:
    result, path = stop_early([0.5, 0.4, 0.6, 0.5, 0.7, 0.6, 0.6], patience=2)
    assert len(result.history) == 7
    assert torch.equal(model_params(result), path[4])


def test_run_that_never_tires_still_returns_the_best_model() -> None:
    result, path = stop_early([0.1, 0.9, 0.3, 0.4], rounds=4, patience=10)
    assert result.stopped == "rounds"
    assert torch.equal(model_params(result), path[1])


@pytest.mark.parametrize("scores", [[10.0, 10.9, 11.1, 12.0, 12.1], [-10.0, -9.1, -8.9, -8.1, -8.1]])
def test_least_gain_is_a_share_of_the_best_score(scores: list[float]) -> None:
    """The second score is within 10% of the first; the third is not, and the two after it are within 10% of that."""
    result, path = stop_early(scores, patience=2, min_gain=0.1)
    assert len(result.history) == 5
    assert torch.equal(model_params(result), path[2])


def test_patience_counts_evaluations_not_rounds() -> None:
    result, path = stop_early([0.5, 0.4, 0.3, 0.2], patience=2, eval_every=2)
    assert len(result.history) == 6
    assert torch.equal(model_params(result), path[1])


def test_validation_clients_count_equally_for_patience() -> None:
    """Means 0.5, 0.55, 0.5, 0.4. Weighed by samples (6 and 11) the first would be the best."""
    result, path = stop_early([0.1, 0.9, 0.5, 0.6, 0.3, 0.7, 0.2, 0.6], clients=True, patience=2)
    found = [row["validation_script"] for row in result.history]
    assert found == pytest.approx([0.5, 0.55, 0.5, 0.4], rel=1e-12)
    assert torch.equal(model_params(result), path[1])


def test_undefined_score_is_never_the_best() -> None:
    result, path = stop_early([math.nan, 0.2, 0.8, 0.5], rounds=4, patience=5)
    assert torch.equal(model_params(result), path[2])


def test_regression_stops_by_validation_loss() -> None:
    """Without a metric for float targets, the lowest validation loss is the best."""
    path: list[Tensor] = []
    federation = fl.Federation.from_arrays(CLIENTS[:1], validation=[CLIENTS[1], CLIENTS[3]])
    result = fl.fit(
        linear_model(),
        federation,
        rounds=40,
        local=fl.Local(batch_size=None, epochs=3, lr=0.05),
        loss=squared_error,
        patience=3,
        callbacks=[lambda event: path.append(event.params.clone())],
    )
    losses = [row["validation_loss"] for row in result.history]
    for params, loss in zip(path, losses, strict=True):
        w = params.numpy()
        by_client = [np.mean(0.5 * (x @ w[:-1] + w[-1] - y) ** 2) for x, y in (CLIENTS[1], CLIENTS[3])]
        assert loss == pytest.approx(np.mean(by_client), rel=1e-10)
    assert torch.equal(model_params(result), path[int(np.argmin(losses))])
    if result.stopped == "patience":
        assert len(losses) == int(np.argmin(losses)) + 4


def test_validation_without_patience_returns_the_last_model() -> None:
    result, path = stop_early([0.9, 0.1, 0.2], rounds=3)
    assert torch.equal(model_params(result), path[2])


def test_patience_needs_validation_data() -> None:
    with pytest.raises(fl.ConfigError, match="validation"):
        fit_linear("fedavg", patience=2)


# ---------------------------------------------------------------------------------------------------------------------
# Counting
# ---------------------------------------------------------------------------------------------------------------------


def columns(result: fl.Result, *names: str) -> list[list[Any]]:
    return [[row[name] for row in result.history] for name in names]


def test_counters_of_a_known_run() -> None:
    """4 numbers of 8 bytes each way, and up the number of samples; client sizes 6, 11, 4, 9 in batches of 4, twice."""
    result = fit_linear("fixed(cohorts=[[0, 1, 2], [3]])", rounds=4)
    works, steps, up, down = columns(result, "works", "local_steps", "uplink_bytes", "downlink_bytes")
    first, second = 2 * (2 + 3 + 1), 2 * 3
    assert works == [1, 2, 3, 4]
    assert steps == [first, first + second, 2 * first + second, 2 * first + 2 * second]
    assert down == [32 * asked for asked in (3, 4, 7, 8)]
    assert up == [40 * answered for answered in (3, 4, 7, 8)]
    assert columns(result, "round", "asked", "answered", "diverged") == [[1, 2, 3, 4], [3, 1] * 2, [3, 1] * 2, [0] * 4]
    seconds = columns(result, "seconds")[0]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


def test_equal_weights_need_no_number_of_samples() -> None:
    result = fit_linear("fixed(cohorts=[[0, 1]])+fedavg(weights='equal')", rounds=2)
    assert columns(result, "uplink_bytes", "downlink_bytes") == [[64, 128], [64, 128]]


def test_buffers_and_precision_count_as_bytes() -> None:
    """Batch norm over 3 features: 3 + 3 + 3 + 1 parameters and 3 + 3 statistics of 4 bytes, a counter of 8."""
    result = fit_linear("fixed(cohorts=[[0, 1]])", model=normalised_model().float(), local=STEADY, rounds=1)
    model_bytes = 4 * (10 + 6) + 8
    assert columns(result, "uplink_bytes", "downlink_bytes") == [[2 * (model_bytes + 4)], [2 * model_bytes]]


def test_absent_clients_send_nothing() -> None:
    result = fit_linear(EVERYBODY, rounds=2, availability=TABLE)
    steps_of = {k: 2 * math.ceil(size / 4) for k, size in enumerate(SIZES)}
    first, second = (sum(steps_of[k] for k in cohort) for cohort in ([0, 2, 3], [2]))
    assert columns(result, "works", "local_steps") == [[1, 2], [first, first + second]]
    assert columns(result, "uplink_bytes") == [[3 * 40, 4 * 40]]
    assert columns(result, "downlink_bytes") == [[4 * 32, 8 * 32]]


def test_frame_is_the_history() -> None:
    result = fit_linear("fedavg", rounds=3)
    frame = result.frame()
    assert frame["round"].tolist() == [1, 2, 3]
    assert frame.to_dict("records") == result.history


# ---------------------------------------------------------------------------------------------------------------------
# A method of a third party: SCAFFOLD, from algorithms.md 2.3
# ---------------------------------------------------------------------------------------------------------------------


@fl.register("test-scaffold")
@dataclass(frozen=True)
class Scaffold(Client):
    """c_k is the mean raw gradient of client k's last local run; c is the mean of the c_k over all clients."""

    weights: ClassVar[Weighting | None] = "equal"
    wants: ClassVar[frozenset[str]] = frozenset({"mean_gradient"})
    remembers: ClassVar[Mapping[str, Literal["row", "scalar"]]] = {"c": "row"}

    def init(self, setup: Setup) -> State:
        return {"c": zeros(setup), "clients": scalar(setup.clients)}

    def send(self, state: State) -> State:
        return {"c": state["c"]}

    def begin(self, memory: State, sent: State, info: Info) -> Correction:
        return Correction(drift=sent["c"] - memory["c"])

    def end(self, memory: State, sent: State, info: Info, updates: Updates) -> tuple[State, State]:
        c = updates.extra["mean_gradient"]
        return {"c": c}, {"change": c - memory["c"]}

    def heard(self, state: State, work: Work, updates: Updates) -> State:
        change = updates.up["test-scaffold.client"]["change"]
        return {**state, "c": state["c"] + change.sum(0) / state["clients"]}

    def report(self, state: State) -> Mapping[str, Tensor]:
        return {"c": state["c"]}

    def wire(self, space: Space) -> Wire:
        return Wire(down=space.size, up=space.size)


@dataclass
class ControlVariates:
    """A callback that adds up what each client sent: its c_k, which the library itself never shows."""

    c_k: Tensor  # [N, P]
    path: list[tuple[Tensor, Tensor, Tensor]]  # params, the server's c, c_k

    def __call__(self, event: fl.Event) -> None:
        if event.updates is not None:
            self.c_k[event.updates.clients] += event.updates.up["test-scaffold.client"]["change"]
        c = torch.tensor(event.metrics["test-scaffold.c"], dtype=torch.float64)
        self.path.append((event.params.clone(), c, self.c_k.clone()))


def controlled(cohorts: Sequence[Sequence[int]], **settings: Any) -> tuple[fl.Result, ControlVariates]:
    variates = ControlVariates(torch.zeros(len(CLIENTS), FEATURES + 1, dtype=torch.float64), [])
    method = f"test-scaffold+fixed(cohorts={[list(cohort) for cohort in cohorts]})"
    return fit_linear(method, callbacks=[variates], **settings), variates


SCAFFOLD_COHORTS = [[0, 1], [2], [3, 0, 1], [2, 1, 0, 3]]


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": None, "lr": 0.02, "epochs": 3},
        {"batch_size": 4, "lr": 0.02, "epochs": 2},
        {"batch_size": 4, "lr": 0.02, "steps": 5, "last_batch": "bootstrap"},
    ],
    ids=["full batch", "minibatches", "steps"],
)
def test_third_party_scaffold_agrees_with_option_two(settings: dict[str, Any]) -> None:
    local = fl.Local(**settings)
    _, variates = controlled(SCAFFOLD_COHORTS, rounds=20, local=local)
    expected = reference.scaffold(
        reference.Linear(), linear_start(), CLIENTS, SCAFFOLD_COHORTS, 20, reference.Local(**settings)
    )
    for (params, c, c_k), state in zip(variates.path, expected, strict=True):
        assert_close(params, state.params, 1e-9)
        assert_close(c, state.c, 1e-9)
        assert_close(c_k, state.c_k, 1e-9)
        torch.testing.assert_close(c, c_k.mean(0), rtol=1e-12, atol=1e-12)
    assert float(variates.path[-1][1].norm()) > 1e-3
    plain = fit_linear(f"fedavg(weights='equal')+fixed(cohorts={SCAFFOLD_COHORTS})", rounds=20, local=local)
    assert not np.allclose(plain.params.numpy(), expected[-1].params, rtol=1e-4)


def test_client_drawn_twice_trains_once_where_clients_remember() -> None:
    """It counts twice in the average, and once in c, or c would no longer be the mean of the c_k."""
    events: list[fl.Event] = []
    variates = ControlVariates(torch.zeros(len(CLIENTS), FEATURES + 1, dtype=torch.float64), [])
    fit_linear("test-scaffold+fixed(cohorts=[[1, 0, 1]])", rounds=3, callbacks=[events.append, variates])
    for event, (_, c, c_k) in zip(events, variates.path, strict=True):
        assert event.updates is not None
        assert event.updates.clients.tolist() == [1, 0]
        torch.testing.assert_close(event.updates.weights, torch.tensor([2 / 3, 1 / 3], dtype=torch.float64))
        torch.testing.assert_close(c, c_k.mean(0), rtol=1e-12, atol=1e-12)


def test_memory_of_a_diverged_client_is_not_committed() -> None:
    """Client 1 diverges in round 2. What it knew from round 1 is what it starts round 3 with."""
    ill = False

    def moody(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = squared_error(outputs, targets)
        return losses * torch.nan if ill and len(targets) == SIZES[1] else losses

    def listen(event: fl.Event) -> None:
        nonlocal ill
        ill = event.round == 1

    local = fl.Local(batch_size=None, epochs=2, lr=0.02)
    cohorts = "fixed(cohorts=[[0, 1], [1, 2], [1, 3]])"
    ailing = fit_linear(f"test-scaffold+{cohorts}", rounds=3, local=local, loss=moody, callbacks=[listen])
    assert [row["diverged"] for row in ailing.history] == [0, 1, 0]
    absent = fit_linear("test-scaffold+fixed(cohorts=[[0, 1], [2], [1, 3]])", rounds=3, local=local)
    assert torch.equal(ailing.params, absent.params)
    assert ailing.history[-1]["test-scaffold.c"] == absent.history[-1]["test-scaffold.c"]


def test_third_party_stage_hears_a_work_that_nobody_answered() -> None:
    """Updates of no clients hold tensors of no rows, as after a round in which everybody diverged."""
    settings: dict[str, Any] = {"rounds": 3, "local": LOCAL}
    result, variates = controlled([[0, 1]], availability=lambda client, work: work != 1, **settings)
    assert [row["answered"] for row in result.history] == [2, 0, 2]
    assert torch.equal(variates.path[0][0], variates.path[1][0])
    assert torch.equal(variates.path[0][1], variates.path[1][1])


def test_third_party_stage_counts_its_bytes() -> None:
    result, _ = controlled([[0, 1]], rounds=1)
    assert columns(result, "uplink_bytes", "downlink_bytes") == [[2 * 2 * 32], [2 * 2 * 32]]


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------------------------------


class InterruptionError(Exception):
    """What ends a run in the middle."""


def interrupt_after(rounds: int) -> Callback:
    def interrupt(event: fl.Event) -> None:
        if event.round == rounds:
            raise InterruptionError

    return interrupt


RESUMED = [
    "fedavg",
    "fedprox(mu=0.5)+fedadam+exponential(decay=0.9)",
    "fedavgm(lr=0.3)",
    "fedyogi(bias_correction=True)",
    "fedadagrad(beta1=0.5)",
    "test-scaffold",
    "test-scaffold+fedadam+exponential(decay=0.9)",
]


def resumable(method: str, *, rounds: int = 9, **settings: Any) -> fl.Result:
    """Two of four clients a round, dropout, batch norm, an evaluation every other round, absent clients."""
    return fl.fit(
        dropout_model(),
        fl.Federation.from_arrays(CLIENTS, test=CLIENTS[0]),
        method,
        rounds=rounds,
        clients_per_round=2,
        local=STEADY,
        loss=squared_error,
        eval_every=2,
        availability=lambda client, work: (client + work) % 5 != 0,
        **settings,
    )


@pytest.mark.parametrize("method", RESUMED)
def test_resumed_run_equals_the_uninterrupted_one(method: str, tmp_path: Path) -> None:
    whole = resumable(method)
    # Round 7 is lost with the interruption: the last checkpoint is that of round 6.
    with pytest.raises(InterruptionError):
        resumable(method, checkpoint=tmp_path, checkpoint_every=3, callbacks=[interrupt_after(7)])
    heard: list[int] = []
    resumed = resumable(
        method,
        checkpoint=tmp_path,
        checkpoint_every=3,
        resume=True,
        callbacks=[lambda event: heard.append(event.round)],
    )
    assert heard == [7, 8, 9]
    assert_same_run(whole, resumed)


@pytest.mark.parametrize("method", ["fedadam", "test-scaffold"])
def test_resumed_run_can_be_longer(method: str, tmp_path: Path) -> None:
    resumable(method, rounds=4, checkpoint=tmp_path)
    assert_same_run(resumable(method), resumable(method, checkpoint=tmp_path, resume=True))


def test_resume_of_a_finished_run_trains_nothing(tmp_path: Path) -> None:
    whole = resumable("test-scaffold", checkpoint=tmp_path)
    heard: list[int] = []
    again = resumable(
        "test-scaffold", checkpoint=tmp_path, resume=True, callbacks=[lambda event: heard.append(event.round)]
    )
    assert heard == []
    assert_same_run(whole, again)


def test_resume_without_a_checkpoint_starts_afresh(tmp_path: Path) -> None:
    assert_same_run(resumable("fedavg"), resumable("fedavg", checkpoint=tmp_path / "new", resume=True))
    with pytest.raises(fl.ConfigError, match="checkpoint"):
        resumable("fedavg", resume=True)


@pytest.mark.parametrize("method", ["fedavg", "test-scaffold"])
def test_interrupt_from_the_keyboard_saves_the_last_whole_round(method: str, tmp_path: Path) -> None:
    """It comes during the evaluation of round 6: the clients remember Work 5 already, the server has not seen it."""
    calls = 0

    def tripping(outputs: Tensor, targets: Tensor) -> float:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return 0.5

    def steady(outputs: Tensor, targets: Tensor) -> float:
        return 0.5

    tripping.__name__ = "steady"
    with pytest.raises(KeyboardInterrupt):
        resumable(method, checkpoint=tmp_path, checkpoint_every=100, metric=tripping)
    heard: list[int] = []
    resumed = resumable(
        method,
        checkpoint=tmp_path,
        resume=True,
        metric=steady,
        callbacks=[lambda event: heard.append(event.round)],
    )
    assert heard == [6, 7, 8, 9]
    assert_same_run(resumable(method, metric=steady), resumed)


def test_damaged_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InterruptionError):
        resumable("test-scaffold", checkpoint=tmp_path, checkpoint_every=2, callbacks=[interrupt_after(7)])
    newest = max(tmp_path.glob("round-*"))
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-10])
    heard: list[int] = []
    resumed = resumable(
        "test-scaffold",
        checkpoint=tmp_path,
        checkpoint_every=2,
        resume=True,
        callbacks=[lambda event: heard.append(event.round)],
    )
    assert heard == [5, 6, 7, 8, 9]
    assert "damaged" in caplog.text
    assert_same_run(resumable("test-scaffold"), resumed)


@pytest.mark.parametrize(
    "change",
    [{"method": "fedadam"}, {"seed": 1}, {"local": fl.Local(lr=0.5)}, {"clients_per_round": 3}],
    ids=["method", "seed", "local", "cohort"],
)
def test_checkpoint_of_another_run_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"method": "fedavg", "rounds": 2, "checkpoint": tmp_path, "clients_per_round": 2}
    fit_linear(**settings)
    with pytest.raises(fl.RunError, match="another run"):
        fit_linear(**{**settings, **change, "resume": True})


def test_fresh_run_does_not_touch_the_checkpoints_of_another(tmp_path: Path) -> None:
    """Without `resume` a folder that holds checkpoints is refused, and the run that they belong to can still go on."""
    settings: dict[str, Any] = {"checkpoint": tmp_path, "checkpoint_every": 2}
    with pytest.raises(InterruptionError):
        resumable("fedavg", callbacks=[interrupt_after(7)], **settings)
    for seed in (0, 1):
        with pytest.raises(fl.RunError, match="resume"):
            resumable("fedavg", rounds=3, seed=seed, **settings)
    heard: list[int] = []
    resumed = resumable("fedavg", resume=True, callbacks=[lambda event: heard.append(event.round)], **settings)
    assert heard == [7, 8, 9]
    assert_same_run(resumable("fedavg"), resumed)


def test_interrupt_in_the_first_round_can_be_resumed(tmp_path: Path) -> None:
    ready = False

    def impatient(outputs: Tensor, targets: Tensor) -> Tensor:
        if ready:
            raise KeyboardInterrupt
        return squared_error(outputs, targets)

    def begin(client: int, work: int) -> bool:
        nonlocal ready
        ready = True  # who answers is asked in the first round, after all checks of the settings
        return True

    impatient.__qualname__ = squared_error.__qualname__  # a checkpoint knows its loss by name
    with pytest.raises(KeyboardInterrupt):
        fit_linear("fedavg", loss=impatient, availability=begin, checkpoint=tmp_path)
    resumed = fit_linear("fedavg", availability=begin, checkpoint=tmp_path, resume=True)
    assert_same_run(fit_linear("fedavg"), resumed)


def patient(rounds: int, scores: Sequence[float], **settings: Any) -> fl.Result:
    """As `stop_early`; a resumed run is given the scores of the rounds that are left."""
    return stop_early(scores, rounds=rounds, patience=2, **settings)[0]


def test_patience_survives_a_resume(tmp_path: Path) -> None:
    """Round 2 is the best; round 3 waits once before the break and round 4 once after it."""
    scores = [0.1, 0.8, 0.3, 0.2, 0.9]
    whole = patient(9, scores)
    assert len(whole.history) == 4
    patient(3, scores[:3], checkpoint=tmp_path)
    assert_same_run(whole, patient(9, scores[3:], checkpoint=tmp_path, resume=True))


def test_resume_of_a_run_that_lost_patience_trains_nothing(tmp_path: Path) -> None:
    scores = [0.8, 0.3, 0.2]
    whole = patient(9, scores, checkpoint=tmp_path)
    assert len(whole.history) == 3
    again = patient(9, [0.9] * 6, checkpoint=tmp_path, resume=True)
    assert [row["round"] for row in again.history] == [1, 2, 3]
    assert_same_run(whole, again)


class Anchored(nn.Module):
    """A linear model with a buffer, of any name a user may choose."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 1)
        self.register_buffer(name, torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x)
        return outputs


@pytest.mark.parametrize("name", ["anchor", "theta", "best"])
def test_best_model_survives_a_resume_whatever_its_buffers_are_called(name: str, tmp_path: Path) -> None:
    def run(rounds: int, scores: Sequence[float], **settings: Any) -> fl.Result:
        model = Anchored(name).double()
        nn.utils.vector_to_parameters(torch.from_numpy(linear_start()), model.parameters())
        federation = fl.Federation.from_arrays(CLIENTS, validation=CLIENTS[0])
        metric = scripted(scores)
        return fl.fit(
            model, federation, rounds=rounds, loss=squared_error, metric=metric, patience=9, seed=2, **settings
        )

    scores = [0.5, 0.9, 0.1, 0.2]
    whole = run(4, scores)
    run(3, scores[:3], checkpoint=tmp_path)
    assert_same_run(whole, run(4, scores[3:], checkpoint=tmp_path, resume=True))


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------


def test_frozen_parameters_stay() -> None:
    """A frozen first layer only changes what the second one sees: the reference on those features must agree."""
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)).double()
    first, second = model[0], model[1]
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    nn.utils.vector_to_parameters(torch.from_numpy(linear_start()), second.parameters())
    first.requires_grad_(False)
    result = fit_linear("fedprox(mu=0.5)+fedavgm(lr=0.4)+fixed(cohorts=[[0, 1], [2]])", model=model, rounds=8)
    assert result.params.shape == (FEATURES + 1,)
    trained = result.model.get_parameter("0.weight"), result.model.get_parameter("0.bias")
    assert torch.equal(trained[0], first.weight)
    assert torch.equal(trained[1], first.bias)
    assert not trained[0].requires_grad
    assert result.model.get_parameter("1.weight").requires_grad

    weight, bias = first.weight.numpy(), first.bias.numpy()
    features = [(x @ weight.T + bias, y) for x, y in CLIENTS]
    rule = reference.Rule(server=lambda: reference.Momentum(lr=0.4), pull=0.5)
    local = reference.Local(batch_size=4, epochs=2, lr=0.02)
    expected = reference.federate(reference.Linear(), linear_start(), features, [[0, 1], [2]], 8, local, rule)
    assert_close(result.params, expected[-1].params, 1e-10)
    assert result.history[-1]["downlink_bytes"] == 8 * (FEATURES + 1) * (2 + 1) * 4


class Tied(nn.Module):
    """One matrix, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES, bias=False)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.second(torch.tanh(self.first(x)))
        return outputs.sum(1, keepdim=True)


def test_tied_parameters_count_once_and_stay_tied() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Tied().double()
    by_hand = copy.deepcopy(model)
    result = fit_linear("fixed(cohorts=[[1]])", model=model, rounds=5, local=fl.Local(batch_size=None, lr=0.01))
    assert result.params.shape == (FEATURES * FEATURES + FEATURES,)
    assert result.model.get_parameter("first.weight") is result.model.get_submodule("second").weight

    x, y = (torch.from_numpy(part) for part in CLIENTS[1])
    for _ in range(5):
        gradients = torch.autograd.grad(squared_error(by_hand(x), y).mean(), list(by_hand.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(by_hand.parameters(), gradients, strict=True):
                parameter.sub_(0.01 * gradient)
    expected = nn.utils.parameters_to_vector(by_hand.parameters()).detach()
    torch.testing.assert_close(result.params, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model_params(result), expected, rtol=1e-12, atol=1e-12)
    assert not torch.equal(expected, nn.utils.parameters_to_vector(model.parameters()).detach())


@pytest.mark.parametrize("training", [True, False])
def test_given_model_is_not_changed(training: bool, tmp_path: Path) -> None:
    model = dropout_model().train(training)
    model[0].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    tensors = [*model.parameters(), *model.buffers()]
    result = fl.fit(
        model,
        fl.Federation.from_arrays(CLIENTS, test=CLIENTS[0], validation=CLIENTS[1]),
        "fedadam",
        rounds=3,
        local=STEADY,
        loss=squared_error,
        patience=2,
        checkpoint=tmp_path,
    )
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(one is other for one, other in zip([*model.parameters(), *model.buffers()], tensors, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True, True, True]
    assert all(module.training is training for module in model.modules())
    own = {tensor.data_ptr() for tensor in tensors}
    assert own.isdisjoint(tensor.data_ptr() for tensor in (*result.model.parameters(), *result.model.buffers()))
    assert not torch.equal(model_params(result), nn.utils.parameters_to_vector(model.parameters()).detach())


def test_what_a_notebook_shows_is_one_line() -> None:
    """However many rounds, samples and clients there were."""
    data = fl.load("digits", partition="iid", clients=40, validation=2)
    result = fl.fit(fl.model("logistic", data), data, rounds=30, clients_per_round=2, eval_every=7)
    shown = "Federation(digits, iid: clients 40, samples 1369 of shape (64,), classes 10, test 360, validation 68)"
    assert repr(data) == shown
    assert repr(data.validation) == "Holdout(clients 2, samples 68 of shape (64,))"
    last = result.history[-1]
    assert repr(result).startswith(f"Result(rounds 30, test_loss {last['test_loss']:.4g}, test_accuracy")
    assert len(repr(result)) < 200


def test_result_does_not_share_memory_with_the_given_data() -> None:
    """Neither the clients' arrays nor torch's own generator feel a run."""
    clients = [(x.copy(), y.copy()) for x, y in CLIENTS]
    generator = torch.random.get_rng_state()
    fit_linear("fedavg", model=dropout_model(), clients=clients, local=STEADY)
    assert torch.equal(torch.random.get_rng_state(), generator)
    for (x, y), (was_x, was_y) in zip(clients, CLIENTS, strict=True):
        assert np.array_equal(x, was_x)
        assert np.array_equal(y, was_y)


def test_an_interrupt_between_state_and_history(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whenever Ctrl-C comes, a resumed run has a line for every round."""
    from fedloom.population import Population

    settle, calls = Population.settle, list[int]()

    def tripping(self: Population) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        settle(self)

    monkeypatch.setattr(Population, "settle", tripping)
    data = fl.Federation.from_arrays([(torch.randn(4, 3), [0, 1, 0, 1]), (torch.randn(4, 3), [1, 1, 0, 0])])
    model = nn.Linear(3, 2)
    with pytest.raises(KeyboardInterrupt):
        fl.fit(model, data, "adabest", rounds=5, checkpoint=tmp_path)
    result = fl.fit(model, data, "adabest", rounds=5, checkpoint=tmp_path, resume=True)
    assert [row["round"] for row in result.history] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("precision", "products", "convolved"), [("auto", "high", True), ("fp32", "highest", False)])
def test_precision_covers_products_and_convolutions(precision: Any, products: str, convolved: bool) -> None:
    """During a run, and no longer."""

    def settings() -> tuple[str, bool]:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    before = settings()
    seen: list[tuple[str, bool]] = []
    data = fl.Federation.from_tensor(torch.randn(8, 3), torch.arange(8) % 2, [0, 4, 8])
    fl.fit(nn.Linear(3, 2), data, rounds=1, precision=precision, callbacks=[lambda _: seen.append(settings())])
    assert seen == [(products, convolved)]
    assert settings() == before
