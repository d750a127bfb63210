"""Hostile clients and clipping: whole runs against the equations, what the next client and every stage get to see,
flipped labels against data that were flipped by hand, and the edges.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

import fedloom as fl
from fedloom.lockstep import alike
from fedloom.methods.attack import z_max
from fedloom.training import Training
from tests import reference
from tests.methods import server_reference
from tests.methods.server_reference import (
    Clip,
    Dgt,
    Hostile,
    Krum,
    Mean,
    Median,
    Recipe,
    TrimmedMean,
    hostile_set,
    little_is_enough,
)
from tests.methods.test_updates import (
    CLIENTS,
    LARGE_COHORTS,
    LOCAL,
    MODEL,
    TOLERANCE,
    WEIGHTS,
    compare,
    play,
    play_rows,
    relative_error,
    two_layer_start,
    with_cohorts,
)

ROUNDS = 12
NUMBER = 2  # round(0.4 * 6)
# Works with none, some and all of the hostile clients, a client twice, and one client alone.
COHORTS = [[0, 1, 2, 3, 4, 5], [3, 1], [4], [2, 0, 5, 4], [1, 0, 3, 0, 2], [5, 2], [0, 4, 3, 5, 1]]
KINDS: list[Any] = ["sign-flip", "scale", "noise", "alie"]
OTHER_SCALES = {"sign-flip": 2.5, "scale": 3.0, "noise": 0.5, "alie": 1.5}


def hostile(kind: Any, s: float | None = None, seed: int = 0) -> Hostile:
    return Hostile(kind, hostile_set(seed, len(CLIENTS), NUMBER), s, seed)


def count_hostile(cohort: list[int], seed: int = 0) -> int:
    return sum(k in hostile_set(seed, len(CLIENTS), NUMBER) for k in cohort)


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs against the equations
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", KINDS)
def test_attacked_run(kind: Any, weights: Any) -> None:
    text = f"attack(kind='{kind}', fraction=0.4)+fedavg(weights='{weights}')"
    local = {**LOCAL, "lr": 0.004}  # models that are pushed away grow
    played = compare(text, Recipe(hostile=hostile(kind), weights=weights), cohorts=COHORTS, local=local, rounds=ROUNDS)
    assert played.column("attack.hostile") == [count_hostile(COHORTS[r % len(COHORTS)]) for r in range(ROUNDS)]
    assert sum(played.column("attack.hostile")) > 0


@pytest.mark.parametrize("seed", [1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_scale_and_seed(kind: Any, seed: int) -> None:
    s = OTHER_SCALES[kind]
    recipe = Recipe(hostile=hostile(kind, s, seed))
    local = {**LOCAL, "lr": 0.004}
    compare(f"attack('{kind}', 0.4, {s})", recipe, cohorts=COHORTS, local=local, rounds=ROUNDS, seed=seed)


def test_defaults() -> None:
    """A fifth of six clients is one, whose update is turned round."""
    recipe = Recipe(hostile=Hostile("sign-flip", hostile_set(0, 6, 1)))
    compare("attack", recipe, cohorts=COHORTS, rounds=ROUNDS)
    assert fl.Method("attack").fills == ["update"]


@pytest.mark.parametrize("norm_", [0.02, 0.1, 0.5])
def test_clip_run(norm_: float) -> None:
    played = compare(f"clip(norm={norm_})", Recipe(updates=[Clip(norm_)]), rounds=ROUNDS)
    assert np.mean(played.column("clip.clipped")) > 0
    assert norm_ != 0.5 or np.mean(played.column("clip.clipped")) < 1


def test_clip_acts_before_krum_and_dgt() -> None:
    """Whatever the order of the text."""
    recipe = Recipe(updates=[Clip(0.1), Krum(1), Dgt(MODEL.groups("model"), 0.5)])
    compare("dgt(alpha=0.5)+krum+clip(norm=0.1)", recipe, cohorts=LARGE_COHORTS, rounds=ROUNDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "aggregator"),
    [
        ("fedavg", Mean()),
        ("median", Median()),
        ("trimmed-mean(fraction=0.25)", TrimmedMean(lambda r: r // 4)),
    ],
)
def test_attack_then_clip_then_krum_then_average(kind: Any, text: str, aggregator: Any) -> None:
    recipe = Recipe(hostile=hostile(kind), updates=[Clip(0.3), Krum(1)], aggregator=aggregator)
    compare(f"{text}+krum+clip(norm=0.3)+attack('{kind}', fraction=0.4)", recipe, cohorts=COHORTS, rounds=ROUNDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_poisoned_model_travels_on(kind: Any) -> None:
    """RADFed: every Work is attacked, and the next client starts from what the hostile one handed on."""
    cohorts = [[0, 1, 2, 3, 4], [4, 5, 3, 1, 2], [2, 4, 0, 5, 3], [1, 3, 5, 2, 0]]
    recipe = Recipe(hostile=hostile(kind), redistributions=3, weights="equal")
    local = {**LOCAL, "lr": 0.002}
    text = f"radfed(redistributions=3)+attack('{kind}', fraction=0.4)"
    played = compare(text, recipe, cohorts=cohorts, local=local, rounds=6)
    works = [[cohorts[(3 * r + s) % 4] for s in range(3)] for r in range(6)]
    assert played.column("attack.hostile") == [sum(map(count_hostile, some)) for some in works]
    honest = play(with_cohorts("radfed(redistributions=3)", cohorts), local=local, rounds=6)
    assert relative_error(played.params[0], honest.params[0]) > 1e-3 or kind == "alie"


def test_asynchronous_clients_are_attacked() -> None:
    """FedAsync: theta <- theta - alpha (theta - x_new), where a hostile x_new is old - s (old - trained)."""
    one_by_one = [[0], [3], [1], [4], [2], [1], [5]]
    bad, s, alpha, kept = hostile_set(0, 6, NUMBER), 4.0, 0.6, 3
    text = f"fedasync(alpha={alpha}, max_staleness={kept - 1})+attack('scale', 0.4, {s})"
    played = play(with_cohorts(text, one_by_one), rounds=20)
    settings_ = reference.Local(**LOCAL)
    queue = [two_layer_start()]
    for w in range(20):
        k = one_by_one[w % len(one_by_one)][0]
        key = np.random.SeedSequence(0, spawn_key=(w, 0))
        u = int(np.random.default_rng(key).integers(0, len(queue)))
        old, theta = queue[-1 - u], queue[-1]
        batches = settings_.batches(len(CLIENTS[k][1]), 0, w, k, 0)
        trained = reference.train(MODEL, old, {}, CLIENTS[k], settings_, batches, np.ones(len(batches)), 0.0, 0.0)
        new = old - (s if k in bad else 1.0) * (old - trained.end)
        queue = [*queue, (1 - alpha) * theta + alpha * new][-kept:]
        assert relative_error(played.params[w], queue[-1]) < TOLERANCE, w
    assert sum(played.column("attack.hostile")) > 0


# ---------------------------------------------------------------------------------------------------------------------
# Who is hostile, and how far a hidden attack may go
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fraction", "number"), [(0.0, 0), (0.04, 0), (0.06, 1), (0.3, 3), (0.35, 4), (1.0, 10)])
def test_how_many_are_hostile(fraction: float, number: int) -> None:
    played = play_rows(f"attack(fraction={fraction})", np.eye(10))
    assert played.history[0]["attack.hostile"] == number
    turned = {k for k in range(10) if played.rows[0][k, k] < 0}
    assert turned == hostile_set(0, 10, number)


def test_the_same_clients_in_every_round_and_more_of_them_in_a_larger_share() -> None:
    turned = []
    for fraction in (0.1, 0.3, 0.5):
        played = play_rows(f"attack(fraction={fraction})", np.eye(10), rounds=4)
        rounds = [{k for k in range(10) if rows[k, k] < 0} for rows in played.rows]
        assert rounds == rounds[:1] * 4
        turned.append(rounds[0])
    assert turned[0] < turned[1] < turned[2]
    assert hostile_set(0, 10, 3) != hostile_set(1, 10, 3)


@given(st.integers(3, 200), st.data())
def test_z_of_a_little_is_enough(r: int, data: st.DataObject) -> None:
    """At z as many honest clients as are missing for a majority stand farther out, if they are normal."""
    f = data.draw(st.integers(1, r - 2))
    z = z_max(r, f)
    assert z == pytest.approx(little_is_enough(r, f), rel=1e-9, abs=1e-12)
    farther = (r - f) * float(norm.sf(z))
    if z > 0 and f < r // 2:
        assert f + farther == pytest.approx(r // 2 + 1)


@pytest.mark.parametrize(("r", "f", "z"), [(50, 12, 0.3360), (20, 6, 0.3661), (20, 4, 0.1573), (20, 1, 0.0)])
def test_z_by_value(r: int, f: int, z: float) -> None:
    assert z_max(r, f) == pytest.approx(z, abs=1e-4)


@pytest.mark.parametrize("cohort", [[0], [0, 1]])
def test_hidden_attackers_need_two_honest_clients(cohort: list[int]) -> None:
    rows = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 7.0]])
    bad = hostile_set(0, 2, 1)
    assert len(bad & {0, 1}) == 1
    played = play_rows("attack(alie, fraction=0.5)", rows, cohorts=[cohort])
    assert np.array_equal(played.rows[0], rows[cohort])


# ---------------------------------------------------------------------------------------------------------------------
# Laws
# ---------------------------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.floats(1e-3, 1e3))
def test_clip_never_lengthens_nor_turns(seed: int, norm_: float) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(5, 4)) * 10.0 ** rng.integers(-4, 4, (5, 1))
    rows[0] = 0
    out = play_rows(f"clip(norm={norm_})", rows).rows[0]
    before, after = np.linalg.norm(rows, axis=1), np.linalg.norm(out, axis=1)
    assert (after <= np.minimum(before, norm_) * (1 + 1e-12)).all()
    np.testing.assert_allclose(out * before[:, None], rows * after[:, None], rtol=1e-9, atol=1e-300)
    inside = before <= norm_
    assert np.array_equal(out[inside], rows[inside])


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_krum_leaves_out_scaled_and_noisy_updates(seed: int) -> None:
    """Ten near updates, three of them hostile and a hundred times as long."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=10 * 8).reshape(10, 8) * 0.1 + rng.normal(size=8)
    bad = hostile_set(0, 10, 3)
    for kind in ("scale", "noise"):
        played = play_rows(f"attack({kind}, 0.3, 100)+krum(byzantine=3)", rows)
        assert played.clients[0] == [k for k in range(10) if k not in bad]


