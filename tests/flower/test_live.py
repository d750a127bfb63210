"""FedAsync with clients that take their own time, against the recursion in NumPy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra flower")

from flwr.app import Context, Message

import fedloom as fl
from fedloom.flower import LocalGrid
from fedloom.space import Space
from tests.flower.in_process import apart, app_for, clients, mlp, served, simulated

ALPHA = 0.6


class Unhurried(LocalGrid):
    """A reply is there after its node was looked at so many times."""

    looks: dict[str, int]
    slow: dict[int, int]  # by node number
    seen: dict[int, np.ndarray]  # by Work: the model that was sent
    rows: dict[int, np.ndarray]  # by Work: what came back

    def push_messages(self, messages: Any) -> list[str]:
        sent = list(messages)
        ids = super().push_messages(sent)
        for id, message in zip(ids, sent, strict=True):
            number = message.metadata.dst_node_id - 1_000_000
            reply = self._replies[id]
            self.looks[id] = self.slow.get(number, 0) if message.metadata.message_type.startswith("train") else 0
            if "order" in message.content:
                w = int(message.content["order"]["work"])
                self.seen[w] = message.content.array_records["model"]["start"].numpy()
                if reply.has_content() and "update" in reply.content:
                    self.rows[w] = reply.content.array_records["update"]["row"].numpy()
        return ids

    def pull_messages(self, message_ids: Any) -> list[Message]:
        ids = list(message_ids)
        here = [id for id in ids if self.looks[id] <= 0]
        for id in ids:
            self.looks[id] -= 1
        return super().pull_messages(here)


def unhurried(memory: Path, slow: dict[int, int], **options: Any) -> Unhurried:
    grid = Unhurried.of_app(app_for(clients(), memory, **options), 5)
    grid.looks, grid.slow, grid.seen, grid.rows = {}, slow, {}, {}
    return grid


@pytest.mark.parametrize("slow", [{}, {2: 4}, {0: 3, 1: 1, 4: 25}])
@pytest.mark.parametrize("staleness", ["constant", "poly", "hinge"])
def test_whoever_is_ready_is_mixed_in_by_its_age(slow: dict[int, int], staleness: str, tmp_path: Path) -> None:
    grid = unhurried(tmp_path, slow)
    thetas = [Space.of(mlp()).flatten(mlp()).numpy()]
    method = f"fedasync(alpha={ALPHA}, staleness={staleness})"
    events: list[fl.Event] = []
    result = served(method, tmp_path, grid=grid, rounds=15, callbacks=[events.append])
    for event in events:
        assert event.updates is not None
        w = int(event.updates.extra["work"][0])
        version = max(i for i, theta in enumerate(thetas) if np.array_equal(theta, grid.seen[w]))
        u = len(thetas) - 1 - version
        s = {"constant": 1.0, "poly": (u + 1) ** -0.5, "hinge": 1.0 if u <= 4 else 1 / (10 * (u - 4) + 1)}[staleness]
        new = thetas[version] - grid.rows[w]
        thetas.append((1 - ALPHA * s) * thetas[-1] + ALPHA * s * new)
        np.testing.assert_allclose(event.params.numpy(), thetas[-1], rtol=1e-12, atol=1e-14)
        thetas[-1] = event.params.numpy()
        assert event.metrics["fedasync.staleness"] == u
    assert len(events) == 15
    assert len(grid.seen) - len(events) == 2  # three clients are at work at any time
    assert max(row["fedasync.staleness"] for row in result.history) >= 2


def test_nobody_waits_for_the_slowest(tmp_path: Path) -> None:
    grid = unhurried(tmp_path, {2: 10**9})
    result = served("fedasync", tmp_path, grid=grid, rounds=20, clients_per_round=3)
    assert len(result.history) == 20
    assert len(grid.seen) == 22


def test_one_at_a_time_equals_the_simulator(tmp_path: Path) -> None:
    options: dict[str, Any] = {"clients_per_round": 1, "rounds": 8}
    for method in ("fedasync(max_staleness=0)", "fedasync(max_staleness=0, rho=0.1)+scaffold"):
        real = served(method, tmp_path, **options)
        assert apart(real.params, simulated(method, **options).params) < 1e-12


def test_what_is_older_than_allowed_is_left_out(tmp_path: Path) -> None:
    grid = unhurried(tmp_path, {2: 6})
    result = served("fedasync(max_staleness=2)", tmp_path, grid=grid, rounds=20)
    assert max(row["fedasync.staleness"] for row in result.history) == 2
    refused = [client for row in result.history for client in row.get("refused_clients", [])]
    assert refused
    assert set(refused) == {2}


def test_what_fails_or_is_too_late_is_replaced(tmp_path: Path) -> None:
    def mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        if message.metadata.message_type.startswith("train") and context.node_config["partition-id"] == 1:
            raise RuntimeError("always")
        return call_next(message, context)

    grid = unhurried(tmp_path, {3: 10**9}, mods=[mod])
    result = served("fedasync", tmp_path, grid=grid, rounds=25, round_timeout=0.2)
    assert len(result.history) == 25
    assert sum(row["refused"] for row in result.history) > 0
    assert sum(row["silent"] for row in result.history) > 0
    assert all(row["answered"] == 1 for row in result.history)


def test_clients_that_all_fail_end_the_run(tmp_path: Path) -> None:
    def mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        if message.metadata.message_type.startswith("train"):
            raise RuntimeError("always")
        return call_next(message, context)

    grid = unhurried(tmp_path, {}, mods=[mod])
    with pytest.raises(fl.RunError, match="the last 51 replies were all refused"):
        served("fedasync", tmp_path, grid=grid)
    assert len(grid.seen) < 60


def test_no_answer_at_all_ends_the_run(tmp_path: Path) -> None:
    grid = unhurried(tmp_path, dict.fromkeys(range(5), 10**9))
    with pytest.raises(fl.RunError, match="no client has answered"):
        served("fedasync", tmp_path, grid=grid, round_timeout=0.2, folder=tmp_path / "run")
    resumed = served("fedasync", tmp_path, folder=tmp_path / "run", resume=True)
    assert len(resumed.history) == 4


def test_a_resumed_server_knows_its_old_models(tmp_path: Path) -> None:
    """Works that were out are asked for again; nothing that was mixed in is lost."""

    def stop(event: fl.Event) -> Any:
        return fl.STOP if event.round == 7 else None

    first = served("fedasync", tmp_path / "m", folder=tmp_path / "run", rounds=12, callbacks=[stop])
    assert len(first.history) == 7
    resumed = served("fedasync", tmp_path / "m", folder=tmp_path / "run", rounds=12, resume=True)
    assert [row["round"] for row in resumed.history] == list(range(1, 13))
    assert resumed.history[:7] == first.history
