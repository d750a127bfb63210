"""FedAsync with clients that remember: each goes on from the last Work that was mixed in, and has one at a time."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra flower")

import fedloom as fl
from tests.flower.in_process import served
from tests.flower.test_live import Unhurried, unhurried


def orders_of(grid: Unhurried) -> list[dict[str, Any]]:
    """What the clients are asked from now on."""
    orders: list[dict[str, Any]] = []
    push = grid.push_messages

    def pushed(messages: Any) -> list[str]:
        sent = list(messages)
        orders.extend(dict(m.content["order"]) for m in sent if "order" in m.content)
        return push(sent)

    grid.push_messages = pushed  # type: ignore[method-assign]
    return orders


@pytest.mark.parametrize("method", ["fedasync(max_staleness=1)+scaffold", "fedasync+bernoulli(rate=0.2)+scaffold"])
@pytest.mark.parametrize("resumable", [False, True])
def test_a_client_goes_on_from_what_was_mixed_in(method: str, resumable: bool, tmp_path: Path) -> None:
    grid = unhurried(tmp_path / "memory", {2: 4})
    orders, mixed = orders_of(grid), {-1}

    def see(event: fl.Event) -> None:
        assert event.updates is not None
        mixed.add(int(event.updates.extra["work"][0]))

    folder = Path(tempfile.mkdtemp(dir=tmp_path)) / "run" if resumable else None
    result = served(
        method, tmp_path, grid=grid, rounds=30, clients_per_round=5, callbacks=[see], folder=folder, round_timeout=60
    )
    assert {order["accepted"] for order in orders} <= mixed
    assert sum(row["forgot"] for row in result.history) == 0
    assert sum(order["accepted"] >= 0 for order in orders) > 5
    if "max_staleness" in method:
        assert sum(row["refused"] for row in result.history) > 0