@pytest.mark.parametrize("kind", [*KINDS, "label-flip"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold+krum", "radfed(redistributions=2)+dgt", "fedasync"])
def test_nobody_is_hostile(kind: str, method: str) -> None:
    """fraction=0: every bit as without the attack."""
    plain, attacked = (digits(text, rounds=3) for text in (method, f"{method}+attack({kind}, fraction=0)"))
    assert torch.equal(plain.params, attacked.params)
    assert [row["train_loss"] for row in plain.history] == [row["train_loss"] for row in attacked.history]
    assert [row["attack.hostile"] for row in attacked.history] == [0] * 3


# ---------------------------------------------------------------------------------------------------------------------
# Flipped labels
# ---------------------------------------------------------------------------------------------------------------------


DIGITS = fl.load("digits", partition="dirichlet(alpha=1.0)", clients=10, seed=0)


def digits(method: str, data: fl.Federation = DIGITS, **settings_: Any) -> fl.Result:
    given_: dict[str, Any] = {"rounds": 4, "engine": "loop", "device": "cpu", "clients_per_round": 6, **settings_}
    local = fl.Local(steps=3, batch_size=10, lr=0.1)
    torch.manual_seed(0)
    return fl.fit(fl.model("mlp(hidden=[8])", data), data, method, local=local, **given_)


def flipped_by_hand(data: fl.Federation, number: int, classes: int) -> fl.Federation:
    bad = hostile_set(0, len(data), number)
    pairs = [data.client(k) for k in range(len(data))]
    pairs = [(x, classes - 1 - y if k in bad else y) for k, (x, y) in enumerate(pairs)]
    made = fl.Federation.from_arrays(
        pairs, test=None if data.test is None else (data.test.x, data.test.y), classes=classes
    )
    return replace(made, preparation=data.preparation)


@pytest.mark.parametrize("method", ["fedavg", "radfed(redistributions=2)", "fedasync", "adabest+median"])
def test_label_flip_is_training_on_flipped_labels(method: str) -> None:
    attacked = digits(f"{method}+attack(label-flip, fraction=0.3)")
    by_hand = digits(method, flipped_by_hand(DIGITS, 3, 10))
    assert torch.equal(attacked.params, by_hand.params)
    assert attacked.history[-1]["test_accuracy"] == by_hand.history[-1]["test_accuracy"]  # of clean test data
    assert not torch.equal(attacked.params, digits(method).params)
    assert sum(row["attack.hostile"] for row in attacked.history) > 0


def test_labels_that_a_user_shared_stay_as_they_are() -> None:
    before = DIGITS.y.clone()
    digits("attack(label-flip)", rounds=1)
    assert torch.equal(DIGITS.y, before)


def test_samples_of_honest_clients_keep_their_labels() -> None:
    """Every client holds the same samples; only the hostile see them flipped."""
    x, y = DIGITS.x[:40], DIGITS.y[:40]
    index, offsets = torch.arange(40).repeat(6), torch.arange(7) * 40
    shared = replace(fl.Federation.build(x, y, index, offsets, classes=10), preparation=DIGITS.preparation)
    attacked = digits("attack(label-flip, fraction=0.5)", shared)
    assert torch.equal(attacked.params, digits("fedavg", flipped_by_hand(shared, 3, 10)).params)
    assert not torch.equal(attacked.params, digits("fedavg", shared).params)


def test_flipped_sequences_keep_their_gaps() -> None:
    """Where nothing is to be predicted nothing is flipped."""
    y = torch.tensor([[0, 2, -100], [1, -100, 1]])
    data = fl.Federation.from_tensor(torch.zeros(2, 3), y, [0, 1, 2], classes=3)
    training = Training(torch.nn.Linear(3, 3), data, "attack(label-flip, fraction=1)", rounds=1, loss=no_loss)
    assert training.simulation.federation.y.tolist() == [[2, 0, -100], [1, -100, 1]]


def no_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.sum(1)


def test_label_flip_needs_labels() -> None:
    with pytest.raises(fl.MethodError, match="label-flip needs class labels"):
        play("attack(kind='label-flip')", rounds=1)


def test_diagnostics_see_flipped_labels() -> None:
    """They ask the clients: with all hostile, labels are as like as before, but of other classes."""
    clean, attacked = (digits(text, diagnose="labels") for text in ("fedavg", "attack(label-flip, fraction=0.5)"))
    assert [r["labels.similarity"] for r in clean.history] != [r["labels.similarity"] for r in attacked.history]


def test_runs_with_equal_labels_share_their_steps() -> None:
    def training(method: str, seed: int = 0) -> Training:
        torch.manual_seed(0)
        model = fl.model("mlp(hidden=[8])", DIGITS)
        return Training(model, DIGITS, method, rounds=1, engine="vector", device="cpu", seed=seed)

    flip = "attack(label-flip, fraction=0.3)"
    assert alike(training(f"dgt+{flip}"), training(f"krum+{flip}"))
    assert alike(training("attack"), training("fedavg"))
    assert not alike(training(flip), training("fedavg"))
    assert not alike(training(flip), training(flip, seed=1))


# ---------------------------------------------------------------------------------------------------------------------
# Engines, overflow, what stages hear, resume, refusals
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "label-flip"])
@pytest.mark.parametrize("method", ["scaffold+clip(norm=1.0)", "radfed(redistributions=2)+fedglad", "md"])
def test_loop_and_vector_agree(kind: str, method: str) -> None:
    text = f"{method}+attack({kind}, fraction=0.3)"
    loop, vector = (digits(text, engine=engine) for engine in ("loop", "vector"))
    torch.testing.assert_close(vector.params, loop.params, rtol=1e-4, atol=1e-5)
    assert [r["attack.hostile"] for r in loop.history] == [r["attack.hostile"] for r in vector.history]


