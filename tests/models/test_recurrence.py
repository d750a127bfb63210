"""A layer of LSTM, of a cohort, against its equations in NumPy and PyTorch's gradients."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedloom as fl
import fedloom.models.recurrence as module
from fedloom.models.catalogue import Shape
from fedloom.models.recurrence import recurrence
from fedloom.models.recurrent import LSTM, set_fused
from fedloom.training import Training
from tests.engines.test_vector import apart
from tests.models.making import make

T, K, B, N, H = 5, 3, 4, 3, 2


def shapes_of(times: int) -> list[tuple[int, ...]]:
    """Of what goes into a layer of one client."""
    return [(times, B, N), (4 * H, N), (4 * H, H), (4 * H,)]


def by_equations(x: np.ndarray, weight_ih: np.ndarray, weight_hh: np.ndarray, bias: np.ndarray) -> np.ndarray:
    def sigmoid(x: np.ndarray) -> np.ndarray:
        return np.asarray(1 / (1 + np.exp(-x)))

    h = c = np.zeros((x.shape[1], weight_hh.shape[1]))
    states = []
    for at_time in x:
        i, f, g, o = np.split(at_time @ weight_ih.T + h @ weight_hh.T + bias, 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        states.append(h)
    return np.stack(states)


def as_tensor_code(x: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias: Tensor) -> Tensor:
    h = c = x.new_zeros(x.shape[1], weight_hh.shape[1])
    states = []
    for at_time in x:
        i, f, g, o = (at_time @ weight_ih.T + h @ weight_hh.T + bias).chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        states.append(h)
    return torch.stack(states)


def test_lowered_as_a_whole_under_autocast() -> None:
    """Also where the inputs are not, and with the bias as it is; and its gradients outside of it."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn((K, *shape), generator=generator, requires_grad=True) for shape in shapes_of(T)]
    with torch.autocast("cpu", torch.bfloat16):
        states = torch.func.vmap(recurrence)(*given)
    assert states.dtype == torch.bfloat16
    found = torch.autograd.grad(states.float().sum(), given)
    exact = torch.func.vmap(recurrence)(*(values.double() for values in given))
    wanted = torch.autograd.grad(exact.sum(), given)
    torch.testing.assert_close(states.double(), exact, rtol=0, atol=0.03)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.15)
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 as it is
        assert recurrence(*(values[0].double() for values in given)).dtype == torch.float64


@pytest.mark.parametrize("times", [1, T])
@pytest.mark.parametrize("over", [(0, 0, 0, 0), (2, 1, 2, 1), (None, 0, 0, None), (1, None, 0, 0), (1, 1, None, 0)])
def test_a_cohort(over: tuple[int | None, ...], times: int) -> None:
    """Whatever axis the clients lie along; what is the same for all of them has a gradient that is the sum."""
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...], at: int | None) -> Tensor:
        whole = shape if at is None else (*shape[:at], K, *shape[at:])
        return (2 * torch.randn(whole, generator=generator, dtype=torch.float64)).requires_grad_()

    inputs = [drawn(shape, at) for shape, at in zip(shapes_of(times), over, strict=True)]
    found = torch.func.vmap(recurrence, in_dims=over)(*inputs)
    own = [
        [values if at is None else values.select(at, k) for values, at in zip(inputs, over, strict=True)]
        for k in range(K)
    ]
    for k, values_of_one in enumerate(own):
        wanted = by_equations(*(values.detach().numpy() for values in values_of_one))
        np.testing.assert_allclose(found[k].detach().numpy(), wanted, rtol=0, atol=1e-13)
    outcomes = (found, torch.stack([as_tensor_code(*values) for values in own]))
    pairs = [torch.autograd.grad(states.sin().sum(), inputs) for states in outcomes]
    for a, b in zip(*pairs, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


def test_gradients_by_differences() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes_of(T)]
    assert torch.autograd.gradcheck(recurrence, inputs)


def test_layers_hand_on_their_states_without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cohort: what a layer gives, and the gradient that comes back, are in memory as the kernels want them."""
    read, given, came = [], [], []
    run, run_backward = module._run, module._run_backward

    def forward(x: Tensor, *others: Tensor) -> Any:
        read.append(x.data_ptr())
        found = run(x, *others)
        given.append(found[0].data_ptr())
        return found

    def backward(gradient: Tensor, *others: Tensor) -> Tensor:
        came.append(gradient.is_contiguous())
        return run_backward(gradient, *others)

    monkeypatch.setattr(module, "_run", forward)
    monkeypatch.setattr(module, "_run_backward", backward)
    layers = LSTM(3, H, layers=3)
    set_fused(layers, False)
    own = {name: torch.stack([p.detach()] * K).requires_grad_() for name, p in layers.named_parameters()}
    x = torch.randn(K, B, T, 3)
    states = torch.func.vmap(lambda p, x: torch.func.functional_call(layers, p, (x,)))(own, x)
    torch.autograd.grad(states.sin().sum(), list(own.values()))
    assert read[1:] == given[:-1]
    assert came[1:] == [True, True]


def test_inputs_that_nobody_trains() -> None:
    """A frozen embedding takes no gradient; the weights' are the same."""
    torch.manual_seed(0)
    x, *weights = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes_of(T))
    wanted = torch.autograd.grad(recurrence(x, *weights).sin().sum(), weights)
    found = torch.autograd.grad(recurrence(x.detach(), *weights).sin().sum(), weights)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["char-lstm(hidden=8)", "bilstm(hidden=8, dropout=0)", "lstm(hidden=8)"])
def test_engines_agree(name: str, precision: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(1, 20, (24, 9), generator=generator)
    data = fl.Federation.from_tensor(x, torch.arange(24) % 3, [0, 4, 12, 24], classes=3)
    settings: dict[str, Any] = {"rounds": 2, "precision": precision, "local": fl.Local(epochs=1, batch_size=4, lr=0.5)}
    model = make(name, Shape((9,), 3, tokens=20))
    runs = [Training(copy.deepcopy(model), data, "fedavg", engine=e, **settings) for e in ("loop", "vector")]
    assert runs[1].simulation.engine.name == "vector"
    assert apart(*(run.run().params for run in runs)) < (1e-6 if precision == "fp32" else 5e-3)
