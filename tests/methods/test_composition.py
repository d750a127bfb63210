"""Methods together: the order of section 1.3, the decisions of section 11, bytes on the wire, resuming."""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom as fl
from tests import reference
from tests.methods.server_reference import (
    AdaBestClients,
    AdaBestServer,
    Descent,
    Dgt,
    FedDynClients,
    FedDynServer,
    FedGlad,
    FedNova,
    Ida,
    Krum,
    Median,
    Pull,
    Recipe,
    Scaffold,
    TwoMoments,
    federate,
)
from tests.methods.test_updates import (
    CLIENTS,
    COHORTS,
    LARGE_COHORTS,
    LOCAL,
    MODEL,
    POISON,
    ROUNDS,
    SIZES,
    Given,
    compare,
    output_is_loss,
    play,
    play_rows,
    random_rows,
    relative_error,
    squared_error,
    two_layer_model,
    two_layer_start,
    with_cohorts,
)
from tests.reference import Array

TENSORS = MODEL.groups("tensor")
WHOLE = MODEL.groups("model")
EVEN_COHORTS = [[0, 1, 2], [3, 1, 5], [4, 2, 0], [5, 4, 3], [1, 0, 4], [2, 3, 5], [4, 1, 2]]  # RADFed needs one m
TWICE = [[0, 1, 0], [2, 2, 2, 5], [3, 4], [1, 5, 1, 0, 1]]


def adabest(beta: float, mu: float, **parts: Any) -> Recipe:
    server = AdaBestServer(two_layer_start(), beta)
    return Recipe(clients=AdaBestClients(mu), server=server, weights="equal", once=True, **parts)


def feddyn(mu: float, **parts: Any) -> Recipe:
    clients = FedDynClients(mu, mean_size=float(np.mean(SIZES)))
    return Recipe(clients=clients, server=FedDynServer(), weights="equal", once=True, **parts)


def scaffold(**parts: Any) -> Recipe:
    clients = Scaffold(population=len(SIZES))
    return Recipe(clients=clients, weights="equal", once=True, **parts)


# ---------------------------------------------------------------------------------------------------------------------
# Section 1.3: the order of the plug-ins
# ---------------------------------------------------------------------------------------------------------------------

STACK = ["krum(byzantine=1)", "dgt(alpha=0.5)", "ida", "fedglad(gamma=0.2)", "fedadam(lr=0.03)", "fedprox(mu=0.5)"]


def stack_recipe() -> Recipe:
    return Recipe(
        clients=Pull(0.5),
        updates=[Krum(1), Dgt(WHOLE, 0.5)],
        aggregator=Ida(),
        rescaler=FedGlad(TENSORS, 0.2),
        server=TwoMoments("adam", 0.03),
    )


def test_order_of_the_stages() -> None:
    """Krum -> DGT -> weights -> aggregate -> FedGLAD -> server."""
    compare("+".join(STACK), stack_recipe(), cohorts=LARGE_COHORTS)


def test_order_of_the_text_does_not_count() -> None:
    first = play(with_cohorts("+".join(STACK), LARGE_COHORTS), rounds=6)
    for order in itertools.islice(itertools.permutations(STACK), 100, 720, 150):
        other = play(with_cohorts("+".join(order), LARGE_COHORTS), rounds=6)
        assert all(np.array_equal(a, b) for a, b in zip(first.params, other.params, strict=True))


@pytest.mark.parametrize("weights", ["samples", "equal"])
def test_krum_before_dgt(weights: Any) -> None:
    """POP is formed from who is left, with their weights."""
    recipe = Recipe(updates=[Krum(1), Dgt(WHOLE, 0.5)], weights=weights)
    text = f"dgt(alpha=0.5)+krum(byzantine=1)+fedavg(weights='{weights}')"
    compare(text, recipe, cohorts=LARGE_COHORTS)


@pytest.mark.parametrize("weights", ["samples", "equal"])
def test_dgt_before_fedglad(weights: Any) -> None:
    recipe = Recipe(updates=[Dgt(WHOLE, 0.5)], rescaler=FedGlad(TENSORS, 0.1), weights=weights)
    compare(f"fedglad(gamma=0.1)+dgt(alpha=0.5)+fedavg(weights='{weights}')", recipe)


def test_dgt_before_fednova() -> None:
    recipe = Recipe(updates=[Dgt(WHOLE, 0.5)], aggregator=FedNova(), rescaler=FedGlad(TENSORS, 0.1))
    compare("fednova+dgt(alpha=0.5)+fedglad(gamma=0.1)", recipe)