def test_an_update_that_overflows_has_diverged() -> None:
    rows = np.full((5, 3), 1e10)
    bad = hostile_set(0, 5, 2)
    played = play_rows("attack(scale, 0.4, 1e300)", rows, rounds=2)
    assert played.column("diverged") == [2, 2]
    assert played.column("attack.hostile") == [2, 2]
    assert played.clients == [[k for k in range(5) if k not in bad]] * 2
    np.testing.assert_allclose(played.params[0], -rows[0], rtol=1e-12)


def test_a_round_of_overflowing_updates_is_counted_and_the_next_starts_at_zero() -> None:
    bad = sorted(hostile_set(0, 5, 2))
    good = [k for k in range(5) if k not in bad]
    played = play_rows("attack(scale, 0.4, 1e300)", np.full((5, 3), 1e10), cohorts=[bad, good, bad], rounds=3)
    assert played.column("diverged") == [2, 0, 2]
    assert played.column("attack.hostile") == [2, 0, 2]
    assert not played.params[0].any()


def test_a_hostile_client_that_diverged_is_left_out() -> None:
    """Its loss is nan, whatever it sends."""
    rows = np.random.default_rng(0).normal(size=(5, 4))
    bad = hostile_set(0, 5, 2)
    for kind in KINDS:
        played = play_rows(f"attack({kind}, fraction=0.4)", rows, bad=[min(bad)])
        assert played.column("diverged") == [1]
        assert played.clients[0] == [k for k in range(5) if k != min(bad)]


