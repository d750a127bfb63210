"""Bad input is refused at the door, in one sentence that says what to do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedloom as fl

X, Y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1, 0, 1])
GOOD = [(X[:4], Y[:4]), (X[4:], Y[4:])]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"clients": []}, "at least one client"),
        ({"clients": [(X, Y), (X[:0], Y[:0])]}, "client 1 has no samples"),
        ({"clients": [(X, Y[:5])]}, r"client 0: x and y .* \(6, 3\) and \(5,\)"),
        ({"clients": [(X, Y), (X[:, :2], Y)]}, "disagree about the shape of one x"),
        ({"clients": [(X, Y), (X.double(), Y)]}, "disagree about the dtype of x"),
        ({"clients": [(X, Y), X]}, "client 1: expected a pair"),
        ({"clients": [(X / torch.tensor([1.0, 0.0, 1.0]), Y)]}, "samples of client 0 hold a NaN or an infinity"),
        ({"clients": [(X, np.array([0.0, np.nan, 0, 0, 0, 0]))]}, "targets of client 0 hold a NaN.* sample 1"),
        ({"clients": [([[1.0], [1.0, 2.0]], [0, 1])]}, "can't be read as one array"),
        ({"clients": [(X, Y - 1)], "classes": 2}, "labels go down to -1"),
        ({"clients": GOOD, "test": (X.long(), Y)}, "test samples have dtype torch.int64"),
        ({"clients": GOOD, "test": (X, Y[:, None])}, r"test targets have shape \(1,\)"),
        ({"clients": GOOD, "classes": 1}, "training labels go up to 1, but there are 1 classes"),
        ({"clients": GOOD, "test": (X, Y + 5), "classes": 2}, "test labels go up to 6"),
        ({"clients": GOOD, "test": (X[:, :1], Y)}, r"test samples have shape \(1,\)"),
        ({"clients": GOOD, "validation": []}, "list of validation clients is empty"),
        ({"clients": [(X, Y.float())], "classes": 2}, "floating-point"),
    ],
)
def test_federation(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(fl.DataError, match=words):
        fl.Federation.from_arrays(**arguments)


@pytest.mark.parametrize(
    ("index", "offsets", "words"),
    [
        ([0, 1, 2, 3], [0, 3, 2, 4], "offsets must rise"),
        ([0, 1, 2, 3], [0, 2, 5], "offsets must rise"),
        ([0, 1, 2, 3], [1, 2, 4], "offsets must rise"),
        ([0, 1, 2, 3], [0, 0, 4], "client 0 has no samples"),
        ([0, 1, 2, 6], [0, 2, 4], "samples 0 to 5"),
    ],
)
def test_slices(index: list[int], offsets: list[int], words: str) -> None:
    with pytest.raises(fl.DataError, match=words):
        fl.Federation.build(X, Y, torch.tensor(index), torch.tensor(offsets))


def test_labels_are_checked_under_cross_entropy_only() -> None:
    federation = fl.Federation.from_arrays([(X, 2 * Y - 1)])
    fl.fit(nn.Linear(3, 1), federation, rounds=1, loss=lambda o, t: (1 - o[:, 0] * t).clamp(min=0))
    with pytest.raises(fl.ModelError, match="whole numbers from 0"):
        fl.fit(nn.Linear(3, 2), federation, rounds=1)


def test_numpy_numbers_are_numbers() -> None:
    local = fl.Local(lr=np.float32(0.5), batch_size=np.int64(2))  # type: ignore[arg-type]
    method = fl.Method("fedprox", mu=np.float64(0.5))
    rounds, seed = np.int64(2), np.int64(3)
    result = fl.fit(nn.Linear(3, 2), fl.Federation.from_arrays(GOOD), method, rounds, np.int64(1), local, seed=seed)  # type: ignore[arg-type]
    assert len(result.history) == 2


def test_a_metric_must_not_hide_the_loss() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return 1.0

    with pytest.raises(fl.ConfigError, match="rename"):
        fl.fit(nn.Linear(3, 2), fl.Federation.from_arrays(GOOD, test=(X, Y)), rounds=1, metric=loss)


def test_client_number() -> None:
    with pytest.raises(fl.DataError, match="no client 2: the clients are 0 to 1"):
        fl.Federation.from_arrays(GOOD).client(2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rounds": 0}, "rounds must be a whole number of at least 1, not 0"),
        ({"rounds": 2.5}, "rounds"),
        ({"clients_per_round": 3}, "between 1 and the number of clients, 2"),
        ({"clients_per_round": 0}, "between 1"),
        ({"clients_per_round": -1}, "between 1"),
        ({"clients_per_round": 1.5}, "a fraction lies in"),
        ({"clients_per_round": 0.0}, "a fraction lies in"),
        ({"clients_per_round": True}, "count or a fraction"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"engine": "lop"}, "did you mean loop"),
        ({"device": "tpu9"}, "unknown device"),
        ({"precision": "fp8"}, "unknown precision"),
        ({"metric": "acuracy"}, "did you mean accuracy"),
        ({"eval_every": 0}, "eval_every"),
        ({"eval_last": 0}, "eval_last"),
        ({"resume": True}, "needs checkpoint="),
        ({"patience": 3}, "needs validation data"),
        ({"dropout_rate": 1.0}, "dropout_rate"),
        ({"availability": 0.0}, "availability"),
        ({"availability": np.ones((3, 4))}, "one line for each of the 2 clients"),
        ({"availability": "no-such-trace.csv"}, "can't be read"),
        ({"method": "fixed(cohorts=[[0, 2]])"}, "no client 2 among 2"),
        ({"loss": lambda o, t: nn.functional.cross_entropy(o, t)}, "one value per sample, shape"),
        ({"loss": lambda o, t: (o - t).mean()}, "one value per sample, shape"),
        ({"loss": lambda o, t: o @ t}, "the loss can't compare outputs of shape"),
        ({"federation": GOOD}, "must be a fl.Federation, not list"),
        ({"local": {"lr": 0.1}}, "must be a fl.Local, not dict"),
        ({"callbacks": print}, "list of functions"),
        ({"min_gain": "a"}, "min_gain"),
        ({"checkpoint": __file__}, "is a file; name a folder"),
        ({"model": nn.Linear(4, 2)}, "can't read samples of shape"),
        ({"model": nn.Linear(3, 1)}, "2 classes, but the model has 1 outputs"),
        ({"model": "mlp"}, "must be a torch.nn.Module"),
        ({"model": nn.ReLU()}, "no trainable parameter"),
        ({"local": fl.Local(batch_size=3, last_batch="drop")}, "client 1 has 2 samples, fewer than batch_size=3"),
    ],
)
def test_fit(arguments: dict[str, Any], words: str) -> None:
    settings: dict[str, Any] = {"model": nn.Linear(3, 2), "federation": fl.Federation.from_arrays(GOOD), "rounds": 1}
    with pytest.raises(fl.FedloomError, match=words):
        fl.fit(**{**settings, **arguments})


def test_float_targets_need_a_loss() -> None:
    federation = fl.Federation.from_arrays([(X, X[:, 0])], test=(X, X[:, 0]))
    with pytest.raises(fl.ModelError, match="pass loss="):
        fl.fit(nn.Linear(3, 1), federation, rounds=1)
    result = fl.fit(nn.Linear(3, 1), federation, rounds=1, loss=lambda o, t: (o[:, 0] - t) ** 2)
    assert "test_loss" in result.history[0]
    assert "test_accuracy" not in result.history[0]


@pytest.mark.parametrize(
    ("sizes", "batch_size", "last_batch", "alone"),
    [([4, 5], 2, "keep", 1), ([4, 5], 2, "bootstrap", None), ([4, 5], 2, "drop", None), ([3, 3], 1, "keep", 0)],
)
def test_batch_of_one_under_batch_norm(sizes: list[int], batch_size: int, last_batch: Any, alone: int | None) -> None:
    x, y = torch.randn(9, 3), torch.zeros(9, dtype=torch.long)
    federation = fl.Federation.from_arrays([(x[:n], y[:n]) for n in sizes], classes=2)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    local = fl.Local(batch_size=batch_size, last_batch=last_batch)
    if alone is None:
        fl.fit(model, federation, rounds=1, local=local)
        return
    with pytest.raises(fl.ModelError, match=f"client {alone} has {sizes[alone]} samples and so a batch of one"):
        fl.fit(model, federation, rounds=1, local=local)


def test_batch_of_one_is_fine_where_batch_norm_has_many_values() -> None:
    federation = fl.Federation.from_arrays([(torch.randn(3, 1, 4, 4), [0, 1, 0])])
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(16, 2))
    fl.fit(model, federation, rounds=1, local=fl.Local(batch_size=2))


@pytest.mark.parametrize(
    "arguments",
    [{"epochs": 0}, {"steps": 0}, {"batch_size": 0}, {"lr": -1.0}, {"lr": float("nan")}, {"momentum": 1.0},
     {"optimizer": "rmsprop"}, {"clip_norm": 0}, {"last_batch": "fill"}, {"nesterov": True}, {"weight_decay": -1},
     {"optimizer": "adam", "momentum": 0.9}, {"epochs": 1.5}, {"batch_size": True},
     {"shuffle": 0}],
)  # fmt: skip
def test_local(arguments: dict[str, Any]) -> None:
    with pytest.raises(fl.ConfigError, match=next(iter(arguments))):
        fl.Local(**arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "digit"}, "did you mean digits"),
        ({"partition": "iidd"}, "did you mean iid"),
        ({"partition": "classes(per_client=0)"}, "at least 1"),
        ({"partition": "classes(per_client=11)"}, "10 classes only"),
        ({"partition": "classes(per_client=1)", "clients": 9}, "can't hold all 10 classes"),
        ({"partition": "iid+iid"}, "expected one name"),
        ({"clients": 2000}, "2000 clients can't share 1437 samples"),
        ({"clients": 0}, "number of clients"),
        ({"seed": -3}, "seed"),
    ],
)
def test_load(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(fl.FedloomError, match=words):
        fl.load(**{"name": "digits", **arguments})


def test_unknown_model() -> None:
    with pytest.raises(fl.ModelError, match="did you mean mlp"):
        fl.model("mlpp", fl.load("digits", clients=2))


def test_a_failing_metric_is_named() -> None:
    def broken(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        raise ValueError("no such thing")

    federation = fl.Federation.from_arrays(GOOD, test=(X, Y))
    with pytest.raises(fl.ModelError, match="the metric broken failed: no such thing"):
        fl.fit(nn.Linear(3, 2), federation, rounds=1, metric=broken)


def test_an_altered_trace_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,1,2\n1,1,1\n")
    with pytest.raises(fl.DataError, match=r"0 \(away\) and 1"):
        fl.fit(nn.Linear(3, 2), fl.Federation.from_arrays(GOOD), rounds=1, availability=trace)
