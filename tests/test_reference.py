"""Whole runs against the NumPy reference: every method, every local optimiser, every way of cutting batches."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from tests import reference
from tests.reference import Adaptive, Array, Averaging, Momentum, NormalisedLinear, Rule, State

ROUNDS = 12  # every cohort at least twice
FEATURES = 4
SIZES = (5, 12, 23, 9, 16)
CLIENTS = reference.make_clients(SIZES, FEATURES)
# Unequal cohorts, one of them a single client, and one in which a client stands twice.
COHORTS = [[0, 1, 2], [3, 1], [4], [2, 0, 2, 4], [1, 0, 3, 4, 2]]
EVERYBODY = [[0, 1, 2, 3, 4]]

FEDADAM_PARAMETERS: dict[str, Any] = {"lr": 0.05, "beta1": 0.5, "beta2": 0.9, "tau": 0.01}

RULES: dict[str, Rule] = {
    "fedavg": Rule(),
    "fedavg(lr=0.5)": Rule(server=partial(Averaging, lr=0.5)),
    "fedavg(weights='equal')": Rule(weights="equal"),
    "fedavg(lr=1.5, weights='equal')": Rule(server=partial(Averaging, lr=1.5), weights="equal"),
    "fedprox": Rule(pull=0.01),
    "fedprox(mu=2.0)": Rule(pull=2.0),
    "fedavgm": Rule(server=Momentum),
    "fedavgm(lr=0.3, momentum=0.6)": Rule(server=partial(Momentum, lr=0.3, beta=0.6)),
    "fedadam": Rule(server=partial(Adaptive, "adam")),
    "fedadam(lr=0.05, beta1=0.5, beta2=0.9, tau=0.01)": Rule(server=partial(Adaptive, "adam", **FEDADAM_PARAMETERS)),
    "fedadam(beta2=0.999, tau=1e-8, bias_correction=True, v_init=0.0)": Rule(
        server=partial(Adaptive, "adam", beta2=0.999, tau=1e-8, bias_correction=True, v_init=0.0)
    ),
    "fedyogi": Rule(server=partial(Adaptive, "yogi")),
    "fedyogi(lr=0.05, beta1=0.5, beta2=0.9, tau=0.01)": Rule(server=partial(Adaptive, "yogi", **FEDADAM_PARAMETERS)),
    "fedyogi(bias_correction=True, v_init=0.5)": Rule(
        server=partial(Adaptive, "yogi", bias_correction=True, v_init=0.5)
    ),
    "fedadagrad": Rule(server=partial(Adaptive, "adagrad", beta1=0.0)),
    "fedadagrad(lr=0.2, beta1=0.9, tau=0.1)": Rule(server=partial(Adaptive, "adagrad", lr=0.2, beta1=0.9, tau=0.1)),
    "fedadagrad(beta1=0.7, bias_correction=True, v_init=0.0)": Rule(
        server=partial(Adaptive, "adagrad", beta1=0.7, bias_correction=True, v_init=0.0)
    ),
    "exponential": Rule(rate=reference.exponential(0.998)),
    "exponential(decay=0.8)": Rule(rate=reference.exponential(0.8)),
    "linear": Rule(rate=reference.linear(0.06)),
    "linear(warmup=0.4)": Rule(rate=reference.linear(0.4)),
    "linear(warmup=0.0)": Rule(rate=reference.linear(0.0)),
    "fedprox(mu=0.5)+fedadam(lr=0.03)+exponential(decay=0.9)": Rule(
        server=partial(Adaptive, "adam", lr=0.03), pull=0.5, rate=reference.exponential(0.9)
    ),
    "linear(warmup=0.3)+fedavgm(lr=0.4)+fedavg(weights='equal')+fedprox(mu=1.0)": Rule(
        server=partial(Momentum, lr=0.4), pull=1.0, rate=reference.linear(0.3), weights="equal"
    ),
    "fedyogi(lr=0.02)+fedprox(mu=0.1)+fedavg(weights='equal')": Rule(
        server=partial(Adaptive, "yogi", lr=0.02), pull=0.1, weights="equal"
    ),
}

LOCALS: dict[str, dict[str, Any]] = {
    "full batch": {"batch_size": None, "lr": 0.02},
    "full batch, 3 epochs": {"batch_size": None, "epochs": 3, "lr": 0.02},
    "full batch, 4 steps": {"batch_size": None, "steps": 4, "lr": 0.02},
    "minibatches": {"batch_size": 4, "lr": 0.02},
    "3 epochs": {"batch_size": 4, "epochs": 3, "lr": 0.02},
    "drop": {"batch_size": 4, "epochs": 2, "last_batch": "drop", "lr": 0.02},
    "bootstrap": {"batch_size": 4, "epochs": 2, "last_batch": "bootstrap", "lr": 0.02},
    "bootstrap above the size": {"batch_size": 10, "epochs": 2, "last_batch": "bootstrap", "lr": 0.02},
    "in order": {"batch_size": 4, "epochs": 2, "lr": 0.02, "shuffle": False},
    "in order, bootstrap": {"batch_size": 4, "epochs": 2, "last_batch": "bootstrap", "lr": 0.02, "shuffle": False},
    "7 steps in order, drop": {"batch_size": 4, "steps": 7, "last_batch": "drop", "lr": 0.02, "shuffle": False},
    "7 steps": {"batch_size": 4, "steps": 7, "lr": 0.02},
    "7 steps, drop": {"batch_size": 4, "steps": 7, "last_batch": "drop", "lr": 0.02},
    "7 steps, bootstrap": {"batch_size": 4, "steps": 7, "last_batch": "bootstrap", "lr": 0.02},
    "momentum": {"batch_size": 4, "epochs": 2, "lr": 0.01, "momentum": 0.7},
    "nesterov": {"batch_size": 4, "epochs": 2, "lr": 0.01, "momentum": 0.7, "nesterov": True},
    "weight decay": {"batch_size": 4, "epochs": 2, "lr": 0.02, "weight_decay": 0.1},
    "clip": {"batch_size": 4, "epochs": 2, "lr": 0.02, "clip_norm": 1.5},
    "clip, decay and momentum": {
        "batch_size": 4,
        "epochs": 2,
        "lr": 0.01,
        "clip_norm": 1.5,
        "weight_decay": 0.1,
        "momentum": 0.9,
    },
    "adam": {"batch_size": 4, "epochs": 2, "lr": 0.02, "optimizer": "adam"},
    "adam, decay and clip": {
        "batch_size": 4,
        "epochs": 2,
        "lr": 0.02,
        "optimizer": "adam",
        "weight_decay": 0.1,
        "clip_norm": 1.5,
    },
    "adamw": {"batch_size": 4, "epochs": 2, "lr": 0.02, "optimizer": "adamw", "weight_decay": 0.5},
}


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs.squeeze(1) - targets) ** 2


def linear_start() -> Array:
    """Parameters that float32 holds exactly."""
    return np.random.default_rng(11).normal(size=FEATURES + 1).astype(np.float32).astype(np.float64)


def linear_model(dtype: torch.dtype = torch.float64) -> nn.Linear:
    model = nn.Linear(FEATURES, 1).to(dtype)
    start = torch.from_numpy(linear_start()).to(dtype)
    with torch.no_grad():
        model.weight.copy_(start[:-1].reshape(1, FEATURES))
        model.bias.copy_(start[-1:])
    return model


def with_cohorts(method: str, cohorts: Sequence[Sequence[int]]) -> str:
    return f"{method}+fixed(cohorts={[list(cohort) for cohort in cohorts]})"


def relative_error(found: Tensor, expected: Array) -> float:
    assert found.shape == expected.shape
    difference: Array = found.double().numpy() - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def fitted(
    model: nn.Module, method: str, local: Mapping[str, Any], *, rounds: int = ROUNDS, seed: int = 0
) -> tuple[fl.Result, list[Tensor]]:
    """A run, and the parameters after each of its rounds."""
    path: list[Tensor] = []
    result = fl.fit(
        model,
        fl.Federation.from_arrays(CLIENTS),
        method,
        rounds=rounds,
        local=fl.Local(**local),
        loss=squared_error,
        engine="loop",
        device="cpu",
        seed=seed,
        callbacks=[lambda event: path.append(event.params.clone())],
    )
    return result, path


def expected_run(
    rule: Rule, local: Mapping[str, Any], cohorts: Sequence[Sequence[int]], rounds: int = ROUNDS, seed: int = 0
) -> list[State]:
    settings = reference.Local(**local)
    return reference.federate(reference.Linear(), linear_start(), CLIENTS, cohorts, rounds, settings, rule, seed=seed)


def compare(
    method: str,
    rule: Rule,
    local: Mapping[str, Any],
    *,
    cohorts: Sequence[Sequence[int]] = COHORTS,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-9,
    seed: int = 0,
) -> None:
    """Every round's parameters and training loss, not the last ones only."""
    result, path = fitted(linear_model(dtype), with_cohorts(method, cohorts), local, seed=seed)
    expected = expected_run(rule, local, cohorts, seed=seed)
    assert len(path) == len(result.history) == ROUNDS
    for params, row, state in zip(path, result.history, expected, strict=True):
        assert relative_error(params, state.params) < tolerance, f"round {row['round']}"
        assert row["train_loss"] == pytest.approx(state.train_loss, rel=tolerance)
    assert relative_error(result.params, expected[-1].params) < tolerance
    final = nn.utils.parameters_to_vector(result.model.parameters()).detach()
    assert relative_error(final, expected[-1].params) < tolerance


