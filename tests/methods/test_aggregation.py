"""FedNova, IDA, median, trimmed mean and FedGLAD: whole runs against the equations, their laws, and the edges."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import fedloom as fl
from tests import reference
from tests.methods.server_reference import (
    Aggregator,
    Descent,
    FedGlad,
    FedNova,
    Ida,
    Krum,
    Median,
    Pull,
    Recipe,
    Server,
    TrimmedMean,
    TwoMoments,
    gsi,
    step_norm,
)
from tests.methods.server_reference import Groups as By
from tests.methods.test_updates import (
    COHORTS,
    GROUPS,
    LARGE_COHORTS,
    LOCAL,
    MODEL,
    WEIGHTS,
    Played,
    compare,
    play,
    play_rows,
    random_rows,
    relative_error,
    with_cohorts,
)
from tests.reference import Array

# ---------------------------------------------------------------------------------------------------------------------
# FedNova
# ---------------------------------------------------------------------------------------------------------------------

NOVA_LOCALS: dict[str, dict[str, Any]] = {
    "plain": LOCAL,
    "momentum": {**LOCAL, "momentum": 0.6},
    "nesterov": {**LOCAL, "momentum": 0.6, "nesterov": True},
    "full batch": {"batch_size": None, "epochs": 2, "lr": 0.02},
}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("local", NOVA_LOCALS)
def test_fednova_run(local: str, weights: Any) -> None:
    """Sizes from 5 to 23 in batches of 4: between 4 and 12 local steps."""
    text = f"fednova+fedavg(weights='{weights}')"
    compare(text, Recipe(aggregator=FedNova(), weights=weights), local=NOVA_LOCALS[local])
    assert fl.Method("fednova").fills == ["aggregator"]


@pytest.mark.parametrize("local", NOVA_LOCALS)
def test_fednova_follows_the_pull(local: str) -> None:
    recipe = Recipe(clients=Pull(3.0), aggregator=FedNova())
    compare("fednova+fedprox(mu=3.0)", recipe, local=NOVA_LOCALS[local])


@pytest.mark.parametrize(("name", "rate"), [("exponential(decay=0.8)", reference.exponential(0.8))])
def test_fednova_follows_a_rate_of_the_round(name: str, rate: reference.Rate) -> None:
    compare(f"fednova+{name}", Recipe(aggregator=FedNova(), rate=rate), local={**LOCAL, "momentum": 0.6})


@pytest.mark.parametrize("pull", [0.0, 2.0])
def test_fednova_follows_a_rate_of_the_step(pull: float) -> None:
    recipe = Recipe(clients=Pull(pull), aggregator=FedNova(), rate=reference.linear(0.3))
    compare(f"fednova+linear(warmup=0.3)+fedprox(mu={pull})", recipe, local=LOCAL)


@pytest.mark.parametrize("tau", [1, 2, 7])
def test_fednova_reference_gives_the_closed_forms(tau: int) -> None:
    """The recursion that the reference runs, against 2.9; both are up to the common factor lr."""
    ones = np.ones(tau)
    rho, eta, mu = 0.7, 0.05, 1.5
    plain = step_norm(reference.Local(lr=eta), ones, 0.0) / eta
    momentum = step_norm(reference.Local(lr=eta, momentum=rho), ones, 0.0) / eta
    proximal = step_norm(reference.Local(lr=eta), ones, mu) / eta
    assert plain == pytest.approx(tau, rel=1e-12)
    assert momentum == pytest.approx((tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho), rel=1e-12)
    assert proximal == pytest.approx((1 - (1 - eta * mu) ** tau) / (eta * mu), rel=1e-12)


def closed_form(kind: str, tau: int, lr: float) -> float:
    if kind == "momentum":
        return (tau - 0.5 * (1 - 0.5**tau) / 0.5) / 0.5
    if kind == "proximal":
        return (1 - (1 - lr * 2.0) ** tau) / (lr * 2.0)
    return float(tau)


@pytest.mark.parametrize("kind", ["plain", "momentum", "proximal"])
def test_fednova_closed_forms(kind: str) -> None:
    """Under a constant gradient x_k the update of client k is lr a_k x_k, so FedNova averages lr tau_eff x_k."""
    lengths, lr = [1, 4, 7], 0.125
    x = np.array([[1.0, 0.0, 2.0], [-1.0, 3.0, 0.5], [0.0, -2.0, 1.0]])
    method = "fednova" + ("+fedprox(mu=2.0)" if kind == "proximal" else "")
    local = {"batch_size": 1, "lr": lr, **({"momentum": 0.5} if kind == "momentum" else {})}
    played = play_rows(method, x, sizes=lengths, local=local)
    a = np.array([closed_form(kind, tau, lr) for tau in lengths])
    p = np.array(lengths) / sum(lengths)
    tau_eff = float(p @ a)
    np.testing.assert_allclose(played.rows[0], lr * tau_eff * x, rtol=1e-12)
    np.testing.assert_allclose(played.weights[0], p, rtol=1e-12)
    np.testing.assert_allclose(played.params[0], -lr * tau_eff * p @ x, rtol=1e-12)


@pytest.mark.parametrize("local", [{"batch_size": 4, "steps": 5, "lr": 0.02}, {"batch_size": None, "lr": 0.02}])
@pytest.mark.parametrize("extra", ["", "+fedprox(mu=1.0)", "+fedadam"])
def test_fednova_of_equal_steps_is_fedavg(extra: str, local: dict[str, Any]) -> None:
    texts = [with_cohorts(f"{m}{extra}", COHORTS) for m in ("fednova", "fedavg")]
    nova, plain = (play(text, local=local, rounds=10) for text in texts)
    for a, b in zip(nova.params, plain.params, strict=True):
        assert relative_error(a, b) < 1e-12
    nova, plain = (play(text, rounds=5) for text in texts)  # as many steps as there are batches
    assert relative_error(nova.params[-1], plain.params[-1]) > 1e-5


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_fednova_refuses_adam(optimizer: str) -> None:
    with pytest.raises(fl.MethodError, match=r"fednova.*adam|adam.*fednova"):
        play(with_cohorts("fednova", COHORTS), local={**LOCAL, "optimizer": optimizer}, rounds=1)


def test_fednova_of_one_client_is_fedavg() -> None:
    nova, plain = (play(with_cohorts(m, [[2], [0]]), rounds=6) for m in ("fednova", "fedavg"))
    for a, b in zip(nova.params, plain.params, strict=True):
        assert relative_error(a, b) < 1e-12


def test_fednova_leaves_a_diverged_client_out_of_tau() -> None:
    rows, lengths = np.array([[1.0, 0.0], [0.0, 1.0], [3.0, 1.0]]), [1, 6, 3]
    local = {"batch_size": 1, "lr": 0.125}
    played = play_rows("fednova", rows, sizes=lengths, bad=[1], local=local)
    clean = play_rows("fednova", rows, sizes=lengths, cohorts=[[0, 2]], local=local)
    assert np.array_equal(played.params[0], clean.params[0])


def test_fednova_of_a_client_that_can_not_move() -> None:
    """A rate of 0 gives a_k = 0 for everybody; 0/0 must not become nan."""
    played = play(with_cohorts("fednova", COHORTS), local={**LOCAL, "lr": 0.0}, rounds=2)
    assert np.isfinite(played.params[-1]).all()


# ---------------------------------------------------------------------------------------------------------------------
# IDA
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("norm", [1, 2])
def test_ida_run(norm: int, weights: Any) -> None:
    """The weights are IDA's own, whatever the others were."""
    compare(f"ida(norm={norm})+fedavg(weights='{weights}')", Recipe(aggregator=Ida(norm), weights=weights))