def test_dgt_before_the_median() -> None:
    recipe = Recipe(updates=[Dgt(TENSORS, 0.5)], aggregator=Median(), server=Descent(reference.Momentum(0.5, 0.5)))
    compare("median+dgt(alpha=0.5, groups='tensor')+fedavgm(lr=0.5, momentum=0.5)", recipe)


# ---------------------------------------------------------------------------------------------------------------------
# Section 7.1: what is switched off is off, in company too
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("company", ["", "+dgt(alpha=0.5)+fedglad(gamma=0.2)", "+krum+dgt(alpha=0.5, groups='layer')"])
@pytest.mark.parametrize(
    "method",
    [
        "fedprox(mu=0)",
        "fedavgm(momentum=0.0)",
        "adabest(beta=0.0, mu=0.0)",
        "radfed(redistributions=1)",
        "2dlrd(c=0.0)",
        "mixing(alpha=1.0)",
        "exponential(decay=1.0)",
        "trimmed-mean(fraction=0.0)",
    ],
)
def test_method_that_is_switched_off(method: str, company: str) -> None:
    """AdaBest takes theta - (theta - g), a trimmed mean another sum: to rounding; all others bit for bit."""
    cohorts = [[0, 1, 2, 3, 4], [5, 4, 3, 2, 1], [1, 3, 5, 0, 2]]
    if method.startswith("radfed"):
        cohorts = cohorts[:1]  # DGT's memory belongs to the slot: it is the client's only where slots do not change
    equal = "+fedavg(weights='equal')"
    off, plain = (
        play(with_cohorts(m + company, cohorts), rounds=9) for m in (method + equal, "fedavg(weights='equal')")
    )
    for a, b in zip(off.params, plain.params, strict=True):
        if method.startswith(("adabest", "trimmed", "radfed")):
            assert relative_error(a, b) < 1e-12
        else:
            assert np.array_equal(a, b)


# ---------------------------------------------------------------------------------------------------------------------
# Section 11.3: SCAFFOLD
# ---------------------------------------------------------------------------------------------------------------------


def test_scaffold_run() -> None:
    """Also the ground for what follows: the reference's SCAFFOLD here is the one of tests/reference.py."""
    compare("scaffold", scaffold())
    local = reference.Local(**LOCAL)
    expected = reference.scaffold(MODEL, two_layer_start(), CLIENTS, COHORTS, ROUNDS, local)
    played = play(with_cohorts("scaffold", COHORTS))
    assert relative_error(played.params[-1], expected[-1].params) < 1e-9


@pytest.mark.parametrize(
    ("text", "server"),
    [
        ("fedadam(lr=0.03)", lambda: TwoMoments("adam", 0.03)),
        ("fedavgm(lr=0.5, momentum=0.5)", lambda: Descent(reference.Momentum(0.5, 0.5))),
        ("fedavg(lr=0.5)", lambda: Descent(reference.Averaging(0.5))),
    ],
)
def test_scaffold_with_servers(text: str, server: Callable[[], Any]) -> None:
    compare(f"scaffold+{text}", scaffold(server=server()))


def test_client_that_krum_drops() -> None:
    """Its c_k stays as written, and its change of c is not added."""
    compare("scaffold+krum(byzantine=1)", scaffold(updates=[Krum(1)]), cohorts=LARGE_COHORTS)
    compare("krum(byzantine=1, keep=2)+scaffold", scaffold(updates=[Krum(1, 2)]), cohorts=LARGE_COHORTS)


def test_krum_leaves_the_memory_of_adabest() -> None:
    compare("adabest(beta=0.5, mu=0.1)+krum", adabest(0.5, 0.1, updates=[Krum(1)]), cohorts=LARGE_COHORTS)


def test_scaffold_with_dgt_and_fedglad() -> None:
    """Neither touches c: it is made of raw gradients."""
    recipe = scaffold(updates=[Dgt(WHOLE, 0.5)], rescaler=FedGlad(TENSORS, 0.1))
    compare("scaffold+dgt(alpha=0.5)+fedglad(gamma=0.1)", recipe)


def poisoned_samples(bad: Mapping[int, Sequence[int]]) -> list[tuple[Array, Array]]:
    """Four clients of four samples, each sample another gradient; `bad` samples of a client make it diverge."""
    rng = np.random.default_rng(7)
    clients = []
    for k in range(4):
        y = np.zeros(4)
        y[list(bad.get(k, ()))] = POISON
        clients.append((rng.normal(size=(4, 3)), y))
    return clients