@pytest.mark.parametrize("local", ["full batch", "3 epochs"])
@pytest.mark.parametrize("method", RULES)
def test_methods(method: str, local: str) -> None:
    compare(method, RULES[method], LOCALS[local])


@pytest.mark.parametrize("local", LOCALS)
def test_local_settings(local: str) -> None:
    compare("fedavg", RULES["fedavg"], LOCALS[local])


@pytest.mark.parametrize("local", LOCALS)
def test_local_settings_under_a_union(local: str) -> None:
    """The pull stands before the clip, the decay and the momentum; the rate changes from step to step."""
    method = "linear(warmup=0.3)+fedavgm(lr=0.4)+fedavg(weights='equal')+fedprox(mu=1.0)"
    compare(method, RULES[method], LOCALS[local])


@pytest.mark.parametrize("weights", ["samples", "equal"])
@pytest.mark.parametrize("local", ["full batch", "full batch, 3 epochs", "minibatches"])
def test_everybody_takes_part(local: str, weights: str) -> None:
    method = f"fedavg(weights='{weights}')"
    rule = Rule(weights="equal") if weights == "equal" else Rule()
    compare(method, rule, LOCALS[local], cohorts=EVERYBODY)


def test_seed_is_part_of_the_key() -> None:
    compare("fedavg", Rule(), LOCALS["bootstrap"], seed=2**40 + 3)


