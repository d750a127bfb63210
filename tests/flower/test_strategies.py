"""Flower's strategies over a federation: against recursions in NumPy, against our own methods, and in one table."""

import io
import logging
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    Strategy,
)
from rich.console import Console
from torch import nn

import fedloom as fl
from fedloom.errors import ConfigError, RunError
from fedloom.flower.strategies import fit_strategy
from fedloom.flower.table import side_by_side
from fedloom.report.table import csv_text, table
from tests.flower import numpy_reference as reference

ROUNDS = 3
ADAPTIVE: dict[str, Any] = {"eta": 0.05, "tau": 0.01}
MOMENTS: dict[str, Any] = {"beta_1": 0.8, "beta_2": 0.9}
FULL = fl.Local(epochs=2, batch_size=None, lr=0.3)
BATCHES = fl.Local(epochs=2, batch_size=5, lr=0.1, momentum=0.5)
Made = Callable[..., Strategy]


def federation(dtype: Any = np.float64) -> fl.Federation:
    x, y = reference.clients(1, seed=9)[0]
    data = [(x.astype(dtype), y) for x, y in reference.clients()]
    return fl.Federation.from_arrays(data, test=(x.astype(dtype), y), classes=reference.CLASSES)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(reference.FEATURES, reference.CLASSES).double()


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def theirs(strategy: Strategy, local: fl.Local = BATCHES, model: nn.Module | None = None, **more: Any) -> fl.Result:
    data = more.pop("data", None) or federation()
    return fit_strategy(strategy, model or linear(), data, **{"rounds": ROUNDS, "local": local, "seed": 4, **more})


def ours(method: str, local: fl.Local = BATCHES, model: nn.Module | None = None, **more: Any) -> fl.Result:
    data = more.pop("data", None) or federation()
    settings = {"rounds": ROUNDS, "clients_per_round": len(data), "local": local, "seed": 4, **more}
    return fl.fit(model or linear(), data, method, **settings)


