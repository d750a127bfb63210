"""DGT and Krum: whole runs against the equations, the laws that the papers claim, and what happens at the edges.

The first part is also the ground that the neighbouring files stand on: a problem of several tensors and layers, and a
model whose updates are given.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.stages import State
from fedloom.training import Training
from tests import reference
from tests.methods import server_reference
from tests.methods.server_reference import Dgt, Krum, Recipe, Seen, TwoLayers, cosine, krum_scores, plain_answers
from tests.reference import Array, Client

ROUNDS = 15  # every cohort at least twice
TOLERANCE = 1e-9
MODEL = TwoLayers(features=3, hidden=3)
SIZES = (5, 12, 23, 9, 16, 7)
CLIENTS = reference.make_clients(SIZES, MODEL.features, seed=1)
# Unequal cohorts with unequal gaps between two visits of a client, one of them a single client.
COHORTS = [[0, 1, 2], [3, 1], [4], [2, 0, 5, 4], [1, 0, 3, 4, 2, 5], [5, 2], [0, 4, 3]]
LARGE_COHORTS = [[0, 1, 2, 3, 4], [5, 4, 3, 2, 1, 0], [1, 3, 5, 0, 2], [2, 3], [4, 5, 1, 0, 3]]  # for Krum
LOCAL: dict[str, Any] = {"batch_size": 4, "epochs": 2, "lr": 0.02}
WEIGHTS = ["samples", "equal"]
GROUPS: list[server_reference.Groups] = ["model", "layer", "tensor"]


# ---------------------------------------------------------------------------------------------------------------------
# Ground: runs of the library
# ---------------------------------------------------------------------------------------------------------------------


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs.squeeze(1) - targets) ** 2


def two_layer_start() -> Array:
    return 0.5 * np.random.default_rng(11).normal(size=MODEL.size)


def two_layer_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(MODEL.features, MODEL.hidden), nn.Linear(MODEL.hidden, 1)).double()
    nn.utils.vector_to_parameters(torch.from_numpy(two_layer_start()), model.parameters())
    return model


def with_cohorts(method: str, cohorts: Sequence[Sequence[int]]) -> str:
    return f"{method}+fixed(cohorts={[list(cohort) for cohort in cohorts]})"


@dataclass
class Played:
    """A run of the library, round by round."""

    result: fl.Result
    params: list[Array] = field(default_factory=list)
    clients: list[list[int]] = field(default_factory=list)
    rows: list[Array] = field(default_factory=list)  # what was averaged
    weights: list[Array] = field(default_factory=list)
    counts: list[list[int]] = field(default_factory=list)
    stages: list[dict[str, State]] = field(default_factory=list)  # what each stage knows after the round

    @property
    def history(self) -> list[dict[str, Any]]:
        return self.result.history

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.history]


def play(
    method: str,
    *,
    model: nn.Module | None = None,
    clients: Sequence[Client] = CLIENTS,
    rounds: int = ROUNDS,
    local: Mapping[str, Any] = LOCAL,
    loss: Callable[[Tensor, Tensor], Tensor] = squared_error,
    clients_per_round: int | float | None = None,
    seed: int = 0,
    **settings: Any,
) -> Played:
    training = Training(
        two_layer_model() if model is None else model,
        fl.Federation.from_arrays(clients),
        method,
        rounds=rounds,
        clients_per_round=clients_per_round,
        local=fl.Local(**{"batch_size": None, **local}),
        loss=loss,
        metric="accuracy",
        engine="loop",
        device="cpu",
        precision="auto",
        seed=seed,
        **{"availability": None, "dropout_rate": 0.0, **settings},
    )
    played = Played(fl.Result(torch.empty(0), nn.Identity(), []))

    def listen(event: fl.Event) -> None:
        played.params.append(event.params.numpy().copy())
        played.stages.append({key: dict(state) for key, state in training.state.stages.items()})
        if event.updates is None:
            played.clients.append([])
            return
        played.clients.append(event.updates.clients.tolist())
        played.rows.append(event.updates.rows.matrix.numpy().copy())
        played.weights.append(event.updates.weights.numpy().copy())
        played.counts.append(event.updates.counts.tolist())

    played.result = training.run([listen])
    return played


def relative_error(found: Array, expected: Array) -> float:
    assert found.shape == expected.shape
    return float(np.linalg.norm(found - expected) / max(float(np.linalg.norm(expected)), 1e-300))


def assert_follows(played: Played, expected: Sequence[Seen], tolerance: float = TOLERANCE) -> None:
    """Every round's parameters, averaged rows, weights and reported numbers."""
    assert len(played.params) == len(expected)
    for r, seen in enumerate(expected):
        assert played.clients[r] == seen.clients, f"round {r + 1}"
        assert relative_error(played.rows[r], seen.rows) < tolerance, f"rows of round {r + 1}"
        np.testing.assert_allclose(played.weights[r], seen.weights, rtol=tolerance, err_msg=f"round {r + 1}")
        assert relative_error(played.params[r], seen.params) < tolerance, f"params of round {r + 1}"
        for name, value in seen.numbers.items():
            found = played.history[r][name]
            np.testing.assert_allclose(found, value, rtol=1e-9, atol=1e-12, err_msg=f"{name} of round {r + 1}")


