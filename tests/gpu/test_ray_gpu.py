"""A worker with a GPU equals the vector engine in one process, for every method."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fedloom as fl
from fedloom.engines.ray import engine, session
from tests.engines.test_vector import LOCALS, apart, dense, federation
from tests.examples import METHODS

pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    with session():
        yield


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "noise(" in method:
        pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    monkeypatch.setattr(engine, "WHOLE", 0)
    local = fl.Local(steps=3, batch_size=8, lr=0.1) if method == "scaffold-m" else LOCALS["plain"]
    options: dict[str, Any] = {"rounds": 4, "clients_per_round": 5, "local": local, "device": "cuda"}
    alone = fl.fit(dense(), federation(), method, engine="vector", **options)
    there = fl.fit(dense(), federation(), method, engine="ray-vector", actors=1, **options)
    assert apart(there.params, alone.params) < 1e-6
