"""Data and models on a GPU as on the CPU. `make gpu`."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom as fl
from fedloom.data.transforms import Draws, Preparation, augmentations
from fedloom.models.catalogue import REGISTRY, Shape, load_models
from fedloom.models.recurrent import set_fused
from fedloom.spec import parse_one

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
load_models()
AUGMENTATION = "crop(padding=2) + flip + cutout(size=5)"


def pictures(n: int = 60, channels: int = 3, side: int = 32) -> torch.Tensor:
    return torch.randint(0, 256, (n, channels, side, side), generator=torch.Generator().manual_seed(0)).byte()


def test_augmented_batches_are_the_same() -> None:
    way = Preparation(True, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3), augmentations(AUGMENTATION))
    key = torch.tensor([123456789, 4000000001])
    here = way.train(pictures(), torch.float64, Draws(key, 7))
    there = way.train(pictures().cuda(), torch.float64, Draws(key.cuda(), 7))
    assert torch.allclose(here, there.cpu(), atol=1e-14, rtol=0)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("lenet5", Shape((3, 32, 32), 10)),
        ("resnet56", Shape((3, 32, 32), 10)),
        ("char-lstm(hidden=32)", Shape((20,), 30, tokens=30, padded=False)),
        ("bilstm(hidden=16, dropout=0)", Shape((20,), 4, tokens=50)),
        ("transformer", Shape((20,), 4, tokens=50)),
        ("stackoverflow-lstm", Shape((12,), 50, tokens=50, per_position=True)),
    ],
)
def test_models_train_the_same(name: str, shape: Shape) -> None:
    torch.manual_seed(0)
    model = REGISTRY.make(REGISTRY.complete(parse_one(name)), shape=shape).double()
    generator = torch.Generator().manual_seed(1)
    if shape.tokens:
        x = torch.randint(1, shape.tokens, (60, *shape.inputs), generator=generator)
        x[::3, -4:] = 0
    else:
        x = pictures()
    y = torch.randint(0, shape.outputs, (60, *shape.inputs) if shape.per_position else (60,), generator=generator)
    federation = fl.Federation.from_tensor(x, y, [0, 20, 40, 60], test=(x, y), classes=shape.outputs)
    if not shape.tokens:
        way = Preparation(True, (0.5,) * 3, (0.25,) * 3, augmentations(AUGMENTATION))
        federation = replace(federation, preparation=way)
    local = fl.Local(steps=3, batch_size=8, lr=0.001)  # a larger rate makes ResNet-56 a chaotic map
    runs = [
        fl.fit(model, federation, rounds=2, local=local, device=device, engine=engine, precision="fp32")
        for device, engine in (("cpu", "loop"), ("cuda", "loop"), ("cuda", "vector"))
    ]
    for run in runs[1:]:
        assert float((run.params.cpu() - runs[0].params).norm() / runs[0].params.norm()) < 1e-8
        assert run.history[-1]["test_accuracy"] == pytest.approx(runs[0].history[-1]["test_accuracy"], abs=0.02)


def test_the_fused_kernel_and_plain_code_agree_on_the_device() -> None:
    torch.manual_seed(0)
    shape = Shape((30,), 80, tokens=80, padded=False)
    model = REGISTRY.make(REGISTRY.complete(parse_one("char-lstm")), shape=shape).double().cuda()
    ids = torch.randint(0, 80, (8, 30)).byte().cuda()
    fused = model(ids)
    set_fused(model, False)
    assert torch.allclose(fused, model(ids), atol=1e-12, rtol=0)


def test_a_row_that_has_finished_is_left_alone() -> None:
    """Of four clients one stops after a step; it is computed beside the other three, on the federation's first sample,
    which overflows here.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    x[0] = 1.7e308
    y = torch.randint(0, 3, (60,), generator=generator)
    federation = fl.Federation.from_tensor(x, y, [0, 5, 10, 25, 40, 60])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).double()
    torch.nn.init.ones_(next(model.parameters()))
    local = fl.Local(batch_size=5, momentum=0.9)
    runs = [
        fl.fit(
            model, federation, "scaffold+fixed(cohorts=[[1, 2, 3, 4]])", 3, local=local, device=device, engine=engine
        )
        for device, engine in (("cpu", "loop"), ("cuda", "vector"))
    ]
    assert runs[1].history[-1]["diverged"] == 0
    assert float((runs[1].params.cpu() - runs[0].params).norm() / runs[0].params.norm()) < 1e-10


@pytest.mark.parametrize("method", ["fedavg", "importance"])
def test_samples_that_stay_on_disk(method: str, tmp_path: Path) -> None:
    """Read for each cohort, without recordings: what recorded steps over all samples give."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", x=rng.standard_normal((60, 6)), y=np.arange(60) % 3, offsets=[0, 10, 25, 40, 60])
    params = []
    for lazy in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 3).double()
        data = fl.Federation.from_folder(tmp_path, lazy=lazy)
        local = fl.Local(batch_size=4, lr=0.1)
        result = fl.fit(model, data, method, rounds=3, clients_per_round=3, local=local, engine="vector", device="cuda")
        params.append(result.params)
    assert torch.allclose(params[0], params[1], atol=1e-12, rtol=0)
