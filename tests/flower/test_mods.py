"""Mods around a real ClientApp, over a grid in one process."""

from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedloom.errors import ConfigError, RunError
from fedloom.flower.grid import LocalGrid
from fedloom.flower.mods import Mod, clip_mod, proximal_mod
from tests.flower.in_process import apart, app_for, clients, served, simulated

START = {"w": np.array([1.0, -2.0, 0.5], np.float32), "b": np.array([0.25]), "seen": np.array(7)}


def least_squares(mods: list[Mod]) -> ClientApp:
    """Four steps of gradient descent on |w - goal|^2 / 2 + mu / 2 |w - start|^2, by Flower's FedProx contract."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays, config = message.content.array_records["arrays"], message.content.config_records["config"]
        mu = float(config.get("proximal-mu", 0.0))  # type: ignore[arg-type]
        start = arrays["w"].numpy().astype(np.float64)
        w, goal = start.copy(), np.array([4.0, 4.0, 4.0])
        for _ in range(4):
            w -= 0.1 * (w - goal + mu * (w - start))
        arrays["w"] = Array(w.astype(np.float32))  # in place: the mod must have kept what was received
        arrays["b"] = Array(arrays["b"].numpy() + 0.5)
        arrays["seen"] = Array(np.asarray(arrays["seen"].numpy() + 100))
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 3})}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"config": message.content.config_records["config"]}), reply_to=message)

    return app


def answered(app: ClientApp, kind: str = "train", config: ConfigRecord | None = None) -> RecordDict:
    grid = LocalGrid.of_app(app, 1)
    arrays = ArrayRecord({name: Array(values) for name, values in START.items()})
    content = RecordDict({"arrays": arrays, "config": config or ConfigRecord({"server-round": 1})})
    (reply,) = grid.send_and_receive([Message(content, grid.get_node_ids()[0], kind)])
    return reply.content


def trained(mods: list[Mod], config: ConfigRecord | None = None) -> dict[str, np.ndarray]:
    arrays = answered(least_squares(mods), config=config).array_records["arrays"]
    return {name: array.numpy() for name, array in arrays.items()}


def closed_form(mu: float) -> np.ndarray:
    """w - c shrinks by 1 - 0.1 (1 + mu) a step, with c = (goal + mu start) / (1 + mu)."""
    start = START["w"].astype(np.float64)
    fixed = (4.0 + mu * start) / (1 + mu)
    return np.asarray(fixed + (start - fixed) * (1 - 0.1 * (1 + mu)) ** 4)


@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_the_proximal_mod_asks_for_fedprox(mu: float) -> None:
    np.testing.assert_allclose(trained([proximal_mod(mu)])["w"], closed_form(mu), rtol=1e-6)
    assert not np.allclose(closed_form(0.0), closed_form(0.7), rtol=1e-3)


def test_the_proximal_mod_wins_over_the_server_and_leaves_evaluation_alone() -> None:
    config = ConfigRecord({"server-round": 1, "proximal-mu": 5.0})
    np.testing.assert_allclose(trained([proximal_mod(0.7)], config)["w"], closed_form(0.7), rtol=1e-6)
    assert "proximal-mu" not in answered(least_squares([proximal_mod(0.7)]), "evaluate").config_records["config"]


def test_clipping_shortens_the_update_over_all_floating_point_arrays() -> None:
    plain = trained([])
    update = np.concatenate([plain[name].astype(np.float64) - START[name] for name in ("w", "b")])
    norm = 0.5
    clipped = trained([clip_mod(norm)])
    expected = update * norm / np.linalg.norm(update)
    found = np.concatenate([clipped[name].astype(np.float64) - START[name] for name in ("w", "b")])
    np.testing.assert_allclose(found, expected, atol=1e-7)
    assert np.linalg.norm(found) == pytest.approx(norm, rel=1e-6)
    assert clipped["seen"] == 107  # a counter is no part of the update
    assert [clipped[name].dtype for name in START] == [values.dtype for values in START.values()]


def test_short_updates_keep_their_bits() -> None:
    plain, clipped = trained([]), trained([clip_mod(1000.0)])
    assert all((plain[name] == clipped[name]).all() for name in plain)


def test_both_mods_act_together() -> None:
    update = trained([proximal_mod(0.7), clip_mod(0.1)])["w"].astype(np.float64) - START["w"]
    pulled = closed_form(0.7) - START["w"]
    np.testing.assert_allclose(update / np.linalg.norm(update), pulled / np.linalg.norm(pulled), atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_passes_unchanged(bad: float) -> None:
    app = ClientApp(mods=[clip_mod(0.1)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = message.content.array_records["arrays"]
        arrays["w"] = Array(np.array([bad, 5.0, 5.0], np.float32))
        return Message(RecordDict({"arrays": arrays}), reply_to=message)

    np.testing.assert_array_equal(answered(app).array_records["arrays"]["w"].numpy(), [bad, 5.0, 5.0])


@pytest.mark.parametrize("wrong", ["another name", "another shape", "two records", "no record"])
def test_replies_that_can_not_be_clipped_are_errors(wrong: str) -> None:
    app = ClientApp(mods=[clip_mod(0.1)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = ArrayRecord({"w": Array(np.zeros(2 if wrong == "another shape" else 3)), "b": Array(np.zeros(1))})
        if wrong == "another name":
            arrays["other"] = arrays.pop("b")
        records = {"a": arrays, "b": arrays} if wrong == "two records" else {"a": arrays}
        return Message(RecordDict({} if wrong == "no record" else records), reply_to=message)  # type: ignore[arg-type]

    grid = LocalGrid.of_app(app, 1)
    content = RecordDict({"arrays": ArrayRecord({name: Array(values) for name, values in START.items()})})
    (reply,) = grid.send_and_receive([Message(content, grid.get_node_ids()[0], "train")])
    assert "clip_mod needs" in (reply.error.reason or "")


def test_errors_of_the_app_and_other_messages_pass() -> None:
    app = ClientApp(mods=[clip_mod(0.1), proximal_mod(1.0)])

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return Message(message.content, reply_to=message)

    assert answered(app, "query").array_records["arrays"]["w"].numpy().tolist() == START["w"].tolist()


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), True, "1"])
def test_values_without_meaning_are_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="mu must be"):
        proximal_mod(value)
    with pytest.raises(ConfigError, match="norm must be"):
        clip_mod(value)


@pytest.mark.parametrize("method", ["fedavg", "adabest", "fedprox(mu=0.2)"])
def test_the_proximal_mod_makes_fedloom_s_own_client_a_fedprox_client(method: str, tmp_path: Path) -> None:
    data = clients()
    grid = LocalGrid.of_app(app_for(data, tmp_path, mods=[proximal_mod(0.3)]), len(data))
    real = served(method, tmp_path, grid=grid)
    other = simulated("fedprox(mu=0.5)" if "fedprox" in method else f"{method}+fedprox(mu=0.3)")
    assert apart(real.params, other.params) < 1e-12


def test_the_clip_mod_bounds_what_fedloom_s_own_client_sends(tmp_path: Path) -> None:
    data = clients()
    grid = LocalGrid.of_app(app_for(data, tmp_path, mods=[clip_mod(0.05)]), len(data))
    real = served("fedavg", tmp_path, grid=grid)
    assert apart(real.params, simulated("fedavg+clip(norm=0.05)").params) < 1e-12
    assert apart(real.params, simulated("fedavg").params) > 1e-3


def test_the_clip_mod_lets_nothing_unbounded_through(tmp_path: Path) -> None:
    data = clients()
    grid = LocalGrid.of_app(app_for(data, tmp_path, mods=[clip_mod(0.05)]), len(data))
    with pytest.raises(RunError, match="Work 0 has 0 usable replies"):
        served("scaffold", tmp_path, grid=grid)
