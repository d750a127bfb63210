"""Checkpoints on a GPU: what is resumed ends as the uninterrupted run, and a run may change its device."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom as fl
from tests.engines.test_vector import dense, federation

pytestmark = pytest.mark.gpu
METHODS = [
    "adabest(mu=0.1)+fedglad+dgt",
    "radfed(redistributions=3)+scaffold",
    "fedasync(staleness=poly, max_staleness=5)",
]


def fit(method: str, rounds: int = 9, **more: Any) -> fl.Result:
    given = {"clients_per_round": 4, "engine": "vector", "device": "cuda", "local": fl.Local(epochs=2, batch_size=8)}
    return fl.fit(dense(torch.float32), federation(), method, rounds=rounds, **{**given, **more})


@pytest.mark.parametrize("method", METHODS)
def test_resumed_run_equals_the_uninterrupted_one(method: str, tmp_path: Path) -> None:
    whole = fit(method)
    assert torch.equal(whole.params, fit(method).params)  # the run itself can be repeated

    def stop(event: fl.Event) -> Any:
        return fl.STOP if event.round == 5 else None

    fit(method, checkpoint=tmp_path, callbacks=[stop])
    resumed = fit(method, checkpoint=tmp_path, resume=True)
    assert torch.equal(whole.params, resumed.params)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")])
def test_device_may_change(method: str, devices: tuple[str, str], tmp_path: Path) -> None:
    whole = fit(method, precision="fp32")
    fit(method, rounds=5, checkpoint=tmp_path, device=devices[0], precision="fp32")
    resumed = fit(method, checkpoint=tmp_path, resume=True, device=devices[1], precision="fp32")
    assert torch.allclose(whole.params.cpu(), resumed.params.cpu(), rtol=1e-4, atol=1e-5)
    assert len(resumed.history) == 9