def drawn_sample(k: int, w: int) -> int:
    """Which sample client k trains on in Work w: batches of one, one step."""
    return int(reference.Local(batch_size=1, steps=1).batches(4, 0, w, k, 0)[0][0])


def test_memory_of_a_diverged_client_is_not_committed() -> None:
    """Client 1 diverges whenever it draws one of two samples; c and c_1 must not hear of it."""
    clients = poisoned_samples({1: [0, 2]})
    cohorts, rounds, lr = [[0, 1, 2], [1, 3], [0, 1, 2, 3]], 18, 0.5
    played = play(
        with_cohorts("scaffold", cohorts),
        model=Given((2, 1)),
        clients=clients,
        rounds=rounds,
        local={"batch_size": 1, "steps": 1, "lr": lr},
        loss=output_is_loss,
    )
    theta, c, c_k = np.zeros(3), np.zeros(3), np.zeros((4, 3))
    diverged = 0
    for w in range(rounds):
        rows, change = [], np.zeros(3)
        for k in cohorts[w % 3]:
            sample = drawn_sample(k, w)
            if clients[k][1][sample] == POISON:
                diverged += 1
                continue
            gradient = clients[k][0][sample]
            rows.append(lr * (gradient + c - c_k[k]))
            change += gradient - c_k[k]
            c_k[k] = gradient
        theta, c = theta - np.mean(rows, axis=0), c + change / 4
        np.testing.assert_allclose(played.params[w], theta, rtol=1e-9, atol=1e-12)
    assert 3 < diverged < 15
    assert sum(played.column("diverged")) == diverged