@pytest.mark.parametrize("local", ["full batch", "3 epochs", "clip, decay and momentum"])
@pytest.mark.parametrize(
    "method",
    [
        "fedavg",
        "fedprox(mu=2.0)",
        "fedavgm(lr=0.3, momentum=0.6)",
        "fedadam",
        "fedyogi",
        "fedadagrad",
        "exponential(decay=0.8)",
        "linear(warmup=0.4)",
    ],
)
def test_single_precision(method: str, local: str) -> None:
    compare(method, RULES[method], LOCALS[local], dtype=torch.float32, tolerance=1e-5)


def test_cases_are_told_apart() -> None:
    """No two rules, and no two local settings, lead to the same place: otherwise a comparison could not fail."""
    by_rule = {method: expected_run(rule, LOCALS["3 epochs"], COHORTS)[-1].params for method, rule in RULES.items()}
    by_local = {name: expected_run(Rule(), settings, COHORTS)[-1].params for name, settings in LOCALS.items()}
    for ends in (by_rule, by_local):
        for one, other in combinations(ends, 2):
            difference = np.linalg.norm(ends[one] - ends[other]) / np.linalg.norm(ends[one])
            assert difference > 1e-5, f"{one} and {other}"


# ---------------------------------------------------------------------------------------------------------------------
# Batch norm: parameters go through the server's rule, buffers do not
# ---------------------------------------------------------------------------------------------------------------------


