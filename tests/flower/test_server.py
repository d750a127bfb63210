"""A server over in-process nodes equals the simulator: every method, its history, memory and restarts."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra flower")

import fedloom as fl
from tests.examples import METHODS
from tests.flower.in_process import apart, mlp, served, simulated

NOT_COMPARED = {"seconds", "refused", "silent", "forgot"}


def check_same(real: fl.Result, other: fl.Result, most: float = 1e-12) -> None:
    assert apart(real.params, other.params) < most
    assert len(real.history) == len(other.history)
    for a, b in zip(real.history, other.history, strict=True):
        assert a.keys() - NOT_COMPARED == b.keys() - NOT_COMPARED
        for name in a.keys() - NOT_COMPARED:
            assert a[name] == pytest.approx(b[name], rel=1e-9, abs=1e-12, nan_ok=True), name


@pytest.mark.parametrize("method", METHODS)
def test_every_method_equals_the_simulator(method: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {}
    if "scaffold-m" in method:
        options["local"] = fl.Local(steps=3, batch_size=4, lr=0.05)
    check_same(served(method, tmp_path, **options), simulated(method, **options))


@pytest.mark.parametrize("method", ["adabest+fedglad", "radfed(redistributions=2)", "fedavg"])
def test_buffers_travel_too(method: str, tmp_path: Path) -> None:
    local = fl.Local(batch_size=4, lr=0.05, last_batch="bootstrap")
    options: dict[str, Any] = {"model": lambda: mlp(norm=True), "local": local}
    check_same(served(method, tmp_path, **options), simulated(method, **options))
