"""The same runs on a GPU as on the CPU. `make gpu`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedloom as fl
from tests.examples import METHODS, STACK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def setting(method: str) -> dict[str, Any]:
    """Batch norm, momentum and clipping where the method allows them; double precision, to compare digit by digit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)).double()
    plain = method == "scaffold-m"
    local = fl.Local(
        steps=6, batch_size=20, lr=0.1, momentum=0 if plain else 0.9, clip_norm=None if plain else 5.0,
        last_batch="bootstrap",
    )  # fmt: skip
    federation = fl.load("digits", "classes(per_client=2)", clients=10)
    return {
        "model": model, "federation": federation, "method": method, "rounds": 6, "clients_per_round": 5, "local": local,
    }  # fmt: skip


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.cpu() - b.cpu()).norm() / b.norm())


@pytest.mark.parametrize("method", METHODS)
def test_gpu_equals_cpu(method: str) -> None:
    if "noise" in method:
        pytest.importorskip("dp_accounting")
    there, here = (fl.fit(**setting(method), device=device) for device in ("cuda", "cpu"))
    assert there.params.is_cuda
    assert apart(there.params, here.params) < 1e-8
    assert there.history[-1]["test_accuracy"] == here.history[-1]["test_accuracy"]
    for a, b in zip(there.model.parameters(), here.model.parameters(), strict=True):
        assert a.device.type == "cpu"  # where the given model lives
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("first", ["cpu", "cuda"])
@pytest.mark.parametrize("method", [STACK, "adabest(deploy=latest_of_all)", "fedasync", "scaffold+fedadam+fedglad"])
def test_resume_on_another_device(method: str, first: str, tmp_path: Path) -> None:
    whole = fl.fit(**setting(method), device="cpu")
    fl.fit(**{**setting(method), "rounds": 3}, device=first, checkpoint=tmp_path)
    for second in ("cuda", "cpu"):
        resumed = fl.fit(**setting(method), device=second, checkpoint=tmp_path, resume=True)
        assert apart(resumed.params, whole.params) < 1e-8


def test_fp32_is_fp32_in_convolutions_too() -> None:
    """One step of one client, against float64: TF32 is off in the fourth digit, float32 in the seventh."""
    torch.manual_seed(0)
    x, y = torch.randn(32, 16, 12, 12), torch.randint(0, 4, (32,))
    model = nn.Sequential(nn.Conv2d(16, 32, 5), nn.Flatten(), nn.Linear(32 * 64, 4))
    off = {}
    for precision in ("auto", "fp32"):
        settings: dict[str, Any] = {"rounds": 1, "local": fl.Local(batch_size=32, lr=0.1), "engine": "loop"}
        exact = fl.fit(model.double(), fl.Federation.from_tensor(x.double(), y, [0, 32]), device="cpu", **settings)
        start = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double()
        data = fl.Federation.from_tensor(x, y, [0, 32])
        found = fl.fit(model.float(), data, device="cuda", precision=precision, **settings)
        off[precision] = float((found.params.cpu() - exact.params).norm() / (exact.params - start).norm())
    assert off["fp32"] < 2e-5 < off["auto"]


@pytest.mark.parametrize("precision", ["auto", "fp32", "bf16"])
def test_precisions_train(precision: Any) -> None:
    federation = fl.load("digits", "iid", clients=10)
    model = fl.model("mlp(hidden=[32])", federation)
    local = fl.Local(epochs=5, batch_size=20, lr=0.1)
    before = torch.get_float32_matmul_precision()
    result = fl.fit(model, federation, rounds=10, local=local, device="cuda", precision=precision)
    assert result.history[-1]["test_accuracy"] > 0.8
    assert torch.get_float32_matmul_precision() == before
