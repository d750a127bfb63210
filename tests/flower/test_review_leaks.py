"""What a client's own faults tell the server: that there was one, of which kind, and nothing of its files or data."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra flower")

from flwr.app import ArrayRecord, Context

import fedloom as fl
from fedloom.flower import LocalGrid, client_app
from tests.flower.in_process import app_for, clients, mlp, served
from tests.flower.test_trust import Content, asked_by

SECRET = "patient-7781"


def nothing_there(context: Context) -> Any:
    raise FileNotFoundError(f"/clinic/{SECRET}/x.csv")


def unreadable(context: Context) -> Any:
    raise fl.DataError(f"/clinic/x.csv, line 3: {SECRET!r} is no number")


@pytest.mark.parametrize("data", [nothing_there, unreadable])
def test_the_owners_functions_fail_in_private(
    data: Callable[[Context], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = LocalGrid.of_app(client_app(lambda context: mlp(), data, memory=tmp_path), 2)
    with caplog.at_level(logging.WARNING, "fedloom"), pytest.raises(fl.RunError, match="only 0 of 2"):
        served("fedavg", tmp_path, grid=grid, clients=2, clients_per_round=2, enrol_timeout=0.2)
    at_server = [r.getMessage() for r in caplog.records if "is left out" in r.getMessage()]
    assert len(at_server) == 2
    assert all("its data can't be made" in line and SECRET not in line for line in at_server)
    own = [r for r in caplog.records if r.exc_info and SECRET in str(r.exc_info[1])]
    assert len(own) == 2  # its own log says why


def test_where_a_client_keeps_its_memory_is_its_own_business(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / SECRET).write_text("a file where a folder should be")
    grid = LocalGrid.of_app(app_for(clients(), tmp_path / SECRET), 5)
    with caplog.at_level(logging.WARNING, "fedloom"), pytest.raises(fl.RunError, match="0 usable replies"):
        served("adabest", tmp_path, grid=grid)
    lines = [record.getMessage() for record in caplog.records]
    assert any("its own log says more" in line and "left out" in line for line in lines)
    assert not any(SECRET in line for line in lines if "left out" in line)
    assert any(SECRET in line for line in lines if line.startswith("refused: "))


def without_c(content: Content) -> None:
    content["beside"] = ArrayRecord({"rates": content["beside"]["rates"]})


def too_large(content: Content) -> None:
    content["order"].update(local='{"lr": 1' + "0" * 400 + "}")


@pytest.mark.parametrize(
    ("change", "why"), [(without_c, "it failed (KeyError)"), (too_large, "settings of local training can't be read")]
)
def test_an_odd_order_is_answered_with_a_sentence(change: Callable[[Content], None], why: str, tmp_path: Path) -> None:
    grid, answers = asked_by(change, tmp_path)
    result = served("scaffold", tmp_path, grid=grid, rounds=1, clients_per_round=5)
    assert result.history[0]["refused_clients"] == [1]
    assert why in answers[0]