def test_hidden_attackers_do_not_count_honest_clients_that_diverged() -> None:
    rows = np.random.default_rng(0).normal(size=(7, 4))
    bad = hostile_set(0, 7, 2)
    broken = min(set(range(7)) - bad)
    played = play_rows("attack(alie, fraction=0.3)", rows, bad=[broken])
    left = [k for k in range(7) if k != broken]
    expected = Hostile("alie", bad).poison(rows[left], left, 0)
    np.testing.assert_allclose(played.rows[0], expected, rtol=1e-12)


def test_what_is_sent_beside_the_update_stays_honest() -> None:
    """SCAFFOLD's c is moved by the honest change of every client that is averaged."""
    recipe = Recipe(
        clients=server_reference.Scaffold(population=len(CLIENTS)), hostile=hostile("scale"), weights="equal", once=True
    )
    local = {**LOCAL, "lr": 0.004}
    compare("scaffold+attack('scale', fraction=0.4)", recipe, cohorts=COHORTS, local=local, rounds=6)


def test_diagnostics_of_a_work_see_what_the_server_received() -> None:
    rows = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    plain, attacked = (
        play_rows(text, rows, diagnose="divergence").history[0]["divergence.updates"]
        for text in ("fedavg", "attack(fraction=0.25)")
    )
    assert plain == pytest.approx(0.0, abs=1e-12)
    assert attacked > 0.1


