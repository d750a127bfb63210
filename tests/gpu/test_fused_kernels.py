"""The kernels of fused convolutions and batch norms, and runs by them, against PyTorch in float64."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedloom as fl
from fedloom.engines.fused_check import compared
from fedloom.engines.fused_layers import ConvolutionOfClients, PackedOfClients, SumOfClients, UnpackedOfClients
from fedloom.engines.vector import Vector
from fedloom.models.resnet import Basic, Bottleneck
from fedloom.training import Training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]
OFF = {"tf32": 3e-3, "half": 2e-2}  # of a result: numbers with ten bits, gradients of numbers with seven
K, B = 3, 5


def normed(x: Tensor, mean: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    wide = (slice(None), None, slice(None), None, None)
    return (x - mean[wide]) * scale[wide] + bias[wide]


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


KERNELS = [(1, 1, 0, True), (1, 1, 0, False), (1, 2, 0, True), (3, 1, 1, False), (3, 2, 1, False), (3, 1, 0, False)]
KERNELS += [(2, 2, 0, False)]


@pytest.mark.parametrize("kind", OFF)
@pytest.mark.parametrize(("size", "stride", "padding", "normed_before"), KERNELS)
@pytest.mark.parametrize(("channels", "outs"), [(64, 16), (16, 64), (32, 32), (3, 20), (200, 72)])
def test_a_convolution(
    channels: int, outs: int, size: int, stride: int, padding: int, normed_before: bool, kind: str
) -> None:
    """What a kernel of more than one pixel reads is never under a norm."""
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    values = [drawn(K, B, channels, 12, 12), *drawn(3, K, channels).unbind(), drawn(K, outs, channels, size, size)]
    h = (12 + 2 * padding - size) // stride + 1
    of_y, of_statistics = drawn(K, B, outs, h, h), 100 * drawn(K, 2, outs)

    def play(dtype: torch.dtype, fused: bool) -> list[Tensor]:
        x, mean, scale, bias, weight = leaves = [own.to(dtype).clone().requires_grad_() for own in values]
        before: list[Any] = [mean, scale, bias] if normed_before else [None] * 3
        if fused:
            settings = (normed_before, False, weight, stride, padding)
            y, statistics = ConvolutionOfClients.apply(packed(x, kind), *before, *settings)  # type: ignore[no-untyped-call]
            y = unpacked(y, kind)
        else:
            read = normed(x, mean, scale, bias).relu() if normed_before else x
            pairs = zip(read, weight, strict=True)
            y = torch.stack([F.conv2d(own, by, None, stride, padding) for own, by in pairs])
            statistics = torch.stack([y.mean((1, 3, 4)), y.var((1, 3, 4), unbiased=False)], 1)
        whole = (y * of_y.to(dtype)).sum() + (statistics * of_statistics.to(dtype)).sum()
        used = leaves if normed_before else [x, weight]
        return [y, statistics, *torch.autograd.grad(whole, used)]

    with compared():  # what is compared before a run agrees, too
        kernels = play(torch.float32, True)
    for found, wanted in zip(kernels, play(torch.float64, False), strict=True):
        assert apart(found, wanted) < OFF[kind]


@pytest.mark.parametrize("kind", OFF)
def test_a_norm_over_what_is_frozen(kind: str) -> None:
    """Its gradients are there though nobody wants that of the image."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (torch.randn(K, *shape, generator=generator, device="cuda") for shape in ((B, 8, 6, 6), (4, 8, 1, 1)))
    norm = [own.requires_grad_() for own in torch.randn(3, K, 8, generator=generator, device="cuda").unbind()]
    with compared():
        y, _ = ConvolutionOfClients.apply(packed(x, kind), *norm, True, False, weight, 1, 0)  # type: ignore[no-untyped-call]
        found = torch.autograd.grad(unpacked(y, kind).float().square().sum(), norm)
    read = normed(x.double(), *(own.double() for own in norm)).relu()
    wanted = torch.autograd.grad(
        torch.einsum("kbchw,koc->kbohw", read, weight[..., 0, 0].double()).square().sum(), norm
    )
    for one, other in zip(found, wanted, strict=True):
        assert apart(one, other.double()) < OFF[kind]


def packed(x: Tensor, kind: str) -> Tensor:
    found: Tensor = PackedOfClients.apply(x) if kind == "half" else x  # type: ignore[no-untyped-call]
    return found


