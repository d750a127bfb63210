"""Diagnostics on a GPU as on the CPU. `make gpu`."""

import numpy as np
import pytest
import torch

import fedloom as fl
from fedloom import diagnose
from fedloom.rows import Rows
from fedloom.space import Space

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SPACE = Space(("a.weight", "a.bias"), (torch.Size([200, 4]), torch.Size([7])), torch.float32)


def test_the_same_numbers() -> None:
    matrix = torch.randn(20, SPACE.size, generator=torch.Generator().manual_seed(0))
    weights = torch.arange(1.0, 21)
    here, there = Rows(matrix, SPACE), Rows(matrix.cuda(), SPACE)
    for on in (weights, weights.cuda()):
        found = diagnose.gsi(there, on)
        assert found.device.type == "cpu"
        assert torch.allclose(found, diagnose.gsi(here, weights), rtol=1e-5)
    assert torch.allclose(diagnose.cosines(there), diagnose.cosines(here), rtol=0, atol=1e-14)
    assert diagnose.conflicts(there) == diagnose.conflicts(here)
    for measure in (diagnose.mean_cosine, diagnose.norm_ratio, diagnose.dissimilarity):
        assert measure(there) == pytest.approx(measure(here), rel=1e-12)
    a, b = matrix[0], matrix[1]
    assert diagnose.distance(a.cuda(), b.cuda()) == pytest.approx(diagnose.distance(a, b), rel=1e-12)
    found_margin = diagnose.feddyn_margin(a.cuda(), b.cuda(), 2, 20)
    assert found_margin == pytest.approx(diagnose.feddyn_margin(a, b, 2, 20), rel=1e-12)
    assert diagnose.norms(a=a.cuda())["a"] == pytest.approx(diagnose.norms(a=a)["a"], rel=1e-12)
    assert diagnose.fairness(a.cuda())[:4] == pytest.approx(diagnose.fairness(a)[:4], rel=1e-12)


@pytest.mark.parametrize("method", ["adabest+fedglad", "radfed(redistributions=2)+dgt", "feddyn"])
def test_in_a_run(method: str) -> None:
    federation = fl.load("digits", partition="dirichlet(alpha=0.3)", clients=12)
    histories = {}
    for device in ("cpu", "cuda"):
        model = fl.model("mlp(hidden=[16])", federation, seed=0).double()
        histories[device] = fl.fit(
            model,
            federation,
            method,
            rounds=3,
            clients_per_round=4,
            local=fl.Local(lr=0.1, batch_size=16),
            device=device,
            diagnose="gsi,similarity,labels,divergence,twin,fairness,probe",
        ).history
    for here, there in zip(histories["cpu"], histories["cuda"], strict=True):
        assert here.keys() == there.keys()
        for name in here.keys() - {"seconds"}:
            assert np.allclose(here[name], there[name], rtol=1e-6, atol=1e-9, equal_nan=True), name