@pytest.mark.parametrize("kind", [*KINDS, "label-flip"])
def test_resumed_bit_for_bit(kind: str, tmp_path: Path) -> None:
    text = f"radfed(redistributions=2)+dgt+attack({kind}, fraction=0.3)"
    whole = digits(text, rounds=5)
    digits(text, rounds=2, checkpoint=tmp_path)
    resumed = digits(text, rounds=5, checkpoint=tmp_path, resume=True)
    assert torch.equal(whole.params, resumed.params)
    assert [r["attack.hostile"] for r in whole.history] == [r["attack.hostile"] for r in resumed.history]


def test_remarks_under_an_asynchronous_schedule() -> None:
    """One update is enough for all but alie."""
    assert not fl.Method("fedasync+attack+clip(norm=1.0)").remarks
    assert "without effect: attack, krum" in fl.Method("fedasync+attack(alie)+krum").remarks[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("attack(kind='sign')", "attack"),
        ("attack(fraction=-0.1)", "between 0 and 1"),
        ("attack(fraction=1.1)", "between 0 and 1"),
        ("attack(fraction=nan)", "a number"),
        ("attack(scale=0)", "finite and above 0"),
        ("attack(scale=-1)", "finite and above 0"),
        ("attack(scale=inf)", "finite and above 0"),
        ("attack(scale=nan)", "a number"),
        ("attack(kind='label-flip', scale=2)", "leave scale out"),
    ],
)
def test_refuses(text: str, words: str) -> None:
    with pytest.raises(fl.MethodError, match=words):
        fl.Method(text)