def test_gap_of_adabest_counts_from_the_last_good_visit() -> None:
    clients = poisoned_samples({1: [0, 2]})
    cohorts, rounds, lr, mu, beta = [[0, 1, 2], [1, 3], [0, 1, 2, 3]], 18, 0.5, 0.3, 0.6
    played = play(
        with_cohorts(f"adabest(beta={beta}, mu={mu})", cohorts),
        model=Given((2, 1)),
        clients=clients,
        rounds=rounds,
        local={"batch_size": 1, "steps": 1, "lr": lr},
        loss=output_is_loss,
    )
    theta, bar = np.zeros(3), np.zeros(3)
    h, last = np.zeros((4, 3)), [-1] * 4
    for w in range(rounds):
        rows = []
        for k in cohorts[w % 3]:
            sample = drawn_sample(k, w)
            if clients[k][1][sample] == POISON:
                continue
            g = lr * (clients[k][0][sample] - mu * h[k])  # all sizes are equal, so mu_k = mu
            h[k] = h[k] / (w - last[k]) + g
            last[k] = w
            rows.append(g)
        before, bar = bar, theta - np.mean(rows, axis=0)
        theta = bar - beta * (before - bar)
        np.testing.assert_allclose(played.params[w], theta, rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Section 11.6: FedGLAD and DGT under AdaBest and FedDyn
# ---------------------------------------------------------------------------------------------------------------------


def test_adabest_and_feddyn_runs() -> None:
    """The ground for what follows."""
    compare("adabest(beta=0.7, mu=0.1)", adabest(0.7, 0.1))
    compare("feddyn(mu=0.1)", feddyn(0.1))


@pytest.mark.parametrize("gamma", [0.1, 0.5])
def test_fedglad_under_adabest(gamma: float) -> None:
    """bar' = theta - s g takes the place of bar, in h too."""
    recipe = adabest(0.7, 0.1, rescaler=FedGlad(TENSORS, gamma))
    played = compare(f"adabest(beta=0.7, mu=0.1)+fedglad(gamma={gamma})", recipe)
    plain = play(with_cohorts("adabest(beta=0.7, mu=0.1)", COHORTS))
    assert relative_error(played.params[-1], plain.params[-1]) > 1e-3


@pytest.mark.parametrize("gamma", [0.1, 0.5])
def test_fedglad_under_feddyn(gamma: float) -> None:
    compare(f"feddyn(mu=0.1)+fedglad(gamma={gamma})", feddyn(0.1, rescaler=FedGlad(TENSORS, gamma)))


def test_fedglad_under_adabest_deploys_the_rescaled_average() -> None:
    """The deployed model is the aggregate, after the rescaler."""
    method = "adabest(beta=0.7, mu=0.1, deploy='aggregate')+fedglad(gamma=0.5)"
    played = play(with_cohorts(method, COHORTS), rounds=5)
    recipe = adabest(0.7, 0.1, rescaler=FedGlad(TENSORS, 0.5))
    federate(MODEL, two_layer_start(), CLIENTS, COHORTS, 5, reference.Local(**LOCAL), recipe)
    assert isinstance(recipe.server, AdaBestServer)
    assert recipe.server.bar is not None
    deployed = torch.nn.utils.parameters_to_vector(played.result.model.parameters()).detach().numpy()
    assert relative_error(deployed, recipe.server.bar) < 1e-9


def test_fedglad_without_freedom_under_adabest_and_feddyn() -> None:
    for method in ("adabest", "feddyn"):
        glad, plain = (play(with_cohorts(m, COHORTS), rounds=10) for m in (f"{method}+fedglad(gamma=0)", method))
        assert all(np.array_equal(a, b) for a, b in zip(glad.params, plain.params, strict=True))


def test_dgt_before_adabest() -> None:
    """bar is built from the calibrated rows; h_k from what the client itself moved."""
    compare("adabest(beta=0.7, mu=0.3)+dgt(alpha=0.5)", adabest(0.7, 0.3, updates=[Dgt(WHOLE, 0.5)]))


def test_dgt_before_feddyn() -> None:
    compare("feddyn(mu=0.3)+dgt(alpha=0.5)", feddyn(0.3, updates=[Dgt(WHOLE, 0.5)]))


def test_all_three_together() -> None:
    recipe = adabest(0.7, 0.1, updates=[Dgt(WHOLE, 0.5)], rescaler=FedGlad(TENSORS, 0.1))
    compare("dgt(alpha=0.5)+fedglad(gamma=0.1)+adabest(beta=0.7, mu=0.1)", recipe)


# ---------------------------------------------------------------------------------------------------------------------
# Section 11.8: under RADFed
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("s", [1, 2, 3])
def test_memory_of_dgt_belongs_to_the_slot(s: int) -> None:
    recipe = Recipe(updates=[Dgt(WHOLE, 0.5)], weights="equal", redistributions=s)
    method = f"radfed(redistributions={s})+dgt(alpha=0.5)"
    played = play(with_cohorts(method, EVEN_COHORTS), rounds=20)
    local = reference.Local(**LOCAL)
    expected = federate(MODEL, two_layer_start(), CLIENTS, EVEN_COHORTS, 20, local, recipe)
    for found, seen in zip(played.params, expected, strict=True):
        assert relative_error(found, seen.params) < 1e-9


def test_fedglad_and_krum_under_radfed() -> None:
    """Both see the travelling models' updates."""
    cohorts = [[0, 1, 2, 3, 4], [5, 4, 3, 2, 1], [1, 3, 5, 0, 2]]
    recipe = Recipe(
        updates=[Krum(1)], rescaler=FedGlad(TENSORS, 0.1), weights="equal", redistributions=2, server=TwoMoments()
    )
    played = play(with_cohorts("radfed(redistributions=2)+krum+fedglad(gamma=0.1)+fedadam", cohorts), rounds=20)
    local = reference.Local(**LOCAL)
    expected = federate(MODEL, two_layer_start(), CLIENTS, cohorts, 20, local, recipe)
    for found, seen in zip(played.params, expected, strict=True):
        assert relative_error(found, seen.params) < 1e-9


@pytest.mark.parametrize("name", ["radfed", "radfedp", "radfedm", "radfeda"])
def test_adafl_and_radfed_are_refused(name: str) -> None:
    for text in (f"adafl+{name}(redistributions=2)", f"{name}(redistributions=2)+adafl"):
        with pytest.raises(fl.MethodError) as error:
            play(text, rounds=1)
        assert "adafl" in str(error.value)
        assert name in str(error.value)


def test_more_travelling_models_than_clients() -> None:
    """A cohort may name a client twice, so there can be more slots than clients: DGT keeps a baseline for each."""
    method = with_cohorts("radfed(redistributions=2)+dgt", [[0, 1, 0]])
    played = play(method, clients=CLIENTS[:2], rounds=3)
    assert np.isfinite(played.params[-1]).all()


def test_importance_under_radfed_is_radfedi() -> None:
    texts = ("radfedi(redistributions=3, gamma=0.5)", "radfed(redistributions=3)+importance(gamma=0.5)")
    one, other = (play(text, rounds=5, clients_per_round=3) for text in texts)
    assert all(np.array_equal(a, b) for a, b in zip(one.params, other.params, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Section 11.9: a client drawn twice
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["samples", "equal"])
def test_client_drawn_twice_without_memory(weights: Any) -> None:
    """Two rows of one client, each with its own batches."""
    compare(f"fedavg(weights='{weights}')", Recipe(weights=weights), cohorts=TWICE)
    compare(f"fednova+fedavg(weights='{weights}')", Recipe(aggregator=FedNova(), weights=weights), cohorts=TWICE)


@pytest.mark.parametrize("text", ["scaffold", "adabest(beta=0.7, mu=0.1)"])
def test_client_drawn_twice_with_memory(text: str) -> None:
    """One row with a double weight; c stays the mean of all c_k, so its change counts once."""
    recipe = scaffold() if text == "scaffold" else adabest(0.7, 0.1)
    played = compare(text, recipe, cohorts=TWICE)
    assert played.counts[:4] == [[2, 1], [3, 1], [1, 1], [3, 1, 1]]


# ---------------------------------------------------------------------------------------------------------------------
# Section 11.10: FedAsync takes one client at a time
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("idle", ["dgt", "krum", "fedglad", "dgt+fedglad+krum"])
def test_methods_without_effect_under_fedasync(idle: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fedloom"):
        played = play(f"fedasync+{idle}", rounds=8, clients_per_round=3)
    warned = [record.getMessage() for record in caplog.records if record.name == "fedloom"]
    plain = play("fedasync", rounds=8, clients_per_round=3)
    assert all(np.array_equal(a, b) for a, b in zip(played.params, plain.params, strict=True))
    assert len(warned) == 1
    assert all(name in warned[0] for name in (*idle.split("+"), "fedasync"))


def test_fedasync_alone_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fedloom"):
        play("fedasync", rounds=3)
    assert not caplog.records


# ---------------------------------------------------------------------------------------------------------------------
# Table 1.6: what crosses the wire, in numbers per client and Work; n = 16 parameters, and the sizes under `samples`
# ---------------------------------------------------------------------------------------------------------------------

N = MODEL.size
WIRE: dict[str, tuple[int, int]] = {
    "fedavg": (N, N + 1),
    "fedavg(weights='equal')": (N, N),
    "fedprox": (N, N + 1),
    "ida": (N, N + 1),
    "ida+fedavg(weights='equal')": (N, N),
    "scaffold": (2 * N, 2 * N),
    "scaffold-m": (2 * N, N),
    "feddyn": (N + 1, N),
    "adabest": (N + 1, N + 1),
    "fedavgm": (N, N + 1),
    "fedadam": (N, N + 1),
    "fedyogi": (N, N + 1),
    "fedadagrad": (N, N + 1),
    "fedasync+fedavg(weights='equal')": (N + 1, N + 1),
    "radfed(redistributions=1)": (N, N),
    "radfedi(redistributions=1)": (N, N + 1),
    "importance": (N, N + 1),
    "importance+fedavg(weights='samples')": (N, N + 2),
    "dgt": (N, N + 1),
    "dgt+fedavg(weights='equal')": (N, N),
    "fedglad": (N, N + 1),
    "fedglad+fedavg(weights='equal')": (N, N),
    "krum": (N, N + 1),
    "median+fedavg(weights='equal')": (N, N),
    "trimmed-mean+fedavg(weights='equal')": (N, N),
    "adafl+fedavg(weights='equal')": (N, N),
    "2dlrd": (N + 1, N + 1),
    "decay-all": (N + 1, N + 1),
    "decay-additive": (N + 1, N + 1),
    "scaffold+dgt+fedglad": (2 * N, 2 * N),
    "adabest+fedglad+2dlrd": (N + 2, N + 1),
}


@pytest.mark.parametrize("method", WIRE)
def test_bytes_on_the_wire(method: str) -> None:
    down, up = WIRE[method]
    local = {"batch_size": 4, "steps": 2, "lr": 0.02}
    played = play(method, rounds=2, clients_per_round=3, local=local)
    asked = np.cumsum(played.column("asked"))
    assert played.column("downlink_bytes") == (8 * down * asked).tolist()
    assert played.column("uplink_bytes") == (8 * up * asked).tolist()


def test_bytes_of_fednova() -> None:
    """n + 2 or 3 numbers: the size, a_k and perhaps the number of steps."""
    played = play("fednova", rounds=1, clients_per_round=3)
    assert played.column("downlink_bytes") == [3 * 8 * N]
    assert played.column("uplink_bytes")[0] in (3 * 8 * (N + 2), 3 * 8 * (N + 3))


@pytest.mark.parametrize("s", [2, 4])
def test_bytes_of_radfed_are_per_work(s: int) -> None:
    played = play(f"radfed(redistributions={s})", rounds=2, clients_per_round=3)
    assert played.column("uplink_bytes") == [s * 3 * 8 * N, 2 * s * 3 * 8 * N]
    assert played.column("works") == [s, 2 * s]


# ---------------------------------------------------------------------------------------------------------------------
# Resuming
# ---------------------------------------------------------------------------------------------------------------------

RESUMED = [
    "dgt(alpha=0.5)",
    "dgt(alpha=0.5, groups='tensor')+krum(byzantine=1)",
    "fedglad(gamma=0.2)",
    "fedglad(gamma=inf, groups='layer')+fedadam",
    "adafl",
    "importance(gamma=0.5)",
    "importance(gamma=0.5, start='full')",
    "radfedi(redistributions=2)+dgt+fedglad",
    "md+fednova+fedavgm",
    "clustered+scaffold+ida",
    "adafl+adabest+dgt+fedglad+median",
    "trimmed-mean(fraction=0.3)+fedyogi+fedglad",
    "radfed(redistributions=2)+dgt(alpha=0.5)+fixed(cohorts=[[0, 1, 2, 0, 3, 4, 5, 1]])",  # more slots than clients
]


def without_seconds(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in history]


def run(method: str, rounds: int, **settings: Any) -> fl.Result:
    return fl.fit(
        two_layer_model(),
        fl.Federation.from_arrays(CLIENTS),
        method,
        rounds=rounds,
        clients_per_round=5,
        local=fl.Local(**LOCAL),
        loss=squared_error,
        engine="loop",
        device="cpu",
        **settings,
    )


@pytest.mark.parametrize("method", RESUMED)
def test_resumed_run_is_the_same(method: str, tmp_path: Path) -> None:
    """After one round, and once more after four."""
    whole = run(method, 6)
    run(method, 1, checkpoint=tmp_path)
    run(method, 4, checkpoint=tmp_path, resume=True)
    resumed = run(method, 6, checkpoint=tmp_path, resume=True)
    assert torch.equal(whole.params, resumed.params)
    assert repr(without_seconds(whole.history)) == repr(without_seconds(resumed.history))


def test_krum_warns_once_over_a_resumed_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    method = with_cohorts("krum(byzantine=2)", [[0, 1, 2]])
    with caplog.at_level(logging.WARNING, logger="fedloom"):
        run(method, 3, checkpoint=tmp_path)
        run(method, 6, checkpoint=tmp_path, resume=True)
    assert len([record for record in caplog.records if "krum" in record.getMessage()]) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Single precision, and numbers of unlike size
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dgt(alpha=0.5)", "fedglad(gamma=0.2)", "ida", "median", "krum", "fednova"])
def test_single_precision_stays_near(method: str) -> None:
    double = play(with_cohorts(method, LARGE_COHORTS), rounds=8)
    single = play(with_cohorts(method, LARGE_COHORTS), rounds=8, model=two_layer_model().float())
    assert single.result.params.dtype == torch.float32
    assert relative_error(single.params[-1].astype(np.float64), double.params[-1]) < 1e-4


@pytest.mark.parametrize("method", ["dgt", "fedglad", "ida", "median", "trimmed-mean(fraction=0.3)", "krum", "fednova"])
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_updates_of_any_size_stay_finite(method: str, scale: float) -> None:
    """Squares of 1e30 overflow single precision; what is averaged must not."""
    rows = (scale * random_rows(np.random.default_rng(0), 5, 4)).astype(np.float32).astype(np.float64)
    played = play(
        with_cohorts(method, [[0, 1, 2, 3, 4]]),
        model=Given((3, 1)).float(),
        clients=[(row[None], np.zeros(1)) for row in rows],
        rounds=3,
        local={"lr": 1.0},
        loss=output_is_loss,
    )
    assert all(np.isfinite(params).all() for params in played.params)
    assert np.abs(played.params[-1]).max() > 0.1 * scale


def test_play_rows_bears_layers_without_bias() -> None:
    assert play_rows("fedglad", [[1.0, 2.0]], layers=[(2, 0)]).params[0].tolist() == [-1.0, -2.0]