def unpacked(x: Tensor, kind: str) -> Tensor:
    found: Tensor = UnpackedOfClients.apply(x).float() if kind == "half" else x  # type: ignore[no-untyped-call]
    return found


@pytest.mark.parametrize("numbers", ["tf32", "half"])
@pytest.mark.parametrize("kind", ["alone", "plain", "normed"])
def test_a_sum(kind: str, numbers: str) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    images = torch.randn(2, K, B, 20, 7, 7, generator=generator, device="cuda")
    norms = torch.randn(2, 3, K, 20, generator=generator, device="cuda")
    of_out = torch.randn(K, B, 20, 7, 7, generator=generator, device="cuda")
    values = [images[0], *norms[0], *([] if kind == "alone" else [images[1]]), *(norms[1] if kind == "normed" else [])]

    def play(dtype: torch.dtype, fused: bool) -> list[Tensor]:
        leaves = [own.to(dtype).clone().requires_grad_() for own in values]
        if fused:
            given = [packed(own, numbers) if own.dim() == 5 else own for own in leaves]
            out = SumOfClients.apply(*given, *[None] * (8 - len(given)), True)  # type: ignore[no-untyped-call]
            out = unpacked(out, numbers)
        else:
            out = normed(*leaves[:4])
            out = out + (normed(*leaves[4:]) if kind == "normed" else leaves[4] if kind == "plain" else 0)
            out = out.relu()
        return [out, *torch.autograd.grad((out * of_out.to(dtype)).sum(), leaves)]

    for found, wanted in zip(play(torch.float32, True), play(torch.float64, False), strict=True):
        assert apart(found, wanted) < (1e-6 if numbers == "tf32" else OFF["half"])


def residual(block: type[Basic] | type[Bottleneck]) -> nn.Module:
    torch.manual_seed(0)
    width = 16 // block.expansion
    body = [block(16, width, 1), block(16, 2 * width, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), *body)


def pictures() -> fl.Federation:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, (160, 3, 16, 16), generator=generator).byte()
    y = torch.randint(0, 5, (160,), generator=generator)
    return fl.Federation.from_tensor(x, y, [0, 32, 64, 96, 160]).images((0.5,) * 3, (0.3,) * 3, augment="crop+flip")


@pytest.mark.parametrize("precision", ["auto", "bf16"])
@pytest.mark.parametrize("block", [Basic, Bottleneck])
def test_a_run(block: Any, precision: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Every recorded step is the fused one, and the run is as near to float64 as its products are."""
    local = fl.Local(epochs=2, batch_size=16, lr=0.02, momentum=0.5)
    settings: dict[str, Any] = {"rounds": 2, "clients_per_round": 4, "local": local, "device": "cuda"}
    wanted = fl.fit(residual(block).double(), pictures(), engine="loop", **settings)
    run = Training(
        residual(block), pictures(), "fedavg", engine="vector", precision=precision, compile=True, **settings
    )
    engine = run.simulation.engine
    assert isinstance(engine, Vector)
    assert engine.fused
    found = run.run()
    assert "fused" not in caplog.text
    start = torch.cat([p.detach().flatten() for p in residual(block).parameters()])
    moved = (wanted.params.cpu() - start.double()).norm()
    assert float((found.params.cpu().double() - wanted.params.cpu()).norm() / moved) < (
        0.05 if precision == "auto" else 0.3
    )


def test_bfloat16_keeps_the_matrix_engine() -> None:
    """Batch norms and LSTMs, too."""
    data = pictures()
    local = fl.Local(steps=2, batch_size=16, lr=0.02)
    settings: dict[str, Any] = {
        "rounds": 1,
        "clients_per_round": 4,
        "local": local,
        "device": "cuda",
        "precision": "bf16",
    }
    run = Training(residual(Basic), data, "fedavg", engine="vector", compile=False, **settings)
    assert isinstance(run.simulation.engine, Vector)
    ids = torch.randint(0, 20, (160, 9), generator=torch.Generator().manual_seed(0))
    texts = fl.Federation.from_tensor(ids, data.y.cpu(), [0, 32, 64, 96, 160], classes=5)
    model = nn.Sequential(nn.Embedding(20, 8), fl.models.recurrent.LSTM(8, 16), nn.Flatten(), nn.Linear(144, 5))
    results = [Training(model, texts, "fedavg", engine=engine, **settings) for engine in ("vector", "loop")]
    assert isinstance(results[0].simulation.engine, Vector)
    vector, loop = (one.run().params for one in results)
    assert float((vector - loop).norm() / loop.norm()) < 1e-2
