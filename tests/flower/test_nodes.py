"""The clients of a federation as Flower's nodes, message by message."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import nn

import fedloom as fl
from fedloom.errors import ConfigError, ModelError
from fedloom.flower.grid import LocalGrid
from tests.flower import numpy_reference as reference

SHAPES, ROUND = {"weight": (3, 4), "bias": (3,)}, {"server-round": 1}
FULL = fl.Local(epochs=2, batch_size=None, lr=0.3)


class Odd(nn.Module):
    """A frozen layer, tied weights, a buffer that a state dict leaves out, and one that holds a counter."""

    tokens: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.last = nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.register_buffer("tokens", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.tokens = self.tokens + 1
        out: torch.Tensor = self.last(self.second(self.first(self.frozen(x) * self.scale).relu()))
        return out


def federation(dtype: Any = np.float32) -> fl.Federation:
    return fl.Federation.from_arrays([(x.astype(dtype), y) for x, y in reference.clients(4)], classes=3)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(reference.FEATURES, reference.CLASSES).double()


def grid_of(model: nn.Module, local: fl.Local = FULL, dtype: Any = np.float64, **more: Any) -> LocalGrid:
    return LocalGrid.of_federation(model, federation(dtype), local, **more)


def asked(
    grid: LocalGrid,
    models: Mapping[int, nn.Module],
    kind: str = "train",
    configs: Mapping[int, dict[str, Any]] | None = None,
) -> list[Message]:
    """One message for each client, with its own model."""
    messages = []
    for k, model in models.items():
        config = ConfigRecord({"server-round": 1, **(configs or {}).get(k, {})})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "config": config})
        messages.append(Message(content, grid.get_node_ids()[k], kind))
    return grid.send_and_receive(messages)


def vector(content: RecordDict) -> np.ndarray:
    arrays = content.array_records["arrays"].values()
    return np.concatenate([array.numpy().reshape(-1) for array in arrays])


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_a_cohort_with_models_rates_and_pulls_of_its_own(engine: str) -> None:
    models = {k: linear() for k in (2, 0, 3)}
    with torch.no_grad():
        for k, model in models.items():
            for p in model.parameters():
                p.add_(0.1 * k)
    configs = {2: {"proximal-mu": 0.7}, 0: {"lr": 0.05}}
    replies = asked(grid_of(linear(), engine=engine), models, configs=configs)
    for k, reply in zip(models, replies, strict=True):
        x, y = reference.clients(4)[k]
        start = np.concatenate([p.detach().numpy().reshape(-1) for p in models[k].parameters()])
        lr, mu = configs.get(k, {}).get("lr", 0.3), configs.get(k, {}).get("proximal-mu", 0.0)
        expected = reference.descend(start, x, y, steps=2, lr=lr, mu=mu)
        np.testing.assert_allclose(vector(reply.content), expected, rtol=1e-10)
        metrics = reply.content.metric_records["metrics"]
        assert set(metrics) == {"num-examples", "train_loss"}
        assert metrics["num-examples"] == len(y)


def test_batches_are_keyed_by_round_client_and_occurrence() -> None:
    local = fl.Local(epochs=1, batch_size=3, lr=0.2)
    model, grid = linear(), grid_of(linear(), local, seed=5)
    node = grid.get_node_ids()[3]

    def message(round: int) -> Message:
        arrays, config = ArrayRecord(model.state_dict()), ConfigRecord({"server-round": round})
        return Message(RecordDict({"arrays": arrays, "config": config}), node, "train")

    def expected(w: int, occurrence: int) -> np.ndarray:
        x, y = reference.clients(4)[3]
        order = np.random.default_rng(np.random.SeedSequence(5, spawn_key=(w, 3, occurrence))).permutation(len(y))
        theta = np.concatenate([p.detach().numpy().reshape(-1) for p in model.parameters()])
        for i in range(0, len(y), 3):
            theta = reference.descend(theta, x[order[i : i + 3]], y[order[i : i + 3]], steps=1, lr=0.2)
        return theta

    replies = grid.send_and_receive([message(8), message(8), message(2)])  # two of one round, and one of another
    for reply, key in zip(replies, ((7, 0), (7, 1), (1, 0)), strict=True):
        np.testing.assert_allclose(vector(reply.content), expected(*key), rtol=1e-10)
    assert not np.allclose(expected(7, 0), expected(7, 1), rtol=1e-3)


def test_replies_are_whole_state_dicts() -> None:
    model = Odd()
    (reply,) = asked(grid_of(model, dtype=np.float32), {1: model})
    before, after = model.state_dict(), reply.content.array_records["arrays"].to_torch_state_dict()
    assert list(before) == list(after)
    assert all(before[name].dtype == after[name].dtype for name in before)
    assert torch.equal(before["frozen.weight"], after["frozen.weight"])
    assert torch.equal(after["first.weight"], after["second.weight"])
    assert not torch.equal(before["first.weight"], after["first.weight"])
    assert int(after["tokens"]) == 2
    assert "scale" not in after


def test_counters_that_were_averaged_are_rounded() -> None:
    model = Odd()
    grid = grid_of(model, dtype=np.float32)
    arrays = ArrayRecord(model.state_dict())
    arrays["tokens"] = Array(np.array(6.9999999))  # what a weighted mean of sevens may be
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 1})})
    (reply,) = grid.send_and_receive([Message(content, grid.get_node_ids()[0], "train")])
    assert int(reply.content.array_records["arrays"]["tokens"].numpy()) == 9


def test_nodes_evaluate_on_their_own_data_and_tell_their_size() -> None:
    model, grid = linear(), grid_of(linear())
    for k, reply in enumerate(asked(grid, dict.fromkeys(range(4), model), "evaluate")):
        x, y = (torch.from_numpy(values) for values in reference.clients(4)[k])
        with torch.no_grad():
            outputs = model(x)
        metrics = reply.content.metric_records["metrics"]
        assert metrics["eval_loss"] == pytest.approx(float(nn.functional.cross_entropy(outputs, y)), rel=1e-12)
        assert metrics["eval_accuracy"] == pytest.approx(float((outputs.argmax(1) == y).double().mean()), rel=1e-12)
    sizes = [r.content.metric_records["metrics"]["num-examples"] for r in asked(grid, {2: model, 0: model}, "query")]
    assert sizes == [10, 4]


def test_what_diverges_is_sent_as_it_is() -> None:
    grid, broken = grid_of(linear()), linear()
    nn.init.constant_(next(broken.parameters()), float("nan"))
    good, bad = asked(grid, {0: linear(), 1: broken})
    assert np.isfinite(vector(good.content)).all()
    assert not np.isfinite(vector(bad.content)).all()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"config": ROUND}, "needs one ArrayRecord with the model, not 0"),
        ({"arrays": SHAPES}, "needs one ConfigRecord with server-round, not 0"),
        ({"arrays": SHAPES, "config": {}}, "server-round must be"),
        ({"arrays": {"weight": (3, 4)}, "config": ROUND}, "'bias' is missing"),
        ({"arrays": {**SHAPES, "weight": (3, 5)}, "config": ROUND}, "has the shape"),
        ({"arrays": SHAPES, "config": {**ROUND, "proximal-mu": -1.0}}, "proximal-mu must be"),
    ],
)
def test_bad_messages_are_errors_of_their_own(content: dict[str, Any], said: str) -> None:
    grid, model = grid_of(linear()), linear()
    good = RecordDict({"arrays": ArrayRecord(model.state_dict()), "config": ConfigRecord({"server-round": 1})})
    arrays = {name: Array(np.zeros(shape)) for name, shape in content.get("arrays", {}).items()}
    bad = RecordDict()
    if arrays:
        bad["arrays"] = ArrayRecord(arrays)
    if "config" in content:
        bad["config"] = ConfigRecord(content["config"])
    nodes = grid.get_node_ids()
    first, second = grid.send_and_receive([Message(bad, nodes[0], "train"), Message(good, nodes[1], "train")])
    assert said in (first.error.reason or "")
    assert second.has_content()


def test_other_actions_are_errors() -> None:
    (reply,) = asked(grid_of(linear()), {0: linear()}, "train.faster")
    assert "train, evaluate and query, not 'train.faster'" in (reply.error.reason or "")


def test_what_can_not_be_trained_is_refused_at_the_door() -> None:
    with pytest.raises(ConfigError, match="engine=ray is for"):
        grid_of(linear(), engine="ray")
    with pytest.raises(ModelError, match="bfloat16"):
        grid_of(nn.Linear(4, 3).bfloat16(), dtype=np.float32)
    with pytest.raises(ModelError, match="can't read samples"):
        grid_of(nn.Linear(5, 3), dtype=np.float32)