def compare(
    method: str,
    recipe: Recipe,
    *,
    cohorts: Sequence[Sequence[int]] = COHORTS,
    local: Mapping[str, Any] = LOCAL,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> Played:
    """A run of the library against the reference's; `recipe` states the weights that the text asks for."""
    played = play(with_cohorts(method, cohorts), local=local, rounds=rounds, seed=seed)
    settings = reference.Local(**local)
    expected = server_reference.federate(
        MODEL, two_layer_start(), CLIENTS, cohorts, rounds, settings, recipe, seed=seed
    )
    assert_follows(played, expected)
    assert relative_error(played.result.params.numpy(), expected[-1].params) < TOLERANCE
    return played


# ---------------------------------------------------------------------------------------------------------------------
# Ground: a model whose updates are given
# ---------------------------------------------------------------------------------------------------------------------


class Piece(nn.Module):
    """A layer of two tensors, both zero; its output is their product with its columns of x."""

    def __init__(self, weight: int, bias: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(weight, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(bias, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : len(self.weight)] @ self.weight + x[:, len(self.weight) :] @ self.bias


class Given(nn.Module):
    """theta . x: with the output as the loss and a rate of 1 a client's update is the mean of its x, wherever theta is.

    The P columns are cut into layers of two tensors each.
    """

    def __init__(self, *layers: tuple[int, int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Piece(*sizes) for sizes in layers)
        self.widths = [sum(sizes) for sizes in layers]

    def forward(self, x: Tensor) -> Tensor:
        outputs = [layer(part) for layer, part in zip(self.layers, torch.split(x, self.widths, dim=1), strict=True)]
        return torch.stack(outputs).sum(0)


POISON = 777.0  # a target that makes a client's loss nan


def output_is_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs * torch.where(targets == POISON, torch.nan, 1.0)  # so that the gradient is nan, too


def play_rows(
    method: str,
    rows: Sequence[Sequence[float]] | Array,
    *,
    cohorts: Sequence[Sequence[int]] | None = None,
    rounds: int = 1,
    layers: Sequence[tuple[int, int]] | None = None,
    sizes: Sequence[int] | None = None,
    bad: Sequence[int] = (),
    local: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Played:
    """Client k answers with the k-th row, exactly, as long as the numbers are short; `bad` clients diverge."""
    matrix = np.asarray(rows, dtype=np.float64)
    sizes = sizes or [1] * len(matrix)
    clients = [
        (np.tile(row, (n, 1)), np.full(n, POISON if k in bad else 0.0))
        for k, (row, n) in enumerate(zip(matrix, sizes, strict=True))
    ]
    cohorts = [list(range(len(matrix)))] if cohorts is None else cohorts
    width = matrix.shape[1]
    return play(
        with_cohorts(method, cohorts),
        model=Given(*(layers or [(width - width // 2, width // 2)])),
        clients=clients,
        rounds=rounds,
        local=local or {"batch_size": None, "lr": 1.0},
        loss=output_is_loss,
        **settings,
    )


def pops(rows: Array, weights: Array) -> Array:
    """POP_k: the weighted sum of the others."""
    total: Array = weights @ rows
    return total - weights[:, None] * rows


def random_rows(rng: np.random.Generator, r: int, width: int, common: float = 0.0) -> Array:
    return rng.normal(size=(r, width)) + common * rng.normal(size=width)


def test_given_rows_arrive() -> None:
    rows = [[1.0, -2.0, 0.5], [0.0, 4.0, 8.0]]
    played = play_rows("fedavg", rows, sizes=[1, 3])
    assert np.array_equal(played.rows[0], rows)
    assert np.array_equal(played.params[0], -(0.25 * np.array(rows[0]) + 0.75 * np.array(rows[1])))


def test_reference_gradient() -> None:
    """The reference's own backward pass against finite differences."""
    x, y = CLIENTS[1]
    params = two_layer_start()
    _, gradient, _ = MODEL.forward_backward(params, {}, x, y)
    for i in range(MODEL.size):
        nudge = np.zeros(MODEL.size)
        nudge[i] = 1e-6
        above, below = (MODEL.forward_backward(params + s * nudge, {}, x, y)[0].mean() for s in (1, -1))
        assert gradient[i] == pytest.approx((above - below) / 2e-6, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_ground_is_fedavg(weights: Any) -> None:
    compare(f"fedavg(weights='{weights}')", Recipe(weights=weights))


# ---------------------------------------------------------------------------------------------------------------------
# DGT: whole runs
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("alpha", [0.99, 0.5])
def test_dgt_run(alpha: float, groups: server_reference.Groups, weights: Any) -> None:
    text = f"dgt(alpha={alpha}, groups='{groups}')+fedavg(weights='{weights}')"
    played = compare(text, Recipe(updates=[Dgt(MODEL.groups(groups), alpha)], weights=weights))
    calibrated = played.column("dgt.calibrated")
    assert 0 < np.mean(calibrated) < 1  # otherwise one branch would not have been met


def test_dgt_defaults() -> None:
    played = compare("dgt", Recipe(updates=[Dgt(MODEL.groups("model"), 0.99)]))
    assert fl.Method("dgt").fills == ["update"]
    assert played.column("dgt.calibrated")[2] == 0  # a round of one client


@pytest.mark.parametrize("groups", ["model", "tensor"])
def test_dgt_max_scale_run(groups: server_reference.Groups) -> None:
    """The run must meet both a shortened and a free calibration."""
    texts = [f"dgt(alpha=0.3, groups='{groups}'{extra})" for extra in ("", ", max_scale=1.05", ", max_scale=1.0")]
    for text, bound in zip(texts, (None, 1.05, 1.0), strict=True):
        compare(text, Recipe(updates=[Dgt(MODEL.groups(groups), 0.3, bound)]))


@pytest.mark.parametrize("local", [{"batch_size": None, "lr": 0.02}, {**LOCAL, "momentum": 0.5}])
def test_dgt_before_a_server_rule(local: dict[str, Any]) -> None:
    server = server_reference.Descent(reference.Momentum(lr=0.3, beta=0.6))
    recipe = Recipe(updates=[Dgt(MODEL.groups("layer"), 0.7)], server=server)
    compare("fedavgm(lr=0.3, momentum=0.6)+dgt(alpha=0.7, groups='layer')", recipe, local=local)


# ---------------------------------------------------------------------------------------------------------------------
# DGT: laws
# ---------------------------------------------------------------------------------------------------------------------


def baselines_and_rows(
    alpha: float, rounds: int, weights: str, seed: int, **dgt: Any
) -> list[tuple[Array, Array, Array, Array]]:
    """(original rows, what was averaged, weights, baselines before the round) of a run over random rows."""
    rng = np.random.default_rng(seed)
    r, width = 4, 6
    sizes = [1, 2, 5, 3]
    everything = random_rows(rng, r * rounds, width, common=1.5)
    # The memory belongs to a client and its row stands for ever, so the samples of a client hold one row per round,
    # one of which each Work draws.
    clients = [
        (np.repeat(everything[k::r], n, axis=0), np.zeros(rounds * n)) for k, n in zip(range(r), sizes, strict=True)
    ]
    extra = "".join(f", {name}={value!r}" for name, value in dgt.items())
    settings: dict[str, Any] = {
        "model": Given((width - 2, 2)),
        "clients": clients,
        "rounds": rounds,
        "local": {"batch_size": 1, "steps": 1, "lr": 1.0},
        "loss": output_is_loss,
    }
    common = f"fedavg(weights='{weights}')"
    plain = play(with_cohorts(common, [[0, 1, 2, 3]]), **settings)
    tailored = play(with_cohorts(f"{common}+dgt(alpha={alpha}{extra})", [[0, 1, 2, 3]]), **settings)
    baseline = np.zeros(r)
    found = []
    for before, after, share in zip(plain.rows, tailored.rows, tailored.weights, strict=True):
        found.append((before, after, share, baseline))
        phi = np.array([cosine(g, pop) for g, pop in zip(before, pops(before, share), strict=True)])
        baseline = alpha * baseline + (1 - alpha) * phi
    return found


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("alpha", [0.2, 0.9])
def test_dgt_cosine_and_norm_law(alpha: float, weights: str) -> None:
    """After calibration the cosine with POP is the baseline, and the length is |g| sqrt(1 - phi^2)/sqrt(1 - T^2)."""
    calibrated = positive = 0
    for before, after, share, baseline in baselines_and_rows(alpha, 60, weights, seed=3):
        for g, out, pop, target in zip(before, after, pops(before, share), baseline, strict=True):
            phi = cosine(g, pop)
            if phi < target:
                calibrated, positive = calibrated + 1, positive + (target > 0.2)
                assert cosine(out, pop) == pytest.approx(target, rel=1e-9, abs=1e-9)
                length = np.linalg.norm(g) * math.sqrt((1 - phi**2) / (1 - target**2))
                assert np.linalg.norm(out) == pytest.approx(length, rel=1e-9)
            else:
                np.testing.assert_allclose(out, g, rtol=1e-12, atol=1e-12)
    assert calibrated > 20
    assert alpha > 0.5 or positive > 20


def test_dgt_max_scale_keeps_the_direction() -> None:
    shortened = 0
    free = baselines_and_rows(0.2, 40, "samples", seed=3)
    bounded = baselines_and_rows(0.2, 40, "samples", seed=3, max_scale=1.1)
    for (before, long, _, _), (_, short, _, _) in zip(free, bounded, strict=True):
        for g, out, bound in zip(before, long, short, strict=True):
            limit = 1.1 * np.linalg.norm(g)
            if np.linalg.norm(out) > limit * (1 + 1e-12):
                shortened += 1
                assert np.linalg.norm(bound) == pytest.approx(limit, rel=1e-9)
                assert cosine(bound, out) == pytest.approx(1.0, abs=1e-12)
            else:
                np.testing.assert_allclose(bound, out, rtol=1e-12, atol=1e-12)
    assert shortened > 3


@pytest.mark.parametrize("seed", range(8))
def test_dgt_starts_as_pcgrad(seed: int) -> None:
    """With all baselines at 0: a conflicting update is projected onto the plane orthogonal to POP, others stay."""
    rng = np.random.default_rng(seed)
    rows = random_rows(rng, 5, 7)
    sizes = [1, 4, 2, 3, 2]
    played = play_rows("dgt", rows, sizes=sizes)
    share = np.array(sizes) / sum(sizes)
    conflicts = 0
    for g, out, pop in zip(rows, played.rows[0], pops(rows, share), strict=True):
        inner = g @ pop
        conflicts += inner < 0
        expected = g - inner / (pop @ pop) * pop if inner < 0 else g
        np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)
    assert played.history[0]["dgt.calibrated"] == pytest.approx(conflicts / 5)


def test_dgt_pop_as_a_sum_or_a_mean() -> None:
    """Only the direction of POP counts: weights that are all multiplied by one number change nothing."""
    rows = random_rows(np.random.default_rng(0), 4, 5)
    one, other = (play_rows("dgt", rows, sizes=[n] * 4).rows[0] for n in (1, 3))
    np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_dgt_never_calibrates_identical_clients(n: int) -> None:
    """phi = 1 is never below the baseline, however long the run; n differs so that rounding differs."""
    row = np.random.default_rng(n).normal(size=6)
    method = "dgt(alpha=0.01)+fedavg(weights='equal')"
    played = play_rows(method, np.tile(row, (n + 1, 1)), rounds=30)
    plain = play_rows("fedavg(weights='equal')", np.tile(row, (n + 1, 1)), rounds=30)
    np.testing.assert_allclose(np.array(played.rows), np.array(plain.rows), rtol=1e-9, atol=1e-9)
    assert np.allclose(played.column("dgt.cosine"), 1.0)


@pytest.mark.parametrize("groups", GROUPS)
def test_dgt_does_not_depend_on_the_order_of_clients(groups: str) -> None:
    cohort = [0, 1, 2, 3, 4, 5]
    method = f"dgt(alpha=0.5, groups='{groups}')"
    played = play(with_cohorts(method, [cohort]), rounds=8)
    for order in ([5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 4, 3]):
        other = play(with_cohorts(method, [order]), rounds=8)
        for r in range(8):
            assert relative_error(other.rows[r][[order.index(k) for k in cohort]], played.rows[r]) < 1e-10
            assert relative_error(other.params[r], played.params[r]) < 1e-10


@pytest.mark.parametrize("factor", [-1.0, 4.0, -0.125])
def test_dgt_is_equivariant(factor: float) -> None:
    """Signs and powers of two are exact, so equality is."""
    rng = np.random.default_rng(2)
    rows = random_rows(rng, 9, 6, common=0.7)
    cohorts = [[0, 1, 2, 3], [2, 5, 0], [1, 7, 8, 6, 3], [4, 2, 0, 1]]
    method = "dgt(alpha=0.4)+fedavg(weights='equal', lr=0.5)"
    one, other = (play_rows(method, scale * rows, cohorts=cohorts, rounds=8) for scale in (1.0, factor))
    assert sum(one.column("dgt.calibrated")) > 0
    for a, b in zip(one.rows, other.rows, strict=True):
        np.testing.assert_allclose(factor * a, b, rtol=1e-12, atol=1e-12)
    assert one.column("dgt.cosine") == pytest.approx(other.column("dgt.cosine"))


def test_dgt_of_two_clients() -> None:
    """POP_1 = g_2 and the other way round: each loses its part along the other."""
    a, b = np.array([2.0, 0.0, 1.0]), np.array([-1.0, 3.0, 0.0])
    out = play_rows("dgt", np.array([a, b]), sizes=[1, 3]).rows[0]
    np.testing.assert_allclose(out[0], a - (a @ b) / (b @ b) * b, rtol=1e-14)
    np.testing.assert_allclose(out[1], b - (a @ b) / (a @ a) * a, rtol=1e-14)


def test_dgt_calibrates_from_the_original_vectors() -> None:
    """Three conflicting clients in the plane: were the second one to see the first one's result, it would differ."""
    rows = np.array([[1.0, 0.0], [-0.5, math.sqrt(0.75)], [-0.5, -1.0]])
    out = play_rows("dgt", rows).rows[0]
    for k in range(3):
        pop = rows.sum(0) - rows[k]
        np.testing.assert_allclose(out[k], rows[k] - (rows[k] @ pop) / (pop @ pop) * pop, rtol=1e-12, atol=1e-12)


def test_dgt_groups_are_tailored_apart() -> None:
    """A conflict in one tensor leaves the others alone, and counts once per group."""
    rows = np.array([[1.0, 2.0, 1.0, 1.0, 3.0], [1.0, 1.0, -2.0, 1.0, 1.0]])
    layers = [(2, 1), (1, 1)]
    parts = {"tensor": [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)], "layer": [slice(0, 3), slice(3, 5)]}
    for groups, slices in parts.items():
        played = play_rows(f"dgt(groups='{groups}')+fedavg(weights='equal')", rows, layers=layers)
        expected = Dgt(slices).apply(plain_answers(rows), np.ones(2) / 2)
        np.testing.assert_allclose(played.rows[0], expected.rows, rtol=1e-12, atol=1e-12)
    whole = play_rows("dgt", rows, layers=layers)
    assert np.array_equal(whole.rows[0], rows)
    tensors = play_rows("dgt(groups='tensor')", rows, layers=layers)
    assert tensors.history[0]["dgt.calibrated"] == pytest.approx(1 / 4)
    assert np.array_equal(tensors.rows[0][:, [0, 1, 3, 4]], rows[:, [0, 1, 3, 4]])


def test_dgt_that_never_triggers_is_fedavg() -> None:
    """Section 7.1: with baselines at -1 that stay there nothing is ever calibrated, bit for bit.

    A baseline of -1 can't be reached from 0, so it is put in place of the stage's start.
    """
    stage = fl.Method("dgt").pipeline().updates[0].stage
    plain = play(with_cohorts("fedavg", COHORTS), rounds=14)
    original = type(stage).init

    def at_the_bottom(self: Any, setup: Any) -> State:
        return {name: torch.full_like(value, -1.0) for name, value in original(self, setup).items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(stage), "init", at_the_bottom)
        tailored = play(with_cohorts("dgt(alpha=1.0)", COHORTS), rounds=14)
    assert all(np.array_equal(a, b) for a, b in zip(plain.params, tailored.params, strict=True))
    assert tailored.column("dgt.calibrated") == [0.0] * 14


# ---------------------------------------------------------------------------------------------------------------------
# DGT: edges
# ---------------------------------------------------------------------------------------------------------------------


def test_dgt_of_one_client_is_fedavg() -> None:
    one, other = (play(with_cohorts(m, [[2], [0], [2]]), rounds=6) for m in ("dgt(alpha=0.1)", "fedavg"))
    assert all(np.array_equal(a, b) for a, b in zip(one.params, other.params, strict=True))
    assert one.column("dgt.calibrated") == [0.0] * 6


def test_dgt_round_of_one_client_leaves_the_baseline() -> None:
    """With alpha this small one visit would turn the baseline into that visit's phi; a lonely visit must not."""
    rows = [[1.0, 1.0, 0.0], [1.0, -0.25, 0.5], [-1.0, 0.5, 2.0]]
    method = "dgt(alpha=0.01)+fedavg(weights='equal')"
    straight = play_rows(method, rows, cohorts=[[0, 1], [0, 2]], rounds=2)
    detour = play_rows(method, rows, cohorts=[[0, 1], [0], [0], [0, 2]], rounds=4)
    np.testing.assert_allclose(detour.rows[-1], straight.rows[-1], rtol=1e-12)
    assert not np.allclose(straight.rows[-1], [rows[0], rows[2]])


def test_dgt_baseline_survives_absence() -> None:
    rows = [[1.0, 1.0, 0.0], [1.0, -0.25, 0.5], [-1.0, 0.5, 2.0], [0.5, 0.5, 0.5]]
    method = "dgt(alpha=0.01)+fedavg(weights='equal')"
    straight = play_rows(method, rows, cohorts=[[0, 1], [0, 2]], rounds=2)
    detour = play_rows(method, rows, cohorts=[[0, 1], [3], [1, 3], [0, 2]], rounds=4)
    np.testing.assert_allclose(detour.rows[-1][0], straight.rows[-1][0], rtol=1e-12)


@pytest.mark.parametrize("groups", GROUPS)
def test_dgt_with_zero_updates(groups: str) -> None:
    """A client that did not move stays, and does not move the others' POP."""
    rows = [[1.0, 2.0, -1.0], [0.0, 0.0, 0.0], [-2.0, 1.0, 0.5]]
    method = f"dgt(groups='{groups}')+fedavg(weights='equal')"
    out = play_rows(method, rows, rounds=3)
    without = play_rows(method, [rows[0], rows[2]], rounds=3)
    for r in range(3):
        assert np.array_equal(out.rows[r][1], np.zeros(3))
        np.testing.assert_allclose(out.rows[r][[0, 2]], without.rows[r], rtol=1e-12, atol=1e-12)


def test_dgt_of_zeros_only() -> None:
    played = play_rows("dgt", np.zeros((3, 4)), rounds=3)
    assert all(np.array_equal(rows, np.zeros((3, 4))) for rows in played.rows)
    assert played.column("dgt.calibrated") == [0.0] * 3


def test_dgt_where_the_others_cancel() -> None:
    """POP = 0 for client 0: it stays and keeps its baseline; the others see client 0 and each other."""
    rows = [[1.0, 0.5], [2.0, -4.0], [-2.0, 4.0]]
    out = play_rows("dgt", rows).rows[0]
    assert np.array_equal(out[0], rows[0])
    assert np.isfinite(out).all()


def test_dgt_of_antiparallel_updates_is_zero() -> None:
    """phi = -1 at baseline 0: the whole update lies along POP, and nothing is left of it."""
    played = play_rows("dgt", [[1.0, 2.0, -2.0], [-2.0, -4.0, 4.0]], rounds=2)
    np.testing.assert_allclose(played.rows[0], np.zeros((2, 3)), atol=1e-15)
    assert np.isfinite(played.rows[1]).all()
    assert played.history[0]["dgt.cosine"] == pytest.approx(-1.0)
    assert played.history[0]["dgt.calibrated"] == 1.0


def test_dgt_baseline_close_to_one_stays_finite() -> None:
    """Identical clients push the baseline to 1; then they conflict."""
    row = np.array([1.0, 2.0, 3.0, 4.0])
    rows = np.array([row, row, -row + 4 * np.eye(4)[0]])
    played = play_rows("dgt(alpha=0.01)", rows, cohorts=[[0, 1]] * 30 + [[0, 2]], rounds=31)
    assert all(np.isfinite(params).all() for params in played.params)
    limit = math.sqrt(1 / (1 - (1 - 1e-6) ** 2))
    assert np.linalg.norm(played.rows[-1][0]) <= limit * np.linalg.norm(row) * (1 + 1e-6)
    bounded = play_rows("dgt(alpha=0.01, max_scale=2.0)", rows, cohorts=[[0, 1]] * 30 + [[0, 2]], rounds=31)
    assert np.linalg.norm(bounded.rows[-1][0]) <= 2 * np.linalg.norm(row) * (1 + 1e-9)


@pytest.mark.parametrize("groups", GROUPS)
def test_dgt_with_a_tensor_that_never_moves(groups: str) -> None:
    """Its gradient is 0 although it is trainable: no nan, and the other groups as without it."""
    rng = np.random.default_rng(5)
    rows = random_rows(rng, 4, 5)
    rows[:, 2] = 0
    layers = [(2, 1), (1, 1)]
    method = f"dgt(alpha=0.5, groups='{groups}')"
    played = play_rows(method, rows, layers=layers, rounds=5)
    assert all(np.isfinite(found).all() for found in played.rows)
    assert all(np.array_equal(found[:, 2], np.zeros(4)) for found in played.rows)
    if groups == "model":
        without = play_rows(method, rows[:, [0, 1, 3, 4]], layers=[(2, 0), (1, 1)], rounds=5)
        for a, b in zip(played.rows, without.rows, strict=True):
            np.testing.assert_allclose(a[:, [0, 1, 3, 4]], b, rtol=1e-12, atol=1e-12)


def test_dgt_ignores_a_diverged_client() -> None:
    rows = random_rows(np.random.default_rng(1), 4, 5)
    played = play_rows("dgt(alpha=0.3)", rows, bad=[1], rounds=4, cohorts=[[0, 1, 2], [1, 2, 3]])
    clean = play_rows("dgt(alpha=0.3)", rows, rounds=4, cohorts=[[0, 2], [2, 3]])
    for a, b in zip(played.rows, clean.rows, strict=True):
        assert np.array_equal(a, b)
    assert played.column("diverged") == [1, 1, 1, 1]


def test_dgt_with_a_client_twice_in_a_round() -> None:
    """Two updates of one client are two updates: each has the other in its POP."""
    rows = np.array([[1.0, 0.5, 0.0], [-1.0, 1.0, 0.25]])
    out = play_rows("dgt+fedavg(weights='equal')", rows, cohorts=[[0, 1, 0]], rounds=3)
    three = np.array([rows[0], rows[1], rows[0]])
    for k, pop in enumerate(pops(three, np.ones(3) / 3)):
        g = three[k]
        expected = g - (g @ pop) / (pop @ pop) * pop if g @ pop < 0 else g
        np.testing.assert_allclose(out.rows[0][k], expected, rtol=1e-12)
    assert all(np.isfinite(found).all() for found in out.rows)


@pytest.mark.parametrize(
    "text",
    [
        "dgt(alpha=-0.1)",
        "dgt(alpha=1.5)",
        "dgt(max_scale=0)",
        "dgt(max_scale=-1.0)",
        "dgt(groups='layers')",
        "dgt(alpha='big')",
    ],
)
def test_dgt_refuses(text: str) -> None:
    with pytest.raises(fl.MethodError, match="dgt"):
        fl.Method(text)


# ---------------------------------------------------------------------------------------------------------------------
# Krum
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("keep", [None, 1, 3])
def test_krum_run(keep: int | None, weights: Any) -> None:
    text = f"krum(byzantine=1, keep={keep})+fedavg(weights='{weights}')"
    played = compare(text, Recipe(updates=[Krum(1, keep)], weights=weights), cohorts=LARGE_COHORTS)
    sizes = [len(LARGE_COHORTS[r % 5]) for r in range(ROUNDS)]
    kept = [n if n < 5 else n - 1 if keep is None else keep for n in sizes]
    assert played.column("krum.kept") == kept
    assert fl.Method("krum").fills == ["update"]


def test_krum_defaults() -> None:
    compare("krum", Recipe(updates=[Krum(1)]), cohorts=LARGE_COHORTS)


@pytest.mark.parametrize("byzantine", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_krum_drops_outliers(byzantine: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(9, 6))
    bad = rng.choice(9, byzantine, replace=False)
    rows[bad] += 50 * rng.normal(size=(byzantine, 6))
    played = play_rows(f"krum(byzantine={byzantine})", rows)
    assert played.clients[0] == [k for k in range(9) if k not in bad]
    assert played.weights[0].sum() == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(20))
def test_krum_keeps_the_lowest_scores(seed: int) -> None:
    rng = np.random.default_rng(seed)
    r = int(rng.integers(5, 10))
    byzantine = int(rng.integers(1, (r - 3) // 2 + 1))
    keep = int(rng.integers(1, r + 1))
    rows = rng.normal(size=(r, 4))
    played = play_rows(f"krum(byzantine={byzantine}, keep={keep})", rows)
    order = np.argsort(krum_scores(rows, byzantine), kind="stable")
    assert sorted(played.clients[0]) == sorted(order[:keep].tolist())


def test_krum_ties_go_to_the_lowest_index() -> None:
    """The corners of a square and its middle, in short numbers: all corners have one score."""
    corners = [[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0], [-1.0, 1.0]]
    for middle in range(5):
        rows = [*corners[:middle], [0.0, 0.0], *corners[middle:]]
        kept = play_rows("krum(byzantine=1, keep=2)", rows).clients[0]
        assert kept == sorted([middle, 0 if middle else 1])
    same = play_rows("krum(byzantine=1)", [[0.3, -0.7]] * 6)
    assert same.clients[0] == [0, 1, 2, 3, 4]


def test_krum_ties_of_unlike_distances() -> None:
    """Scores 2 + 2, 0 + 4 and 0 + 4: whole numbers, so a tie is a tie, and the first of them is kept."""
    rows = np.array([[0.0, 0.0], [0.0, -2.0], [0.0, -2.0], [1.0, 1.0], [-1.0, 1.0]])
    assert krum_scores(rows, 1).tolist() == [4.0, 4.0, 4.0, 6.0, 6.0]
    assert play_rows("krum(byzantine=1, keep=1)", rows).clients[0] == [0]
    assert play_rows("krum(byzantine=1, keep=1)", rows[[1, 2, 0, 3, 4]]).clients[0] == [0]


def test_krum_far_from_the_origin() -> None:
    """Close updates with a large common part: distances must not drown in the rounding of squares of size 1e12."""
    rng = np.random.default_rng(0)
    near = rng.normal(size=(7, 4))
    rows = 1e6 + near
    order = np.argsort(krum_scores(rows, 2), kind="stable")
    assert play_rows("krum(byzantine=2, keep=3)", rows).clients[0] == sorted(order[:3].tolist())


@pytest.mark.parametrize("cohort", [[0], [0, 1], [0, 1, 2, 3]])
def test_krum_of_too_few_does_not_filter(cohort: list[int], caplog: pytest.LogCaptureFixture) -> None:
    rows = random_rows(np.random.default_rng(0), 6, 4)
    with caplog.at_level(logging.WARNING, logger="fedloom"):
        played = play_rows("krum(byzantine=1)", rows, cohorts=[cohort], rounds=5)
        warned = [record for record in caplog.records if record.name == "fedloom"]
    plain = play_rows("fedavg", rows, cohorts=[cohort], rounds=5)
    assert all(np.array_equal(a, b) for a, b in zip(played.params, plain.params, strict=True))
    assert played.column("krum.kept") == [len(cohort)] * 5
    assert len(warned) == 1
    assert "krum" in warned[0].getMessage()


def test_krum_with_enough_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fedloom"):
        play_rows("krum(byzantine=1)", random_rows(np.random.default_rng(0), 5, 4), rounds=3)
    assert not caplog.records


def test_krum_counts_after_divergence() -> None:
    """Five are asked, one diverges: four are too few for one Byzantine client."""
    rows = random_rows(np.random.default_rng(0), 5, 4)
    rows[2] += 100
    played = play_rows("krum(byzantine=1)", rows, bad=[4])
    assert played.clients[0] == [0, 1, 2, 3]
    assert played.history[0]["krum.kept"] == 4


@pytest.mark.parametrize("text", ["krum(byzantine=-1)", "krum(keep=0)", "krum(keep=-2)", "krum(byzantine=0.5)"])
def test_krum_refuses(text: str) -> None:
    with pytest.raises(fl.MethodError, match="krum"):
        fl.Method(text)
