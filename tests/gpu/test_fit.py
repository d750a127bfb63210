"""The same runs on a GPU as on the CPU. `make gpu`."""

import pytest
import torch
from torch import nn

import fedloom as fl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


METHODS = ["fedavg", "fedprox(mu=0.1)", "fedavgm(lr=0.3)", "fedadam", "fedyogi", "fedadagrad", "exponential", "linear"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("normed", [False, True])
def test_gpu_equals_cpu(method: str, normed: bool) -> None:
    federation = fl.load("digits", "classes(per_client=2)", clients=10)
    torch.manual_seed(0)
    layers = [nn.Linear(64, 32), *([nn.BatchNorm1d(32)] if normed else []), nn.ReLU(), nn.Linear(32, 10)]
    model = nn.Sequential(*layers).double()
    local = fl.Local(epochs=2, batch_size=20, lr=0.1, momentum=0.9, clip_norm=5.0, last_batch="bootstrap")
    there, here = (fl.fit(model, federation, method, 5, 4, local, device=device) for device in ("cuda", "cpu"))
    assert there.params.is_cuda
    difference = (there.params.cpu() - here.params).norm() / here.params.norm()
    assert float(difference) < 1e-9
    assert there.history[-1]["test_accuracy"] == here.history[-1]["test_accuracy"]


@pytest.mark.parametrize("precision", ["auto", "fp32", "bf16"])
def test_precisions_train(precision: str) -> None:
    federation = fl.load("digits", "iid", clients=10)
    model = fl.model("mlp(hidden=[32])", federation)
    local = fl.Local(epochs=5, batch_size=20, lr=0.1)
    before = torch.get_float32_matmul_precision()
    result = fl.fit(model, federation, rounds=10, local=local, device="cuda", precision=precision)  # type: ignore[arg-type]
    assert result.history[-1]["test_accuracy"] > 0.8
    assert torch.get_float32_matmul_precision() == before
    assert next(result.model.parameters()).device.type == "cpu"  # where the given model lives
