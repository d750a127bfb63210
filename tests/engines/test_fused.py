"""Convolutions and batch norms that are fused: what is left pending, and when it is written.

Here the three layers are tensor code, in float64; their kernels are in tests/gpu/test_fused_kernels.py.
"""

import dataclasses
import logging
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

import fedloom as fl
from fedloom.engines import fused, fused_check, vector
from fedloom.engines.choose import worth_fusing
from fedloom.engines.fused import Fused, Pending, is_fusible
from fedloom.models.resnet import Basic, Bottleneck
from fedloom.task import Task
from fedloom.training import Training

K, B = 3, 4


class Convolution:
    """By the definitions; counts how its inputs came."""

    calls: list[tuple[str, int]] = []  # noqa: RUF012

    @classmethod
    def apply(
        cls,
        x: Tensor,
        mean: Tensor | None,
        scale: Tensor | None,
        bias: Tensor | None,
        relu: bool,
        through: bool,
        weight: Tensor,
        stride: int,
        padding: int,
    ) -> tuple[Tensor, ...]:
        cls.calls.append(("normed" if mean is not None else "through" if through else "plain", weight.shape[-1]))
        if mean is not None and scale is not None and bias is not None:
            x = normed(x, mean, scale, bias)
            x = x.relu() if relu else x
        y = F.conv2d(x, weight, None, stride, padding)
        statistics = torch.stack([y.mean((0, 2, 3)), y.var((0, 2, 3), unbiased=False)])
        return (y, statistics, 1 * x) if through else (y, statistics)


class Scale:
    @staticmethod
    def apply(
        statistics: Tensor, weight: Tensor, mean: Tensor, var: Tensor, momentum: float, eps: float, places: int
    ) -> tuple[Tensor, ...]:
        new = statistics.detach()
        unbiased = new[1] * places / (places - 1)
        after = [(1 - momentum) * old + momentum * own for old, own in ((mean, new[0]), (var, unbiased))]
        return statistics[0], weight / (statistics[1] + eps).sqrt(), *after


class Sum:
    calls: list[str] = []  # noqa: RUF012

    @classmethod
    def apply(cls, y: Tensor, mean: Tensor, scale: Tensor, bias: Tensor, other: Tensor | None, *rest: Any) -> Tensor:
        *norm, relu = rest
        cls.calls.append("alone" if other is None else "plain" if norm[0] is None else "normed")
        found = normed(y, mean, scale, bias)
        if other is not None:
            found = found + (other if norm[0] is None else normed(other, *norm))
        return found.relu() if relu else found


def normed(x: Tensor, mean: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return (x - mean[:, None, None]) * scale[:, None, None] + bias[:, None, None]


@pytest.fixture(autouse=True)
def in_tensor_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers in float64 on a CPU, where the kernels can't go."""
    for layer in (Convolution, Scale, Sum):
        monkeypatch.setattr(fused, layer.__name__, layer)
    monkeypatch.setattr(fused, "EXACT", (torch.float32, torch.float64))
    Convolution.calls.clear()
    Sum.calls.clear()


def pieces(*layers: nn.Module) -> list[nn.Module]:
    return [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), *layers]


