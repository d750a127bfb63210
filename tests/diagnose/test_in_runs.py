"""Diagnostics of a run, against the same numbers computed from what the clients sent, in float64 NumPy."""

import logging
import math
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import fedloom as fl
from fedloom.diagnostics import Twin
from fedloom.errors import FedloomError
from fedloom.training import Training

Array = NDArray[np.float64]
ALL = "gsi,similarity,labels,divergence,twin,fairness,probe"
LOCAL = fl.Local(batch_size=None, lr=0.1)  # one step on all samples: a formula


@pytest.fixture(scope="module")
def federation() -> fl.Federation:
    return fl.load("digits", partition="dirichlet(alpha=0.3)", clients=12, seed=1)


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()


class Watching:
    """Keeps what was averaged in each round."""

    def __init__(self) -> None:
        self.rows: list[Array] = []
        self.weights: list[Array] = []
        self.clients: list[list[int]] = []
        self.params: list[Array] = []

    def __call__(self, event: fl.Event) -> None:
        assert event.updates is not None
        self.rows.append(event.updates.rows.matrix.numpy().copy())
        self.weights.append(event.updates.weights.numpy().copy())
        self.clients.append(event.updates.clients.tolist())
        self.params.append(event.params.numpy().copy())


def run(federation: fl.Federation, method: str, diagnose: str | None, **settings: Any) -> tuple[fl.Result, Watching]:
    watching = Watching()
    settings = {"rounds": 4, "clients_per_round": 4, "local": LOCAL, "seed": 3, **settings}
    return fl.fit(model(), federation, method, diagnose=diagnose, callbacks=[watching], **settings), watching


def cosine(a: Array, b: Array) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def mean_angle(rows: Array) -> float:
    return float(np.mean([cosine(a, b) for a, b in combinations(rows, 2)]))


def test_gsi_of_every_tensor_and_of_all(federation: fl.Federation) -> None:
    result, seen = run(federation, "fedavg", "gsi")
    for line, rows, w in zip(result.history, seen.rows, seen.weights, strict=True):
        for part, found in zip((slice(0, 640), slice(640, 650)), line["gsi.tensor"], strict=True):
            mean = w @ rows[:, part]
            expected = math.sqrt(w @ (rows[:, part] ** 2).sum(1) / (mean @ mean))
            assert found == pytest.approx(expected, rel=1e-9)
        mean = w @ rows
        assert line["gsi.model"] == pytest.approx(math.sqrt(w @ (rows**2).sum(1) / (mean @ mean)), rel=1e-9)


def test_similarity(federation: fl.Federation) -> None:
    result, seen = run(federation, "fedavg", "similarity", rounds=20)
    matrices = [line["round"] for line in result.history if "similarity.matrix" in line]
    assert matrices == list(range(2, 21, 2))  # ten times in a run
    for line, rows, clients in zip(result.history, seen.rows, seen.clients, strict=True):
        squares = (rows**2).sum(1)
        pairs = [a @ b < 0 for a, b in combinations(rows, 2)]
        assert line["similarity.cosine"] == pytest.approx(mean_angle(rows), rel=1e-9)
        assert line["similarity.conflicts"] == pytest.approx(np.mean(pairs))
        assert line["similarity.norm_ratio"] == pytest.approx(squares.std() / squares.mean(), rel=1e-9)
        assert "similarity.cosine_before" not in line
        if "similarity.matrix" in line:
            assert np.allclose(line["similarity.matrix"], [[cosine(a, b) for b in rows] for a in rows])
            assert line["clients"] == clients


def test_similarity_before_and_after_dgt(federation: fl.Federation) -> None:
    result, seen = run(federation, "dgt(alpha=0.5)", "similarity", rounds=6)
    for line, rows in zip(result.history, seen.rows, strict=True):  # what was averaged, so after
        assert line["similarity.cosine"] == pytest.approx(mean_angle(rows), rel=1e-9)
    assert any(line["similarity.cosine"] > line["similarity.cosine_before"] + 1e-3 for line in result.history)


