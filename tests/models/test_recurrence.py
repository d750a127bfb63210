"""The recurrent part of an LSTM, of a cohort, against its equations in NumPy and PyTorch's gradients."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedloom as fl
from fedloom.models.catalogue import Shape
from fedloom.models.recurrence import recurrence
from fedloom.training import Training
from tests.engines.test_vector import apart
from tests.models.making import make

T, K, B, H = 5, 3, 4, 2


def by_equations(projected: np.ndarray, weight: np.ndarray) -> np.ndarray:
    def sigmoid(x: np.ndarray) -> np.ndarray:
        return np.asarray(1 / (1 + np.exp(-x)))

    h = c = np.zeros((projected.shape[1], weight.shape[0]))
    states = []
    for at_time in projected:
        i, f, g, o = np.split(at_time + h @ weight, 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        states.append(h)
    return np.stack(states)


def as_tensor_code(projected: Tensor, weight: Tensor) -> Tensor:
    h = c = projected.new_zeros(projected.shape[1], len(weight))
    states = []
    for at_time in projected:
        i, f, g, o = (at_time + h @ weight).chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        states.append(h)
    return torch.stack(states)


def test_lowered_as_a_whole_under_autocast() -> None:
    """Also where the inputs are not, since a bias was added to them; and its gradients outside of it."""
    generator = torch.Generator().manual_seed(0)
    projected = torch.randn(T, K, B, 4 * H, generator=generator, requires_grad=True)
    weight = torch.randn(K, H, 4 * H, generator=generator, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        states = torch.func.vmap(recurrence, in_dims=(1, 0), out_dims=1)(projected, weight)
    assert states.dtype == torch.bfloat16
    found = torch.autograd.grad(states.float().sum(), (projected, weight))
    exact = torch.func.vmap(recurrence, in_dims=(1, 0), out_dims=1)(projected.double(), weight.double())
    wanted = torch.autograd.grad(exact.sum(), (projected, weight))
    torch.testing.assert_close(states.double(), exact, rtol=0, atol=0.03)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.15)
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 as it is
        assert recurrence(projected[:, 0].double(), weight[0].double()).dtype == torch.float64


@pytest.mark.parametrize("times", [1, T])
@pytest.mark.parametrize("over", [(0, 0), (2, 1), (None, 0), (1, None)])
def test_a_cohort(over: tuple[int | None, int | None], times: int) -> None:
    """Whatever axis the clients lie along; what is the same for all of them has a gradient that is the sum."""
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...], at: int | None) -> Tensor:
        whole = shape if at is None else (*shape[:at], K, *shape[at:])
        return (2 * torch.randn(whole, generator=generator, dtype=torch.float64)).requires_grad_()

    inputs = [drawn((times, B, 4 * H), over[0]), drawn((H, 4 * H), over[1])]
    found = torch.func.vmap(recurrence, in_dims=over)(*inputs)
    own = [
        [values if at is None else values.select(at, k) for values, at in zip(inputs, over, strict=True)]
        for k in range(K)
    ]
    for k, pair in enumerate(own):
        wanted = by_equations(*(values.detach().numpy() for values in pair))
        np.testing.assert_allclose(found[k].detach().numpy(), wanted, rtol=0, atol=1e-13)
    outcomes = (found, torch.stack([as_tensor_code(*pair) for pair in own]))
    pairs = [torch.autograd.grad(states.sin().sum(), inputs) for states in outcomes]
    for a, b in zip(*pairs, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


def test_gradients_by_differences() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((T, B, 4 * H), (H, 4 * H))]
    assert torch.autograd.gradcheck(recurrence, inputs)


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