class Joined(nn.Module):
    """Two branches, joined in a way of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Sequential(*pieces())
        self.left = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.right = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        a, b = self.left(x), self.right(x)
        if self.how == "inplace":
            seen = F.relu(a, inplace=True)
            a = seen + b + a  # which is rectified, too
        elif self.how == "inplace, later":
            joined = a + b
            F.relu(a, True)
            a = joined.relu() + a
        elif self.how == "+=":
            a += b
        elif self.how == "+=, two names":
            other = a
            other += b
        elif self.how == "+=, of a sum":
            b += a.relu() + x
            a = b
        elif self.how == "method":
            a = a.add(b).relu()
        elif self.how == "torch":
            a = torch.relu(torch.add(input=a, other=b))
        elif self.how == "scaled":
            a = torch.add(a, b, alpha=0.5)
        elif self.how == "number":
            a = 1.5 + a + 2
        elif self.how == "twice":
            a = (a + b) + (a + b).relu() + x
        elif self.how == "product":
            a = a * b - x / 2
        elif self.how == "tensor first":
            a = x.mean((2, 3), keepdim=True).expand_as(x) + a
        elif self.how == "list":
            a = torch.stack([a, b]).sum(0)
        return self.out(a.flatten(2).mean(2))  # type: ignore[no-any-return]


NETS: dict[str, nn.Module] = {
    "bottleneck": nn.Sequential(*pieces(Bottleneck(8, 4, 1), Bottleneck(16, 4, 1), Bottleneck(16, 8, 2))),
    "basic": nn.Sequential(*pieces(Basic(8, 8, 1), Basic(8, 4, 2))),
    "pooled": nn.Sequential(*pieces(nn.MaxPool2d(2), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6, 5))),
    "other norms": nn.Sequential(nn.Conv2d(3, 8, 3, bias=True), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 8, 1)),
    "grouped": nn.Sequential(*pieces(nn.Conv2d(8, 8, 3, groups=4), nn.BatchNorm2d(8), nn.ReLU6())),
    "bare norm": nn.Sequential(
        nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 5, 1, bias=False)
    ),
    "two norms": nn.Sequential(*pieces(nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1, bias=False), nn.BatchNorm2d(4))),
    "no statistics": nn.Sequential(
        *pieces(nn.Conv2d(8, 4, 1, bias=False)), nn.BatchNorm2d(4, track_running_stats=False)
    ),
    **{
        how: Joined(how)
        for how in ("+=", "+=, two names", "+=, of a sum", "method", "torch", "scaled", "number", "twice")
    },
    **{how: Joined(how) for how in ("product", "tensor first", "list", "inplace", "inplace, later")},
}


@pytest.mark.parametrize("name", NETS)
def test_a_net_is_the_same_function(name: str) -> None:
    """Losses, gradients and running statistics of every client, as without."""
    torch.manual_seed(0)
    net = NETS[name].double().train()
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            module.reset_parameters()
    held = {
        key: values + 0.1 * torch.randn(K, *values.shape, dtype=torch.float64)
        if values.is_floating_point()
        else values.expand(K)
        for key, values in (*net.named_parameters(), *net.named_buffers())
    }
    held = {key: values.abs() if "running_var" in key else values for key, values in held.items()}
    x = torch.randn(K, B, 3, 6, 6, dtype=torch.float64)

    def play(by: Any) -> list[Tensor]:
        leaves = {key: held[key].detach().clone().requires_grad_() for key, _ in net.named_parameters()}
        buffers = {key: held[key].clone() for key, _ in net.named_buffers()}

        def client(own: dict[str, Tensor], kept: dict[str, Tensor], images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            state = {**own, **kept}
            if by is None:
                out = functional_call(net, state, (images,))
            else:
                with by():
                    out = functional_call(net, state, (images,)) * 1
            weights = torch.linspace(-1, 1, out[0].numel(), dtype=torch.float64)
            return (out.flatten(1) * weights).sin().sum(), kept

        losses, after = vmap(client)(leaves, buffers, x)
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
        return [losses, *gradients, *after.values()]

    for found, wanted in zip(play(Fused), play(None), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_a_bottleneck_writes_only_what_it_must() -> None:
    """Norms before convolutions 1x1 stay pending; what a convolution 3x3 reads, and the end of the block, is written,
    and its second reader reads it through the first.
    """
    net = nn.Sequential(*pieces(Bottleneck(8, 4, 1), Bottleneck(16, 4, 1))).double().train()
    with Fused():
        out = net(torch.randn(B, 3, 6, 6, dtype=torch.float64))
        assert isinstance(out, Pending)
        assert out.shape == (B, 16, 6, 6)
        assert out.written is None
    first = [("plain", 3), ("normed", 1), ("through", 3), ("normed", 1), ("normed", 1)]  # the last is the shortcut
    assert Convolution.calls == [*first, ("through", 1), ("through", 3), ("normed", 1)]
    assert Sum.calls == ["alone", "normed", "alone"]  # the second block's sum is not asked for yet


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "method": lambda a, b: a.add_(b),
    "method of one": lambda a, b: a.relu_(),
    "function": lambda a, b: torch.relu_(a),
    "argument": lambda a, b: F.leaky_relu(a, 0.1, inplace=True),
    "product": operator.imul,
    "number": lambda a, b: a.__iadd__(2),
}


@pytest.mark.parametrize("how", CHANGES)
def test_nothing_pending_is_changed_in_place(how: str) -> None:
    """It is told, so that the step runs without fused layers. Sums and ReLUs of norms are known under all names."""
    layer = nn.Sequential(*pieces()[:2]).double().train()
    x = torch.randn(B, 3, 6, 6, dtype=torch.float64)
    with Fused(), pytest.raises(NotImplementedError, match="can't be changed in place"):
        CHANGES[how](layer(x), layer(x))


def test_evaluation_and_single_values_are_left_alone() -> None:
    net = nn.Sequential(*pieces()).double()
    x = torch.randn(K, 1, 3, 1, 1, dtype=torch.float64)

    def client(images: Tensor) -> Tensor:
        with Fused():
            return net(images) * 1  # type: ignore[no-any-return]

    with pytest.raises(ValueError, match="more than 1 value per channel"):
        vmap(client)(x)
    net.eval()
    torch.testing.assert_close(vmap(client)(x), torch.stack([net(images) for images in x]))


def test_who_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "find_spec", lambda name: "there")
    monkeypatch.setattr(fused, "EXACT", (torch.float32,))

    def asked(net: nn.Module, precision: Any = "auto") -> bool:
        return is_fusible(Task.of(net, None, torch.device("cpu"), precision))

    both = nn.Sequential(*pieces())
    assert asked(both)
    assert asked(both, "bf16")
    assert not asked(both, "fp32")
    assert not asked(nn.Sequential(*pieces()).double())
    assert not asked(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()))
    assert not asked(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    assert asked(nn.Sequential(*pieces(nn.Conv2d(8, 256, 1), nn.Conv2d(256, 512, 3, groups=256))))
    assert not asked(nn.Sequential(*pieces(nn.Conv2d(8, 257, 1))))
    assert not asked(nn.Sequential(*pieces(nn.Conv2d(8, 65, 3))))  # as in ResNet-18
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    assert not asked(both)


def test_only_long_runs_are_fused() -> None:
    """ResNet-56 as FedGLAD trains it: 35 steps of 64 samples, 9.35 MB of activations for each, 59 convolutions."""
    data = fl.Federation.from_arrays([(torch.zeros(2, 10), [0, 9])])
    small = Training(nn.Linear(10, 10), data, "fedavg", rounds=1, device="cpu").simulation.setup
    local = fl.Local(epochs=5, batch_size=64, last_batch="drop")
    setup = dataclasses.replace(small, sizes=torch.full((100,), 500), clients=100, per_round=10, local=local)
    layers = nn.Sequential(*(nn.Conv2d(1, 1, 1) for _ in range(59)))

    def found(precision: Any, activations: int, *rounds: int) -> list[bool]:
        task = Task.of(layers, None, torch.device("cpu"), precision)
        return [worth_fusing(task, setup, activations, n) for n in rounds]

    # 500 rounds save 500 * 350 * 64 * 9.35e6 * 1e-12 = 104.7 s; compiling takes 35.4 s.
    assert found("auto", 9_350_000, 1, 100, 330, 340, 500) == [False, False, False, True, True]
    # In half precision they save 500 * 350 * 64 * 4.8e6 * 2.4e-12 = 129 s.
    assert found("bf16", 4_800_000, 1, 100, 270, 280, 500) == [False, False, False, True, True]


class Wrong(Sum):
    """As layers are that compare what they compute."""

    @classmethod
    def apply(cls, *values: Any) -> Tensor:
        if fused_check._compares[0]:
            raise ArithmeticError("addition is off by 0.5, where it is 1")
        return super().apply(*values)


class Other(Sum):
    """What no comparison of layers finds."""

    @classmethod
    def apply(cls, *values: Any) -> Tensor:
        return super().apply(*values) * 1.5


class Failing(Sum):
    @classmethod
    def apply(cls, *values: Any) -> Tensor:
        raise RuntimeError("PTXAS error")


FAILED = "the fused form failed, so steps run without it: "
WARNINGS = [(Wrong, f"{FAILED}addition is off by 0.5"), (Failing, f"{FAILED}PTXAS error")]
WARNINGS += [(Other, "the fused form has other losses (off by ")]


@pytest.mark.parametrize(("layer", "warning"), [(Sum, ""), *WARNINGS])
def test_a_fused_step_is_compared_first(
    layer: Any, warning: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that fails, or whose layers compute something else, is left out with a warning, and the run goes on."""
    monkeypatch.setattr(fused, "Sum", layer)
    monkeypatch.setattr(vector, "recorded", lambda run, cohort, pool: run)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(48, 3, 6, 6, generator=generator), torch.arange(48) % 5
    data = fl.Federation.from_tensor(x, y, [0, 16, 32, 48], classes=5)
    torch.manual_seed(0)
    net = nn.Sequential(*pieces(Bottleneck(8, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)))
    settings: dict[str, Any] = {"rounds": 2, "clients_per_round": 3, "local": fl.Local(batch_size=8, lr=0.1)}
    wanted = fl.fit(net, data, engine="vector", **settings)
    run = Training(net, data, "fedavg", engine="vector", **settings)
    engine = run.simulation.engine
    assert isinstance(engine, vector.Vector)
    engine.graphs = engine.fused = True
    with caplog.at_level(logging.WARNING, "fedloom"):
        found = run.run()
    assert (warning in caplog.text) if warning else not caplog.text
    assert (layer is Sum) == (len(Sum.calls) > 8)  # in every step, or in the trial alone
    torch.testing.assert_close(found.params, wanted.params, rtol=1e-4, atol=1e-5)