def test_labels(federation: fl.Federation) -> None:
    result, seen = run(federation, "fedavg", "labels")
    shares = np.stack([np.bincount(federation.client(k)[1], minlength=10) for k in range(12)]).astype(float)
    for line, clients in zip(result.history, seen.clients, strict=True):
        assert line["labels.similarity"] == pytest.approx(cosine(shares[clients].sum(0), shares.sum(0)), rel=1e-12)


def test_divergence_of_a_round(federation: fl.Federation) -> None:
    result, seen = run(federation, "fedavg", "divergence")
    starts = [torch.nn.utils.parameters_to_vector(model().parameters()).detach().numpy(), *seen.params]
    for line, rows, start in zip(result.history, seen.rows, starts, strict=False):
        assert line["divergence.updates"] == pytest.approx(1 - mean_angle(rows), rel=1e-9)
        assert line["divergence.models"] == pytest.approx(1 - mean_angle(start - rows), rel=1e-6)
        assert not any(name.startswith("between_") for name in line)


def test_divergence_between_averages(federation: fl.Federation) -> None:
    result, seen = run(federation, "radfed(redistributions=5)", "divergence", rounds=3)
    once, _ = run(federation, "fedavg", "divergence", rounds=1)
    first = result.history[0]["between_divergence_models"]
    assert first[0] == pytest.approx(once.history[0]["divergence.models"], rel=1e-9)  # before any model has travelled
    starts = [torch.nn.utils.parameters_to_vector(model().parameters()).detach().numpy(), *seen.params]
    for line, rows, start in zip(result.history, seen.rows, starts, strict=False):
        apart = line["between_divergence_models"]
        assert len(apart) == 5
        assert apart[-1] == line["divergence.models"] == pytest.approx(1 - mean_angle(start - rows), rel=1e-6)


def pooled_step(federation: fl.Federation, theta: Array, clients: list[int]) -> Array:
    """One step of softmax regression on all samples of these clients."""
    x, y = (torch.cat(parts).numpy() for parts in zip(*(federation.client(k) for k in clients), strict=True))
    x = x.reshape(len(x), 64).astype(np.float64)
    W, b = theta[:640].reshape(10, 64), theta[640:]
    scores = np.exp(x @ W.T + b)
    error = (scores / scores.sum(1, keepdims=True) - np.eye(10)[y]) / len(x)
    return theta - 0.1 * np.concatenate([(error.T @ x).ravel(), error.sum(0)])