def normalised_model(hidden: int) -> nn.Sequential:
    """Batch norm and a linear layer, after another linear layer if `hidden` is not 0; no parameter at its default."""
    width = hidden or FEATURES
    before: list[nn.Module] = [nn.Linear(FEATURES, hidden, bias=False)] if hidden else []
    model = nn.Sequential(*before, nn.BatchNorm1d(width), nn.Linear(width, 1)).double()
    start = np.random.default_rng(5).normal(size=sum(p.numel() for p in model.parameters()))
    nn.utils.vector_to_parameters(torch.from_numpy(start), model.parameters())
    return model


def buffers_of(model: nn.Module) -> dict[str, Array]:
    return {name.rpartition(".")[2]: buffer.numpy().astype(np.float64) for name, buffer in model.named_buffers()}


NORMALISED_RULES = [
    "fedavg",
    "fedavg(weights='equal')",
    "fedavg(lr=0.5)",
    "fedavgm(lr=0.3, momentum=0.6)",
    "fedadam",
    "fedprox(mu=0.5)+fedadam(lr=0.03)+exponential(decay=0.9)",
]


@pytest.mark.parametrize("rounds", [1, 2, ROUNDS])
@pytest.mark.parametrize("hidden", [0, 3])
@pytest.mark.parametrize("method", NORMALISED_RULES)
def test_batch_norm(method: str, hidden: int, rounds: int) -> None:
    """After one round, two and many: buffers are read from the result, which only the last round leaves behind."""
    local: dict[str, Any] = {"batch_size": 5, "epochs": 2, "last_batch": "drop", "lr": 0.02, "momentum": 0.5}
    model = normalised_model(hidden)
    start = nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()
    result, path = fitted(model, with_cohorts(method, COHORTS), local, rounds=rounds)

    by_hand = NormalisedLinear(FEATURES, hidden)
    expected = reference.federate(
        by_hand,
        start,
        CLIENTS,
        COHORTS,
        rounds,
        reference.Local(**local),
        RULES[method],
        buffers=by_hand.start_buffers(),
    )
    for params, row, state in zip(path, result.history, expected, strict=True):
        assert relative_error(params, state.params) < 1e-9, f"round {row['round']}"
        assert row["train_loss"] == pytest.approx(state.train_loss, rel=1e-9)
    found = buffers_of(result.model)
    assert found.keys() == expected[-1].buffers.keys()
    for name, value in expected[-1].buffers.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12, err_msg=name)
    final = nn.utils.parameters_to_vector(result.model.parameters()).detach()
    assert relative_error(final, expected[-1].params) < 1e-9


def test_batch_norm_counter_is_the_largest() -> None:
    """Client 2 takes 4 steps and client 0 one: the counter follows the longer run and stays whole."""
    local = {"batch_size": 5, "last_batch": "drop", "lr": 0.02}
    result, _ = fitted(normalised_model(0), with_cohorts("fedavg", [[0, 2]]), local, rounds=3)
    counter = result.model.get_buffer("0.num_batches_tracked")
    assert counter.dtype == torch.int64
    assert int(counter) == 12


@pytest.mark.parametrize("hidden", [0, 3])
def test_reference_gradients(hidden: int) -> None:
    """The reference's own backward passes against finite differences: it is the judge, so it is judged first."""
    x, y = CLIENTS[1]
    models: list[tuple[reference.Model, int, reference.Buffers]] = [(reference.Linear(), FEATURES + 1, {})]
    by_hand = NormalisedLinear(FEATURES, hidden)
    models.append((by_hand, hidden * FEATURES + 3 * by_hand.width + 1, by_hand.start_buffers()))
    for model, size, buffers in models:
        params = np.random.default_rng(1).normal(size=size)
        _, gradient, _ = model.forward_backward(params, buffers, x, y)
        for i in range(size):
            nudge = np.zeros(size)
            nudge[i] = 1e-5
            above, below = (model.forward_backward(params + s * nudge, buffers, x, y)[0].mean() for s in (1, -1))
            assert gradient[i] == pytest.approx((above - below) / 2e-5, rel=1e-6, abs=1e-8)