def test_ida_default_is_the_first_norm() -> None:
    compare("ida", Recipe(aggregator=Ida(1)))
    assert fl.Method("ida").fills == ["aggregator"]


def test_ida_weights() -> None:
    rows = np.array([[0.0, 0.0], [3.0, 1.0], [0.0, 5.0]])
    for norm, distance in ((1, [3.0, 3.0, 4.0]), (2, [math.sqrt(5), math.sqrt(5), math.sqrt(10)])):
        inverse = 1 / np.array(distance)
        played = play_rows(f"ida(norm={norm})", rows)
        np.testing.assert_allclose(played.weights[0], inverse / inverse.sum(), rtol=1e-9)


@pytest.mark.parametrize("norm", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_ida_of_two_clients_is_half_and_half(seed: int, norm: int) -> None:
    rows = random_rows(np.random.default_rng(seed), 2, 5)
    played = play_rows(f"ida(norm={norm})", rows, sizes=[1, 7])
    np.testing.assert_allclose(played.weights[0], [0.5, 0.5], rtol=1e-9)


@pytest.mark.parametrize("r", [1, 2, 3, 6])
@pytest.mark.parametrize("norm", [1, 2])
def test_ida_of_identical_clients(r: int, norm: int) -> None:
    sizes = [1 << k for k in range(r)]  # the mean over so many equal samples is exact
    played = play_rows(f"ida(norm={norm})", np.tile([0.25, -3.0, 2.0], (r, 1)), sizes=sizes)
    np.testing.assert_allclose(played.weights[0], np.full(r, 1 / r), rtol=1e-12)
    np.testing.assert_allclose(played.params[0], [-0.25, 3.0, -2.0], rtol=1e-12)


def test_ida_with_a_client_on_the_mean() -> None:
    """Its distance is 0, so it takes all the weight, and nothing is nan."""
    played = play_rows("ida", [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    np.testing.assert_allclose(played.weights[0], [0.0, 1.0, 0.0], atol=1e-5)
    assert played.weights[0].sum() == pytest.approx(1.0, rel=1e-12)
    np.testing.assert_allclose(played.params[0], [-2.0, -2.0], rtol=1e-5)


def test_ida_of_zeros() -> None:
    played = play_rows("ida", np.zeros((3, 2)), rounds=2)
    np.testing.assert_allclose(played.weights[0], np.full(3, 1 / 3), rtol=1e-12)
    assert np.array_equal(played.params[1], np.zeros(2))


def test_ida_does_not_depend_on_scale_order_or_shift_of_the_model() -> None:
    rows = random_rows(np.random.default_rng(4), 5, 6)
    plain = play_rows("ida", rows).weights[0]
    np.testing.assert_allclose(play_rows("ida", 1e-3 * rows).weights[0], plain, rtol=1e-6)
    np.testing.assert_allclose(play_rows("ida", rows + 3.0).weights[0], plain, rtol=1e-9)
    np.testing.assert_allclose(play_rows("ida", rows[::-1]).weights[0], plain[::-1], rtol=1e-12)


@pytest.mark.parametrize("text", ["ida(norm=3)", "ida(norm=0)", "ida(norm=1.5)"])
def test_ida_refuses(text: str) -> None:
    with pytest.raises(fl.MethodError, match="ida"):
        fl.Method(text)


# ---------------------------------------------------------------------------------------------------------------------
# Median and trimmed mean
# ---------------------------------------------------------------------------------------------------------------------

TRIMMED: dict[str, Callable[[int], int]] = {
    "trimmed-mean": lambda r: r // 10,
    "trimmed-mean(fraction=0.2)": lambda r: r // 5,
    "trimmed-mean(fraction=0.4)": lambda r: 2 * r // 5,
    "trimmed-mean(fraction=0.0)": lambda r: 0,
}


@pytest.mark.parametrize("weights", WEIGHTS)
def test_median_run(weights: Any) -> None:
    """Cohorts of even and odd size; sizes of clients play no part."""
    compare(f"median+fedavg(weights='{weights}')", Recipe(aggregator=Median(), weights=weights))
    assert fl.Method("median").fills == ["aggregator"]


@pytest.mark.parametrize("text", TRIMMED)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_trimmed_mean_run(weights: Any, text: str) -> None:
    recipe = Recipe(aggregator=TrimmedMean(TRIMMED[text]), weights=weights)
    compare(f"{text}+fedavg(weights='{weights}')", recipe, cohorts=LARGE_COHORTS)
    assert fl.Method(text).fills == ["aggregator"]


def test_median_of_an_even_number_is_the_middle() -> None:
    played = play_rows("median", [[0.0, 8.0], [1.0, 2.0], [4.0, 1.0], [100.0, -50.0]])
    assert np.array_equal(played.params[0], [-2.5, -1.5])
    np.testing.assert_allclose(played.weights[0], np.full(4, 0.25))


@pytest.mark.parametrize("method", ["median", "trimmed-mean(fraction=0.2)"])
def test_robust_averages_bear_one_liar(method: str) -> None:
    rows = np.tile([1.0, -2.0, 3.0], (5, 1))
    rows[3] = 1e12
    np.testing.assert_allclose(play_rows(method, rows).params[0], [-1.0, 2.0, -3.0], rtol=1e-12)


@pytest.mark.parametrize("r", [1, 2, 3, 9, 10, 11, 20])
def test_trimmed_mean_counts(r: int) -> None:
    """A tenth from each side, rounded down: nothing below ten clients."""
    rows = np.arange(r, dtype=np.float64)[:, None] ** 2 * [[1.0, -1.0]]
    cut = r // 10
    expected = np.mean(np.arange(r)[cut : r - cut] ** 2)
    np.testing.assert_allclose(play_rows("trimmed-mean", rows).params[0], [-expected, expected], rtol=1e-12)


def test_trimmed_mean_counts_in_decimals() -> None:
    """0.29 of 100 is 29, although 0.29 * 100 is 28.999999999999996 in floating point."""
    rows = np.arange(100, dtype=np.float64)[:, None] ** 2 * [[1.0, 1.0]]
    expected = np.mean(np.arange(100)[29:71] ** 2)
    np.testing.assert_allclose(play_rows("trimmed-mean(fraction=0.29)", rows).params[0], [-expected] * 2, rtol=1e-12)


@pytest.mark.parametrize("method", ["median", "trimmed-mean(fraction=0.4)", "ida"])
def test_one_client_is_averaged_to_itself(method: str) -> None:
    one, plain = (play(with_cohorts(m, [[2], [0]]), rounds=4) for m in (method, "fedavg"))
    for a, b in zip(one.params, plain.params, strict=True):
        assert relative_error(a, b) < 1e-12


@pytest.mark.parametrize("method", ["median", "trimmed-mean(fraction=0.34)", "ida", "fednova"])
def test_diverged_client_is_not_averaged(method: str) -> None:
    rows = random_rows(np.random.default_rng(1), 4, 3)
    played = play_rows(method, rows, bad=[2])
    clean = play_rows(method, rows, cohorts=[[0, 1, 3]])
    assert np.array_equal(played.params[0], clean.params[0])


@pytest.mark.parametrize("text", ["trimmed-mean(fraction=0.5)", "trimmed-mean(fraction=-0.1)", "median(3)"])
def test_robust_averages_refuse(text: str) -> None:
    with pytest.raises(fl.MethodError, match=r"median|trimmed-mean"):
        fl.Method(text)


# ---------------------------------------------------------------------------------------------------------------------
# FedGLAD: whole runs
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("gamma", ["0.02", "0.5", "inf"])
def test_fedglad_run(gamma: str, groups: By, weights: Any) -> None:
    text = f"fedglad(gamma={gamma}, groups='{groups}')+fedavg(weights='{weights}')"
    recipe = Recipe(rescaler=FedGlad(MODEL.groups(groups), float(gamma)), weights=weights)
    played = compare(text, recipe)
    scales = [scale for found in played.column("fedglad.scale") for scale in np.ravel(found)]
    assert np.std(scales) > 1e-3


def test_fedglad_defaults() -> None:
    compare("fedglad", Recipe(rescaler=FedGlad(MODEL.groups("tensor"), 0.02, 0.9)))
    assert fl.Method("fedglad").fills == ["rescaler"]


def test_fedglad_without_bounds_has_a_name() -> None:
    method = fl.Method("fedglad", gamma=math.inf)
    assert method == fl.Method("fedglad(gamma=inf)") == fl.Method(method.text) == fl.Method(method.data)


SERVERS: dict[str, Callable[[], Server]] = {
    "fedavg(lr=0.5)": lambda: Descent(reference.Averaging(0.5)),
    "fedavgm(lr=0.3, momentum=0.6)": lambda: Descent(reference.Momentum(0.3, 0.6)),
    "fedadam(lr=0.03)": lambda: TwoMoments("adam", 0.03),
    "fedyogi(lr=0.03)": lambda: TwoMoments("yogi", 0.03),
    "fedadagrad(lr=0.05, beta1=0.5)": lambda: TwoMoments("adagrad", 0.05, beta1=0.5),
}


@pytest.mark.parametrize("beta", [0.9, 0.3])
@pytest.mark.parametrize("server", SERVERS)
def test_fedglad_with_servers(server: str, beta: float) -> None:
    """First moments from the rescaled average, second ones from the plain one."""
    recipe = Recipe(rescaler=FedGlad(MODEL.groups("tensor"), 0.1, beta), server=SERVERS[server]())
    compare(f"{server}+fedglad(gamma=0.1, beta={beta})", recipe)


AGGREGATORS: dict[str, Callable[[], Aggregator]] = {
    "fednova": FedNova,
    "ida": Ida,
    "median": Median,
    "trimmed-mean(fraction=0.25)": lambda: TrimmedMean(lambda r: r // 4),
}


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_fedglad_with_aggregators(aggregator: str, groups: By) -> None:
    """GSI from the rows and weights that were averaged; a median has 1/r and the plain mean."""
    rescaler = FedGlad(MODEL.groups(groups), 0.1)
    recipe = Recipe(aggregator=AGGREGATORS[aggregator](), rescaler=rescaler)
    if aggregator in ("fednova", "ida"):
        compare(f"{aggregator}+fedglad(gamma=0.1, groups='{groups}')", recipe)
        return
    played = compare(f"{aggregator}+fedglad(gamma=0.1, groups='{groups}')", recipe)
    for rows, found in zip(played.rows, played.column("fedglad.gsi"), strict=True):
        if len(rows) > 1:
            expected = [gsi(rows[:, group], np.full(len(rows), 1 / len(rows))) for group in MODEL.groups(groups)]
            np.testing.assert_allclose(np.ravel(found), expected, rtol=1e-9)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_fedglad_after_krum(weights: Any) -> None:
    """The kept set and its size, not r."""
    recipe = Recipe(updates=[Krum(1)], rescaler=FedGlad(MODEL.groups("tensor"), 0.1), weights=weights)
    compare(f"krum+fedglad(gamma=0.1)+fedavg(weights='{weights}')", recipe, cohorts=LARGE_COHORTS)


# ---------------------------------------------------------------------------------------------------------------------
# FedGLAD: laws
# ---------------------------------------------------------------------------------------------------------------------


def gsi_of(rows: Sequence[Sequence[float]] | Array, method: str = "fedglad(groups='model')", **settings: Any) -> float:
    (found,) = play_rows(method, rows, **settings).history[0]["fedglad.gsi"]
    return float(found)


@pytest.mark.parametrize("seed", range(10))
def test_gsi_forms(seed: int) -> None:
    """Eq. 9 = Eq. 10 = the code's form, never below 1."""
    rng = np.random.default_rng(seed)
    r = int(rng.integers(2, 8))
    rows = random_rows(rng, r, 6, common=float(rng.random()))
    g = rows.mean(0)
    eq9 = math.sqrt((rows**2).sum() / (r * (g @ g)))
    eq10 = math.sqrt(1 + ((rows - g) ** 2).sum() / (r * (g @ g)))
    code = 1 / math.sqrt(1 - ((rows - g) ** 2).sum() / (rows**2).sum())
    found = gsi_of(rows)
    assert found >= 1
    assert found == pytest.approx(eq9, rel=1e-10)
    assert found == pytest.approx(eq10, rel=1e-10)
    assert found == pytest.approx(code, rel=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_gsi_with_weights(seed: int) -> None:
    """GSI^2 = sum a |g_k|^2 / |g|^2 = 1 + sum a |g_k - g|^2 / |g|^2, with no r in it."""
    rng = np.random.default_rng(seed)
    rows = random_rows(rng, 4, 6)
    sizes = rng.integers(1, 9, 4).tolist()
    share = np.array(sizes) / sum(sizes)
    g = share @ rows
    found = gsi_of(rows, sizes=sizes)
    assert found**2 == pytest.approx(share @ (rows**2).sum(1) / (g @ g), rel=1e-10)
    assert found**2 == pytest.approx(1 + share @ ((rows - g) ** 2).sum(1) / (g @ g), rel=1e-10)


def test_gsi_where_the_released_form_has_no_root() -> None:
    """Section 9: weights .9 and .1, g = 1 and -1: 1.25."""
    assert gsi_of([[1.0, 0.0], [-1.0, 0.0]], sizes=[9, 1]) == pytest.approx(1.25, rel=1e-12)


@pytest.mark.parametrize("r", [2, 3, 5])
def test_gsi_of_known_cohorts(r: int) -> None:
    identical = np.tile([0.3, -1.7, 2.2, 0.1, 5.0], (r, 1))
    assert gsi_of(identical) == pytest.approx(1.0, abs=1e-12)
    assert gsi_of(identical, sizes=[1 + k for k in range(r)]) == pytest.approx(1.0, abs=1e-12)
    assert gsi_of(np.eye(r)) == pytest.approx(math.sqrt(r), rel=1e-12)
    rotation, _ = np.linalg.qr(np.random.default_rng(r).normal(size=(r, r)))
    assert gsi_of(rotation) == pytest.approx(math.sqrt(r), rel=1e-9)


def test_gsi_has_no_scale() -> None:
    rows = random_rows(np.random.default_rng(0), 4, 6)
    assert gsi_of(rows) == pytest.approx(gsi_of(1e-6 * rows), rel=1e-9)
    assert gsi_of(rows) == pytest.approx(gsi_of(1e6 * rows), rel=1e-9)
    assert gsi_of(rows) == pytest.approx(gsi_of(-rows), rel=1e-12)


@pytest.mark.parametrize("scale", [1e-9, 1e-12])
def test_gsi_of_tiny_updates(scale: float) -> None:
    """A late round: an eps of 1e-12 beside squares would show here."""
    rows = random_rows(np.random.default_rng(0), 4, 6)
    assert gsi_of(scale * rows) == pytest.approx(gsi_of(rows), rel=1e-9)


def test_gsi_after_krum_is_that_of_the_kept() -> None:
    """Identical but for one liar: 1, where the printed r would give sqrt(4/5)."""
    rows = np.tile([1.0, 2.0, -1.0], (5, 1))
    rows[4] = [50.0, 0.0, 0.0]
    assert gsi_of(rows, "krum(byzantine=1)+fedglad(groups='model')") == pytest.approx(1.0, abs=1e-12)


def test_gsi_of_ida_uses_its_weights() -> None:
    rows = random_rows(np.random.default_rng(3), 4, 6)
    played = play_rows("ida+fedglad(groups='model')", rows, sizes=[1, 2, 3, 4])
    found = float(played.history[0]["fedglad.gsi"][0])
    assert found == pytest.approx(gsi(rows, played.weights[0]), rel=1e-10)
    assert found != pytest.approx(gsi(rows, np.arange(1, 5) / 10), rel=1e-3)


def test_gsi_of_a_median_uses_the_plain_mean() -> None:
    """The median of these is 0 where the mean is not, and GSI is finite and at least 1."""
    rows = np.array([[0.0, 0.0], [0.0, 0.0], [3.0, 6.0]])
    played = play_rows("median+fedglad(groups='model')", rows, sizes=[1, 2, 3])
    assert float(played.history[0]["fedglad.gsi"][0]) == pytest.approx(math.sqrt(3), rel=1e-12)
    assert np.array_equal(played.params[0], np.zeros(2))


def test_fednova_keeps_gsi_at_least_one() -> None:
    """Under one common gradient the rows differ in length only, until FedNova makes them equal."""
    rows = np.tile([1.0, -2.0, 0.5], (3, 1))
    local = {"batch_size": 1, "lr": 0.125}
    nova, plain = (
        gsi_of(rows, f"{m}+fedglad(groups='model')", sizes=[1, 3, 8], local=local) for m in ("fednova", "fedavg")
    )
    assert nova == pytest.approx(1.0, abs=1e-9)
    assert plain > 1.05


def lists(played: Played, name: str) -> Array:
    return np.array([np.ravel(found) for found in played.column(f"fedglad.{name}")])


def changing_rounds(gamma: str, rounds: int, method: str = "fedavg", beta: float = 0.9) -> Played:
    """Cohorts that agree and cohorts that do not, in turn: GSI jumps between 1 and several."""
    rng = np.random.default_rng(8)
    base = rng.normal(size=5)
    rows = np.array([base, base + 0.01, base - 0.02 * np.eye(5)[1], *rng.normal(size=(3, 5))])
    cohorts = [[0, 3, 4], [0, 1, 2], [3, 4, 5], [1, 2], [0, 1, 2, 3, 4, 5]]
    text = f"fedglad(gamma={gamma}, beta={beta})+{method}"
    return play_rows(text, rows, cohorts=cohorts, rounds=rounds, layers=[(2, 1), (1, 1)])


@pytest.mark.parametrize("gamma", ["0.02", "0.3", "inf"])
def test_fedglad_first_round_is_untouched(gamma: str) -> None:
    played = changing_rounds(gamma, 4)
    assert np.array_equal(lists(played, "scale")[0], np.ones(4))
    assert not np.array_equal(lists(played, "scale")[1], np.ones(4))


@pytest.mark.parametrize("gamma", [0.02, 0.1])
def test_fedglad_stays_within_its_bounds(gamma: float) -> None:
    """1 -+ gamma t; both bounds are met, and past t = 1/gamma the lower one is 0 and idle."""
    rounds = 30
    played, free = changing_rounds(str(gamma), rounds), changing_rounds("inf", rounds)
    scales, ratios = lists(played, "scale"), lists(free, "scale")
    t = np.arange(rounds)[:, None]
    expected = np.minimum(np.maximum(ratios, 1 - gamma * t), 1 + gamma * t)
    np.testing.assert_allclose(scales, expected, rtol=1e-9)
    assert (ratios < 1 - gamma * t).any()
    assert (ratios > 1 + gamma * t).any()
    assert (scales > 0).all()
    at_bound = ((ratios <= 1 - gamma * t) | (ratios >= 1 + gamma * t)).mean(1)
    np.testing.assert_allclose(played.column("fedglad.at_bound")[1:], at_bound[1:], atol=1e-12)
    assert free.column("fedglad.at_bound")[1:] == [0.0] * (rounds - 1)


@pytest.mark.parametrize("beta", [0.9, 0.5])
def test_fedglad_baseline_does_not_know_the_present(beta: float) -> None:
    """Eq. 13: the ratio is GSI over a moving average of the GSIs before it."""
    played = changing_rounds("inf", 20, beta=beta)
    found, scales = lists(played, "gsi"), lists(played, "scale")
    b = found[0]
    for now, scale in zip(found, scales, strict=True):
        np.testing.assert_allclose(scale, now / b, rtol=1e-9)
        b = beta * b + (1 - beta) * now


@pytest.mark.parametrize("server", ["fedavg", "fedavg(lr=0.5)", "fedavgm", "fedadam", "fedyogi", "fedadagrad"])
def test_fedglad_without_freedom_is_the_baseline(server: str) -> None:
    """gamma = 0, bit for bit."""
    plain = play(with_cohorts(server, COHORTS), rounds=10)
    for groups in GROUPS:
        glad = play(with_cohorts(f"{server}+fedglad(gamma=0, groups='{groups}')", COHORTS), rounds=10)
        assert all(np.array_equal(a, b) for a, b in zip(glad.params, plain.params, strict=True))


def test_fedglad_of_a_steady_gsi_is_the_baseline() -> None:
    rows = random_rows(np.random.default_rng(0), 3, 4)
    glad, plain = (play_rows(m, rows, rounds=30) for m in ("fedglad(gamma=inf)", "fedavg"))
    for a, b in zip(glad.params, plain.params, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("server", ["fedadam", "fedyogi", "fedadagrad"])
def test_second_moment_does_not_know_the_scale(server: str) -> None:
    """The rows do not depend on the model here, so v must be the same with and without FedGLAD; m must not."""
    method = f"{server}(beta1=0.9)"
    free, fixed = (changing_rounds(gamma, 12, method) for gamma in ("inf", "0.0"))
    for one, other in zip(free.stages, fixed.stages, strict=True):
        v = one[f"{server}.server"]["v"].numpy(), other[f"{server}.server"]["v"].numpy()
        np.testing.assert_allclose(v[0], v[1], rtol=1e-9)
    m = free.stages[-1][f"{server}.server"]["m"].numpy(), fixed.stages[-1][f"{server}.server"]["m"].numpy()
    assert relative_error(m[0], m[1]) > 1e-2


# ---------------------------------------------------------------------------------------------------------------------
# FedGLAD: edges
# ---------------------------------------------------------------------------------------------------------------------


def test_fedglad_passes_over_rounds_of_one_client() -> None:
    """Neither B nor t moves: the rounds of several clients go as if the others had not been."""
    rng = np.random.default_rng(8)
    rows = random_rows(rng, 6, 5)
    crowds = [[0, 1, 2], [3, 4], [1, 2, 5], [0, 5], [0, 1, 2, 3, 4, 5]]
    mixed = [cohort for crowd in crowds for cohort in (crowd, [2], [0])]
    plain = play_rows("fedglad(gamma=0.1)", rows, cohorts=crowds, rounds=10)
    lonely = play_rows("fedglad(gamma=0.1)", rows, cohorts=mixed, rounds=30)
    np.testing.assert_allclose(lists_of(lonely, range(0, 30, 3)), lists(plain, "scale"), rtol=1e-9)
    for r in (1, 2, 4, 5):  # a round of one client is FedAvg
        moved = lonely.params[r - 1] - lonely.params[r]
        np.testing.assert_allclose(moved, lonely.rows[r][0], rtol=1e-9, atol=1e-12)


def lists_of(played: Played, rounds: Sequence[int]) -> Array:
    return np.array([np.ravel(played.history[r]["fedglad.scale"]) for r in rounds])


def test_fedglad_that_starts_with_one_client() -> None:
    rows = random_rows(np.random.default_rng(8), 4, 5)
    played = play_rows("fedglad(gamma=inf)", rows, cohorts=[[0], [1, 2, 3]], rounds=6)
    assert all(np.isfinite(params).all() for params in played.params)
    np.testing.assert_allclose(lists_of(played, [1, 3, 5]), 1.0, rtol=1e-9)  # B is the GSI of the first crowd


def test_fedglad_after_divergence_counts_who_is_left() -> None:
    rows = random_rows(np.random.default_rng(8), 4, 5)
    cohorts = [[0, 1, 2], [0, 3], [1, 3, 2]]
    played = play_rows("fedglad(gamma=0.3)", rows, cohorts=cohorts, bad=[3], rounds=9)
    clean = play_rows("fedglad(gamma=0.3)", rows, cohorts=[[0, 1, 2], [0], [1, 2]], rounds=9)
    assert all(np.array_equal(a, b) for a, b in zip(played.params, clean.params, strict=True))


def test_fedglad_with_a_tensor_that_never_moves() -> None:
    """All its rows are 0: GSI = 1, nothing is nan, and the other groups do not notice."""
    rng = np.random.default_rng(8)
    rows = random_rows(rng, 6, 5)
    rows[:, 2] = 0
    cohorts = [[0, 1, 2], [3, 4], [1, 2, 5], [0, 5]]
    played = play_rows("fedglad(gamma=0.2)", rows, cohorts=cohorts, rounds=12, layers=[(2, 1), (1, 1)])
    assert np.array_equal(lists(played, "gsi")[:, 1], np.ones(12))
    assert all(params[2] == 0 and np.isfinite(params).all() for params in played.params)
    without = play_rows(
        "fedglad(gamma=0.2)", rows[:, [0, 1, 3, 4]], cohorts=cohorts, rounds=12, layers=[(2, 1), (1, 0)]
    )
    np.testing.assert_allclose(lists(played, "scale")[:, 0], lists(without, "scale")[:, 0], rtol=1e-12)


def test_fedglad_where_a_tensor_averages_to_zero() -> None:
    """Its GSI is infinite: s = 1 and B stays, so that the round after it is scaled as if it had not been."""
    rows = np.array([[1.0, 2.0, 1.0, 3.0], [2.0, 1.0, 3.0, 1.0], [1.0, 2.0, -1.0, 3.0], [3.0, 0.5, 2.0, 2.0]])
    layers = [(2, 1), (1, 0)]
    method = "fedglad(gamma=inf)+fedavg(weights='equal')"
    first, cancelled, last = [0, 1], [0, 2], [1, 3]  # column 2 cancels in the second
    played = play_rows(method, rows, cohorts=[first, cancelled, last], rounds=3, layers=layers)
    assert all(np.isfinite(params).all() for params in played.params)
    assert lists(played, "scale")[1, 1] == 1.0
    found = lists(played, "gsi")
    assert lists(played, "scale")[2, 1] == pytest.approx(found[2, 1] / found[0, 1], rel=1e-12)
    b = 0.9 * found[0, 0] + 0.1 * found[1, 0]
    assert lists(played, "scale")[2, 0] == pytest.approx(found[2, 0] / b, rel=1e-12)
    # The same as the first round: B starts with the first GSI that there is.
    late = play_rows(method, rows, cohorts=[cancelled, first, last], rounds=3, layers=layers)
    assert lists(late, "scale")[:, 1] == pytest.approx([1.0, 1.0, found[2, 1] / found[0, 1]], rel=1e-12)
    assert all(np.isfinite(params).all() for params in late.params)


def test_fedglad_where_a_tensor_averages_to_a_trace_of_rounding() -> None:
    """-80 + 669 - 589 is 0, but thirds of it add up to 3e-14 in floating point. Taken for a length, that makes a GSI of
    2e16, which B would not forget for 300 rounds: past t = 1/gamma the tensor would stand still.
    """
    rows = np.array([[1.0, -80.0], [2.0, 669.0], [1.5, -589.0], [1.0, 100.0], [2.0, 150.0], [1.5, 120.0]])
    agreeing, cancelled = [3, 4, 5], [0, 1, 2]
    method = "fedglad(gamma=inf)+fedavg(weights='equal')"
    played = play_rows(method, rows, cohorts=[agreeing, cancelled, agreeing], rounds=3)
    assert lists(played, "scale")[:, 1] == pytest.approx([1.0, 1.0, 1.0], rel=1e-9)
    late = play_rows(method, rows, cohorts=[cancelled, agreeing], rounds=2)
    assert lists(late, "scale")[:, 1] == pytest.approx([1.0, 1.0], rel=1e-9)


def test_fedglad_reports_a_round_of_one_client_as_itself() -> None:
    """One client has GSI 1, not that of the round before it."""
    rows = random_rows(np.random.default_rng(8), 3, 4)
    played = play_rows("fedglad(gamma=0.1)", rows, cohorts=[[0, 1, 2], [1]], rounds=4)
    assert (lists_of(played, [1, 3]) == 1.0).all()
    found = lists(played, "gsi")
    assert (found[[0, 2]] > 1.0).any()
    np.testing.assert_allclose(found[[1, 3]], 1.0)


def test_fedglad_of_zeros_only() -> None:
    played = play_rows("fedglad", np.zeros((3, 4)), rounds=3)
    assert np.array_equal(played.params[-1], np.zeros(4))
    assert np.array_equal(lists(played, "gsi"), np.ones((3, 2)))


def test_fedglad_groups_have_names_in_order() -> None:
    for groups, number in (("tensor", 4), ("layer", 2), ("model", 1)):
        played = play(with_cohorts(f"fedglad(groups='{groups}')", COHORTS), rounds=3)
        assert np.shape(played.history[0]["fedglad.gsi"]) == (number,)
        rows, share = played.rows[0], played.weights[0]
        expected = [gsi(rows[:, part], share) for part in MODEL.groups(groups)]  # type: ignore[arg-type]
        np.testing.assert_allclose(played.history[0]["fedglad.gsi"], expected, rtol=1e-9)


@pytest.mark.parametrize(
    "text",
    ["fedglad(gamma=-0.1)", "fedglad(beta=1.5)", "fedglad(beta=-0.1)", "fedglad(groups='group')"],
)
def test_fedglad_refuses(text: str) -> None:
    with pytest.raises(fl.MethodError, match="fedglad"):
        fl.Method(text)


def test_reference_parts_are_told_apart() -> None:
    """No two aggregators lead to the same place: otherwise a comparison could not fail."""
    ends: dict[str, Array] = {}
    for name in ("mean", *AGGREGATORS):
        ends[name] = play(with_cohorts("fedavg" if name == "mean" else name, LARGE_COHORTS), rounds=5).params[-1]
    names = sorted(ends)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert relative_error(ends[one], ends[other]) > 1e-5, f"{one} and {other}"