def test_twin_trains_on_the_pooled_data_of_the_round(federation: fl.Federation) -> None:
    result, seen = run(federation, "fedavg", "twin")
    twin = torch.nn.utils.parameters_to_vector(model().parameters()).detach().numpy()
    for line, clients, theta in zip(result.history, seen.clients, seen.params, strict=True):
        twin = pooled_step(federation, twin, clients)
        expected = np.linalg.norm(theta - twin) / np.linalg.norm(twin)
        assert line["twin.distance"] == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_twin_is_shuffled_where_clients_are_not(federation: fl.Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """In stored order it would see one client after the other."""
    twins: list[Any] = []
    heard = Twin.heard

    def kept(self: Twin, *rest: Any) -> dict[str, float]:
        found = heard(self, *rest)
        twins.append(self.theta)
        return found

    monkeypatch.setattr(Twin, "heard", kept)
    for shuffle in (True, False):
        run(federation, "fedavg", "twin", rounds=1, local=fl.Local(batch_size=8, lr=0.1, shuffle=shuffle))
    assert torch.equal(*twins)


def test_twin_travels_with_the_models_of_radfed(federation: fl.Federation) -> None:
    result, _ = run(federation, "radfed(redistributions=3)", "twin", rounds=2)
    for line in result.history:
        assert len(line["between_twin_distance"]) == 3
        assert line["twin.distance"] == pytest.approx(line["between_twin_distance"][-1], rel=1e-9)  # equal weights


def test_fairness_is_the_score_of_every_client(federation: fl.Federation) -> None:
    result, _ = run(federation, "fedavg", "fairness", rounds=20)
    assert [line["round"] for line in result.history if "fairness.scores" in line] == list(range(2, 21, 2))
    scores = []
    for k in range(12):
        x, y = federation.client(k)
        scores.append(float((result.model(x.double()).argmax(1) == y).double().mean()))
    last = result.history[-1]
    assert last["fairness.scores"] == pytest.approx(scores)
    assert last["fairness.mean"] == pytest.approx(np.mean(scores))
    assert last["fairness.std"] == pytest.approx(np.std(scores))
    assert last["fairness.p10"] == pytest.approx(np.quantile(scores, 0.1))


@pytest.mark.parametrize("method", ["fedavg", "adabest", "scaffold"])
def test_a_probe_hears_what_everybody_would_send(federation: fl.Federation, method: str) -> None:
    few, seen = run(federation, method, "probe,gsi", rounds=3)
    full, _ = run(federation, method, "gsi", rounds=1, clients_per_round=12)
    assert few.history[0]["probe.gsi"] == pytest.approx(full.history[0]["gsi.tensor"], rel=1e-9)
    assert few.history[0]["probe.gsi_model"] == pytest.approx(full.history[0]["gsi.model"], rel=1e-9)
    for line, rows in zip(few.history, seen.rows, strict=True):
        assert line["probe.sampled_norm"] == pytest.approx(np.linalg.norm(rows, axis=1).mean(), rel=1e-9)
    everybody, told = run(federation, method, "probe", rounds=3, clients_per_round=12)
    for line in everybody.history:  # all are sampled: the probe repeats the round
        assert line["probe.norm"] == pytest.approx(line["probe.sampled_norm"], rel=1e-9)
    assert len(told.rows) == 3


@pytest.mark.parametrize("method", ["adabest+fedglad", "scaffold", "radfed(redistributions=2)+feddyn", "fedasync"])
@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_looking_changes_nothing(federation: fl.Federation, method: str, engine: str) -> None:
    settings: dict[str, Any] = {"local": fl.Local(lr=0.1, batch_size=16), "engine": engine, "eval_every": 2}
    plain, _ = run(federation, method, None, **settings)
    watched, _ = run(federation, method, ALL, **settings)
    assert torch.equal(plain.params, watched.params)
    for before, after in zip(plain.history, watched.history, strict=True):
        for name in before.keys() - {"seconds"}:
            assert np.array_equal(np.asarray(before[name]), np.asarray(after[name]), equal_nan=True)
    assert "theta_norm" in plain.history[1]
    assert "theta_norm" not in plain.history[0]  # which is not evaluated


def test_norms_are_always_there(federation: fl.Federation) -> None:
    result, seen = run(federation, "feddyn", None)
    for line, rows, w, theta in zip(result.history, seen.rows, seen.weights, seen.params, strict=True):
        assert line["theta_norm"] == pytest.approx(np.linalg.norm(theta), rel=1e-9)
        assert line["aggregate_norm"] == pytest.approx(np.linalg.norm(w @ rows), rel=1e-9)


def test_feddyns_margin_says_when_h_grows(federation: fl.Federation) -> None:
    result, _ = run(federation, "feddyn", None, rounds=15, clients_per_round=2)
    norms = [line["feddyn.h_norm"] for line in result.history]
    margins = [line["feddyn.margin"] for line in result.history]
    assert math.isnan(margins[0])  # h was zero
    grew = [b > a for a, b in pairwise(norms)]
    assert grew == [margin > 0 for margin in margins[1:]]


def test_a_resumed_run_measures_on(federation: fl.Federation, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"clients_per_round": 4, "local": LOCAL, "seed": 3, "diagnose": ALL}
    whole = fl.fit(model(), federation, "adabest", rounds=4, **settings)
    stop: list[Any] = [lambda event: fl.STOP if event.round == 2 else None]
    fl.fit(model(), federation, "adabest", rounds=4, checkpoint=tmp_path, callbacks=stop, **settings)
    again = fl.fit(model(), federation, "adabest", rounds=4, checkpoint=tmp_path, resume=True, **settings)
    for a, b in zip(whole.history, again.history, strict=True):
        assert a["twin.distance"] == b["twin.distance"]
        assert a["probe.gsi_model"] == b["probe.gsi_model"]
    settings["diagnose"] = None
    with pytest.raises(FedloomError, match="diagnose was"):
        fl.fit(model(), federation, "adabest", rounds=4, checkpoint=tmp_path, resume=True, **settings)


def test_costs_are_told_before_the_first_round(federation: fl.Federation, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fedloom"):
        run(federation, "fedavg", "probe, twin", rounds=1)
    assert "diagnose probe: all 12 clients train in every round, beside the 4 of the round" in caplog.text
    assert "diagnose twin: as much training again" in caplog.text


def test_bad_names(federation: fl.Federation) -> None:
    cases = [("gsy", "did you mean gsi"), ("gsi;labels", "unknown diagnostic"), (3, "must name diagnostics")]
    for bad, message in cases:
        with pytest.raises(FedloomError, match=message):
            run(federation, "fedavg", bad)  # type: ignore[arg-type]
    x = torch.randn(8, 3, dtype=torch.float64)
    numbers = fl.Federation.from_arrays([(x[:4], x[:4, 0]), (x[4:], x[4:, 0])])

    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets) ** 2

    with pytest.raises(FedloomError, match="no class labels"):
        fl.fit(nn.Linear(3, 1).double(), numbers, rounds=1, loss=squared, diagnose="labels")
    found = fl.fit(nn.Linear(3, 1).double(), numbers, rounds=1, loss=squared, diagnose="fairness,gsi,probe,twin")
    assert all(math.isnan(score) for score in found.history[0]["fairness.scores"])


def test_who_does_not_answer_is_not_measured(federation: fl.Federation) -> None:
    for method in ("fedavg", "radfed(redistributions=2)", "scaffold"):
        result, seen = run(federation, method, ALL, rounds=6, dropout_rate=0.5)
        assert len(result.history) == 6
        for line, clients in zip(result.history, seen.clients, strict=False):
            assert len(line.get("clients", [])) in (0, len(clients))


def test_an_early_trainings_diagnosis_has_no_state(federation: fl.Federation) -> None:
    training = Training(model(), federation, "fedavg", rounds=1, clients_per_round=4, diagnose="twin")
    assert training.diagnosis.tensors(0) == {}


def test_an_interrupted_round_is_not_measured_twice(federation: fl.Federation, tmp_path: Path) -> None:
    """The twin has learned from a round that is then lost, and played again."""
    settings: dict[str, Any] = {"rounds": 4, "clients_per_round": 4, "local": LOCAL, "seed": 3, "diagnose": "twin"}
    whole = fl.fit(model(), federation, "fedavg", **settings)
    training = Training(model(), federation, "fedavg", checkpoint=tmp_path, **settings)
    evaluate = type(training.simulation).evaluate

    def interrupt(self: Any, state: Any) -> Any:
        if state.round == 3:
            raise KeyboardInterrupt
        return evaluate(self, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(training.simulation), "evaluate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            training.run()
    again = fl.fit(model(), federation, "fedavg", checkpoint=tmp_path, resume=True, **settings)
    found = [[line["twin.distance"] for line in run.history] for run in (whole, again)]
    assert found[0] == found[1]


def test_snapshots_are_ten_at_most(federation: fl.Federation) -> None:
    for rounds, times in ((5, 5), (10, 10), (19, 10), (25, 9)):
        result, _ = run(federation, "fedavg", "similarity", rounds=rounds)
        assert sum("similarity.matrix" in line for line in result.history) == times


def test_a_probe_stands_beside_the_first_work_of_a_round(federation: fl.Federation) -> None:
    once, _ = run(federation, "fedavg", "probe", rounds=1)
    travelled, _ = run(federation, "radfed(redistributions=3)+fedavg(weights=samples)", "probe", rounds=1)
    for name in ("probe.norm", "probe.sampled_norm"):
        assert travelled.history[0][name] == pytest.approx(once.history[0][name], rel=1e-9)