@pytest.mark.parametrize(
    ("strategy", "combine", "mu"),
    [
        (FedAvg(), reference.mean, 0.0),
        (FedProx(proximal_mu=0.5), reference.mean, 0.5),
        (FedAvgM(server_learning_rate=0.7, server_momentum=0.6), reference.momentum(0.7, 0.6), 0.0),
        (FedMedian(), reference.median, 0.0),
        (FedTrimmedAvg(beta=0.15), reference.trimmed, 0.0),
        (Krum(num_malicious_nodes=1), reference.krum, 0.0),
        # Reddi et al. let v begin at tau^2 and correct no bias. Flower lets it begin at 0, and corrects FedAdam's bias
        # as in step t + 1 of Adam, not t.
        (FedAdam(**ADAPTIVE, **MOMENTS), reference.adaptive("adam", 0.05, 0.8, 0.9, 0.01, 0.0, 1), 0.0),
        (FedYogi(**ADAPTIVE, **MOMENTS), reference.adaptive("yogi", 0.05, 0.8, 0.9, 0.01, 0.0, None), 0.0),
        (FedAdagrad(**ADAPTIVE), reference.adaptive("adagrad", 0.05, 0.0, 0.0, 0.01, 0.0, None), 0.0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Strategy) else "",
)
def test_strategies_are_what_their_equations_say(strategy: Strategy, combine: reference.Combine, mu: float) -> None:
    model = linear()
    start = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()
    expected = reference.play(start, reference.clients(), combine, ROUNDS, mu)
    result = theirs(strategy, FULL, model)
    np.testing.assert_allclose(result.params.numpy(), expected, rtol=1e-9, atol=1e-12)
    assert not np.allclose(start, expected, rtol=1e-2)


PAIRS: dict[str, Made] = {
    "fedavg": FedAvg,
    "fedprox(mu=0.5)": lambda **more: FedProx(proximal_mu=0.5, **more),
    "fedavgm(lr=0.7, momentum=0.6)": lambda **more: FedAvgM(server_learning_rate=0.7, server_momentum=0.6, **more),
    "median": FedMedian,
    "krum(byzantine=1, keep=1)": lambda **more: Krum(num_malicious_nodes=1, **more),
    "fedyogi(lr=0.05, beta1=0.8, beta2=0.9, tau=0.01, v_init=0.0)": lambda **more: FedYogi(
        **ADAPTIVE, **MOMENTS, **more
    ),
    "fedadagrad(lr=0.05, tau=0.01, v_init=0.0)": lambda **more: FedAdagrad(**ADAPTIVE, **more),
}


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize("method", PAIRS)
def test_strategies_equal_our_methods_on_the_same_batches(method: str, engine: str) -> None:
    found, expected = theirs(PAIRS[method](fraction_evaluate=0.0), engine=engine), ours(method, engine=engine)
    torch.testing.assert_close(found.params, expected.params, rtol=1e-9, atol=1e-12)
    for mine, other in zip(expected.history, found.history, strict=True):
        for name in ("round", "works", "local_steps", "asked", "answered", "diverged", "downlink_bytes"):
            assert mine[name] == other[name], name
        for name in ("train_loss", "test_loss", "test_accuracy"):
            assert other[name] == pytest.approx(mine[name], rel=1e-9), name
    if method == "fedavg":  # the only one of these whose weights need the number of samples in both
        assert [line["uplink_bytes"] for line in expected.history] == [line["uplink_bytes"] for line in found.history]
    assert all(a == b for a, b in zip(found.model.state_dict(), expected.model.state_dict(), strict=True))


@pytest.mark.parametrize("correction", ["", ", v_init=0.0", ", v_init=0.0, bias_correction=True"])
def test_fedadam_differs_from_the_paper_and_from_adam(correction: str) -> None:
    method = f"fedadam(lr=0.05, beta1=0.8, beta2=0.9, tau=0.01{correction})"
    found, expected = theirs(FedAdam(**ADAPTIVE, **MOMENTS)), ours(method)
    assert not torch.allclose(found.params, expected.params, rtol=1e-3)


@pytest.mark.parametrize(
    "method", ["fedyogi(lr=0.05, beta1=0.8, beta2=0.9, tau=0.01)", "fedadagrad(lr=0.05, tau=0.01)"]
)
def test_second_moments_that_begin_at_zero_differ_from_the_paper(method: str) -> None:
    strategy = FedYogi(**ADAPTIVE, **MOMENTS) if "yogi" in method else FedAdagrad(**ADAPTIVE)
    assert not torch.allclose(theirs(strategy).params, ours(method).params, rtol=1e-3)


def test_fedadam_sends_float64_and_clients_answer_in_their_own_dtype() -> None:
    data, model = federation(np.float32), linear().float()
    found = theirs(FedAdam(fraction_evaluate=0.0), model=model, data=data)
    size = sum(p.numel() for p in model.parameters())
    down = np.diff([0, *(line["downlink_bytes"] for line in found.history)]) / (len(data) * size)
    up = np.diff([0, *(line["uplink_bytes"] for line in found.history)]) / len(data)
    assert down.tolist() == [4, 8, 8]
    assert up.tolist() == [4 * size + 4] * 3
    assert found.params.dtype == torch.float32


def test_batch_norm_is_averaged_as_ours_is() -> None:
    local, data = fl.Local(steps=3, batch_size=4, lr=0.1, last_batch="bootstrap"), federation(np.float32)
    found = theirs(FedAvg(), local, normed(), data=data)
    expected = ours("fedavg", local, normed(), data=data)
    mine, other = expected.model.state_dict(), found.model.state_dict()
    assert mine.keys() == other.keys()
    for name in mine:
        assert mine[name].dtype == other[name].dtype
        torch.testing.assert_close(other[name], mine[name], rtol=1e-4, atol=1e-5)
    assert int(other["1.num_batches_tracked"]) == 9
    assert not torch.allclose(other["1.running_mean"], torch.zeros(5), atol=1e-2)
    assert found.history[-1]["test_loss"] == pytest.approx(expected.history[-1]["test_loss"], rel=1e-4)


def test_fedadam_takes_batch_norm_statistics_for_parameters() -> None:
    """Flower's adaptive servers step on running means too; ours, like the papers, leave them out."""
    local, data = fl.Local(steps=3, batch_size=4, lr=0.1, last_batch="bootstrap"), federation(np.float32)
    name = "1.running_mean"
    averaged = theirs(FedAvg(), local, normed(), data=data, rounds=1).model.state_dict()[name]
    stepped = theirs(FedAdam(eta=0.01), local, normed(), data=data, rounds=1).model.state_dict()[name]
    left = ours("fedadam", local, normed(), data=data, rounds=1).model.state_dict()[name]
    torch.testing.assert_close(left, averaged, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(stepped, averaged, rtol=1e-2)


def test_fractions_draw_by_the_seed_and_leave_the_generators_alone() -> None:
    drawing = random.Random(4)
    cohorts = [drawing.sample(range(7), 3) for _ in range(ROUNDS)]
    assert len({tuple(sorted(cohort)) for cohort in cohorts}) > 1
    expected = ours(f"fixed(cohorts={cohorts})", clients_per_round=3)
    random.seed(77)
    np.random.seed(77)
    found = theirs(FedAvg(fraction_train=0.5, fraction_evaluate=0.0))
    torch.testing.assert_close(found.params, expected.params, rtol=1e-9, atol=1e-12)
    assert [line["asked"] for line in found.history] == [3] * ROUNDS
    assert random.random() == random.Random(77).random()
    assert np.random.random() == np.random.RandomState(77).random()
    again, other = (theirs(FedAvg(fraction_train=0.5), seed=seed).params for seed in (4, 5))
    assert not torch.equal(found.params, other)
    assert not torch.equal(again, other)


class Spoiler(FedAvg):
    """Changes all that it gets and all that it has sent, once it needs it no more."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.sent = list(super().configure_train(server_round, arrays, config, grid))
        return self.sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        got = list(replies)
        found = super().aggregate_train(server_round, got)
        for message in got:
            message.content.array_records["arrays"].clear()
            message.content.metric_records["metrics"]["num-examples"] = 0
        self.sent[0].content.array_records["arrays"].clear()  # the starting model itself, in the first round
        self.sent[0].content.config_records["config"]["server-round"] = 99
        return found


def test_a_strategy_that_changes_what_it_gets_harms_nobody() -> None:
    model = linear()
    before = [p.clone() for p in model.parameters()]
    found = theirs(Spoiler(fraction_evaluate=0.0), model=model)
    torch.testing.assert_close(found.params, theirs(FedAvg(fraction_evaluate=0.0)).params, rtol=0, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_what_clients_evaluate_stands_in_the_history() -> None:
    data = federation()
    found = theirs(FedAvg(), data=data)
    total = right = 0.0
    with torch.no_grad():
        for k in range(len(data)):
            x, y = data.client(k)
            right += float((found.model(x).argmax(1) == y).sum())
            total += len(y)
    assert found.history[-1]["clients_eval_accuracy"] == pytest.approx(right / total, rel=1e-9)
    assert "clients_eval_accuracy" not in theirs(FedAvg(fraction_evaluate=0.0)).history[-1]


def test_callbacks_hear_every_round_and_may_stop() -> None:
    heard: list[fl.Event] = []

    def stop_at_two(event: fl.Event) -> Any:
        heard.append(event)
        return fl.STOP if event.round == 2 else None

    result = theirs(FedAvg(), callbacks=[stop_at_two], eval_every=2, rounds=5)
    assert result.stopped == "callback"
    assert [event.round for event in heard] == [1, 2] == [line["round"] for line in result.history]
    assert ["test_loss" in event.metrics for event in heard] == [False, True]
    assert torch.equal(heard[-1].params, result.params)
    assert result.history[1]["seconds"] > result.history[0]["seconds"] > 0
    assert result.frame().shape[0] == 2


class Broken(FedAvg):
    def __init__(self, how: str) -> None:
        super().__init__(fraction_evaluate=0.0, arrayrecord_key="model" if how == "renamed" else "arrays")
        self.how = how

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        config["lr"] = -1.0 if self.how == "bad config" else 0.1
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        if self.how == "raises":
            raise ZeroDivisionError("no weights")
        arrays, metrics = super().aggregate_train(server_round, replies)
        if self.how == "none":
            return None, metrics
        if self.how == "another model":
            return ArrayRecord([np.zeros(3)]), metrics
        return arrays, metrics


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "round 1: Flower's Broken failed: no weights"),
        ("none", "round 1: Flower's Broken returned no arrays; its aggregate_train must"),
        ("another model", "round 1: Flower's Broken returned arrays that are no such model: .*'0' is not in the model"),
        ("bad config", "round 1: 7 of 7 clients answered with an error.*lr must be a finite number"),
    ],
)
def test_broken_strategies_are_told_in_one_sentence(how: str, said: str) -> None:
    with pytest.raises(RunError, match=said):
        theirs(Broken(how))


def test_a_strategy_may_name_its_records() -> None:
    plain = theirs(FedAvg(fraction_evaluate=0.0), fl.Local(epochs=2, batch_size=5, lr=0.1))
    renamed = theirs(Broken("renamed"), fl.Local(epochs=2, batch_size=5, lr=5.0))  # it sends lr=0.1
    assert torch.equal(renamed.params, plain.params)


def test_nobody_asked_is_told() -> None:
    with pytest.raises(RunError, match="asked no client to train"):
        theirs(FedAvg(fraction_train=0.0))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"strategy": FedAvg}, "not FedAvg"),
        ({"strategy": "fedavg"}, "such as FedAvg"),
        ({"rounds": 0}, "rounds must be"),
        ({"eval_every": 0}, "eval_every must be"),
        ({"strategy": FedAvg(min_available_nodes=8)}, "waits for min_available_nodes=8 nodes.*has 7"),
        ({"strategy": FedAvg(min_train_nodes=9)}, "waits for min_train_nodes=9"),
        ({"engine": "ray"}, "engine=ray is for fl.fit"),
        ({"engine": "vectr"}, "did you mean vector"),
        ({"seed": -1}, "seed must be"),
        ({"callbacks": [3]}, "callbacks must be"),
        ({"federation": 3}, "must be a fl.Federation"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_trained(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fit_strategy(**{"strategy": FedAvg(), "model": linear(), "federation": federation(), **arguments})


def test_flowers_log_is_as_loud_after_a_run_as_before(capfd: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("flwr")
    level = log.level
    theirs(FedAvg())
    assert log.level == level
    assert "aggregate_train" not in capfd.readouterr().err


def test_both_kinds_stand_in_one_table() -> None:
    data = federation()
    results = {
        "fedavg": [ours("fedavg", data=data, seed=s) for s in range(2)],
        "Flower's FedAvg": [theirs(FedAvg(), data=data, seed=s) for s in range(2)],
        "Flower's FedAdam": [theirs(FedAdam(), data=data, seed=s) for s in range(2)],
    }
    comparison = side_by_side(results, data)
    lines = csv_text(comparison).splitlines()
    assert len(lines) == 7
    assert lines[1].split(",")[2:] == lines[3].split(",")[2:]  # FedAvg is FedAvg, to the last count
    shown = io.StringIO()
    Console(width=200, file=shown).print(table(comparison))
    assert all(name in shown.getvalue() for name in results)
    assert comparison.rows[1].gain is not None
    assert comparison.rows[1].gain.mean == pytest.approx(0.0)
    assert comparison.config.setting == "arrays, as given, 7 clients, 7 a round"


def test_tables_of_nothing_are_refused() -> None:
    data = federation()
    one = ours("fedavg", data=data, rounds=1)
    with pytest.raises(ConfigError, match="nothing to compare"):
        side_by_side({}, data)
    with pytest.raises(ConfigError, match="b has 2 results, but the first has 1"):
        side_by_side({"a": one, "b": [one, one]}, data)
    with pytest.raises(ConfigError, match="ends without test_f1"):
        side_by_side({"a": one}, data, metric="f1")
