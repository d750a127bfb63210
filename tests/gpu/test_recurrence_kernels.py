"""The kernels of a cohort's LSTMs, and runs by them, against tensor code in float64."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fedloom as fl
import fedloom.models.recurrence as module
from fedloom.engines.vector import Vector
from fedloom.models.catalogue import Shape
from fedloom.models.recurrence import Recurrence
from fedloom.training import Training
from tests.models.making import make
from tests.models.test_recurrence import as_tensor_code

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]
K, T = 3, 12
ALLOWED = {torch.float32: 3e-3, torch.bfloat16: 2e-2}  # of a result: products of numbers with ten bits, or with seven


@pytest.fixture(autouse=True)
def rounded_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def drawn(samples: int, hidden: int, dtype: torch.dtype, inputs: int = 8) -> tuple[list[Tensor], Tensor]:
    """What goes into a layer of K clients, and a gradient of the states, which lies sample by sample as that of
    the last layer does.
    """
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    weights = [normal(K, 4 * hidden, width) / width**0.5 for width in (inputs, hidden)]
    given = [values.to(dtype) for values in (normal(K, T, samples, inputs), *weights)]
    return [*given, normal(K, 4 * hidden)], normal(K, samples, T, hidden).to(dtype).transpose(1, 2)


def play(given: list[Tensor], gradient: Tensor) -> list[Tensor]:
    leaves = [values.clone().requires_grad_() for values in given]
    states = Recurrence.apply(*leaves, True)[0]  # type: ignore[no-untyped-call]
    return [states.detach(), *torch.autograd.grad(states, leaves, gradient)]


def exact(given: list[Tensor], gradient: Tensor) -> list[Tensor]:
    leaves = [values.double().requires_grad_() for values in given]
    states = torch.stack([as_tensor_code(*own) for own in zip(*leaves, strict=True)])
    return [states.detach(), *torch.autograd.grad(states, leaves, gradient.double())]


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "hidden"), [(3, 5), (8, 256), (100, 100), (256, 256), (300, 300)])
@pytest.mark.parametrize("samples", [1, 20, 70, 256])
def test_states_and_gradients(samples: int, inputs: int, hidden: int, dtype: torch.dtype) -> None:
    given, gradient = drawn(samples, hidden, dtype, inputs)
    assert module._has_kernels(given[0])
    found = play(given, gradient)
    for ours, theirs in zip(found, exact(given, gradient), strict=True):
        assert apart(ours, theirs) < ALLOWED[dtype]
    for ours, again in zip(found, play(given, gradient), strict=True):
        assert torch.equal(ours, again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_alone_where_no_gradient_follows(dtype: torch.dtype) -> None:
    given, gradient = drawn(70, 100, dtype)
    states, cells, gates = Recurrence.apply(*given, False)  # type: ignore[no-untyped-call]
    assert torch.equal(states, play(given, gradient)[0])
    assert cells.shape == (K, 1, 70, 100)
    assert not gates.numel()


def test_one_time() -> None:
    given, gradient = drawn(20, 32, torch.float32)
    given[0], gradient = given[0][:, :1], gradient[:, :1]
    states, of_x, of_ih, of_hh, of_bias = play(given, gradient)
    wanted = exact(given, gradient)
    assert not of_hh.any()
    for ours, theirs in zip((states, of_x, of_ih, of_bias), (*wanted[:3], wanted[4]), strict=True):
        assert apart(ours, theirs) < ALLOWED[torch.float32]


def test_all_digits_where_they_are_wanted() -> None:
    torch.set_float32_matmul_precision("highest")
    given, gradient = drawn(70, 100, torch.float32)
    for ours, theirs in zip(play(given, gradient), exact(given, gradient), strict=True):
        assert apart(ours, theirs) < 1e-5


def test_recorded_and_played_again() -> None:
    given, gradient = drawn(70, 100, torch.float32)
    wanted = play(given, gradient)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = play(given, gradient)
    for _ in range(2):
        graph.replay()
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["char-lstm(hidden=40)", "bilstm(hidden=24, dropout=0)"])
@pytest.mark.parametrize("precision", ["auto", "bf16"])
def test_a_run(precision: Any, name: str) -> None:
    """As near to a run client by client in float64 as its products are; recorded, with batches of several lengths."""
    generator = torch.Generator().manual_seed(1)
    ids, y = (torch.randint(0, top, shape, generator=generator) for top, shape in ((20, (250, 15)), (5, (250,))))
    texts = fl.Federation.from_tensor(ids, y, [0, 32, 70, 100, 250], classes=5)
    local = fl.Local(epochs=2, batch_size=64, lr=0.3)
    settings: dict[str, Any] = {"rounds": 2, "clients_per_round": 4, "local": local, "device": "cuda"}
    model = make(name, Shape((15,), 5, tokens=20))
    start = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
    run = Training(model, texts, "fedavg", engine="vector", precision=precision, **settings)
    assert isinstance(run.simulation.engine, Vector)
    found = run.run().params.cpu().double()
    wanted = fl.fit(model.double(), texts, "fedavg", engine="loop", **settings).params.cpu()
    assert float((found - wanted).norm() / (wanted - start).norm()) < (0.02 if precision == "auto" else 0.1)
